from __future__ import annotations

import re
from dataclasses import replace

import pytest

from tensorgrad.models.gpt2 import PRESETS
from tensorgrad.parallel import Mesh
from tensorgrad.parallel.planning.advice import RESERVED, memory_advice
from tensorgrad.parallel.planning.estimate import TrainingJob, estimate
from tensorgrad.parallel.planning.plan import divisors

CONFIG = replace(PRESETS["gpt2-124M"], vocab_multiple=128)


def test_the_fewest_micro_batches_that_fit_are_named() -> None:
    job = TrainingJob(CONFIG, batch=64)
    memory = estimate(replace(job, micro_batches=4)).bytes + RESERVED
    said = memory_advice(job, memory)
    assert "with --micro-batches 4" in said
    tried, limit, needs = (float(x) for x in re.findall(r"([\d.]+) GiB", said))
    assert tried > limit >= needs - 0.1


def test_a_huge_batch_is_advised_at_once() -> None:
    job = TrainingJob(CONFIG, batch=10**12 + 39)  # a prime number
    assert "no division of the batch fits" not in memory_advice(job, 2**34)
    assert divisors(2**3 * 3**2) == (1, 2, 3, 4, 6, 8, 9, 12, 18, 24, 36, 72)


def test_the_estimate_is_that_of_the_dtype() -> None:
    estimates = set()
    for dtype in ("float32", "bfloat16", "bfloat16-parameters"):
        said = memory_advice(TrainingJob(CONFIG, batch=64, dtype=dtype), 2**34)
        estimates.add(re.findall(r"([\d.]+) GiB", said)[0])
    assert len(estimates) == 3


def test_ranks_may_shard_more() -> None:
    job = TrainingJob(replace(CONFIG, layers=48, width=1536), Mesh(dp=8), batch=8)
    memory = estimate(replace(job, zero=1)).bytes + RESERVED
    assert "with --parallel zero1 --micro-batches 1" in memory_advice(job, memory)


def test_a_model_that_cannot_fit_needs_more_gpus() -> None:
    said = memory_advice(TrainingJob(CONFIG, batch=8), 2**30)
    assert "no division of the batch fits: train with --recompute" in said
    assert "see `tensorgrad plan --fit --memory 1GiB`" in said


@pytest.mark.parametrize("chunks", [1, 2])
def test_interleaved_pipelines_keep_their_rule(chunks: int) -> None:
    job = TrainingJob(
        CONFIG, Mesh(pp=4), batch=12, micro_batches=4, schedule="interleaved", chunks=chunks
    )
    assert "GiB" in memory_advice(job, 2**31)
