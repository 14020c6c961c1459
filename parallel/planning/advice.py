"""Changes that let a training step fit into memory. Tests: test_advice.py."""

from __future__ import annotations

from dataclasses import replace

from tensorgrad.parallel.planning.estimate import TrainingJob, estimate
from tensorgrad.parallel.planning.plan import divisors

RESERVED = 2**30  # bytes of a GPU for CUDA, kernels and NCCL


def memory_advice(job: TrainingJob, memory: float, reserved: float = RESERVED) -> str:
    """Return what a step needs by the planner's estimate, and a setting that fits.

    Args:
        job: what was tried.
        memory: bytes of a GPU.
        reserved: bytes of a GPU for what is not estimated.
    """
    need = estimate(job).bytes + reserved
    tried = f"the estimate is {_gib(need)} of {_gib(memory)}"
    for option, other in _smaller(job):
        need = estimate(other).bytes + reserved
        if need <= memory:
            return f"{tried}; with {option} it is {_gib(need)}"
    return (
        f"{tried}, and no division of the batch fits: train with --recompute, which the estimate "
        f"does not know, see `tensorgrad plan --fit --memory {memory / 2**30:.0f}GiB` for more "
        "GPUs, or choose a smaller model or --context"
    )


def _smaller(job: TrainingJob) -> list[tuple[str, TrainingJob]]:
    """Return jobs with the same results that need less memory, and the options for them."""
    rows = job.batch // job.mesh.dp
    counts = [m for m in divisors(rows) if m > job.micro_batches]
    found = []
    stages = range(job.zero, 4 if job.mesh.dp > 1 and job.mesh.pp == 1 else job.zero + 1)
    for zero in stages:
        option = f"--parallel zero{zero} " if zero != job.zero else ""
        for count in [job.micro_batches] * bool(option) + counts:
            if job.schedule == "interleaved" and job.chunks > 1 and count % job.mesh.pp:
                continue
            text = f"{option}--micro-batches {count}"
            found.append((text, replace(job, zero=zero, micro_batches=count)))
    return found


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"
