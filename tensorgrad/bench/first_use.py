"""`tensorgrad bench first-use`: the first training step with empty and with filled kernel caches.

Each run is a new process. The time is that of forward, backward and the optimizer step, once
modules, weights and the GPU are ready: compiling or loading kernels, libraries that initialize on
first use, and the step itself. Tests: tests/bench/test_small.py.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from tensorgrad.bench.options import PRESET, Device, Precision, Sizes, crossed, precision_on
from tensorgrad.bench.pictures import bars
from tensorgrad.bench.processes import in_new_process
from tensorgrad.bench.steps import MODEL, Preset, model_case, settings_of, training_step
from tensorgrad.bench.sweep import Case, Measurement, Row, Sweep
from tensorgrad.bench.timing import seconds_of
from tensorgrad.train.ranks import OneProcess


def first_use_sweep(
    *,
    preset: Preset = "gpt2-124M",
    sizes: Sizes = PRESET,
    batch: int = 4,
    dtype: Precision | None = None,
    device: Device = "auto",
) -> Iterator[Measurement]:
    """Measure the first training step of a process, with empty and with filled kernel caches.

    Args:
        preset: of the model.
        batch: sequences of a step.
        dtype: as in training (default: bfloat16-parameters, on a CPU float32).
    """
    model = model_case(preset, batch, precision_on(device, dtype), sizes)
    with closing(FirstUseBench(device)) as measure:
        yield Measurement(FIRST_USE, crossed(caches=("empty", "warm"), **model), measure, device)


def first_steps(case: dict[str, Any], device: str) -> list[float]:
    """Return the seconds of the first two steps of this process."""
    step = training_step(settings_of(case), OneProcess(), device)
    return [seconds_of(step, device) for _ in range(2)]


class FirstUseBench:
    """Measures first steps; the caches are in a folder that ends with it."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._folder = tempfile.TemporaryDirectory()
        self._filled = False

    def close(self) -> None:
        """Remove the caches."""
        self._folder.cleanup()

    def __call__(self, case: Case) -> Row:
        """Return the results of a case."""
        if case["caches"] == "warm" and not self._filled:
            self._times(case)
        first, second = self._times(case)
        folder = Path(self._folder.name)
        return {
            "first_s": first, "second_s": second,
            "kernels": len(list(folder.glob("tensorgrad/kernels/*"))),
            "cupy_kernels": len(list(folder.glob("cupy/*.cubin"))),
        }  # fmt: skip

    def _times(self, case: Case) -> list[float]:
        if case["caches"] == "empty":
            self._folder.cleanup()
            self._folder = tempfile.TemporaryDirectory()
        name = self._folder.name
        caches = {"XDG_CACHE_HOME": name, "CUPY_CACHE_DIR": f"{name}/cupy",
                  "CUDA_CACHE_PATH": f"{name}/driver"}  # fmt: skip
        found: list[float] = in_new_process(
            first_steps, {"case": dict(case), "device": self._device}, caches
        )
        self._filled = True
        return found


FIRST_USE = Sweep(
    "first-use",
    ("caches", *MODEL),
    ("first_s", "second_s", "kernels", "cupy_kernels"),
    bars("First training step", "s", ("caches", "preset"), ("first_s", "second_s")),
)
