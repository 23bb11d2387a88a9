"""Launched by mpirun or srun without RANK and WORLD_SIZE, every process would train alone."""

import pytest

from ext.core import launch_env
from ext.core.launch_env import check_launch_environment

OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_RANK": "3"}


@pytest.fixture(autouse=True)
def no_mpi4py(monkeypatch):
    monkeypatch.setattr(launch_env, "find_spec", lambda name: None)


def test_names_what_is_missing():
    assert check_launch_environment(OPEN_MPI) == [
        "Open MPI started 8 processes (OMPI_COMM_WORLD_SIZE=8), but RANK and WORLD_SIZE are not set: every process "
        "would see world size 1 and train alone. Start with the deepspeed launcher, or in each process export "
        "RANK=$OMPI_COMM_WORLD_RANK WORLD_SIZE=$OMPI_COMM_WORLD_SIZE LOCAL_RANK=$OMPI_COMM_WORLD_LOCAL_RANK and one "
        "MASTER_ADDR and MASTER_PORT for all. If one process alone is what you want, export RANK=0 WORLD_SIZE=1."
    ]


@pytest.mark.parametrize("variable", ["OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS"])
def test_every_launcher(variable):
    (text,) = check_launch_environment({variable: "2"})
    assert f"({variable}=2), but RANK and WORLD_SIZE are not set" in text


def test_one_of_two():
    (text,) = check_launch_environment({**OPEN_MPI, "RANK": "3"})
    assert "but WORLD_SIZE is not set" in text
    (text,) = check_launch_environment({**OPEN_MPI, "WORLD_SIZE": "8", "RANK": ""})
    assert "but RANK is not set" in text


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"RANK": "0", "WORLD_SIZE": "1"},
        {**OPEN_MPI, "RANK": "3", "WORLD_SIZE": "8"},
        {"OMPI_COMM_WORLD_SIZE": "1"},
        {"SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "1"},
        {"SLURM_NTASKS": ""},
        {"SLURM_NTASKS": "junk"},
        {"PMI_SIZE": "-1"},
    ],
)
def test_nothing_wrong(environ):
    assert check_launch_environment(environ) == []


@pytest.mark.parametrize(
    ("environ", "text"),
    [
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK='x': allowed is a whole number, 0 or more."),
        ({"RANK": "0", "WORLD_SIZE": "-2"}, "WORLD_SIZE='-2': allowed is a whole number, 0 or more."),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 with WORLD_SIZE=2: ranks run from 0 to WORLD_SIZE - 1."),
        ({"LOCAL_RANK": "1.0"}, "LOCAL_RANK='1.0': allowed is a whole number, 0 or more."),
    ],
)
def test_wrong_numbers(environ, text):
    assert check_launch_environment(environ) == [text]


class TestWithAProcessGroup:
    def test_alone_although_eight_were_started(self):
        (text,) = check_launch_environment(OPEN_MPI, world_size=1)
        assert "RANK and WORLD_SIZE are not set" in text

    def test_all_are_there(self):
        assert check_launch_environment(OPEN_MPI, world_size=8) == []

    def test_alone_on_purpose(self):
        assert check_launch_environment({**OPEN_MPI, "RANK": "0", "WORLD_SIZE": "1"}, world_size=1) == []


def test_deepspeed_asks_mpi4py_where_it_is_installed(monkeypatch):
    monkeypatch.setattr(launch_env, "find_spec", lambda name: object() if name == "mpi4py" else None)
    assert check_launch_environment(OPEN_MPI) == []
    assert check_launch_environment(OPEN_MPI, world_size=1) != []
