"""Patches are applied and undone whole, refuse hosts they were not tested with, and know their targets."""

import importlib
import sys
import types

import pytest

import patches
from ext.core.errors import PatchError
from patches import Patch, manager
from patches.manager import signature_of


def _original(a, b):
    return "original"


def _replacement(a, b):
    return "replacement"


@pytest.fixture
def host(monkeypatch):
    """A module of two names, and a patch for both that tests may vary."""
    module = types.ModuleType("patched_host")
    module.f = module.g = _original
    module.ours = _replacement
    monkeypatch.setitem(sys.modules, "patched_host", module)

    def use(**changes):
        values = {
            "name": "sample",
            "target": "patched_host:f",
            "places": ("patched_host:f", "patched_host:g"),
            "distribution": "pydantic",
            "versions": ">=2",
            "signature": "(a, b)",
            "replacement": "patched_host:ours",
            "reason": "a test",
        }
        patch = Patch(**{**values, **changes})
        monkeypatch.setattr(manager, "all_patches", lambda: {"sample": patch})
        return module

    yield use
    manager._originals.pop("sample", None)


def test_apply_and_undo_twice(host):
    module = host()
    for _ in range(2):
        manager.apply("sample")
        manager.apply("sample")
        assert module.f(1, 2) == module.g(1, 2) == "replacement"
        manager.undo("sample")
        manager.undo("sample")
        assert module.f is module.g is _original


def test_a_block_restores_what_was_in_force_before(host):
    module = host()
    with manager.applied("sample"), manager.applied("sample"):
        assert module.g is _replacement
    assert module.f is module.g is _original
    manager.apply("sample")
    with manager.applied("sample"):
        pass
    assert module.f is _replacement


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"versions": "<2"}, "tested are <2"),
        ({"distribution": "no-such-host"}, "no-such-host is not installed"),
        ({"signature": "(a, b, c)"}, "signature of patched_host:f is (a, b), tested is (a, b, c)"),
        ({"places": ("patched_host:f", "patched_host:h")}, "patched_host:h cannot be found"),
        ({"places": ("patched_host:f", "patched_host:ours")}, "something else has replaced it already"),
        ({"replacement": "patched_host:none"}, "patched_host:none cannot be found"),
    ],
)
def test_refusals_leave_everything_as_it_was(host, changes, text):
    module = host(**changes)
    with pytest.raises(PatchError) as error:
        manager.apply("sample")
    assert text in str(error.value)
    assert module.f is module.g is _original
    assert not manager.is_applied("sample")


def test_a_failure_half_way_undoes_itself(host, monkeypatch):
    module = host()
    write = manager._write

    def fails_on_second(place, value):
        if place.endswith(":g") and value is _replacement:
            raise AttributeError("read-only")
        write(place, value)

    monkeypatch.setattr(manager, "_write", fails_on_second)
    with pytest.raises(PatchError, match="patched_host:g cannot be replaced: read-only"):
        manager.apply("sample")
    assert module.f is module.g is _original


def test_unknown_names_get_the_nearest():
    with pytest.raises(PatchError, match="Did you mean 'deepspeed_initialize'"):
        manager.apply("deepspeed_initialise")


def test_modules_that_import_the_name_are_patched_and_undone_whenever_they_are_loaded(host, monkeypatch):
    module = host(importers=("early_importer:f", "late_importer:f", "never_loaded:f"))
    early, late = types.ModuleType("early_importer"), types.ModuleType("late_importer")
    monkeypatch.setitem(sys.modules, "early_importer", early)
    early.f = module.f
    for _ in range(2):
        manager.apply("sample")
        assert early.f is _replacement
        monkeypatch.setitem(sys.modules, "late_importer", late)
        late.f = module.f
        manager.undo("sample")
        assert early.f is late.f is module.f is _original
        monkeypatch.delitem(sys.modules, "late_importer")


def test_an_importer_that_holds_something_else_is_refused(host, monkeypatch):
    module = host(importers=("early_importer:f",))
    early = types.ModuleType("early_importer")
    early.f = len
    monkeypatch.setitem(sys.modules, "early_importer", early)
    with pytest.raises(PatchError, match="early_importer:f is not patched_host:f"):
        manager.apply("sample")
    assert module.f is _original


WITH_CHECKOUT_ONLY = {
    name for name, patch in patches.all_patches().items() if patch.target.startswith("megatron.training")
}
"""Their canary is in tests/system: the wheel of megatron-core has no training code."""


@pytest.mark.parametrize("name", sorted(set(patches.all_patches()) - WITH_CHECKOUT_ONLY))
def test_every_patch_knows_its_target(name):
    """The canary: fails when a new release of a host changes a signature or moves a name."""
    patch = patches.all_patches()[name]
    assert patch.name == name
    before = [_read(place) for place in patch.places]
    assert all(value is _read(patch.target) for value in before)
    assert signature_of(_read(patch.target)) == patch.signature
    for _ in range(2):
        patches.apply(name)
        assert all(_read(place) is _read(patch.replacement) for place in patch.places)
        patches.undo(name)
        assert [_read(place) for place in patch.places] == before


def _read(place):
    module, _, attribute = place.partition(":")
    return getattr(importlib.import_module(module), attribute)
