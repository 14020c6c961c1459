"""`tensorgrad bench profiler`: what the profiler costs, and how well its times sum up to a step.

Rounds without and with the profiler take turns; figures are medians. Run it while nothing else uses
the machine. That it costs nothing while off is counted in tests/profile/test_profiler.py.
Tests: tests/bench/test_small.py.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from functools import cache, partial

from tensorgrad.bench import options
from tensorgrad.bench.pictures import bars
from tensorgrad.bench.steps import Preset, model_case, step_of
from tensorgrad.bench.sweep import Case, Row, Sweep
from tensorgrad.bench.timing import seconds_of
from tensorgrad.profile import Profiler
from tensorgrad.profile.tables import op_table
from tensorgrad.profile.training_step import TrainingStep


def profiler_sweep(
    *,
    preset: Preset = "gpt2-124M",
    sizes: options.Sizes = options.PRESET,
    batch: int = 8,
    dtype: options.Precision | None = None,
    steps: int = 20,
    rounds: int = 5,
    device: options.Device = "auto",
) -> Iterator[Sweep]:
    """Measure what the profiler costs, by source of its times, and how well they sum up to a step.

    Args:
        preset: of the model.
        batch: sequences of a step.
        dtype: as in training (default: bfloat16-parameters, on a CPU float32).
        steps: of a round.
        rounds: without and with the profiler, in turns; the median counts.
    """
    model = model_case(preset, batch, options.precision_on(device, dtype), sizes)
    sources = ("host",) if device == "cpu" else ("host", "events", "cupti")
    cases = options.crossed(source=sources, **model, steps=steps, rounds=rounds)

    @cache
    def trained() -> TrainingStep:  # by all sources, before the first round
        step = step_of(model, device)
        seconds_of(step, device, 3)
        return step

    measure = partial(measure_profiler, trained=trained, device=device)
    results = "off_ms", "on_ms", "cost", "busy_ms", "gaps_ms", "sum_ratio"
    draw = bars("Step with the profiler", "ms", ("source", "preset"), results[:2])
    yield Sweep("profiler", cases, measure, results, draw, device, percents=("cost",))


def measure_profiler(case: Case, trained: Callable[[], TrainingStep], device: str) -> Row:
    """Return the results of a case."""
    steps, off, on = case["steps"], [], []
    step = trained()
    for _ in range(case["rounds"]):
        off.append(seconds_of(step, device, steps) / steps)
        with Profiler(step.model, source=case["source"]) as profiler:
            on.append(seconds_of(step, device, steps) / steps)
    table, without = op_table(profiler.recording), statistics.median(off)
    return {
        "off_ms": 1e3 * without,
        "on_ms": 1e3 * statistics.median(on),
        "cost": 100 * (statistics.median(on) / without - 1),
        "busy_ms": 1e3 * table.busy,
        "gaps_ms": 1e3 * table.gaps,
        "sum_ratio": (table.busy + table.gaps) / without,
    }
