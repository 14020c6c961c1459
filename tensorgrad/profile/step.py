"""Profile the training step of a language model: its time, its memory, and files with both.

The step is that of the training loop, with the strategy of the ranks, on random tokens. Tests:
tests/profile/test_step.py.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from tensorgrad import backend, random, ranges
from tensorgrad.autograd import no_grad
from tensorgrad.data import Tokenizer
from tensorgrad.errors import ArgumentError
from tensorgrad.files import replacing, write_json
from tensorgrad.models.language_model import LanguageModel
from tensorgrad.optim import Optimizer
from tensorgrad.parallel.comm.collectives import Comm
from tensorgrad.parallel.program import make_strategy
from tensorgrad.profile.ceilings import Ceilings, measure_ceilings
from tensorgrad.profile.memory import KINDS, MemoryRecording
from tensorgrad.profile.overlap import (
    CommunicationOverlap,
    Timeline,
    overlap,
    overlaps_to_markdown,
    timeline,
)
from tensorgrad.profile.pictures import plot_memory, plot_roofline, plot_timeline
from tensorgrad.profile.profiler import Profiler
from tensorgrad.profile.recording import Recording
from tensorgrad.profile.tables import (
    Table,
    attention_split,
    kernel_table,
    layer_table,
    op_table,
    to_csv,
    to_markdown,
)
from tensorgrad.profile.trace import merge_traces, write_trace
from tensorgrad.tensor import Tensor
from tensorgrad.train import config
from tensorgrad.train.language import LanguageSettings, with_options
from tensorgrad.train.strategy import OneProcess, Strategy

_LARGEST = 20  # allocations in memory.json
Progress = Callable[[str, int, int], object]


@dataclass(frozen=True)
class StepProfile:
    """What profiling a training step gave.

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
    def tokens_per_second(self) -> float:
        """Without the profiler, on all ranks."""
        return self.settings.batch * self.context / self.seconds


