"""Locks that a killed build leaves behind are removed, those of a living one are waited for."""

import os
import subprocess
import threading
import time

import pytest

import build_extensions


@pytest.fixture
def lock(tmp_path):
    path = tmp_path / "lock"
    path.touch()
    return path


def _age(path, seconds):
    os.utime(path, (time.time() - seconds,) * 2)


def test_the_lock_of_a_killed_build_goes(lock, capsys):
    _age(lock, 60)
    build_extensions._wait_or_remove(lock.parent, lock)
    assert not lock.exists()
    assert "no longer running" in capsys.readouterr().err


def test_the_lock_of_a_living_build_stays_until_it_is_released(lock, capsys):
    _age(lock, 60)
    compiler = subprocess.Popen(["sleep", "60"], cwd=lock.parent)
    try:
        waiting = threading.Thread(target=build_extensions._wait_or_remove, args=(lock.parent, lock))
        waiting.start()
        waiting.join(1.5)
        assert waiting.is_alive()
        assert lock.exists()
        lock.unlink()
        waiting.join(10)
        assert not waiting.is_alive()
    finally:
        compiler.kill()
        compiler.wait()
    assert "waiting for the build" in capsys.readouterr().err
