"""`tensorgrad bench buckets`: overhead of gradient buckets, beside the formula and its optimum.

The overhead is the time of a data-parallel step beyond that of the same step alone. The formula is
that of parallel/bucket_size.py, with what this machine measures: the time of backward, and latency
and bandwidth of all-reduce. Tests: tests/bench/test_buckets.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from tensorgrad.bench import options
from tensorgrad.bench.pictures import new_figure
from tensorgrad.bench.steps import RankTimer, settings_of, step_of
from tensorgrad.bench.sweep import Case, Row, Sweep
from tensorgrad.bench.timing import phases
from tensorgrad.core import backend
from tensorgrad.nn import Parameter
from tensorgrad.parallel.bucket_size import Overlap, default_bucket_bytes
from tensorgrad.parallel.buckets import assign_buckets, leading_embeddings
from tensorgrad.parallel.comm.collectives import Comm
from tensorgrad.parallel.data import DataParallel
from tensorgrad.profile.training_step import language_step
from tensorgrad.train.strategy import Strategy

_WIDE = 4  # bytes of a gradient
_SMALL = 1024  # bytes of an all-reduce that takes its latency


def buckets_sweep(
    *,
    comm: Comm,
    sizes: tuple[float, ...] = (1, 2, 5, 10, 25, 50, 100, 200, 400),
    layers: options.Layers = 12,
    width: options.Width = 768,
    heads: options.Heads = 12,
    context: options.Context = 1024,
    vocab: options.Vocab = 50304,
    batch: int = 8,
    dtype: options.Precision | None = None,
    steps: int = 10,
    device: options.Device = "auto",
) -> Iterator[Sweep]:
    """Measure what gradient buckets add to a step, by size, beside the formula and its optimum.

    The model is a GPT-2, by default of 124M parameters, on the ranks that mpirun starts.

    Args:
        sizes: of a bucket of gradients, MB (10^6 bytes).
        batch: sequences of a rank.
        dtype: of matrix products, as in training (default: bfloat16-parameters, on a CPU float32).
        steps: of a timed window; the median of three windows counts.
    """
    options.check_ranks("buckets", comm.size)
    cases = options.crossed(
        bucket_mb=sorted(map(float, sizes)), layers=layers, width=width, heads=heads,
        context=context, vocab=vocab, batch=batch, dtype=options.precision_on(device, dtype),
        ranks=comm.size, steps=steps,
    )  # fmt: skip
    settings_of(cases[0])
    results = (
        *("buckets", "step_ms", "alone_ms", "overhead_ms", "formula_ms", "best_mb", "best_ms"),
        *("default_mb", "backward_ms", "gradients_mb", "bandwidth_gbps", "latency_us"),
    )
    yield Sweep("buckets", cases, BucketBench(comm, device), results, draw_buckets, device)


class BucketBench:
    """Measures bucket sizes; all ranks make one and call it in the same order.

    Args:
        comm: the ranks.
        device: of this rank.
    """

    def __init__(self, comm: Comm, device: str) -> None:
        self._comm, self._device, self._timer = comm, device, RankTimer(comm, device, 3)
        self._shared: tuple[float, Overlap] | None = None

    def __call__(self, case: Case) -> Row:
        """Return the results of a case."""
        if self._shared is None:  # by all sizes
            self._shared = self._milliseconds(case, None), self._measured_model(case)
        (alone, model), size = self._shared, case["bucket_mb"] * 1e6
        step = self._milliseconds(
            case, DataParallel(self._comm, "overlap", bucket_mb=case["bucket_mb"])
        )
        return {
            "buckets": self._count(case),
            "step_ms": step,
            "alone_ms": alone,
            "overhead_ms": step - alone,
            "formula_ms": 1e3 * model.overhead(size),
            "best_mb": model.best / 1e6,
            "best_ms": 1e3 * model.overhead(model.best),
            "default_mb": default_bucket_bytes(model.gradients) / 1e6,
            "backward_ms": 1e3 * model.backward,
            "gradients_mb": model.gradients / 1e6,
            "bandwidth_gbps": model.bandwidth / 1e9,
            "latency_us": 1e6 * model.latency,
        }

    def _milliseconds(self, case: Case, strategy: Strategy | None) -> float:
        """Return the time of a step, alone or with the ranks."""
        batch = case["batch"] * (1 if strategy is None else strategy.ranks)
        step = language_step(*settings_of({**case, "batch": batch}), self._device, strategy)
        return 1e3 * self._timer.seconds(step, case["steps"])

    def _count(self, case: Case) -> int:
        """Return the number of buckets."""
        parameters, leading = self._parameters(case)
        return len(set(assign_buckets(parameters, case["bucket_mb"], leading).values()))

    def _parameters(self, case: Case) -> tuple[dict[str, Parameter], set[str]]:
        """Return the parameters by name, and the names of embeddings."""
        model = language_step(*settings_of(case), self._device, lazy=True).model
        parameters = dict(model.named_parameters())
        return parameters, set(leading_embeddings(model, parameters))

    def _measured_model(self, case: Case) -> Overlap:
        """Return the formula with the times of this machine."""
        parameters, leading = self._parameters(case)
        gradients = _WIDE * sum(parameter.size for parameter in parameters.values())
        last = _WIDE * sum(parameters[name].size for name in leading)
        step = step_of(case, self._device)
        times = [phases(self._device, *step.phases())[1] for _ in range(4)]
        backward = self._timer.largest(float(np.median(times[1:])))
        latency = self._all_reduce_seconds(_SMALL)
        whole = self._all_reduce_seconds(gradients)
        bandwidth = gradients / max(whole - latency, 1e-9)
        return Overlap(gradients, backward, bandwidth, latency, last=last)

    def _all_reduce_seconds(self, size: int) -> float:
        """Return the time of an all-reduce of `size` bytes."""
        array = backend.to_device(np.zeros(max(1, size // _WIDE), np.float32), self._device)
        return self._timer.seconds(lambda: self._comm.all_reduce(array, "mean"), 5)


def draw_buckets(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the figure of a sweep: measured overhead, the formula, its optimum, the default."""
    first = rows[0]
    title = "Gradient buckets: {layers} layers, C {width}, batch {batch} a rank, {ranks} ranks"
    figure = new_figure(1, 1, (title + "\n{dtype}, {device}").format(**first), 8.0)
    axes = figure.subplots()
    sizes = [row["bucket_mb"] for row in rows]
    axes.plot(sizes, [row["overhead_ms"] for row in rows], "o-", label="measured")
    axes.plot(sizes, [row["formula_ms"] for row in rows], "s--", label="formula")
    best, default = first["best_mb"], first["default_mb"]
    axes.axvline(best, color="C2", linestyle=":", label=f"optimum of the formula: {best:.3g} MB")
    axes.axvline(default, color="C3", linestyle=":", label=f"default: {default:.3g} MB")
    axes.set(xscale="log", xlabel="bucket size (MB)", ylabel="overhead of a step (ms)")
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize=8)
    return {"": figure}
