"""`tensorgrad profile`: where the time and the memory of a training step go."""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from cyclopts import Parameter

from tensorgrad.cli.sizes import DEFAULT_MODEL, ModelOptions, given
from tensorgrad.cli.sweeps import Progress, ranks_of
from tensorgrad.core.errors import ArgumentError
from tensorgrad.io.command import aligned, printable
from tensorgrad.io.files import make_folder
from tensorgrad.nn import ATTENTION_KERNELS
from tensorgrad.parallel.comm.collectives import Comm
from tensorgrad.parallel.comm.launch import launched_ranks
from tensorgrad.parallel.program import strategy_name
from tensorgrad.profile.overlap import overlaps_to_markdown
from tensorgrad.profile.step import StepProfile, profile_step, settings_of_run, write_step_profile
from tensorgrad.profile.tables import attention_split, kernel_table, op_table, to_markdown
from tensorgrad.startup.distribution import install
from tensorgrad.train.device import choose_device
from tensorgrad.train.folder import check_new_folder, free_folder
from tensorgrad.train.language import LanguageSettings
from tensorgrad.train.settings import DTYPES
from tensorgrad.train.strategy_settings import MODES

_log = logging.getLogger(__name__)


@Parameter(name="*", group="Step")
@dataclass(frozen=True)
class StepOptions:
    """The step to profile; with RUN, what is not given is the run's, except `parallel`.

    Args:
        batch: sequences of a step, on all ranks together (default: 8).
        micro_batches: parts of a batch, computed one by one (default: 1).
        attention: one kernel (flash), one for the softmax (fused-softmax), or op by op (unfused);
            the last two show what its parts cost (default: flash).
        recompute: compute each block again in backward (default: no).
        dtype: dtype of matrix products, as in training (default: float32).
        parallel: how data parallel ranks work together, as in training (default: overlap).
        device: cpu, cuda, cuda:N, or auto: a GPU if there is one (default: auto).
        seed: of parameters and tokens (default: 0).
    """

    batch: int | None = None
    micro_batches: int | None = None
    attention: Literal[ATTENTION_KERNELS] | None = None  # type: ignore[valid-type]
    recompute: bool | None = None
    dtype: Literal[DTYPES] | None = None  # type: ignore[valid-type]
    parallel: Literal[MODES] | None = None  # type: ignore[valid-type]
    device: str | None = None
    seed: int | None = None


def profile(
    run: Path | None = None,
    /,
    *,
    model: ModelOptions = DEFAULT_MODEL,
    step: StepOptions = StepOptions(),
    what: tuple[Literal["time", "memory"], ...] | None = None,
    steps: int = 3,
    warmup: int = 2,
    nvtx: bool = False,
    source: Literal["cupti", "events", "host"] | None = None,
    rows: int = 20,
    out: Path | None = None,
) -> int:
    """Show where the time and the memory of a training step of a language model go.

    Writes a trace for ui.perfetto.dev, tables, a roofline and memory over time into a folder, and
    prints the table of ops. Works on several ranks that mpirun starts.

    Args:
        run: a run or its config.json, whose step to profile; default: a step from the options.
        what: time, memory, or both (default: both).
        steps: steps to record.
        warmup: steps before those, which compile kernels; not a warmup of the learning rate.
        nvtx: also show ranges in Nsight Systems.
        source: what measures the GPU: cupti (each kernel), events (each op), host (nothing);
            default: cupti where cupti-python is installed, else events.
        rows: rows of the table to print.
        out: a new folder for the files; default: the first new runs/profile-N.
    """
    if rows < 0:
        raise ArgumentError(f"--rows: got {rows}, expected 0 or more")
    options = given(model, step)
    chosen = LanguageSettings() if run is None else settings_of_run(run, model.model or "")
    settings, device = choose_device(replace(chosen, **options))
    comm, device = ranks_of(device if launched_ranks() == 1 else settings.device)
    main = comm.rank == 0
    folder = _new_folder(out, comm)
    if main and find_spec("matplotlib") is None:
        _log.warning("no pictures: run %s to draw them", install("plot"))
    try:
        with Progress("profile", "step", main) as progress:
            found = profile_step(
                settings, device, steps=steps, warmup=warmup,
                what=tuple(dict.fromkeys(what or ("time", "memory"))), nvtx=nvtx, source=source,
                comm=comm, progress=progress.show,
            )  # fmt: skip
    except BaseException:
        with suppress(OSError):
            folder.rmdir()  # nothing was written
        raise
    written = write_step_profile(found, folder, comm)
    if main:
        strategy = f"{comm.size} ranks, {strategy_name(settings, comm.size)}; "
        print(printable(aligned(strategy * (comm.size > 1) + _report(found, rows))))
        print(f"in {folder}: {', '.join(sorted(path.name for path in written))}")
    return 0


def _new_folder(out: Path | None, comm: Comm) -> Path:
    """Create the folder for the files; of several ranks rank 0 does, and tells the others.

    Raises:
        ArgumentError: it holds files, or cannot be written to.
    """
    folder = free_folder("runs/profile") if out is None else out
    if comm.rank == 0:
        check_new_folder(folder)
        make_folder(folder)
    return Path(comm.broadcast_object(str(folder)))


def _report(found: StepProfile, rows: int) -> str:
    """Return what the command prints."""
    settings = found.settings
    ms = 1e3 * found.seconds
    lines = [
        f"{settings.model_class.__name__}, {found.parameters:,} parameters, batch "
        f"{settings.batch}, {settings.dtype}, on {found.device}: {ms:.2f} ms a step, "
        f"{found.tokens_per_second:,.0f} tokens/s"
    ]
    if found.recording is not None:
        table = op_table(found.recording)
        lines += ["", to_markdown(table, found.ceilings, rows)]
        if found.recording.source == "cupti":
            lines.append(to_markdown(kernel_table(found.recording), found.ceilings, rows))
        lines.append(
            f"with the profiler ({found.recording.source}) {1e3 * table.step:.2f} ms a step: "
            f"{1e3 * table.busy:.2f} ms busy, {1e3 * table.gaps:.2f} ms in gaps"
        )
        split = attention_split(found.recording)
        if split:
            parts = ", ".join(f"{name} {1e3 * seconds:.2f} ms" for name, seconds in split.items())
            lines.append(f"inside attention: {parts}")
        if found.ceilings is not None:
            peaks = found.ceilings.flops.items()
            products = ", ".join(f"{name} {peak / 1e12:.3g} TFLOP/s" for name, peak in peaks)
            copy = found.ceilings.bandwidth / 1e9
            lines.append(f"measured ceilings: copy {copy:.3g} GB/s, products {products}")
        if found.overlaps:
            lines += ["", overlaps_to_markdown(found.overlaps)]
    return "\n".join(lines + _memory_lines(found))


def _memory_lines(found: StepProfile) -> list[str]:
    lines = []
    for name, memory in (("forward alone", found.memory_forward), ("a step", found.memory)):
        if memory is None or memory.peak is None:
            continue
        peak = memory.peak
        place = peak.layer or peak.phase
        lines += ["", f"peak memory of {name}: {peak.peak / 1e6:,.1f} MB, in {peak.op} ({place})"]
        lines += [f"  {size / 1e6:10,.1f} MB  {line}" for line, size in memory.peak_by_line()[:8]]
    return lines


profile.runs_on_ranks = True  # type: ignore[attr-defined]
