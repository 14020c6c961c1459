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
from tensorgrad.bench.steps import (
    MODEL,
    Preset,
    Step,
    StepSettings,
    model_and_step,
    model_case,
    settings_of,
)
from tensorgrad.bench.sweep import Case, Measurement, Row, Sweep
from tensorgrad.bench.timing import seconds_of
from tensorgrad.models.language_model import LanguageModel
from tensorgrad.profile import Profiler
from tensorgrad.profile.tables import op_table
from tensorgrad.train.strategy import OneProcess

Trained = Callable[[], tuple[LanguageModel, Step]]


def profiler_sweep(
    *,
    preset: Preset = "gpt2-124M",
    sizes: options.Sizes = options.PRESET,
    batch: int = 8,
    dtype: options.Precision | None = None,
    steps: int = 20,
    rounds: int = 5,
    device: options.Device = "auto",
) -> Iterator[Measurement]:
    """Measure what the profiler costs, by source of its times, and how well they sum up to a step.

    Args:
        preset: of the model.
        batch: sequences of a step.
        dtype: as in training (default: bfloat16-parameters, on a CPU float32).
        steps: of a round.
        rounds: without and with the profiler, in turns; the median counts.
    """
    options.check_counts("profiler", steps=steps, rounds=rounds)
    model = model_case(preset, batch, options.precision_on(device, dtype), sizes)
    sources = ("host",) if device == "cpu" else ("host", "events", "cupti")
    cases = options.crossed(source=sources, **model, steps=steps, rounds=rounds)
    trained = cache(partial(_trained, settings_of(model), device))  # of all sources
    measure = partial(measure_profiler, trained=trained, device=device)
    yield Measurement(PROFILER, cases, measure, device)


def _trained(settings: StepSettings, device: str) -> tuple[LanguageModel, Step]:
    """Return a model and its step, which has run before."""
    model, step = model_and_step(settings, OneProcess(), device)
    seconds_of(step, device, 3)
    return model, step


def measure_profiler(case: Case, trained: Trained, device: str) -> Row:
    """Return the results of a case."""
    steps, off, on = case["steps"], [], []
    model, step = trained()

    def profiled() -> None:
        with profiler.step():
            step()

    for _ in range(case["rounds"]):
        off.append(seconds_of(step, device, steps) / steps)
        with Profiler(model, source=case["source"]) as profiler:
            on.append(seconds_of(profiled, device, steps) / steps)
    table, without = op_table(profiler.recording), statistics.median(off)
    return {
        "off_ms": 1e3 * without,
        "on_ms": 1e3 * statistics.median(on),
        "cost": 100 * (statistics.median(on) / without - 1),
        "busy_ms": 1e3 * table.busy,
        "gaps_ms": 1e3 * table.gaps,
        "sum_ratio": (table.busy + table.gaps) / without,
    }


PROFILER = Sweep(
    "profiler",
    ("source", *MODEL, "steps", "rounds"),
    ("off_ms", "on_ms", "cost", "busy_ms", "gaps_ms", "sum_ratio"),
    bars("Step with the profiler", "ms", ("source", "preset"), ("off_ms", "on_ms")),
    percents=("cost",),
)
