/* Joins network namespaces by one TUN device in each, and makes every packet between them cost time.
 *
 *   relay DELAY_US MBIT PACKET_US NAMESPACE...
 *
 * Namespace i gets the device eth0 and the address 10.77.0.(i+1). A source sends one packet after another: each takes
 * PACKET_US plus its bits at MBIT (0: no limit), then travels for DELAY_US. Writes "ready" and runs until it is killed;
 * the devices vanish with it. Needs CAP_SYS_ADMIN and CAP_NET_ADMIN. Linux only.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <poll.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

enum { MAX_NAMESPACES = 64, MAX_QUEUED = 1 << 16, MAX_PACKET = 65536, BURST = 64, DESTINATION = 19 };

typedef struct {
    uint64_t due; /* ns */
    int destination, length;
    char *bytes;
} Packet;

typedef struct {
    int fd;
    uint64_t free_at; /* ns at which the source may send again */
    unsigned head, tail;
    Packet queue[MAX_QUEUED];
} Source;

static Source sources[MAX_NAMESPACES];

static uint64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static int open_device(const char *name) {
    char path[256];
    snprintf(path, sizeof path, "/var/run/netns/%s", name);
    int ns = open(path, O_RDONLY);
    if (ns < 0 || setns(ns, CLONE_NEWNET) < 0) {
        perror(path);
        exit(1);
    }
    close(ns);
    int fd = open("/dev/net/tun", O_RDWR | O_NONBLOCK);
    struct ifreq request = {0};
    request.ifr_flags = IFF_TUN | IFF_NO_PI;
    strcpy(request.ifr_name, "eth0");
    if (fd < 0 || ioctl(fd, TUNSETIFF, &request) < 0) {
        perror("/dev/net/tun");
        exit(1);
    }
    return fd;
}

/* Hand over what is due; the time of what is due next, or UINT64_MAX. */
static uint64_t deliver(Source *source, int count, uint64_t time) {
    while (source->head != source->tail) {
        Packet *packet = &source->queue[source->head % MAX_QUEUED];
        if (packet->due > time) return packet->due;
        if (packet->destination >= 0 && packet->destination < count) {
            /* A full device drops the packet, as a network would; TCP sends it again. */
            ssize_t written = write(sources[packet->destination].fd, packet->bytes, (size_t)packet->length);
            (void)written;
        }
        free(packet->bytes);
        source->head++;
    }
    return UINT64_MAX;
}

static void take(Source *source, uint64_t delay, double ns_per_byte, uint64_t per_packet) {
    static char bytes[MAX_PACKET];
    for (int i = 0; i < BURST; i++) {
        ssize_t length = read(source->fd, bytes, sizeof bytes);
        if (length <= DESTINATION) return;
        int is_ipv4 = (bytes[0] >> 4) == 4;
        if (!is_ipv4 || source->tail - source->head == MAX_QUEUED) continue;
        Packet *packet = &source->queue[source->tail++ % MAX_QUEUED];
        packet->bytes = malloc((size_t)length);
        memcpy(packet->bytes, bytes, (size_t)length);
        packet->length = (int)length;
        packet->destination = (unsigned char)bytes[DESTINATION] - 1;
        uint64_t time = now();
        uint64_t start = source->free_at > time ? source->free_at : time;
        source->free_at = start + per_packet + (uint64_t)((double)length * ns_per_byte);
        packet->due = source->free_at + delay;
    }
}

int main(int argc, char **argv) {
    int count = argc - 4;
    if (count < 1 || count > MAX_NAMESPACES) {
        fprintf(stderr, "usage: relay DELAY_US MBIT PACKET_US NAMESPACE...\n");
        return 2;
    }
    uint64_t delay = (uint64_t)(atof(argv[1]) * 1e3), per_packet = (uint64_t)(atof(argv[3]) * 1e3);
    double mbit = atof(argv[2]), ns_per_byte = mbit > 0 ? 8e3 / mbit : 0;
    struct pollfd polled[MAX_NAMESPACES];
    for (int i = 0; i < count; i++) {
        sources[i].fd = open_device(argv[4 + i]);
        polled[i] = (struct pollfd){.fd = sources[i].fd, .events = POLLIN};
    }
    printf("ready\n");
    fflush(stdout);
    for (;;) {
        uint64_t time = now(), next = UINT64_MAX;
        for (int i = 0; i < count; i++) {
            uint64_t due = deliver(&sources[i], count, time);
            if (due < next) next = due;
        }
        struct timespec wait, *until = NULL;
        if (next != UINT64_MAX) {
            uint64_t left = next > time ? next - time : 0;
            wait = (struct timespec){.tv_sec = (time_t)(left / 1000000000u), .tv_nsec = (long)(left % 1000000000u)};
            until = &wait;
        }
        if (ppoll(polled, (nfds_t)count, until, NULL) <= 0) continue;
        for (int i = 0; i < count; i++)
            if (polled[i].revents & POLLIN) take(&sources[i], delay, ns_per_byte, per_packet);
    }
}
