"""The profiler on a GPU: every kernel has an op, and times sum up.

What it costs is measured by `tensorgrad bench profiler`.
"""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensorgrad import Tensor, nn
from tensorgrad.core import backend
from tensorgrad.models.gpt2 import GPT2, PRESETS
from tensorgrad.optim import AdamW
from tensorgrad.parallel.planning.estimate import TrainingJob, stage_memory
from tensorgrad.profile import Profiler
from tensorgrad.profile.ceilings import measure_ceilings
from tensorgrad.profile.memory import KINDS
from tensorgrad.profile.step import profile_step, write_step_profile
from tensorgrad.profile.tables import busy_times, kernel_table, op_table
from tensorgrad.train.language import LanguageSettings

pytestmark = pytest.mark.gpu

needs_cupti = pytest.mark.skipif(
    importlib.util.find_spec("cupti") is None,
    reason="cupti-python is not installed (pip install -e '.[cuda13]')",
)
SOURCES = ["events", pytest.param("cupti", marks=needs_cupti)]


def synchronize() -> None:
    backend.cupy.cuda.runtime.deviceSynchronize()


class Step:
    """A GPT-2 that trains on one batch of a GPU."""

    def __init__(self, config: Any, batch: int, dtype: str) -> None:
        with nn.init.on("cuda"):
            self.model = GPT2(config).to("cuda", dtype)
        self.optimizer = AdamW(self.model.named_parameters(), 1e-4)
        tokens = np.random.default_rng(0).integers(0, config.vocab_size, (batch, config.context))
        self.tokens = backend.to_device(tokens.astype(np.int32), "cuda")
        for _ in range(3):
            self()
        synchronize()

    def __call__(self) -> None:
        self.optimizer.zero_grad()
        self.model(Tensor(self.tokens), Tensor(self.tokens)).backward()
        self.optimizer.step(1.0)

    def recorded(self, steps: int, **options: Any) -> Profiler:
        with Profiler(self.model, self.optimizer, **options) as profiler:
            for _ in range(steps):
                with profiler.step():
                    self()
        return profiler


SMALL = replace(PRESETS["gpt2-124M"], layers=2, context=256, vocab_size=5000)


@pytest.mark.parametrize("source", SOURCES)
def test_kernels_belong_to_ops_and_sum_up_to_the_step(source: str) -> None:
    recording = Step(SMALL, 8, "bfloat16").recorded(5, source=source).recording
    assert recording.source == source
    linked = [recording.range_of(kernel) for kernel in recording.kernels]
    with_op = sum(each is not None and each.is_work for each in linked)
    assert with_op >= 0.95 * len(linked)
    for kernel, around in zip(recording.kernels, linked, strict=True):
        if around is not None:  # the host launches before the GPU runs, but for clocks
            assert kernel.start >= around.start - 20_000
    table = op_table(recording)
    rows = {(row.name, row.phase): row for row in table.rows}
    assert rows["attention_packed", "forward"].calls == pytest.approx(2)
    total = sum(row.seconds for row in table.rows)
    assert total - table.overlap + table.gaps == pytest.approx(table.step)
    for start, end in busy_times(recording):
        assert recording.window[0] - 20_000 <= start < end <= recording.window[1] + 20_000


@needs_cupti
def test_names_of_kernels_are_those_of_the_sources() -> None:
    recording = Step(SMALL, 8, "bfloat16").recorded(2, source="cupti").recording
    names = " ".join(row.name for row in kernel_table(recording).rows)
    assert "adam_step" in names
    assert "_Z" not in names


def test_memory_of_a_gpu_step_is_that_of_the_pool() -> None:
    step = Step(SMALL, 8, "bfloat16")
    pool = backend.cupy.get_default_memory_pool()
    before = pool.used_bytes()
    memory = step.recorded(1, memory=True).memory
    assert memory is not None
    assert memory.device != "cpu"
    for sample in memory.samples:
        assert sum(sample.kinds) == sample.peak
        assert min(sample.kinds) >= 0
    last = dict(zip(KINDS, memory.samples[-1].kinds, strict=True))
    known = sum(last[kind] for kind in ("parameters", "gradients", "optimizer"))
    assert known == pytest.approx(before, rel=0.1)
    peak = memory.peak
    assert peak is not None
    planned = stage_memory(TrainingJob(SMALL, batch=8, dtype="bfloat16-parameters"), 0)
    activations = planned["activations"] + planned["tokens, loss and head"]
    assert peak.kinds[KINDS.index("activations")] == pytest.approx(activations, rel=0.02)
    assert peak.kinds[KINDS.index("other")] < 0.1 * peak.peak


def test_ceilings_of_the_chip() -> None:
    found = measure_ceilings("cuda", ["bfloat16", "float32"])
    assert found.bandwidth > 1e11
    assert found.flops["bfloat16"] > 2 * found.flops["float32"]


def test_files_of_a_profile(tmp_path: Path) -> None:
    for attention in ("flash", "unfused"):
        settings = LanguageSettings(
            layers=2, heads=4, width=256, context=256, vocab=1000, batch=8, device="cuda",
            dtype="bfloat16-parameters", attention=attention,
        )  # fmt: skip
        found = profile_step(settings, "cuda", steps=2)
        assert found.recording is not None
        folder = tmp_path / attention
        folder.mkdir()
        write_step_profile(found, folder)
        assert (folder / "trace.json").stat().st_size > 10_000


def test_nvtx() -> None:
    Step(SMALL, 2, "bfloat16").recorded(1, nvtx=True)
