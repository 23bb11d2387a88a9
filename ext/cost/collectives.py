"""Times of collectives over one link class, and the fit of a link to measured times."""

from __future__ import annotations

from collections.abc import Sequence

from ext.core.errors import ConfigError
from ext.cost.hardware import Link


def send(num_bytes: float, link: Link) -> float:
    """Seconds of one message of ``num_bytes``."""
    return link.latency + num_bytes / link.bandwidth


def all_reduce(num_bytes: float, group_size: int, link: Link) -> float:
    """Seconds of a ring all-reduce of a tensor of ``num_bytes`` on each of ``group_size`` ranks.

    2(n-1) steps of num_bytes/n each (Patarasuk and Yuan, 2009).
    """
    return 2 * reduce_scatter(num_bytes, group_size, link)


def reduce_scatter(num_bytes: float, group_size: int, link: Link) -> float:
    """Seconds of a ring reduce-scatter; ``num_bytes`` is the size before it, on each rank."""
    return (group_size - 1) * send(num_bytes / group_size, link)


def all_gather(num_bytes: float, group_size: int, link: Link) -> float:
    """Seconds of a ring all-gather; ``num_bytes`` is the size after it, on each rank."""
    return reduce_scatter(num_bytes, group_size, link)


def all_to_all(num_bytes: float, group_size: int, link: Link) -> float:
    """Seconds of a linear all-to-all; ``num_bytes`` is what each rank holds before it, its own part included."""
    return (group_size - 1) * send(num_bytes / group_size, link)


def fit_link(sizes: Sequence[float], seconds: Sequence[float], num_steps: int = 1) -> Link:
    """The link whose ``num_steps`` messages of ``size`` bytes in all take the measured ``seconds``, by least squares.

    Fits seconds = num_steps * latency + size / bandwidth with relative errors, so that small and large sizes count
    alike; a negative latency, which noise can give, is set to zero and the bandwidth fitted alone.

    Args:
        sizes: bytes that cross the link, per measurement (for a ring all-reduce 2(n-1)/n times the tensor).
        seconds: measured times.
        num_steps: messages per measurement (for a ring all-reduce 2(n-1)).

    Raises:
        ConfigError: fewer than two different sizes, a size or time that is not positive, or times that do not grow.
    """
    if len(sizes) != len(seconds) or len(set(sizes)) < 2:
        raise ConfigError(
            f"a link is fitted from two or more different sizes, got {len(set(sizes))}. Measure more sizes."
        )
    if min(sizes) <= 0 or min(seconds) <= 0:
        raise ConfigError(
            "a link is fitted from positive sizes and times. Remove the measurements that are zero or less."
        )
    # Minimise sum((a/t + b*s/t - 1)^2) over a (all latencies) and b (time per byte).
    u = [1 / t for t in seconds]
    v = [s / t for s, t in zip(sizes, seconds, strict=True)]
    uu, uv, vv = (sum(x * y for x, y in zip(p, q, strict=True)) for p, q in ((u, u), (u, v), (v, v)))
    determinant = uu * vv - uv * uv
    latency = (sum(u) * vv - sum(v) * uv) / determinant
    per_byte = (sum(v) * uu - sum(u) * uv) / determinant
    if per_byte <= 0:
        raise ConfigError("the measured times do not grow with the size. Measure larger sizes.")
    if latency < 0:
        latency, per_byte = 0.0, sum(v) / vv
    return Link(bandwidth=1 / per_byte, latency=latency / num_steps)
