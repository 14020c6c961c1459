"""Cases of training steps of a language model, and their time and memory on all ranks.

The step is that of profile/training_step.py. Tests: tests/bench/test_steps.py.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal
from unittest.mock import patch

from tensorgrad.bench.memory import peak_memory
from tensorgrad.bench.options import PRESET, Sizes
from tensorgrad.core import backend
from tensorgrad.models import gpt2, presets
from tensorgrad.parallel.comm.collectives import Comm
from tensorgrad.parallel.comm.handle import Handle
from tensorgrad.profile.training_step import TrainingStep, language_step, synchronize
from tensorgrad.train.language import LanguageSettings

GPT2S = {
    name: replace(config, vocab_multiple=128)
    for name, config in {**gpt2.PRESETS, "char": gpt2.GPT2Config(10000, 256, 6, 6, 384)}.items()
}
MODELS: dict[str, Any] = {**GPT2S, "llama-124M": presets.PRESETS["llama-124M"]}
_NAMES = tuple(MODELS)
Preset = Literal[_NAMES]  # type: ignore[valid-type]
Step = Callable[[], object]

MODEL = ("preset", "layers", "width", "heads", "context", "vocab", "batch", "dtype")
# Parameters of a case that are settings of training.
_OPTIONS = (
    *("batch", "dtype", "attention", "recompute", "recompute_norms", "micro_batches"),
    *("grad_dtype", "seed"),
)


def sized(preset: str, sizes: Sizes = PRESET) -> Any:
    """Return a model of MODELS; a GPT-2 has its vocabulary padded to a multiple of 128."""
    return with_sizes(MODELS[preset], sizes.given())


def with_sizes(config: Any, sizes: Mapping[str, Any]) -> Any:
    """Return a config with those parameters of a case that are sizes.

    Raises:
        ArgumentError: the sizes do not fit.
    """
    found = {name: size for name, size in sizes.items() if name in MODEL[1:5]}
    return replace(config, **found, vocab_size=sizes.get("vocab", config.vocab_size))


def sizes_of(config: Any) -> dict[str, int]:
    """Return the sizes of a model by parameter of a case."""
    return {**{name: getattr(config, name) for name in MODEL[1:5]}, "vocab": config.vocab_size}


def model_case(preset: str, batch: int, dtype: str, sizes: Sizes = PRESET) -> dict[str, Any]:
    """Return the parameters of MODEL, after a check; see `sized` and `settings_of`."""
    case = {"preset": preset, **sizes_of(sized(preset, sizes)), "batch": batch, "dtype": dtype}
    settings_of(case)
    return case


def settings_of(case: Mapping[str, Any], config: Any = None) -> tuple[LanguageSettings, Any]:
    """Return the training and the model of a case: its preset, or a GPT-2, with its sizes.

    Args:
        case: a value for each parameter.
        config: of the model, if the case has a part of the sizes alone.
    Raises:
        ArgumentError: a size or a setting is out of its range.
    """
    if config is None:
        base = MODELS[case["preset"]] if "preset" in case else gpt2.GPT2Config()
        config = with_sizes(base, case)
    options = {name: case[name] for name in _OPTIONS if name in case}
    settings = LanguageSettings(model=presets.model_name(config), lr=6e-4, **options)
    settings.check_batch(1)
    return settings, config


def step_of(case: Mapping[str, Any], device: str) -> TrainingStep:
    """Return the training step of a case in this process; see `settings_of`."""
    return language_step(*settings_of(case), device)


@dataclass(frozen=True)
class RankTimer:
    """Time and memory of calls that all ranks make together.

    Args:
        comm: the ranks.
        device: of this rank.
        windows: number of windows of calls; their median is the result.
    """

    comm: Comm
    device: str
    windows: int

    def seconds(self, call: Step, calls: int) -> float:
        """Return the median time of a call on the slowest rank, after one to warm up."""
        call()
        windows = []
        for _ in range(self.windows):
            synchronize(self.device)
            self.comm.barrier()
            begin = time.perf_counter()
            for _ in range(calls):
                call()
            synchronize(self.device)
            windows.append(time.perf_counter() - begin)
        return self.largest(statistics.median(windows) / calls)

    def idle(self, step: Step, steps: int) -> list[float]:
        """Return for each rank the fraction of the time of some steps that it waits for others."""
        spans: list[tuple[Any, Any]] = []
        wait = Handle.wait

        def timed(handle: Handle) -> None:
            before = self._moment()
            wait(handle)
            spans.append((before, self._moment()))

        self.comm.barrier()
        with patch.object(Handle, "wait", timed):
            begin = self._moment()
            for _ in range(steps):
                step()
            end = self._moment()
        synchronize(self.device)
        waited = sum(self._between(*span) for span in spans)
        return list(self.comm.all_gather_objects(waited / self._between(begin, end)))

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

    def largest(self, value: float) -> float:
        """Return the largest value of all ranks."""
        return float(max(self.comm.all_gather_objects(value)))

    @contextmanager
    def peak(self, row: dict[str, Any]) -> Iterator[None]:
        """Add the peak memory of the `with` block on any rank to a row, in MB.

        "peak_mb" is the memory of arrays. "device_mb" is all memory that is used on a GPU then,
        with CUDA's, NCCL's and the free blocks of the memory pool.
        """
        with peak_memory(self.device) as peak:
            yield
            synchronize(self.device)
        row["peak_mb"] = self.largest(peak.bytes / 1e6)
        if self.device != "cpu":
            free, total = backend.cupy.cuda.runtime.memGetInfo()
            row["device_mb"] = self.largest((total - free) / 1e6)
