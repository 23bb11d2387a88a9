from __future__ import annotations

import pytest

from ext.core import errors
from ext.core.errors import ConfigError, ExtError, nearest, nearest_name


def test_every_error_is_an_ext_error_and_a_builtin():
    classes = [
        c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, ExtError) and c is not ExtError
    ]
    assert len(classes) >= 6
    assert all(issubclass(c, (ValueError, RuntimeError)) for c in classes)


def test_config_error_lists_all_problems():
    error = ConfigError("first", "second")
    assert error.problems == ("first", "second")
    assert str(error) == "first\nsecond"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("shifted_critcal_path", "shifted_critical_path"),
        ("1F1B", "1f1b"),
        ("zzz", None),
        ("", None),
        ("x" * 10**6, None),
    ],
)
def test_nearest_name(name, expected):
    allowed = ["1f1b", "gpipe", "shifted_critical_path"]
    assert nearest_name(name, allowed) == expected
    assert nearest(name, allowed) == (f" Did you mean '{expected}'?" if expected else "")
