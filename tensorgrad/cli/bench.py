"""`tensorgrad bench`: a command for each sweep, which writes a table and pictures, and resumes.

A sweep is a function that yields what to measure; its arguments are the command's options.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter

from tensorgrad.bench.attention import attention_sweep
from tensorgrad.bench.buckets import buckets_sweep
from tensorgrad.bench.comm import comm_sweep
from tensorgrad.bench.cpu import cpu_sweep
from tensorgrad.bench.decode import decode_sweep
from tensorgrad.bench.derivatives import derivatives_sweep
from tensorgrad.bench.errors import errors_sweep
from tensorgrad.bench.first_use import first_use_sweep
from tensorgrad.bench.kernels import kernels_sweep
from tensorgrad.bench.loss_curve import loss_sweep
from tensorgrad.bench.matrix import matrix_sweep, parallel_sweep
from tensorgrad.bench.model import model_sweep
from tensorgrad.bench.options import check_numbers
from tensorgrad.bench.overhead import overhead_sweep
from tensorgrad.bench.precision import precision_sweep
from tensorgrad.bench.profiler import profiler_sweep
from tensorgrad.bench.proposals import proposals_sweep
from tensorgrad.bench.step import step_sweep
from tensorgrad.bench.sweep import Sweep
from tensorgrad.bench.translation import translation_sweep
from tensorgrad.cli.sweeps import ranks_of, sweep_cases
from tensorgrad.train.command_line import STYLE

Out = Annotated[Path, Parameter(help="folder of the files; finished rows in it are kept")]
OUT = Path("runs/bench")
SWEEPS: tuple[Callable[..., Iterator[Sweep]], ...] = (
    *(attention_sweep, model_sweep, matrix_sweep, comm_sweep, precision_sweep, buckets_sweep),
    *(parallel_sweep, step_sweep, cpu_sweep, kernels_sweep, decode_sweep, overhead_sweep),
    *(first_use_sweep, errors_sweep, profiler_sweep, proposals_sweep, loss_sweep),
    *(translation_sweep, derivatives_sweep),
)


def _command(sweep: Callable[..., Iterator[Sweep]]) -> Callable[..., int]:
    """Return the command of a sweep: its options and --out."""
    signature = inspect.signature(sweep, eval_str=True)
    names = signature.parameters

    def command(*words: Any, **options: Any) -> int:
        out = options.pop("out", OUT)
        check_numbers(options)
        comm, device = ranks_of(options.get("device", "auto" if "device" in names else "cpu"))
        own = {"device": device, "comm": comm}
        options |= {name: value for name, value in own.items() if name in names}
        with closing(sweep(*words, **options)) as found:  # type: ignore[type-var]
            return max([sweep_cases(measurement, out, comm) for measurement in found])

    kind = inspect.Parameter.KEYWORD_ONLY
    parameters = [parameter for name, parameter in names.items() if name != "comm"]
    parameters.append(inspect.Parameter("out", kind, annotation=Out, default=OUT))
    command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    command.__doc__, command.__annotations__ = (
        sweep.__doc__,
        {},
    )  # its signature's annotations count
    command.runs_on_ranks = "comm" in names  # type: ignore[attr-defined]
    return command


bench = App(
    name="bench",
    help="Measure, and write a table as CSV and Markdown, and pictures. Every finished row is kept "
    "at once: the same command resumes.",
    version_flags=(),
    **STYLE,
)
bench.default_parameter = Parameter.combine(
    bench.default_parameter, Parameter(consume_multiple=True)
)
for _sweep in SWEEPS:
    _name = _sweep.__name__.removesuffix("_sweep").replace("_", "-")
    bench.command(_command(_sweep), name=_name)
