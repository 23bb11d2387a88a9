"""Registries: names, import paths, and what cannot be found; `nearest` suggests."""

import pytest

from ext.core.errors import ConfigError, nearest, nearest_name
from ext.core.registry import Registry


class Shape:
    pass


@pytest.fixture
def shapes():
    registry = Registry("shape", Shape)

    @registry.register("circle")
    class Circle(Shape):
        pass

    registry.register("square")(Shape)
    return registry


def test_lists_and_finds(shapes):
    assert list(shapes) == ["circle", "square"]
    assert shapes.get("square") is Shape
    assert "circle" in shapes
    assert "oval" not in shapes


def test_a_second_registration_raises(shapes):
    with pytest.raises(ValueError, match="shape 'circle' is taken by"):
        shapes.register("circle")(Shape)


def test_another_kind_of_class_raises(shapes):
    with pytest.raises(TypeError, match="int is no Shape"):
        shapes.register("number")(int)


def test_unknown_name(shapes):
    with pytest.raises(ConfigError, match=r"^unknown shape 'cirle'\. Did you mean 'circle'\? Known: circle, square\.$"):
        shapes.get("cirle")


@pytest.mark.parametrize("path", ["", "os", "os.path"])
def test_a_name_without_colon_is_no_path(shapes, path):
    with pytest.raises(ConfigError, match="unknown shape"):
        shapes.get(path)


@pytest.mark.parametrize("path", ["os:path", "no.where:X", "os:", ":", ":X", ".x:Y", "os:no_such", "..:a"])
def test_paths_that_lead_nowhere(shapes, path):
    with pytest.raises(ConfigError, match="shape '.*' (cannot be imported|is no subclass of)"):
        shapes.get(path)


def test_nearest_ignores_case_and_far_names():
    assert nearest("SHEDULE", ["schedule", "partition"]) == " Did you mean 'schedule'?"
    assert nearest("zzz", ["schedule"]) == ""
    assert nearest_name("moe", ["MoE"]) == "MoE"
    assert nearest_name("x" * 10**6, ["schedule"]) is None
    assert nearest_name("x", []) is None
