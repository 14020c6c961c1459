"""Benchmark of data, pipeline, tensor and sharded parallel training.

    mpirun -n 2 python -m examples.bench.parallel --compiled --json parallel.json
    mpirun -n 2 python -m examples.bench.parallel data --layers 24 --width 512 --heads 8 \
        --context 256 --batch 8
    mpirun -n 4 python -m examples.bench.parallel zero --model gpt2-1558M --batch 8 --steps 2
    mpirun -n 2 python -m examples.bench.parallel --device cpu --layers 2 --width 64 --heads 2 \
        --context 32 --vocab 512 --batch 2 --micro 2 --sizes 0.1 1

all-reduce  through Comm, and by direct calls of NCCL (MPI on CPUs)
data        each gradient reduction, one rank alone, and PyTorch's DDP
pipeline    each schedule, plain model parallelism, and idle time beside the bubble fraction; that
            holds for stages of equal time, so compare the idle time of the slowest stage
tensor      tensor parallelism, with and without sequence parallelism, and one rank
zero        peak memory of each stage, and of the plan

"alone" is one rank's time while the other ranks do the same, so that all GPUs are equally warm.
PyTorch is measured where it is installed. "peak MB" is the memory of arrays; "device MB" all memory
used on a GPU, with NCCL's buffers and the memory pool's free blocks. "clock_mhz" and "watts" are of
the first rank's GPU while it had work for the line, warm-up included; they need nvidia-ml-py.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from tensorgrad import backend
from tensorgrad.bench import steps, torch_ddp
from tensorgrad.bench.memory import release
from tensorgrad.bench.steps import RankTimer, Step, StepSettings
from tensorgrad.files import write_json
from tensorgrad.gpu import GpuMonitor, clock_and_watts
from tensorgrad.models.gpt2 import PRESETS, GPT2Config
from tensorgrad.parallel import (
    Comm,
    DataParallel,
    Handle,
    Mesh,
    Pipeline,
    Zero,
    make_mesh,
    mesh_ranks,
    world,
)
from tensorgrad.parallel.comm.launch import launched_ranks
from tensorgrad.parallel.planning.estimate import TrainingJob, estimate
from tensorgrad.parallel.schedule import bubble_fraction
from tensorgrad.train.ranks import OneProcess, Ranks
from tensorgrad.train.settings import has_narrow_products

_WINDOW, _MOST_CALLS = 0.05, 1000  # seconds of a timed window of all-reduces, and its calls

# The field of GPT2Config that each option sets.
_SIZES = {name: name for name in ("layers", "heads", "width", "context")} | {"vocab": "vocab_size"}

Line = dict[str, Any]


@dataclass(frozen=True)
class Bench(RankTimer):
    """The settings of a benchmark.

    Attributes:
        comm, device, windows: see `RankTimer`.
        config, dtype: of the model.
        batch: sequences of a rank, or of a pipeline.
        micro: micro-batches of a pipeline.
        steps: steps of a timed window.
        bucket: MB; None: by the number of gradients.
        sizes: MB of the arrays to all-reduce.
        torch: PyTorch, or None.
        compiled: whether PyTorch compiles its model.
    """

    config: GPT2Config
    dtype: str
    batch: int
    micro: int
    steps: int
    bucket: float | None
    sizes: list[float]
    torch: Any
    compiled: bool

    def idle(self, step: Step) -> list[float]:
        """Return for each rank the fraction of the time that it waits for others."""
        spans: list[tuple[Any, Any]] = []
        wait = Handle.wait

        def timed(handle: Handle) -> None:
            before = self._moment()
            wait(handle)
            spans.append((before, self._moment()))

        self.comm.barrier()
        with patch.object(Handle, "wait", timed):
            begin = self._moment()
            for _ in range(self.steps):
                step()
            end = self._moment()
        self.wait()
        waited = sum(self._between(*span) for span in spans)
        fractions = self.comm.all_gather_objects(waited / self._between(begin, end))
        return [float(fraction) for fraction in fractions]

    def _moment(self) -> Any:
        """Return the time, or on a GPU an event of its current stream."""
        if self.device == "cpu":
            return time.perf_counter()
        event = backend.cupy.cuda.Event()
        event.record()
        return event

    def _between(self, begin: Any, end: Any) -> float:
        """Return the seconds between two past moments."""
        if self.device == "cpu":
            return float(end - begin)
        return float(backend.cupy.cuda.get_elapsed_time(begin, end)) / 1e3


def training_step(bench: Bench, ranks: Ranks, micro: int = 1) -> Step:
    """Return a training step of this rank."""
    settings = StepSettings(bench.config, bench.batch, bench.dtype, micro_batches=micro)
    return steps.training_step(settings, ranks, bench.device)


def measured(bench: Bench, name: str, make: Callable[[], Step], idle: bool = False) -> Line:
    """Return the time of a step, and the peak memory of building and running it."""
    line: Line = {"name": name}
    with bench.peak(line):
        step = make()
        step()
        bench.wait()
    line["ms"] = 1e3 * bench.seconds(step, bench.steps)
    if idle:
        fractions = bench.idle(step)
        line["idle"], line["most idle"] = min(fractions), max(fractions)
    return line


def all_reduce(bench: Bench) -> Iterator[Line]:
    """Yield bus bandwidths of float32 all-reduce, through Comm and by direct calls.

    A window has many calls, so that the host is ahead of the GPU for most of it.
    """
    comm = bench.comm
    if comm.size == 1:
        return
    for size in bench.sizes:
        array = backend.to_device(np.ones(int(size * 1e6 / 4), np.float32), bench.device)
        direct = _direct(comm, array)
        once = bench.seconds(partial(comm.all_reduce, array, "mean"), 1)
        calls = max(2, min(_MOST_CALLS, int(_WINDOW / once)))
        times: dict[str, list[float]] = {"ours": [], "direct": []}
        for _ in range(bench.windows):
            times["ours"].append(bench.seconds(partial(comm.all_reduce, array, "mean"), calls))
            if direct is not None:
                times["direct"].append(bench.seconds(direct, calls))
        bus = 2 * (comm.size - 1) / comm.size * array.nbytes / 1e9
        line: Line = {"name": f"{size:g} MB", "GB/s": bus / statistics.median(times["ours"])}
        if direct is not None:
            line["direct GB/s"] = bus / statistics.median(times["direct"])
            line["ratio"] = line["GB/s"] / line["direct GB/s"]
        yield line


def _direct(comm: Comm, array: Any) -> Step | None:
    """Return a direct call of NCCL or MPI; None where several ranks use one GPU."""
    if backend.is_numpy(array):
        from mpi4py import MPI

        return lambda: MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, array)
    if comm.local_size > backend.gpu_count():
        return None
    from cupy.cuda import nccl

    unique_id = comm.broadcast_object(nccl.get_unique_id().hex() if comm.rank == 0 else "")
    link = nccl.NcclCommunicator(comm.size, bytes.fromhex(unique_id), comm.rank)
    stream = backend.cupy.cuda.get_current_stream()
    float32, mean = 7, 4
    place = array.data.ptr
    return lambda: link.allReduce(place, place, array.size, float32, mean, stream.ptr)


def data(bench: Bench) -> Iterator[Line]:
    """Yield one rank alone, then each gradient reduction, then PyTorch alone and with DDP."""
    comm, tokens = bench.comm, bench.batch * bench.config.context
    alone: Line = {}
    naive = 0.0
    for name in ("alone", "naive", "flat", "overlap") if comm.size > 1 else ("alone",):
        ranks = OneProcess() if name == "alone" else DataParallel(comm, name, bench.bucket)
        line = measured(bench, name, partial(training_step, bench, ranks))
        alone = alone or line
        if name == "naive":
            naive = line["ms"]
        elif naive:
            line["speed-up"] = naive / line["ms"]
        yield _compared(line, alone, tokens, comm.size)
    if bench.torch is None:
        return
    torch_ddp.join(bench.torch, comm, bench.device)
    alone = {}
    for name in ("PyTorch alone", "PyTorch DDP") if comm.size > 1 else ("PyTorch alone",):
        release()
        step = torch_ddp.training_step(
            bench.torch,
            bench.config,
            bench.batch,
            bench.device,
            autocast=has_narrow_products(bench.dtype),
            several=name.endswith("DDP"),
            compiled=bench.compiled,
        )
        line = {"name": name, "ms": 1e3 * bench.seconds(step, bench.steps)}
        alone = alone or line
        yield _compared(line, alone, tokens, comm.size)
    bench.torch.distributed.destroy_process_group()


def _compared(line: Line, alone: Line, tokens: int, ranks: int) -> Line:
    """Add the throughput of all ranks, the scaling efficiency, and the extra memory."""
    several = 1 if line is alone else ranks
    line["tokens/s"] = several * tokens / line["ms"] * 1e3
    if several > 1:
        line["efficiency"] = alone["ms"] / line["ms"]
        for name, kind in (("extra memory", "peak MB"), ("extra of the device", "device MB")):
            if kind in line:
                line[name] = line[kind] / alone[kind] - 1
    return line


def pipeline(bench: Bench) -> Iterator[Line]:
    """Yield one rank alone, plain model parallelism, and each schedule."""
    comm, micro = bench.comm, bench.micro
    if comm.size == 1:
        return
    alone = measured(bench, "alone", partial(training_step, bench, OneProcess(), micro))
    yield alone
    slow: Line = {}
    for name, chunks in (("model-parallel", 1), ("gpipe", 1), ("1f1b", 1), ("interleaved", 2)):
        if comm.size * chunks > bench.config.layers or (chunks > 1 and micro % comm.size):
            continue
        ranks = Pipeline(comm, name, chunks)
        line = measured(bench, name, partial(training_step, bench, ranks, micro), idle=True)
        slow = slow or line
        line["speed-up"] = slow["ms"] / line["ms"]
        line["efficiency"] = alone["ms"] / (comm.size * line["ms"])
        line["bubble fraction"] = bubble_fraction(name, comm.size, micro, chunks)
        job = TrainingJob(bench.config, Mesh(1, comm.size), bench.batch, micro, 0, name, chunks,
                  dtype=bench.dtype)  # fmt: skip
        line["planned MB"] = estimate(job).bytes / 1e6
        yield line


def zero(bench: Bench) -> Iterator[Line]:
    """Yield the measured and planned peak memory of each stage of ZeRO."""
    comm = bench.comm
    for stage in range(4):
        name = f"ZeRO {stage}" if stage else "overlap"
        ranks = Zero(comm, stage) if stage else DataParallel(comm, "overlap", bench.bucket)
        line = measured(bench, name, partial(training_step, bench, ranks))
        job = TrainingJob(
            bench.config, Mesh(comm.size), bench.batch * comm.size, zero=stage, dtype=bench.dtype
        )
        line["planned MB"] = estimate(job).bytes / 1e6
        line["ratio"] = line["peak MB"] / line["planned MB"]
        yield line


def tensor(bench: Bench) -> Iterator[Line]:
    """Yield one rank alone, and tensor parallel ranks, with the planned memory."""
    comm = bench.comm
    if comm.size == 1:
        return
    alone = measured(bench, "alone", partial(training_step, bench, OneProcess()))
    yield alone
    mesh = make_mesh(comm.size, comm.rank, tp=comm.size)
    for sequence in (False, True):
        ranks = mesh_ranks(comm, mesh, sequence=sequence)
        name = "shared rows" if sequence else "shared layers"
        line = measured(bench, name, partial(training_step, bench, ranks))
        line["speed-up"] = alone["ms"] / line["ms"]
        job = TrainingJob(bench.config, mesh, bench.batch, sequence=sequence, dtype=bench.dtype)
        line["planned MB"] = estimate(job).bytes / 1e6
        line["ratio"] = line["peak MB"] / line["planned MB"]
        yield line


PARTS = {
    "all-reduce": all_reduce,
    "data": data,
    "pipeline": pipeline,
    "tensor": tensor,
    "zero": zero,
}


def options() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("parts", nargs="*", default=PARTS, metavar="part", help=", ".join(PARTS))
    parser.add_argument("--model", choices=PRESETS, default="gpt2-124M")
    for name, size in _SIZES.items():
        parser.add_argument(f"--{name}", type=int, dest=size, help="default: as --model")
    parser.add_argument(
        "--dtype", choices=steps.PRECISIONS, help="default: bfloat16-parameters, on CPUs float32"
    )
    parser.add_argument("--batch", type=int, default=32, help="sequences of a rank or pipeline")
    parser.add_argument("--micro", type=int, default=8, help="micro-batches of a pipeline")
    parser.add_argument("--steps", type=int, default=10, help="steps of a timed window")
    parser.add_argument(
        "--windows", type=int, default=3, help="number of windows; the median counts"
    )
    parser.add_argument("--bucket", type=float, help="MB; default: by the number of gradients")
    parser.add_argument("--sizes", type=float, nargs="+", default=[25, 100, 500], help="MB")
    parser.add_argument("--device", default="auto", help="cpu, cuda or auto")
    parser.add_argument("--no-pytorch", action="store_true", help="skip PyTorch")
    parser.add_argument("--compiled", action="store_true", help="compile PyTorch's model")
    parser.add_argument("--json", type=Path, help="file to write")
    given = parser.parse_args()
    if unknown := [part for part in given.parts if part not in PARTS]:
        parser.error(f"part: got {unknown[0]}, expected some of {', '.join(PARTS)}")
    pipelined = "pipeline" in given.parts and launched_ranks() > 1
    if pipelined and (given.micro < 1 or given.batch % given.micro):
        parser.error(f"--micro: got {given.micro}, expected a divisor of --batch, {given.batch}")
    return given


def main() -> None:
    """Measure the parts named on the command line; rank 0 prints."""
    given, comm = options(), world()
    device = comm.select_device(given.device)
    sizes = {name: getattr(given, name) for name in _SIZES.values()}
    changed = {name: value for name, value in sizes.items() if value is not None}
    config = replace(PRESETS[given.model], vocab_multiple=128, **changed)
    dtype = given.dtype or ("float32" if device == "cpu" else "bfloat16-parameters")
    torch = None
    if importlib.util.find_spec("torch") and not given.no_pytorch:
        torch = importlib.import_module("torch")
    bench = Bench(comm, device, given.windows, config, dtype, given.batch, given.micro,
                  given.steps, given.bucket, given.sizes, torch, given.compiled)  # fmt: skip
    found: dict[str, list[Line]] = {}
    if comm.rank == 0:
        print(f"{comm.size} ranks on {device}, {given.model}, {dtype}, batch {given.batch}")
    index = backend.gpu_index(device) if comm.rank == 0 else None
    with GpuMonitor(index, 0.2, busy=True) as monitor:
        for part in given.parts:
            found[part] = []
            monitor.take()
            for line in PARTS[part](bench):
                found[part].append(line | clock_and_watts(monitor.take()))
                if comm.rank == 0:
                    show(part, found[part][-1])
    if comm.rank == 0 and given.json is not None:
        result = {"ranks": comm.size, "device": device, "dtype": dtype, "model": asdict(config)}
        result |= {"batch": given.batch, "micro": given.micro, "parts": found}
        write_json(given.json, result, 1)


def show(part: str, line: Line) -> None:
    """Print one line."""
    values = "  ".join(f"{name} {value:,.4g}" for name, value in line.items() if name != "name")
    print(f"{part:11} {line['name']:16} {values}", flush=True)


if __name__ == "__main__":
    main()
