"""An error that one tensor-parallel rank sees ends the other, which waits for it inside a collective, by name."""

import os
from pathlib import Path

import pytest

from ext.core.errors import DataError
from ext.testing.ranks import RanksFailed, run_ranks

pytestmark = [pytest.mark.dist, pytest.mark.slow]


def _fails_alone(rank, world_size, folder):
    from ext.adapters.megatron import testing
    from ext.adapters.megatron.schedule import PlanForwardBackward
    from ext.config import ExtConfig

    os.dup2(os.open(f"{folder}/stderr{rank}", os.O_WRONLY | os.O_CREAT), 2)
    testing.parallel(tp=2, pp=2)
    model, function = testing.build(), PlanForwardBackward(ExtConfig.from_block({"pipeline": {"schedule": "1f1b"}}))
    testing.train(function, model, testing.batches(2))
    host = testing.forward_step

    def forward_step(data, chunk):
        if rank == 1:
            raise DataError("no sample left on one rank")
        return host(data, chunk)

    testing.forward_step = forward_step
    testing.train(function, model, testing.batches(2))


def test_the_other_tensor_parallel_rank_is_ended_by_name(tmp_path):
    with pytest.raises(RanksFailed) as failed:
        run_ranks(_fails_alone, 4, str(tmp_path), timeout=60)
    assert sorted(failed.value.failures) == [0, 1, 2, 3]
    texts = [Path(tmp_path, f"stderr{rank}").read_text() for rank in range(4)]
    for rank, text in enumerate(texts):
        said = f"rank {rank} stops, as rank 1 failed: DataError: no sample left on one rank"
        assert said in text or "no sample left on one rank" in str(failed.value.errors.get(rank)), (rank, text)
