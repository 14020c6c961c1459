from __future__ import annotations

import pytest

from tensorgrad.bench.buckets import buckets_sweep, draw_buckets
from tensorgrad.bench.sweep import Case
from tensorgrad.errors import ArgumentError
from tensorgrad.parallel.comm.collectives import Comm


def cases_of(comm: Comm, sizes: tuple[float, ...], steps: int) -> list[Case]:
    tiny = {"vocab": 64, "context": 8, "layers": 2, "heads": 2, "width": 16, "batch": 2}
    return list(
        next(buckets_sweep(comm=comm, sizes=sizes, steps=steps, device="cpu", **tiny)).cases
    )


def test_bad_arguments_are_errors() -> None:
    comm = Comm()
    with pytest.raises(ArgumentError, match="got one rank, expected several"):
        cases_of(comm, (1.0,), 1)


def test_the_picture_has_the_formula_and_its_optimum() -> None:
    comm = Comm()
    comm.size = 2
    rows = [
        {
            **case, "overhead_ms": 1.0, "formula_ms": 2.0, "best_mb": 3.0, "default_mb": 4.0,
            "device": "cpu",
        }
        for case in cases_of(comm, (5, 1), 1)
    ]  # fmt: skip
    assert [row["bucket_mb"] for row in rows] == [1.0, 5.0]
    [axes] = draw_buckets(rows)[""].axes
    labels = [line.get_label() for line in axes.lines]
    assert labels == ["measured", "formula", "optimum of the formula: 3 MB", "default: 4 MB"]
