"""Plan the training of a GPT-2 on many GPUs: memory, traffic and time, or the smallest mesh.

    python -m tensorgrad.parallel.planning.plan --model gpt2-1558M --dp 8 --pp 4 --tp 2 --batch 512
    python -m tensorgrad.parallel.planning.plan --model gpt2-1558M --fit --memory 80GiB --batch 512
    python -m tensorgrad.parallel.planning.plan --model gpt2-124M --dp 2 --batch 64 --json

Memory is that of the fullest GPU, time that of the slowest stage at the given speeds, both from the
formulas of costs.py and estimate.py. No GPU is needed. Tests: tests/parallel/planning/test_plan.py.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import lru_cache
from typing import Any

from tensorgrad.command import command
from tensorgrad.errors import ArgumentError
from tensorgrad.models.gpt2 import PRESETS
from tensorgrad.parallel.mesh import Mesh
from tensorgrad.parallel.planning.estimate import (
    DTYPES,
    Estimate,
    Speeds,
    TrainingJob,
    estimate,
    stage_memory,
)
from tensorgrad.parallel.schedule import SCHEDULES

_SIZES = {name: name for name in ("layers", "heads", "width", "context")} | {"vocab": "vocab_size"}
_UNITS = {"": 1, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}


def fit(
    job: TrainingJob,
    memory: float,
    speeds: Speeds | None = None,
    most: int = 16384,
    zero: int | None = None,
    reserved: float = 0.0,
    bucket: float | None = None,
) -> Estimate:
    """Return the estimate on the fewest GPUs that a job fits on; of several meshes the fastest.

    Args:
        job: its mesh and number of micro-batches are ignored.
        memory: bytes of a GPU.
        speeds: see `estimate`.
        most: the largest number of GPUs to try.
        zero: the stage of ZeRO; None: any.
        reserved: bytes of the memory for what is not estimated.
        bucket: see `estimate`.
    Raises:
        ArgumentError: no mesh has enough memory; the message says what the best needs.
    """
    if most < 1:
        raise ArgumentError(f"fit: most is {most} GPUs, expected 1 or more")
    speeds = Speeds() if speeds is None else speeds
    stages = range(4) if zero is None else (zero,)
    nearest: tuple[float, TrainingJob] | None = None
    meshes = sorted(_meshes(job, speeds, most), key=lambda mesh: mesh.size)
    found: list[Estimate] = []
    for mesh in meshes:
        if found and mesh.size > found[0].job.mesh.size:
            break
        for stage in stages if mesh.dp > 1 else stages[:1]:
            if stage > 1 and mesh.pp > 1:
                continue  # several blocks are in use at a time
            for micro in _micros(job, mesh):
                tried = replace(job, mesh=mesh, zero=stage, micro=micro)
                ends = {0, mesh.pp - 1} if mesh.pp > 1 else {0}
                need = reserved + max(sum(stage_memory(tried, each).values()) for each in ends)
                if nearest is None or need < nearest[0]:
                    nearest = (need, tried)
                if need > memory:
                    if job.schedule == "gpipe":
                        continue  # the last stage keeps gradients of the head for each
                    break  # fewer micro-batches are larger
                candidate = estimate(tried, speeds, bucket)
                if candidate.bytes + reserved <= memory:
                    found.append(candidate)
    if not found:
        assert nearest is not None  # one GPU is always tried
        need, job = nearest
        raise ArgumentError(
            f"fit: {memory / 2**30:.1f} GiB a GPU are not enough on up to {most:,}, expected "
            f"{need / 2**30:.1f} GiB or more, as for {describe(job)}"
        )
    # Among plans of about equal time prefer large micro-batches, whose products are more efficient.
    return min(found, key=lambda each: (float(f"{each.seconds:.2g}"), each.job.micro))


def describe(job: TrainingJob) -> str:
    """Return the mesh and the options of a job in one line."""
    mesh = job.mesh
    parts = [f"dp {mesh.dp} x pp {mesh.pp} x tp {mesh.tp}"]
    if job.zero:
        parts.append(f"ZeRO {job.zero}")
    if mesh.pp > 1:
        parts.append(job.schedule + (f" with {job.chunks} parts on a stage" * (job.chunks > 1)))
    each = job.tokens // job.config.context
    parts.append(f"batch {job.batch} = {mesh.dp} dp x {job.micro} micro-batches x {each} sequences")
    return ", ".join(parts)


def _meshes(job: TrainingJob, speeds: Speeds, most: int) -> Iterator[Mesh]:
    """Yield the meshes that can train the model."""
    config = job.config
    widest = min(config.heads, speeds.gpus_per_host)
    for tp in range(1, widest + 1):
        if any(size % tp for size in (config.rows, 4 * config.width)):
            continue
        if job.sequence and config.context % tp:
            continue
        for pp in range(1, config.layers // job.chunks + 1):
            for dp in _divisors(job.batch):
                if dp * pp * tp <= most and any(True for _ in _micros(job, Mesh(dp, pp, tp))):
                    yield Mesh(dp, pp, tp)


def _micros(job: TrainingJob, mesh: Mesh) -> Iterator[int]:
    """Yield numbers of micro-batches from the largest, which needs least memory but for GPipe."""
    for micro in reversed(_divisors(job.batch // mesh.dp)):
        if job.schedule != "interleaved" or job.chunks == 1 or micro % mesh.pp == 0:
            yield micro


@lru_cache(maxsize=1024)
def _divisors(number: int) -> tuple[int, ...]:
    return tuple(each for each in range(1, number + 1) if number % each == 0)


def bytes_of(text: str, name: str = "memory") -> float:
    """Return the number of bytes in a text: "80GiB", "80 GB", "1e9".

    Args:
        text: the text.
        name: of the argument, for the error.
    Raises:
        ArgumentError: the text is not a number of bytes.
    """
    match = re.fullmatch(r"\s*([0-9]+\.?[0-9]*(?:e[0-9]+)?)\s*([kMGT]|[KMG]i)?B?\s*", text)
    if match is None:
        raise ArgumentError(f"plan: {name} is {text!r}, expected bytes, such as 80GiB or 80GB")
    return float(match[1]) * _UNITS[match[2] or ""]


def to_json(found: Estimate, reserved: float = 0.0) -> dict[str, Any]:
    """Return an estimate for JSON, in bytes and seconds."""
    job = found.job
    return {
        "model": asdict(job.config),
        "parameters": job.config.parameters,
        "mesh": {axis: getattr(job.mesh, axis) for axis in ("dp", "pp", "tp")},
        "gpus": job.mesh.size,
        "job": {
            name: getattr(job, name)
            for name in ("batch", "micro", "zero", "schedule", "chunks", "sequence", "dtype")
        },
        "speeds": asdict(found.speeds),
        "fullest_stage": found.stage,
        "memory": {**found.memory, "reserved": reserved, "total": found.bytes + reserved},
        "sent": [asdict(each) for each in found.sent],
        "time": {**found.time, "total": found.seconds},
        "bubble_fraction": found.bubble_fraction,
        "tokens_per_second": found.tokens_per_second,
        "model_flops_per_second_and_gpu": found.flops_per_second,
        "problems": job.problems,
    }


def table(name: str, found: Estimate, memory: float | None = None, reserved: float = 0.0) -> str:
    """Return an estimate as a table to read.

    Args:
        name: of the model.
        found: the estimate.
        memory: bytes of a GPU, to say whether they suffice.
        reserved: bytes of a GPU for what is not estimated.
    """
    job, mesh = found.job, found.job.mesh
    gpus = f"{mesh.size:,} GPU{'s' * (mesh.size > 1)}"
    title = f"{name}, {job.config.parameters / 1e6:,.0f}M parameters, on {gpus}"
    lines = [f"{title}: {describe(job)}, {job.dtype}"]
    lines += [f"note: {problem}" for problem in job.problems]
    total = found.bytes + reserved
    lines += ["", f"memory of a GPU{f' of stage {found.stage}' if mesh.pp > 1 else '':28}     GiB"]
    for what, size in {**found.memory, "reserved": reserved}.items():
        if size:
            lines.append(f"  {what:40}{size / 2**30:9.2f}")
    enough = ""
    if memory is not None:
        enough = f" of {memory / 2**30:.0f}" + ("" if total <= memory else ": too much")
    lines.append(f"  {'total':40}{total / 2**30:9.2f}{enough}")
    if found.sent:
        lines += ["", f"{'sent by a GPU in a step':38}calls       MB       ms  waited for"]
    for sent in found.sent:
        lines.append(
            f"  {sent.axis} {sent.what:31}{sent.calls:7,}{sent.bytes / 1e6:9,.0f}"
            f"{sent.seconds * 1e3:9.2f}{sent.exposed * 1e3:12.2f}"
        )
    lines += ["", f"{'time of a step':42}       ms fraction"]
    for what, seconds in {**found.time, "total": found.seconds}.items():
        if seconds:
            fraction = 100 * seconds / found.seconds
            lines.append(f"  {what:40}{seconds * 1e3:9.2f}{fraction:7.1f} %")
    rate, flops = found.tokens_per_second, found.flops_per_second
    lines += ["", f"{rate:,.0f} tokens/s, {flops / 1e12:.0f} TFLOP/s of the model a GPU"]
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = argparse.ArgumentParser(
        prog="python -m tensorgrad.parallel.planning.plan",
        description=(__doc__ or "").splitlines()[0],
    )
    add = made.add_argument
    add("--model", choices=PRESETS, default="gpt2-124M")
    for name in _SIZES:
        add(f"--{name}", type=int, dest=_SIZES[name], help="override the model's")
    add("--vocab-multiple", type=int, default=128, help="pad the token embedding to a multiple")
    add("--dp", type=int, default=1, help="data parallel ranks")
    add("--pp", type=int, default=1, help="pipeline stages")
    add("--tp", type=int, default=1, help="tensor parallel ranks")
    add("--zero", type=int, choices=range(4), help="ZeRO stage; default: 0, with --fit any")
    add("--batch", type=int, default=512, help="sequences of a step, on all GPUs together")
    add("--micro", type=int, help="micro-batches of a step; default: 1, with --pp up to 4 times pp")
    add("--schedule", choices=SCHEDULES, default="1f1b")
    add("--chunks", type=int, default=1, help="parts of the model on a stage, for interleaved")
    add("--sequence", action="store_true", help="sequence parallelism among the tp ranks")
    add("--dtype", choices=DTYPES, default="bfloat16", help="of parameters and activations")
    add("--fit", action="store_true", help="find the smallest mesh that fits in --memory")
    add("--memory", help="memory of a GPU, such as 80GiB")
    add("--reserved", default="1GiB", help="memory for CUDA, kernels and NCCL (default: 1GiB)")
    add("--max-gpus", type=int, default=16384, help="largest number of GPUs for --fit")
    add("--bucket", type=float, help="MB of gradients in a bucket; default: as in training")
    usual = Speeds()
    add("--tflops", type=float, default=usual.flops / 1e12, help="achieved by a GPU, TFLOP/s")
    add("--memory-bandwidth", type=float, default=usual.memory_bandwidth / 1e9, help="GB/s")
    add("--bandwidth", type=float, default=usual.bandwidth / 1e9, help="GB/s, NCCL within a host")
    add("--network", type=float, default=usual.network / 1e9, help="GB/s a GPU, between hosts")
    add("--latency", type=float, default=usual.latency * 1e6, help="microseconds of a call")
    add("--gpus-per-host", type=int, default=usual.gpus_per_host)
    add("--json", action="store_true", help="print JSON, in bytes and seconds")
    return made


@command
def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    given = parser().parse_args(arguments)
    memory = None if given.memory is None else bytes_of(given.memory)
    reserved = bytes_of(given.reserved, "reserved")
    found = _plan(given, memory, reserved)
    if given.json:
        print(json.dumps(to_json(found, reserved), indent=1))
    else:
        print(table(given.model, found, memory, reserved))


def _plan(given: argparse.Namespace, memory: float | None, reserved: float) -> Estimate:
    """Return the estimate that the command line asks for."""
    mesh = [name for name in ("dp", "pp", "tp") if getattr(given, name) != 1]
    chosen = mesh + ["micro"] * (given.micro is not None)
    if given.fit and chosen:
        raise ArgumentError(
            f"plan: --fit is given with --{chosen[0]} {getattr(given, chosen[0])}, expected "
            "without: it finds dp, pp, tp and micro itself"
        )
    speeds = Speeds(
        given.tflops * 1e12,
        given.memory_bandwidth * 1e9,
        given.bandwidth * 1e9,
        given.network * 1e9,
        given.latency * 1e-6,
        given.gpus_per_host,
    )
    sizes = {name: getattr(given, name) for name in _SIZES.values()}
    changed = {name: value for name, value in sizes.items() if value is not None}
    job = TrainingJob(
        replace(PRESETS[given.model], vocab_multiple=given.vocab_multiple, **changed),
        Mesh() if given.fit else Mesh(given.dp, given.pp, given.tp),
        given.batch,
        1 if given.fit else _usual_micro(given),
        given.zero or 0,
        given.schedule,
        given.chunks,
        given.sequence,
        given.dtype,
    )
    bucket = None if given.bucket is None else given.bucket * 1e6
    if not given.fit:
        return estimate(job, speeds, bucket)
    if memory is None:
        raise ArgumentError("plan: --fit needs --memory, the memory of a GPU, such as 80GiB")
    return fit(job, memory, speeds, given.max_gpus, given.zero, reserved, bucket)


def _usual_micro(given: argparse.Namespace) -> int:
    """Return --micro, or by default a number of micro-batches that divides the batch."""
    if given.micro is not None:
        return int(given.micro)
    if given.pp <= 1 or given.batch < 1 or given.batch % given.dp:
        return 1
    local = given.batch // given.dp
    fitting = [m for m in _divisors(local) if m <= 4 * given.pp and m % given.pp == 0]
    return max(fitting, default=max(m for m in _divisors(local) if m <= 4 * given.pp))


if __name__ == "__main__":
    sys.exit(main())
