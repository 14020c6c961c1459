"""`tensorgrad curvature RUN`: eigenvalues and spectral density of the loss of a run."""

from __future__ import annotations

import json as jsonlib
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from tensorgrad.cli.sweeps import Progress
from tensorgrad.core.errors import ArgumentError
from tensorgrad.curvature.record import FILE, read_curvature
from tensorgrad.curvature.runs import DEFAULTS, CurvatureOptions, measure_run
from tensorgrad.io.command import aligned
from tensorgrad.io.files import write_json
from tensorgrad.io.tables import to_markdown, write_text
from tensorgrad.report import write_report
from tensorgrad.report.curvature import PICTURE, checkpoint_rows, density_picture
from tensorgrad.train.device import choose_device
from tensorgrad.train.tasks import task_of_run


def curvature(
    run: Path,
    /,
    *,
    options: Annotated[CurvatureOptions, Parameter(name="*")] = DEFAULTS,
    batch: int | None = None,
    dtype: Literal["float32", "tf32", "bfloat16", "float16"] = "float32",
    device: str = "auto",
    json: bool = False,
    task: str | None = None,
    model_file: Annotated[str, Parameter(name="--model")] = "",
) -> int:
    """Measure eigenvalues and spectral density of the loss at the checkpoints of a run.

    Writes curvature.json and curvature.svg into the folder of the run, and its report anew, with
    the largest eigenvalue of each checkpoint beside 2 / learning rate.

    Args:
        run: folder of the run.
        batch: another batch size than the run's.
        dtype: dtype of matrix products.
        device: cpu, cuda, cuda:N, or auto: a GPU if there is one.
        json: print what curvature.json has.
        task: the Python file of the run's task, if it is your own; it is executed.
        model_file: the Python file of the run's model, if it is your own; it is executed.
    """
    lowest = {"eigenvalues": 1, "batches": 1, "steps": 1, "samples": 0, "seed": 0, "tolerance": 0}
    for option, low in lowest.items():
        if not (value := getattr(options, option)) >= low:
            raise ArgumentError(f"--{option}: got {value}, expected {low} or more")
    if options.eigenvalues > 20:
        raise ArgumentError(f"--eigenvalues: got {options.eigenvalues}, expected at most 20")
    if options.samples == 1:
        raise ArgumentError("--samples: got 1, expected 0, or 2 or more")
    kind, settings = task_of_run(run, task, model_file)
    rows = settings.batch if batch is None else batch
    one_part = {"batch": rows, "micro_batches": 1, "grad_dtype": "float32"}
    settings, place = choose_device(replace(settings, device=device, dtype=dtype, **one_part))
    prepared = kind(settings, run, resuming=True)
    prepared.prepare(place)
    with Progress("curvature", "product") as progress:
        found = measure_run(prepared, options, progress.show)
    write_json(run / FILE, found)
    measured, picture = read_curvature(run / FILE), run / PICTURE
    if measured.density is None:
        picture.unlink(missing_ok=True)
    else:
        write_text(picture, density_picture(measured))
    page = write_report(run)
    if json:
        print(jsonlib.dumps(found, indent=1))
    else:
        print(aligned(to_markdown(*checkpoint_rows(measured), numbers=5)), end="")
        print(f"{run / FILE}, {page}")
    return 0
