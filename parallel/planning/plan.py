"""Plan the training of a model on many GPUs: memory, traffic and time, or the smallest mesh.

The program is `tensorgrad plan`.

Memory is that of the fullest GPU, time that of the slowest stage at the given speeds, both from the
formulas of costs.py and estimate.py. No GPU is needed. Tests: tests/parallel/planning/test_plan.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields, replace
from functools import lru_cache
from typing import Any

from tensorgrad.core.errors import ArgumentError
from tensorgrad.parallel.mesh import Mesh
from tensorgrad.parallel.planning.costs import divides
from tensorgrad.parallel.planning.estimate import (
    Estimate,
    Speeds,
    TrainingJob,
    estimate,
    stage_memory,
)
from tensorgrad.parallel.tensor import rows_of

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
        most: the largest number of GPUs to try; only one with bfloat16 gradients.
        zero: the stage of ZeRO; None: any.
        reserved: bytes of the memory for what is not estimated.
        bucket: see `estimate`.
    Raises:
        ArgumentError: no mesh has enough memory; the message says what the best needs.
    """
    if most < 1:
        raise ArgumentError(f"fit: most is {most} GPUs, expected 1 or more")
    speeds = Speeds() if speeds is None else speeds
    if job.grad_dtype != "float32":
        most = 1  # several ranks add gradients in float32
    stages = range(4) if zero is None else (zero,)
    nearest: tuple[float, TrainingJob] | None = None
    meshes = sorted(_meshes(job, speeds, most), key=lambda mesh: mesh.size)
    found: list[Estimate] = []
    for mesh in meshes:
        if found and mesh.size > found[0].job.mesh.size:
            break
        for stage in reversed(stages if mesh.dp > 1 else stages[:1]):
            if stage > 1 and mesh.pp > 1:
                continue  # several blocks are in use at a time
            fits = False
            for micro_batches in _micros(job, mesh):
                tried = replace(job, mesh=mesh, zero=stage, micro_batches=micro_batches)
                useful = memory if nearest is None else max(memory, nearest[0])
                need = reserved + _memory(tried, useful - reserved)
                if nearest is None or need < nearest[0]:
                    nearest = (need, tried)
                if need > memory:
                    if job.schedule == "gpipe":
                        continue  # the last stage keeps gradients of the head for each
                    break  # fewer micro-batches are larger
                fits = True
                candidate = estimate(tried, speeds, bucket)
                if candidate.bytes + reserved <= memory:
                    found.append(candidate)
            if stage == 1 and not fits:
                break  # nor without ZeRO, which needs no less
    if not found:
        assert nearest is not None  # a single GPU is always tried
        need, job = nearest
        raise ArgumentError(
            f"fit: {memory / 2**30:.1f} GiB a GPU are not enough on up to {most:,}, expected "
            f"{need / 2**30:.1f} GiB or more, as for {describe(job)}"
        )
    return min(found, key=_preference)


def _preference(plan: Estimate) -> tuple[float, int, int]:
    """Return what is least for the best plan.

    Among plans of about equal time these are large micro-batches, whose products are more
    efficient, and then little ZeRO.
    """
    return float(f"{plan.seconds:.2g}"), plan.job.micro_batches, plan.job.zero


def _memory(job: TrainingJob, useful: float) -> float:
    """Return the bytes that the fullest stages need, or those of the first that need too many."""
    need = 0.0
    for stage in dict.fromkeys((0, job.mesh.pp - 1)):
        need = max(need, sum(stage_memory(job, stage).values()))
        if need > useful:
            break
    return need


def usual_micro_batches(batch: int, dp: int = 1, pp: int = 1) -> int:
    """Return a number of micro-batches that divides the batch: 1, with stages up to 4 times pp."""
    if pp <= 1 or batch < 1 or dp < 1 or batch % dp:
        return 1
    local = batch // dp
    fitting = [m for m in divisors(local) if m <= 4 * pp and m % pp == 0]
    return max(fitting, default=max(m for m in divisors(local) if m <= 4 * pp))


def describe(job: TrainingJob) -> str:
    """Return the mesh and the options of a job in one line."""
    mesh = job.mesh
    parts = [f"dp {mesh.dp} x pp {mesh.pp} x tp {mesh.tp}"]
    if job.zero:
        parts.append(f"ZeRO {job.zero}")
    if mesh.pp > 1:
        parts.append(job.schedule + (f" with {job.chunks} parts on a stage" * (job.chunks > 1)))
    each = job.tokens // job.config.context
    parts.append(
        f"batch {job.batch} = {mesh.dp} dp x {job.micro_batches} micro-batches x {each} sequences"
    )
    return ", ".join(parts)


