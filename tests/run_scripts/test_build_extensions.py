"""Locks that a killed build leaves behind are removed, those of a living one are waited for."""

import subprocess
import threading

import pytest

import build_extensions


@pytest.fixture
def lock(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    path = tmp_path / build_extensions.NAME / "lock"
    path.parent.mkdir()
    path.touch()
    return path


def test_the_lock_of_a_killed_build_goes(lock, capsys):
    assert build_extensions.clear_lock(lock)
    assert not lock.exists()
    assert "no longer running" in capsys.readouterr().err


def test_the_lock_of_a_living_build_stays_until_it_is_released(lock, capsys):
    with lock.open() as held:
        build = subprocess.Popen(["sleep", "60"], stdin=held)
    try:
        waiting = threading.Thread(target=build_extensions.clear_lock, args=(lock,))
        waiting.start()
        waiting.join(1.5)
        assert waiting.is_alive()
        assert lock.exists()
        lock.unlink()
        waiting.join(10)
        assert not waiting.is_alive()
    finally:
        build.kill()
        build.wait()
    assert f"held by process {build.pid}" in capsys.readouterr().err


def test_nothing_is_built_where_it_is_built(lock, capsys):
    lock.unlink()
    (lock.parent / f"{build_extensions.NAME}.so").touch()
    build_extensions.main()
    assert capsys.readouterr().err == ""