def settings_of_run(path: Path, file: str = "") -> LanguageSettings:
    """Return the settings of a run, with the vocabulary of its tokenizer.

    Args:
        path: the folder of a run, or its config.json.
        file: the Python file of the run's model, if a user has defined it.
    Raises:
        CheckpointError: there is no config.json, or it is of another task.
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
    _check(steps, warmup, what)
    run = _ProfiledStep(settings, device, comm)
    for number in range(warmup):
        progress("warm-up", number, warmup)
        run()
    run.wait()
    seconds = _seconds(run, steps, progress)
    rank = 0 if comm is None else comm.rank
    found = StepProfile(settings, "", run.parameters, run.model.context, seconds)
    if "time" in what:

        def record(count: int, stage: str) -> Recording:
            with Profiler(run.model, nvtx=nvtx, source=source, rank=rank) as profiler:
                if comm is not None:
                    comm.barrier()  # profilers do not start equally fast
                for number in range(count):
                    progress(stage, number, count)
                    run()
                run.wait()
            return profiler.recording

        record(1, "warm-up of the profiler")
        recording = record(steps, "time")
        ceilings = None
        if rank == 0:  # which writes the tables
            progress("ceilings", 0, 1)
            dtypes = {each.dtype for each in recording.ranges if each.flops}
            ceilings = measure_ceilings(device, dtypes)
        found = replace(
            *(found,),
            device=recording.device, recording=recording, ceilings=ceilings,
            overlaps=_gathered(overlap, recording, comm),
            timelines=_gathered(timeline, recording, comm),
        )  # fmt: skip
    if "memory" in what:
        progress("memory", 0, 2)
        forward = _memory(run, run.forward)
        progress("memory", 1, 2)
        whole = _memory(run, run)
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
    written = _write_traces(found, folder, comm)
    if comm is not None and comm.rank > 0:
        return written
    written.append(folder / "summary.json")
    write_json(written[-1], summary(found), 2)
    if found.recording is not None:
        for name, table in _tables(found.recording).items():
            for suffix, text in ((".csv", to_csv(table)), (".md", markdown(found, table))):
                written.append(folder / f"{name}{suffix}")
                _write_text(written[-1], text)
    for name, memory in (("memory", found.memory), ("memory_forward", found.memory_forward)):
        if memory is not None:
            written.append(folder / f"{name}.json")
            write_json(written[-1], memory_facts(memory))
    return written + _draw(found, folder)


def markdown(found: StepProfile, table: Table, most: int = 30) -> str:
    """Return a table of a profile as Markdown, with rates as fractions of the ceilings."""
    ceilings = found.ceilings
    if ceilings is None:
        return to_markdown(table, most=most)
    return to_markdown(table, bandwidth=ceilings.bandwidth, peaks=ceilings.flops, most=most)


def summary(found: StepProfile) -> dict[str, Any]:
    """Return the figures of a profile: seconds, bytes, bytes/s and FLOP/s."""
    facts: dict[str, Any] = {
        "device": found.device,
        "parameters": found.parameters,
        "seconds": found.seconds,
        "tokens_per_second": found.tokens_per_second,
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
            "communication": [asdict(each) for each in found.overlaps],
            "ceilings": asdict(found.ceilings),
        }
    for name, memory in (("memory", found.memory), ("memory_forward", found.memory_forward)):
        if memory is not None and memory.peak is not None:
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
                "ms": (each.time - start) / 1e6,
                "op": each.op,
                "phase": each.phase,
                "layer": each.layer,
                "used": each.used,
                "peak": each.peak,
                "bytes": each.kinds,
            }
            for each in samples
        ],
        "peak": None if peak is None else asdict(peak),
        "peak_by_line": [{"line": line, "bytes": size} for line, size in memory.peak_by_line()],
        "at_peak": [] if peak is None else [asdict(a) for a in memory.alive_at(peak)[:_LARGEST]],
        "largest": [asdict(each) for each in memory.largest(_LARGEST)],
    }


class _ProfiledStep:
    """A model, its optimizer and a batch; called, it trains one step."""

    def __init__(self, settings: LanguageSettings, device: str, comm: Comm | None) -> None:
        self._settings, self._device = settings, device
        self._strategy: Strategy = OneProcess() if comm is None else make_strategy(settings, comm)
        random.seed(settings.seed)
        vocabulary = Tokenizer.load(settings.tokenizer).vocab_size if settings.tokenizer else None
        sizes = settings.config(vocabulary)
        model: LanguageModel = settings.model_class(sizes)
        self.model = with_options(model.to(device, settings.parameter_dtype), settings)
        self.parameters = sum(tensor.size for tensor in self.model.parameters())
        self.optimizer: Optimizer = self._strategy.prepare(self.model, settings.optimizer)
        self._strategy.begin(0, [tensor.data for tensor in self.model.state_dict().values()])
        self._scaler, self._precision = settings.scaler(), settings.precision()
        rows = settings.batch // self._strategy.ranks
        if not rows or rows % settings.micro_batches or settings.batch % self._strategy.ranks:
            raise ArgumentError(
                f"--batch: got {settings.batch}, expected a multiple of the "
                f"{self._strategy.ranks} ranks times --micro-batches, {settings.micro_batches}"
            )
        shape = settings.micro_batches, rows // settings.micro_batches, sizes.context + 1
        rng = np.random.default_rng(settings.seed + self._strategy.rank)
        tokens = rng.integers(0, sizes.vocab_size, shape, np.int32)
        self._parts = [
            (backend.to_device(part[:, :-1].copy(), device),
             backend.to_device(part[:, 1:].copy(), device))
            for part in tokens
        ]  # fmt: skip

    def __call__(self) -> None:
        """Train one step."""
        optimizer, strategy = self.optimizer, self._strategy
        with ranges.phase("step"):
            optimizer.zero_grad()
            strategy.compute_gradients(self._loss, self._parts, self._scaler)
            optimizer.step(self._settings.clip or math.inf, self._scaler, strategy.reduce_norm)
            strategy.after_step()

    def forward(self) -> None:
        """Compute the loss of a part of the batch, without gradients."""
        with no_grad():
            self._loss(*self._parts[0])

    def wait(self) -> None:
        """Wait for the GPU."""
        if self._device != "cpu":
            backend.cupy.cuda.runtime.deviceSynchronize()

    def _loss(self, x: Any, y: Any) -> Tensor:
        with self._precision():
            loss: Tensor = self.model(Tensor(x), Tensor(y))
            return loss


def _check(steps: int, warmup: int, what: Sequence[str]) -> None:
    if steps < 1:
        raise ArgumentError(f"--steps: got {steps}, expected 1 or more")
    if warmup < 0:
        raise ArgumentError(f"--warmup: got {warmup}, expected 0 or more")
    if not what or set(what) - {"time", "memory"}:
        raise ArgumentError(f"--what: got {','.join(what)!r}, expected time, memory or both")


def _seconds(run: _ProfiledStep, steps: int, progress: Progress) -> float:
    began = time.perf_counter()
    for number in range(steps):
        progress("without profiler", number, steps)
        run()
    run.wait()
    return (time.perf_counter() - began) / steps


def _memory(run: _ProfiledStep, call: Callable[[], None]) -> MemoryRecording:
    with Profiler(run.model, run.optimizer, memory=True) as profiler:
        call()
        run.wait()
    assert profiler.memory is not None
    return profiler.memory


_Result = TypeVar("_Result", CommunicationOverlap, Timeline)


def _gathered(
    measure: Callable[[Recording], _Result], recording: Recording, comm: Comm | None
) -> list[_Result]:
    """Return the overlaps or timelines of all ranks, on all ranks; nothing for one rank.

    Events around ops do not time the kernels of NCCL, which are on a stream of their own.
    """
    if comm is None or comm.size == 1 or recording.source == "events":
        return []
    own = measure(recording)
    return [type(own)(**facts) for facts in comm.all_gather_objects(asdict(own))]


def _tables(recording: Recording) -> dict[str, Table]:
    found = {"ops": op_table(recording), "layers": layer_table(recording)}
    if recording.source == "cupti":
        found["kernels"] = kernel_table(recording)
    return found


def _write_traces(found: StepProfile, folder: Path, comm: Comm | None) -> list[Path]:
    if found.recording is None:
        return []
    if comm is None or comm.size == 1:
        write_trace(found.recording, folder / "trace.json")
        return [folder / "trace.json"]
    paths = [folder / f"trace-rank{rank}.json" for rank in range(comm.size)]
    write_trace(found.recording, paths[comm.rank])
    comm.barrier()
    if comm.rank > 0:
        return [paths[comm.rank]]
    there = [path for path in paths if path.is_file()]  # those of other hosts may not be
    merge_traces(there, folder / "trace.json")
    return [folder / "trace.json", *there]


def _draw(found: StepProfile, folder: Path) -> list[Path]:
    """Draw the pictures, where matplotlib is installed."""
    if find_spec("matplotlib") is None:
        return []
    settings, written = found.settings, []
    title = f"{settings.model_class.__name__}, {found.parameters / 1e6:,.1f}M parameters, "
    title += f"batch {settings.batch}, {settings.dtype}, {found.device}"
    if found.recording is not None and found.ceilings is not None:
        written.append(folder / "roofline.png")
        plot_roofline(op_table(found.recording), found.ceilings, written[-1], title)
    if found.timelines:
        written.append(folder / "timeline.png")
        plot_timeline(found.timelines, written[-1], f"{title}, {settings.parallel}")
    for name, memory in (("memory", found.memory), ("memory_forward", found.memory_forward)):
        if memory is not None:
            written.append(folder / f"{name}.png")
            what = "a full step" if name == "memory" else "forward alone"
            plot_memory(memory, written[-1], f"{title}: {what}")
    return written


def _write_text(path: Path, text: str) -> None:
    with replacing(path) as file:
        file.write(text.encode())


def communication_markdown(found: StepProfile) -> str:
    """Return the table of communication by rank, or nothing for one rank."""
    return overlaps_to_markdown(found.overlaps) if found.overlaps else ""