def _meshes(job: TrainingJob, speeds: Speeds, most: int) -> Iterator[Mesh]:
    """Yield the meshes that can train the model."""
    config, rows = job.config, list(rows_of(replace(job.costs, tp=1).model))
    has_table = any(row.shard.kind != "inside" for row in rows)
    for tp in range(1, min(config.heads, speeds.gpus_per_host) + 1 if has_table else 2):
        if not all(divides(row, tp) for row in rows):
            continue
        if job.sequence and config.context % tp:
            continue
        for pp in range(1, len(job.costs.blocks) // job.chunks + 1):
            for dp in divisors(job.batch):
                if dp * pp * tp <= most and any(True for _ in _micros(job, Mesh(dp, pp, tp))):
                    yield Mesh(dp, pp, tp)


def _micros(job: TrainingJob, mesh: Mesh) -> Iterator[int]:
    """Yield numbers of micro-batches from the largest, which needs least memory but for GPipe."""
    for micro_batches in reversed(divisors(job.batch // mesh.dp)):
        if job.schedule != "interleaved" or job.chunks == 1 or micro_batches % mesh.pp == 0:
            yield micro_batches


@lru_cache(maxsize=1024)
def divisors(number: int) -> tuple[int, ...]:
    """Return the divisors of a number, the smallest first."""
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return tuple(sorted({*small, *(number // divisor for divisor in small)}))


def bytes_of(text: str, name: str = "memory") -> float:
    """Return the number of bytes in a text: "80GiB", "80 GB", "1e9B".

    Args:
        text: a number and its unit: without one, 80 could be bytes or GiB. 0 needs none.
        name: of the argument, for the error.
    Raises:
        ArgumentError: the text is not a finite number of bytes.
    """
    match = re.fullmatch(r"\s*([0-9]+\.?[0-9]*(?:e[0-9]+)?)\s*([kMGT]|[KMG]i)?(B?)\s*", text)
    has_unit = match is not None and (match[2] or match[3] or not float(match[1]))
    if match is None or not has_unit or not float(match[1]) < math.inf:
        raise ArgumentError(
            f"plan: {name} is {text!r}, expected bytes with their unit, such as 80GiB or 80GB"
        )
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
            f.name: getattr(job, f.name)
            for f in fields(job)
            if f.name not in ("config", "mesh", "model")
        },
        "speeds": asdict(found.speeds),
        "fullest_stage": found.stage,
        "memory": {**found.memory, "reserved": reserved, "total": found.bytes + reserved},
        "sent": [asdict(transfer) for transfer in found.sent],
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
    if job.grad_dtype != "float32":
        lines[0] += f", gradients in {job.grad_dtype}"
    if job.optimizer != "adamw":
        lines[0] += f", {job.optimizer}"
    lines += [f"note: {problem}" for problem in job.problems]
    total = found.bytes + reserved
    sizes = {**found.memory, "reserved": reserved, "total": total}
    stage = f" of stage {found.stage}" if mesh.pp > 1 else ""
    lines += ["", *_columns([
        (f"memory of a GPU{stage}", "GiB"),
        *((f"  {what}", f"{size / 2**30:.2f}") for what, size in sizes.items() if size),
    ])]  # fmt: skip
    if memory is not None:
        lines[-1] += f" of {memory / 2**30:.0f}" + ("" if total <= memory else ": too much")
    if found.sent:
        lines += ["", *_columns([
            ("sent by a GPU in a step", "calls", "MB", "ms", "waited for"),
            *(
                (f"  {sent.axis} {sent.what}", f"{sent.calls:,}", f"{sent.bytes / 1e6:,.0f}",
                 f"{sent.seconds * 1e3:.2f}", f"{sent.exposed * 1e3:.2f}")
                for sent in found.sent
            ),
        ])]  # fmt: skip
    times = {**found.time, "total": found.seconds}
    lines += ["", *_columns([
        ("time of a step", "ms", "fraction"),
        *(
            (f"  {what}", f"{seconds * 1e3:.2f}", f"{100 * seconds / found.seconds:.1f} %")
            for what, seconds in times.items() if seconds
        ),
    ])]  # fmt: skip
    rate, flops = found.tokens_per_second, found.flops_per_second
    lines += ["", f"{rate:,.0f} tokens/s, {flops / 1e12:.0f} TFLOP/s of the model a GPU"]
    return "\n".join(lines)


def _columns(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Return a line for each row: labels on the left, columns of numbers on the right."""
    label, *widths = (max(map(len, column)) for column in zip(*rows, strict=True))
    return [
        row[0].ljust(max(label, 38))
        + "".join(f"  {cell:>{max(width, 7)}}" for cell, width in zip(row[1:], widths, strict=True))
        for row in rows
    ]
