"""Locks of extension builds: found, told apart by who holds them, and named for the launcher."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ext.core import extension_locks
from ext.core.extension_locks import age, extension_root, find_locks, waiting_for

HOUR = 3600


@pytest.fixture
def root(tmp_path):
    return tmp_path / "torch_extensions"


@pytest.fixture
def environ(root):
    return {"TORCH_EXTENSIONS_DIR": str(root)}


def make_lock(root, name="deepspeed_shm_comm", seconds_old=0.0):
    path = root / name / "lock"
    path.parent.mkdir(parents=True)
    path.touch()
    made = time.time() - seconds_old
    os.utime(path, (made, made))
    return path


def test_none(environ, root):
    assert find_locks(environ) == waiting_for(environ) == []
    root.mkdir()
    (root / "op").mkdir()
    (root / "op" / "locksmith").touch()
    (root / "op" / "lock").mkdir()
    assert find_locks(environ) == []


def test_a_killed_build(environ, root):
    path = make_lock(root, seconds_old=3 * HOUR)
    (lock,) = find_locks(environ)
    assert (lock.path, lock.extension, lock.holders, lock.is_stale) == (path, "deepspeed_shm_comm", (), True)
    assert lock.age_seconds == pytest.approx(3 * HOUR, abs=60)
    assert waiting_for(environ) == [
        f"waiting for the build of extension 'deepspeed_shm_comm': lock {path}, 3 hours old, held by no process here. "
        f"If no other machine builds it: rm {path}"
    ]


def test_a_young_lock_may_be_another_machines(environ, root):
    make_lock(root)
    assert not find_locks(environ)[0].is_stale


def test_a_build_in_progress(environ, root):
    # Holds the file open as torch.utils.file_baton does.
    code = "import os, sys; os.open(sys.argv[1], os.O_CREAT | os.O_EXCL); print('held', flush=True); sys.stdin.read()"
    path = root / "op" / "lock"
    path.parent.mkdir(parents=True)
    command = [sys.executable, "-c", code, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as builder:
        assert builder.stdout is not None
        assert builder.stdout.readline() == "held\n"
        long_ago = time.time() - HOUR
        os.utime(path, (long_ago, long_ago))
        (lock,) = find_locks(environ)
        assert lock.holders == (builder.pid,)
        assert not lock.is_stale
        assert waiting_for(environ)[0].endswith(f"60 min old, held by process {builder.pid}")
        builder.kill()
    assert find_locks(environ)[0].is_stale


def test_torchs_own_lock_is_recognised(environ, root):
    from torch.utils.file_baton import FileBaton

    path = root / "op" / "lock"
    path.parent.mkdir(parents=True)
    baton = FileBaton(str(path))
    assert baton.try_acquire()
    assert find_locks(environ)[0].holders == (os.getpid(),)
    baton.release()
    assert find_locks(environ) == []


def test_folders_per_python_and_cuda_version(environ, root):
    paths = {make_lock(root, "py311_cpu/op"), make_lock(root, "op2")}
    make_lock(root, "a/b/too/deep")
    assert {lock.path for lock in find_locks(environ)} == paths


def test_oldest_first(environ, root):
    make_lock(root, "new", 10)
    make_lock(root, "old", 1000)
    assert [lock.extension for lock in find_locks(environ)] == ["old", "new"]


def test_a_clock_that_runs_ahead(environ, root):
    make_lock(root, seconds_old=-500)
    assert find_locks(environ)[0].age_seconds == 0


def test_without_a_process_table(environ, root, monkeypatch):
    def refuse(path):
        raise FileNotFoundError(path)

    make_lock(root, seconds_old=HOUR)
    monkeypatch.setattr(extension_locks.os, "listdir", refuse)
    (lock,) = find_locks(environ)
    assert (lock.holders, lock.certain) == ((), False)


def test_root(monkeypatch, tmp_path):
    assert extension_root({"TORCH_EXTENSIONS_DIR": "/x"}) == Path("/x")
    assert extension_root({"XDG_CACHE_HOME": "/c"}) == Path("/c/torch_extensions")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert extension_root({}) == tmp_path / ".cache" / "torch_extensions"


def test_root_is_where_torch_builds(monkeypatch, tmp_path):
    from torch.utils.cpp_extension import get_default_build_root

    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    for name, value in (("XDG_CACHE_HOME", str(tmp_path)), ("HOME", str(tmp_path))):
        monkeypatch.setenv(name, value)
        assert get_default_build_root() == str(extension_root(os.environ))
        monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0 s"), (119, "119 s"), (120, "2 min"), (7300, "2 hours"), (10**6, "12 days")]
)
def test_age(seconds, text):
    assert age(seconds) == text
