from __future__ import annotations

import pytest

from tensorgrad.bench import buckets
from tensorgrad.bench.buckets import BucketBench, buckets_sweep, draw_buckets
from tensorgrad.bench.steps import RankTimer
from tensorgrad.bench.sweep import Case
from tensorgrad.errors import ArgumentError
from tensorgrad.parallel.bucket_size import Overlap, default_bucket_bytes
from tensorgrad.parallel.comm.collectives import Comm


def cases_of(comm: Comm, sizes: tuple[float, ...], steps: int) -> list[Case]:
    tiny = {"vocab": 64, "context": 8, "layers": 2, "heads": 2, "width": 16, "batch": 2}
    return list(
        next(buckets_sweep(comm=comm, sizes=sizes, steps=steps, device="cpu", **tiny)).cases
    )


def test_the_default_case() -> None:
    comm = Comm()
    comm.size = 2
    cases = next(buckets_sweep(comm=comm, device="cpu")).cases
    assert cases[0] == {
        "bucket_mb": 1.0, "layers": 12, "width": 768, "heads": 12, "context": 1024,
        "vocab": 50304, "batch": 8, "dtype": "float32", "ranks": 2, "steps": 10,
    }  # fmt: skip
    assert [case["bucket_mb"] for case in cases] == [1, 2, 5, 10, 25, 50, 100, 200, 400]


def test_embeddings_have_a_bucket_of_their_own() -> None:
    comm = Comm()
    comm.size = 2
    small, large = cases_of(comm, (1e-6, 1.0), 1)
    bench = BucketBench(comm, "cpu")
    assert bench._count(large) == 2
    assert bench._count(small) == 2 * 6 + 1 + 1  # modules of two blocks, the last norm


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
    assert [list(line.get_ydata()) for line in axes.lines[:2]] == [[1, 1], [2, 2]]
    assert [list(line.get_xdata()) for line in axes.lines] == [[1, 5], [1, 5], [3, 3], [4, 4]]


def test_a_row_has_the_overhead_of_a_step_and_of_the_formula(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    comm = Comm()
    comm.size = 2
    [case] = cases_of(comm, (0.001,), 1)
    bench = BucketBench(comm, "cpu")
    seconds = iter((0.005, 0.007))
    monkeypatch.setattr(RankTimer, "seconds", lambda *_: next(seconds))
    monkeypatch.setattr(buckets, "language_step", lambda settings, *_: sizes.append(settings.batch))
    monkeypatch.setattr(BucketBench, "_count", lambda *_: 3)
    model = Overlap(4e6, 0.1, 1e9, 1e-3)
    monkeypatch.setattr(BucketBench, "_measured_model", lambda *_: model)
    sizes: list[int] = []
    monkeypatch.setattr(Overlap, "best", 5e5)
    row = bench(case)
    assert row["buckets"] == 3
    assert row["best_mb"] == 0.5
    assert sizes == [2, 4]  # alone, and of two ranks
    assert (row["alone_ms"], row["step_ms"]) == pytest.approx((5, 7))
    assert row["overhead_ms"] == pytest.approx(2)
    assert row["formula_ms"] == pytest.approx(1e3 * model.overhead(1e3))
    assert row["best_ms"] == pytest.approx(1e3 * model.overhead(1e6 * row["best_mb"]))
    assert row["default_mb"] == pytest.approx(default_bucket_bytes(4e6) / 1e6)
    assert (row["backward_ms"], row["gradients_mb"]) == pytest.approx((100, 4))
    assert (row["bandwidth_gbps"], row["latency_us"]) == pytest.approx((1, 1000))


def test_the_formula_has_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    comm = Comm()
    comm.size = 2
    [case] = cases_of(comm, (1.0,), 1)
    calls = iter(((0, 9.0), (0, 0.3), (0, 0.1), (0, 0.2)))  # the first one warms up
    monkeypatch.setattr(buckets, "phases", lambda *_: next(calls))
    monkeypatch.setattr(RankTimer, "seconds", lambda timer, call, count: 1e-3 + call().size / 1e6)
    monkeypatch.setattr(Comm, "all_reduce", lambda comm, array, mean: array)
    model = BucketBench(comm, "cpu")._measured_model(case)
    rows, width = 64 + 8, 16  # rows and columns of both embeddings
    assert model.gradients == 4 * (rows * width + 2 * (12 * width**2 + 13 * width) + 2 * width)
    assert model.last == 4 * rows * width
    assert model.backward == 0.2
    assert model.latency == pytest.approx(1e-3 + 256e-6)
    assert model.bandwidth == pytest.approx(4e6 * model.gradients / (model.gradients - 1024))
