"""The base of configuration blocks: strict, frozen, and JSON's lists are tuples."""

import pytest
from pydantic import ValidationError

from ext.core.model import StrictModel


class Example(StrictModel):
    counts: tuple[int, ...] = ()
    some: float | tuple[float, ...] | None = None
    text: str = ""


def test_lists_are_taken_for_tuples():
    assert Example(counts=[1, 2], some=[1.5]) == Example(counts=(1, 2), some=(1.5,))  # type: ignore[arg-type]
    assert isinstance(Example.model_validate({"counts": [1]}).counts, tuple)


@pytest.mark.parametrize(
    "wrong", [{"counts": [1.0]}, {"counts": [True]}, {"counts": {1}}, {"counts": 1}, {"text": ["a"]}, {"other": 1}]
)
def test_nothing_else_is_converted(wrong):
    with pytest.raises(ValidationError):
        Example.model_validate(wrong)


def test_frozen():
    with pytest.raises(ValidationError):
        Example().text = "x"  # type: ignore[misc]
