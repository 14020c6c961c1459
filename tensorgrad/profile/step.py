"""Profile the training step of a language model: its time, its memory, and files with both.

The step is that of the training loop, with the strategy of the ranks, on random tokens. Tests:
tests/profile/test_step.py.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tensorgrad.core.errors import ArgumentError
from tensorgrad.core.record import no_grad
from tensorgrad.data import Tokenizer
from tensorgrad.io.files import write_json
from tensorgrad.io.tables import write_text
from tensorgrad.parallel.comm.collectives import Comm
from tensorgrad.parallel.program import make_strategy
from tensorgrad.profile.ceilings import Ceilings, measure_ceilings
from tensorgrad.profile.memory import KINDS, MemoryRecording
from tensorgrad.profile.overlap import CommunicationOverlap, Timeline, overlap, timeline
from tensorgrad.profile.pictures import plot_memory, plot_roofline, plot_timeline
from tensorgrad.profile.profiler import Profiler
from tensorgrad.profile.recording import Recording
from tensorgrad.profile.tables import (
    attention_split,
    kernel_table,
    layer_table,
    op_table,
    to_csv,
    to_markdown,
)
from tensorgrad.profile.trace import merge_traces, write_trace
from tensorgrad.profile.training_step import language_step, synchronize
from tensorgrad.train import config
from tensorgrad.train.language import LanguageSettings

_log = logging.getLogger(__name__)
_LARGEST = 20  # allocations in memory.json
Progress = Callable[[str, int, int], object]


@dataclass(frozen=True)
class StepProfile:
    """The results of profiling a training step.

    Attributes:
        settings: of the step.
        device: its name.
        context: T, in tokens.
        parameters: of the model.
        seconds: of a step without the profiler, the mean of as many steps.
        recording: of the steps with the profiler; None where time was not asked for.
        overlaps: communication of each rank; on rank 0, with several ranks.
        timelines: computation and communication of each rank in the last step, likewise.
        ceilings: of the device, on rank 0; None where time was not asked for.
        memory: of a full step; None where memory was not asked for.
        memory_forward: of forward alone, without gradients.
    """

    settings: LanguageSettings
    device: str
    parameters: int
    context: int
    seconds: float
    recording: Recording | None = None
    overlaps: Sequence[CommunicationOverlap] = ()
    timelines: Sequence[Timeline] = ()
    ceilings: Ceilings | None = None
    memory: MemoryRecording | None = None
    memory_forward: MemoryRecording | None = None

    @property
    def memories(self) -> dict[str, MemoryRecording]:
        """The recordings of memory by the name of their file."""
        both = {"memory": self.memory, "memory_forward": self.memory_forward}
        return {name: memory for name, memory in both.items() if memory is not None}

    @property
    def tokens_per_second(self) -> float:
        """Without the profiler, on all ranks."""
        return self.settings.batch * self.context / self.seconds


def settings_of_run(path: Path, file: str = "") -> LanguageSettings:
    """Return the settings of a run, with the vocabulary of its tokenizer.

    Args:
        path: the folder of a run, or its config.json.
        file: the Python file of the run's model, if a user has defined it.
    Raises:
        CheckpointError: there is no config.json, or it belongs to another task.
        DataError: the tokenizer is damaged.
    """
    folder = path.parent if path.name == config.FILE else path
    settings = config.load(LanguageSettings, folder, file)
    tokenizer = folder / "tokenizer.json"
    if tokenizer.is_file():
        return replace(settings, tokenizer="", vocab=Tokenizer.load(tokenizer).vocab_size)
    return settings


def profile_step(
    settings: LanguageSettings,
    device: str = "cpu",
    *,
    steps: int = 3,
    warmup: int = 2,
    what: Sequence[str] = ("time", "memory"),
    nvtx: bool = False,
    source: str | None = None,
    comm: Comm | None = None,
    progress: Progress = lambda stage, done, total: None,
) -> StepProfile:
    """Profile the training step of a language model on random tokens.

    Time and memory are recorded in separate steps, since following arrays takes time. All ranks
    call it.

    Args:
        settings: sizes, batch, dtype, attention, recomputation, micro-batches and parallelism;
            data and schedule do not matter.
        device: "cpu", "cuda" or "cuda:N".
        steps: to record.
        warmup: steps before, which compile kernels and fill the memory pool.
        what: of "time" and "memory".
        nvtx, source: as of `Profiler`.
        comm: the ranks; default: this process alone.
        progress: called with a stage, and how much of it is done.
    Raises:
        ArgumentError: an argument is out of its range.
        DeviceError: the device does not exist, or the source is not available.
    """
    for option, value, low in (("--steps", steps, 1), ("--warmup", warmup, 0)):
        if value < low:
            raise ArgumentError(f"{option}: got {value}, expected {low} or more")
    if not what or set(what) - {"time", "memory"}:
        raise ArgumentError(f"--what: got {','.join(what)!r}, expected time, memory or both")
    vocabulary = Tokenizer.load(settings.tokenizer).vocab_size if settings.tokenizer else None
    comm = Comm() if comm is None else comm
    strategy = make_strategy(settings, comm) if comm.size > 1 else None
    step = language_step(settings, settings.config(vocabulary), device, strategy)
    parameters = sum(tensor.size for tensor in step.model.parameters())

    def run(count: int, stage: str) -> None:
        for number in range(count):
            progress(stage, number, count)
            step()
        synchronize(device)

    run(warmup, "warm-up")
    began = time.perf_counter()
    run(steps, "without profiler")
    seconds = (time.perf_counter() - began) / steps
    found = StepProfile(settings, "", parameters, step.model.context, seconds)
    if "time" in what:

        def record(count: int, stage: str) -> Recording:
            with Profiler(step.model, nvtx=nvtx, source=source, rank=comm.rank) as profiler:
                comm.barrier()  # profilers do not start equally fast
                run(count, stage)
            return profiler.recording

        record(1, "warm-up of the profiler")
        recording = record(steps, "time")
        ceilings = None
        if comm.rank == 0:  # which writes the tables
            progress("ceilings", 0, 1)
            dtypes = {span.dtype for span in recording.ranges if span.flops}
            ceilings = measure_ceilings(device, dtypes)
        found = replace(
            *(found,),
            device=recording.device, recording=recording, ceilings=ceilings,
            overlaps=_gathered(overlap, recording, comm),
            timelines=_gathered(timeline, recording, comm),
        )  # fmt: skip
    if "memory" in what:

        def memory(call: Callable[[], object]) -> MemoryRecording:
            with Profiler(step.model, step.optimizer, memory=True) as profiler:
                call()
                synchronize(device)
            assert profiler.memory is not None
            return profiler.memory

        progress("memory", 0, 2)
        with no_grad():
            forward = memory(lambda: step.loss(*step.parts[0]))
        progress("memory", 1, 2)
        whole = memory(step)
        found = replace(found, device=whole.device, memory=whole, memory_forward=forward)
    return found


def write_step_profile(found: StepProfile, folder: Path, comm: Comm | None = None) -> list[Path]:
    """Write the files of a profile into an existing folder; all ranks call it.

    trace.json (of several ranks also trace-rank0.json and so on), ops, kernels and layers as .csv
    and .md, summary.json, memory.json and memory_forward.json; with matplotlib roofline.png,
    memory.png, memory_forward.png and, of several ranks, timeline.png. Rank 0 writes all but the
    traces of the others.

    Returns:
        The paths, on rank 0; on other ranks their trace.
    Raises:
        OSError: a file cannot be written.
    """
    comm = Comm() if comm is None else comm
    written = _write_traces(found, folder, comm)
    if comm.rank > 0:
        return written
    written.append(folder / "summary.json")
    write_json(written[-1], summary(found), 2)
    if found.recording is not None:
        tables = {"ops": op_table(found.recording), "layers": layer_table(found.recording)}
        if found.recording.source == "cupti":
            tables["kernels"] = kernel_table(found.recording)
        for name, table in tables.items():
            written += [folder / f"{name}.csv", folder / f"{name}.md"]
            write_text(written[-2], to_csv(table))
            write_text(written[-1], to_markdown(table, found.ceilings))
    for name, memory in found.memories.items():
        written.append(folder / f"{name}.json")
        write_json(written[-1], memory_facts(memory))
    return written + _draw(found, folder)


def summary(found: StepProfile) -> dict[str, Any]:
    """Return the figures of a profile: seconds, bytes, bytes/s and FLOP/s."""
    facts: dict[str, Any] = {
        name: getattr(found, name)
        for name in ("device", "parameters", "seconds", "tokens_per_second")
    }
    if found.recording is not None and found.ceilings is not None:
        table = op_table(found.recording)
        facts |= {
            "seconds_with_profiler": table.step,
            "source": found.recording.source,
            "busy": table.busy,
            "gaps": table.gaps,
            "overlap_of_streams": table.overlap,
            "attention": attention_split(found.recording),
            "communication": [asdict(overlap) for overlap in found.overlaps],
            "ceilings": asdict(found.ceilings),
        }
    for name, memory in found.memories.items():
        if memory.peak is not None:
            facts[name] = {
                "peak": memory.peak.peak,
                "at": {"op": memory.peak.op, "layer": memory.peak.layer},
                **dict(zip(KINDS, memory.peak.kinds, strict=True)),
            }
    return facts


def memory_facts(memory: MemoryRecording) -> dict[str, Any]:
    """Return a memory recording for JSON: the timeline, the peak, and what is there then."""
    samples = memory.samples
    start = samples[0].time if samples else 0
    peak = memory.peak
    return {
        "device": memory.device,
        "kinds": KINDS,
        "timeline": [
            {
                "ms": (sample.time - start) / 1e6,
                **{
                    name: getattr(sample, name) for name in ("op", "phase", "layer", "used", "peak")
                },
                "bytes": sample.kinds,
            }
            for sample in samples
        ],
        "peak": None if peak is None else asdict(peak),
        "peak_by_line": [{"line": line, "bytes": size} for line, size in memory.peak_by_line()],
        "at_peak": [] if peak is None else [asdict(a) for a in memory.alive_at(peak)[:_LARGEST]],
        "largest": [asdict(allocation) for allocation in memory.largest(_LARGEST)],
    }


def _gathered(measure: Callable[[Recording], Any], recording: Recording, comm: Comm) -> list[Any]:
    """Return the overlaps or timelines of all ranks, on all ranks; nothing for one rank.

    Events around ops do not time the kernels of NCCL, which are on a stream of their own.
    """
    if comm.size == 1 or recording.source == "events":
        return []
    own = measure(recording)
    return [type(own)(**facts) for facts in comm.all_gather_objects(asdict(own))]


def _write_traces(found: StepProfile, folder: Path, comm: Comm) -> list[Path]:
    if found.recording is None:
        return []
    if comm.size == 1:
        write_trace(found.recording, folder / "trace.json")
        return [folder / "trace.json"]
    paths = [folder / f"trace-rank{rank}.json" for rank in range(comm.size)]
    write_trace(found.recording, paths[comm.rank])
    comm.barrier()
    if comm.rank > 0:
        return [paths[comm.rank]]
    there = [path for path in paths if path.is_file()]  # files of other hosts may be missing
    merge_traces(there, folder / "trace.json")
    return [folder / "trace.json", *there]


def _draw(found: StepProfile, folder: Path) -> list[Path]:
    """Draw the pictures, where matplotlib is installed; where it fails, warn."""
    if find_spec("matplotlib") is None:
        return []
    try:
        return _pictures(found, folder)
    except OSError:
        raise
    except Exception as error:  # matplotlib's settings may be anything, such as MPLBACKEND
        _log.warning("no pictures: %s: %.300s", type(error).__name__, error)
        return []


def _pictures(found: StepProfile, folder: Path) -> list[Path]:
    settings, written = found.settings, []
    title = f"{settings.model_class.__name__}, {found.parameters / 1e6:,.1f}M parameters, "
    title += f"batch {settings.batch}, {settings.dtype}, {found.device}"
    if found.recording is not None and found.ceilings is not None:
        written.append(folder / "roofline.png")
        plot_roofline(op_table(found.recording), found.ceilings, written[-1], title)
    if found.timelines:
        written.append(folder / "timeline.png")
        plot_timeline(found.timelines, written[-1], f"{title}, {settings.parallel}")
    for name, memory in found.memories.items():
        written.append(folder / f"{name}.png")
        what = "a full step" if name == "memory" else "forward alone"
        plot_memory(memory, written[-1], f"{title}: {what}")
    return written
