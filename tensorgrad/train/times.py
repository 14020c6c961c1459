"""times.jsonl: the seconds, the speed and the memory of a run, which differ from run to run."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tensorgrad.core import backend
from tensorgrad.kernels.gpu import GpuMonitor, name_of, peak_flops
from tensorgrad.train.log import StepLog, read_metrics

_SECONDS = 1.0  # between two lines, at least


class Clock:
    """The time of training since the clock was made, without pauses."""

    def __init__(self) -> None:
        self._began, self._paused = time.perf_counter(), 0.0

    @property
    def seconds(self) -> float:
        """Seconds without those of `paused`."""
        return self.elapsed - self._paused

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self._began

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the `with` block, such as an evaluation, from the time of training."""
        before = self.elapsed
        try:
            yield
        finally:
            self._paused += self.elapsed - before


@dataclass(frozen=True)
class Work:
    """The work of a step, of which the speed follows.

    Args:
        tokens: of a step, on all ranks together; 0: unknown.
        flops: of training on a token, 0: unknown.
        peak: FLOP/s of all GPUs together; None: unknown.
        steps_per_epoch: 0: the data has no epochs.
    """

    tokens: int = 0
    flops: float = 0.0
    peak: float | None = None
    steps_per_epoch: int = 0


class TimesLog:
    """Writes times.jsonl: a line for a step whose loss was logged, at most one each second.

    Each line has

        step
        seconds             of training, without evaluations, samples and checkpoints
        elapsed             seconds of the run, without those between stop and resume
        epoch               epochs done, such as 1.25, where the data has epochs
        tokens              trained so far
        tokens_per_second   since the line before
        mfu                 FLOPs of the model / peak FLOP/s of the GPUs, 0 to 1, at this speed
        memory_mb           of the GPU, used by arrays
        peak_memory_mb      of the GPU, reserved for arrays; on the CPU the process's peak
        gpu_utilization     in percent, clock_mhz and watts: means since the line before

    as far as they are known. Seconds continue when a run resumes: they are those of its lines up to
    the checkpoint.

    Args:
        path: of the file.
        step: that the run starts from.
        clock: started with the run.
        work: of a step.
        device: "cpu" or "cuda:N".
        monitor: of this GPU.
    """

    def __init__(
        self, path: Path, step: int, clock: Clock, work: Work, device: str, monitor: GpuMonitor
    ) -> None:
        self._log = StepLog(path, step or -1)
        last = (read_metrics(path) or [{}])[-1]
        self._before = float(last.get("seconds") or 0), float(last.get("elapsed") or 0)
        self._clock, self._work, self._monitor = clock, work, monitor
        self._on_gpu = device != "cpu"
        self._written = self._step = step
        self._seconds = self._elapsed = 0.0  # readings of the clock, at the line before

    def update(self, step: int, at_once: bool = False) -> dict[str, float] | None:
        """Write a line for this step if one is due; return its values, None if there is none.

        Args:
            step: the number of steps done.
            at_once: whether one is due in any case, as before a checkpoint.
        """
        seconds, elapsed = self._clock.seconds, self._clock.elapsed
        if step == self._written or not (at_once or elapsed - self._elapsed >= _SECONDS):
            return None
        values = {
            "seconds": self._before[0] + seconds,
            "elapsed": self._before[1] + elapsed,
            **self._epoch(step),
            **self._speed(step, seconds),
            **memory(self._on_gpu),
            **self._monitor.take(),
        }
        self._written = self._step = step
        self._seconds, self._elapsed = seconds, elapsed
        values = {name: round(value, 4) for name, value in values.items()}
        self._log.write({"step": step, **values})
        return values

    def close(self) -> None:
        """Close the file."""
        self._log.close()

    def _epoch(self, step: int) -> dict[str, float]:
        steps = self._work.steps_per_epoch
        return {"epoch": step / steps} if steps else {}

    def _speed(self, step: int, seconds: float) -> dict[str, float]:
        work = self._work
        if not work.tokens:
            return {}
        per_second = (step - self._step) * work.tokens / max(seconds - self._seconds, 1e-9)
        found = {"tokens": step * work.tokens, "tokens_per_second": per_second}
        if work.flops and work.peak:
            found["mfu"] = work.flops * per_second / work.peak
        return found


def peak_of(device: str, dtype: str, processes: int) -> float | None:
    """Return the peak FLOP/s of the GPUs of a run, one for each process; None if unknown."""
    index = None if device == "cpu" else backend.gpu_index(device)
    peak = None if index is None else peak_flops(name_of(index), dtype)
    return None if peak is None else peak * processes


def memory(on_gpu: bool) -> dict[str, float]:
    """Return memory_mb and peak_memory_mb in units of 10^6 bytes, as far as they are known."""
    if on_gpu:
        used, reserved = backend.memory_bytes()
        return {"memory_mb": used / 1e6, "peak_memory_mb": reserved / 1e6}
    if sys.platform == "win32":
        return {}
    import resource

    unit = 1 if sys.platform == "darwin" else 1024  # bytes of ru_maxrss
    return {"peak_memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6}
