"""Agreement of all ranks on the outcome of a step."""

from __future__ import annotations

import pytest

from ext.core.errors import CommunicationError, ConfigError, DataError
from ext.runtime.guard import FailureGuard
from ext.testing.ranks import run_ranks

pytestmark = pytest.mark.dist


def _steps(rank: int, world_size: int) -> None:
    guard = FailureGuard()
    for _ in range(3):
        guard.start_step()
        assert not guard.agreed
        guard.agree(None)
        assert guard.agreed
    guard.agree(None)  # without a step around it
    for failing in range(world_size):
        guard.start_step()
        with pytest.raises(DataError, match=f"^too short on {failing}$"):
            guard.agree(DataError(f"too short on {failing}") if rank == failing else None)
    for failing in range(world_size):
        guard.start_step()
        error = KeyError("what") if rank == failing else None
        expected, text = (
            (KeyError, "what") if error else (CommunicationError, f"^rank {failing} failed: KeyError: 'what'$")
        )
        with pytest.raises(expected, match=text):
            guard.agree(error)
    guard.start_step()
    lost = CommunicationError("lost a peer") if rank != world_size - 1 else ConfigError("the first cause")
    with pytest.raises(ConfigError, match="^the first cause$"):
        guard.agree(lost)
    assert guard.from_rank_0(lambda: {"rank": rank}) == {"rank": 0}

    def refuse():
        raise ConfigError(f"found on {rank}")

    with pytest.raises(ConfigError, match="^found on 0$"):
        guard.from_rank_0(refuse)
    guard.start_step()
    guard.start_step()  # a step that was given up before its end
    guard.agree(None)


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_all_ranks_go_on_or_raise_the_same_error(world_size):
    run_ranks(_steps, world_size)
