"""The tensor-parallel benchmark at toy size: rows as promised, links made and removed, loopback where there is none."""

import json
import os
import subprocess
from contextlib import contextmanager

import pytest
import typer

from emulated_network import NoEmulatedNetwork
from emulated_network.shaped import shaped_link
from tensor_parallel_bench import run as bench
from tensor_parallel_bench.setting import Setting

TOY = Setting(32, 2, 8, 2, 2, 3, (4.0,), 0.5, 2)
MODES = ("none", "full", "on_demand", "overlapped", "sub_pipelined")
CONTRACT = {"name", "measured", "reference", "ratio", "unit", "command"}


def namespaces():
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout.split()
    return [name for name in listed if name.startswith(f"ext{os.getpid()}s")]


@contextmanager
def no_link(mbit):
    raise NoEmulatedNetwork("ip is not installed; it makes the emulated network.")
    yield


def rows_of(capsys):
    out, err = capsys.readouterr()
    return [json.loads(line) for line in out.splitlines()], err


@pytest.mark.dist
def test_without_a_link_it_says_so_and_uses_loopback(monkeypatch, capsys):
    monkeypatch.setattr(bench, "shaped_link", no_link)
    bench.run(TOY, as_json=True)
    rows, err = rows_of(capsys)
    assert "loopback instead" in err
    assert all(set(row) >= CONTRACT for row in rows)
    names = [row["name"].partition(",")[0].removeprefix("tensor_parallel_") for row in rows]
    assert [name for name in names if name in MODES] == list(MODES)
    saved = {name: row["saved_share"] for name, row in zip(names, rows, strict=True) if "saved_share" in row}
    assert saved["none"] == 0
    assert saved["full"] > saved["overlapped"] > 0.3
    assert saved["overlapped"] == pytest.approx(saved["on_demand"], abs=0.05)
    shares = {name: row["measured"] for name, row in zip(names, rows, strict=True) if name.startswith("window_")}
    assert sum(shares.values()) == pytest.approx(1, abs=1e-2)


@pytest.mark.dist
@pytest.mark.slow
def test_a_link_is_made_as_asked_and_removed(capsys):
    try:
        with shaped_link(100.0) as names:
            shape = subprocess.run(["tc", "-n", names[1], "qdisc", "show"], capture_output=True, text=True, check=True)
            assert "tbf" in shape.stdout
            assert "rate 100Mbit" in shape.stdout
            assert namespaces() == names[::-1] or namespaces() == names
    except NoEmulatedNetwork:
        return  # the test above is what there is elsewhere
    assert namespaces() == []
    bench.run(TOY, as_json=True)
    rows, err = rows_of(capsys)
    assert err == ""
    assert len(rows) >= len(MODES)
    assert namespaces() == []


@pytest.mark.parametrize(
    ("ranks", "ratios", "says"), [(4, "1", "joins two ranks"), (2, "x", "commas"), (2, "0", "0.01")]
)
def test_wrong_options_are_refused(ranks, ratios, says):
    with pytest.raises(typer.BadParameter, match=says):
        bench.main(ranks, ratios, as_json=True)
