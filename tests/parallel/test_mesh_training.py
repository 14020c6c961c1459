from __future__ import annotations

from pathlib import Path

import pytest

from tests.parallel import mesh_training
from tests.ranks import run_ranks

pytestmark = pytest.mark.slow

PROGRAM = Path(mesh_training.__file__)


@pytest.mark.mpi
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_mesh_takes_the_steps_of_one_process(ranks: int) -> None:
    runs = len(mesh_training.cases(ranks, "cpu"))
    assert run_ranks(PROGRAM, ranks, ["cpu"]).stdout == f"{runs} runs on {ranks} ranks, cpu\n"


@pytest.mark.mpi
@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_mesh_takes_the_steps_of_one_process_on_gpus(ranks: int) -> None:
    runs = len(mesh_training.cases(ranks, "cuda"))
    out = run_ranks(PROGRAM, ranks, ["cuda"], timeout=300).stdout
    assert out == f"{runs} runs on {ranks} ranks, cuda:0\n"
