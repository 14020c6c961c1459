from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tensorgrad.errors import ArgumentError
from tensorgrad.parallel import Comm, DataParallel, Mesh, Pipeline, TensorParallel, Zero
from tensorgrad.parallel.strategy import mesh_strategy
from tensorgrad.train.strategy import OneProcess
from tests.parallel import mesh_training
from tests.ranks import run_ranks

pytestmark = pytest.mark.slow

PROGRAM = Path(mesh_training.__file__)


@pytest.mark.parametrize(
    ("mesh", "options", "message"),
    [
        (Mesh(2, rank=1), {}, "mesh is of rank 1 of 2, expected rank 0 of 1"),
        (Mesh(), {"zero": 4}, "zero is 4, expected 0 to 3"),
        (Mesh(), {"zero": 1, "reduction": "flat"}, "reduction is 'flat' with zero 1, expected 'ov"),
        (Mesh(), {"schedule": "x"}, "schedule is 'x', expected one of model-parallel, gpipe"),
        (Mesh(), {"chunks": 2}, "chunks is 2 with schedule '1f1b', expected 1; more are for"),
    ],
    ids=str,
)
def test_options_of_a_mesh_that_do_not_fit(
    mesh: Mesh, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ArgumentError, match=f"mesh_strategy: {message}"):
        mesh_strategy(Comm(), mesh, **options)


def test_axes_of_one_rank_cost_nothing() -> None:
    comm = Comm()
    assert type(mesh_strategy(comm, Mesh())) is DataParallel
    assert type(mesh_strategy(comm, Mesh(), zero=3)) is Zero
    comm.size = 2
    with pytest.raises(ArgumentError, match="zero is 2, expected 0 or 1 in a pipeline"):
        mesh_strategy(comm, Mesh(pp=2), zero=2)
    for mesh, kind in ((Mesh(pp=2), Pipeline), (Mesh(tp=2), TensorParallel)):
        comm.split = lambda ranks: Comm()  # type: ignore[method-assign]
        strategy = mesh_strategy(comm, mesh)
        assert type(strategy) is kind
        assert type(strategy._inner) is OneProcess


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
