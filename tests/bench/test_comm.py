from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tensorgrad.bench.comm import comm_sweep, draw_comm
from tensorgrad.bench.sweep import Case
from tensorgrad.errors import ArgumentError
from tensorgrad.parallel.comm.collectives import Comm
from tests.ranks import run_ranks


class _Ranks(Comm):
    """Four ranks, of which this is the first; nothing is sent."""

    def __init__(self) -> None:
        super().__init__()
        self.size = 4


def cases_of(**options: Any) -> list[Case]:
    return list(next(comm_sweep(comm=_Ranks(), **options)).cases)


def test_cases_by_backend_ranks_and_size() -> None:
    cases = cases_of(sizes=(4, 1), ranks=(2, 4), backends=("mpi", "nccl"), device="cuda:0")
    assert len(cases) == 8
    assert [(case["ranks"], case["size_mb"]) for case in cases[:4]] == [
        *((2, 1.0), (2, 4.0), (4, 1.0), (4, 4.0))
    ]
    assert {case["ranks"] for case in cases_of(device="cpu")} == {4}
    assert cases_of(device="cpu") == [
        {"backend": "mpi", "ranks": 4, "size_mb": size, "dtype": "float32"}
        for size in (1, 4, 16, 64, 256, 1024)
    ]
    assert {case["backend"] for case in cases_of(device="cuda:0")} == {"mpi", "nccl"}
    rows = [{**case, "ms": 1.0, "bus_gbps": 2.0, "device": "cpu"} for case in cases]
    [time, bandwidth] = draw_comm(rows)[""].axes
    assert (time.get_ylabel(), bandwidth.get_ylabel()) == ("time (ms)", "bus bandwidth (GB/s)")
    assert [line.get_label() for line in time.lines] == ["mpi, 2", "mpi, 4", "nccl, 2", "nccl, 4"]
    line = bandwidth.lines[0]
    assert (list(line.get_xdata()), list(line.get_ydata())) == ([1, 4], [2, 2])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ranks": (1,)}, "ranks is 1, expected 2 to 4"),
        ({"ranks": (5,)}, "ranks is 5, expected 2 to 4"),
        ({"backends": ("nccl",)}, "--backends: got nccl without a GPU, expected mpi"),
    ],
)
def test_bad_arguments_are_errors(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        cases_of(device="cpu", **arguments)


def test_one_rank_has_nothing_to_reduce() -> None:
    with pytest.raises(ArgumentError, match="got one rank, expected several"):
        next(comm_sweep(comm=Comm(), device="cpu"))


@pytest.mark.mpi
def test_memory_that_one_rank_of_a_group_lacks_is_a_row(tmp_path: Path) -> None:
    run_ranks(Path(__file__).with_name("comm_ranks.py"), 3, [tmp_path])
