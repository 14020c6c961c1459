"""`tensorgrad bench first-use`: the first training step with empty and with filled kernel caches.

Each run is a new process. The time is that of forward, backward and the optimizer step, once
modules, weights and the GPU are ready: compiling or loading kernels, libraries that initialize on
first use, and the step itself. Tests: tests/bench/test_small.py.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tensorgrad.bench.options import PRESET, Device, Precision, Sizes, crossed, precision_on
from tensorgrad.bench.pictures import bars
from tensorgrad.bench.processes import in_new_process
from tensorgrad.bench.steps import Preset, model_case, step_of
from tensorgrad.bench.sweep import Case, Row, Sweep
from tensorgrad.bench.timing import seconds_of


def first_use_sweep(
    *,
    preset: Preset = "gpt2-124M",
    sizes: Sizes = PRESET,
    batch: int = 4,
    dtype: Precision | None = None,
    device: Device = "auto",
) -> Iterator[Sweep]:
    """Measure the first training step of a process, with empty and with filled kernel caches.

    Args:
        preset: of the model.
        batch: sequences of a step.
        dtype: as in training (default: bfloat16-parameters, on a CPU float32).
    """
    model = model_case(preset, batch, precision_on(device, dtype), sizes)
    cases = crossed(caches=("empty", "warm"), **model)
    with TemporaryDirectory() as folder:
        measure = partial(measure_first_use, folder=Path(folder), device=device)
        results = "first_s", "second_s", "kernels", "cupy_kernels"
        draw = bars("First training step", "s", ("caches", "preset"), results[:2])
        yield Sweep("first-use", cases, measure, results, draw, device)


def first_steps(case: dict[str, Any], device: str) -> list[float]:
    """Return the seconds of the first two steps of this process."""
    step = step_of(case, device)
    return [seconds_of(step, device) for _ in range(2)]


def measure_first_use(case: Case, folder: Path, device: str) -> Row:
    """Return the results of a case; the caches are in a folder."""
    caches = {"XDG_CACHE_HOME": str(folder), "CUPY_CACHE_DIR": str(folder / "cupy"),
              "CUDA_CACHE_PATH": str(folder / "driver")}  # fmt: skip
    arguments = {"case": dict(case), "device": device}
    if case["caches"] == "empty":
        for path in folder.iterdir():
            shutil.rmtree(path)
    elif not any(folder.iterdir()):
        in_new_process(first_steps, arguments, caches)
    first, second = in_new_process(first_steps, arguments, caches)
    return {
        "first_s": first, "second_s": second,
        "kernels": len(list(folder.glob("tensorgrad/kernels/*"))),
        "cupy_kernels": len(list(folder.glob("cupy/*.cubin"))),
    }  # fmt: skip
