"""`tensorgrad bench profiler`: what the profiler costs, and how well its times sum up to a step.

Rounds without and with the profiler take turns; figures are medians. Run it while nothing else uses
the machine. That it costs nothing while off is counted in tests/profile/test_profiler.py.
Tests: tests/bench/test_small.py.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from tensorgrad.bench.options import (
    PRESET,
    Device,
    Precision,
    Sizes,
    check_counts,
    crossed,
    precision_on,
)
from tensorgrad.bench.pictures import bars
from tensorgrad.bench.steps import MODEL, Preset, Step, model_and_step, model_case, settings_of
from tensorgrad.bench.sweep import Case, Measurement, Row, Sweep
from tensorgrad.bench.timing import seconds_of
from tensorgrad.models.language_model import LanguageModel
from tensorgrad.profile import Profiler
from tensorgrad.profile.recording import Recording
from tensorgrad.profile.tables import op_table
from tensorgrad.train.ranks import OneProcess


def profiler_sweep(
    *,
    preset: Preset = "gpt2-124M",
    sizes: Sizes = PRESET,
    batch: int = 8,
    dtype: Precision | None = None,
    steps: int = 20,
    rounds: int = 5,
    device: Device = "auto",
) -> Iterator[Measurement]:
    """Measure what the profiler costs, by source of its times, and how well they sum up to a step.

    Args:
        preset: of the model.
        batch: sequences of a step.
        dtype: as in training (default: bfloat16-parameters, on a CPU float32).
        steps: of a round.
        rounds: without and with the profiler, in turns; the median counts.
    """
    check_counts("profiler", steps=steps, rounds=rounds)
    model = model_case(preset, batch, precision_on(device, dtype), sizes)
    sources = ("host",) if device == "cpu" else ("host", "events", "cupti")
    cases = crossed(source=sources, **model, steps=steps, rounds=rounds)
    yield Measurement(PROFILER, cases, ProfilerBench(device), device)


class ProfilerBench:
    """Measures sources with one step, which has run before."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._model: LanguageModel | None = None
        self._step: Step = lambda: None

    def __call__(self, case: Case) -> Row:
        """Return the results of a case."""
        device, steps = self._device, case["steps"]
        if self._model is None:
            self._model, self._step = model_and_step(settings_of(case), OneProcess(), device)
            seconds_of(self._step, device, 3)
        off, on = [], []
        for _ in range(case["rounds"]):
            off.append(seconds_of(self._step, device, steps) / steps)
            seconds, recording = self._profiled(case["source"], steps)
            on.append(seconds)
        table, without = op_table(recording), statistics.median(off)
        return {
            "off_ms": 1e3 * without,
            "on_ms": 1e3 * statistics.median(on),
            "cost": 100 * (statistics.median(on) / without - 1),
            "busy_ms": 1e3 * table.busy,
            "gaps_ms": 1e3 * table.gaps,
            "sum_ratio": (table.busy + table.gaps) / without,
        }

    def _profiled(self, source: str, steps: int) -> tuple[float, Recording]:
        """Return seconds of a step with a profiler, and what it recorded."""

        def profiled() -> None:
            with profiler.step():
                self._step()

        with Profiler(self._model, source=source) as profiler:
            seconds = seconds_of(profiled, self._device, steps) / steps
        return seconds, profiler.recording


PROFILER = Sweep(
    "profiler",
    ("source", *MODEL, "steps", "rounds"),
    ("off_ms", "on_ms", "cost", "busy_ms", "gaps_ms", "sum_ratio"),
    bars("Step with the profiler", "ms", ("source", "preset"), ("off_ms", "on_ms")),
    percents=("cost",),
)
