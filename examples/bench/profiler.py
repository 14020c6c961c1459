"""What the profiler costs while it records, and how well its times sum up to the measured step.

    python examples/bench/profiler.py --preset gpt2-124M --batch 16 --dtype bfloat16

Rounds without and with the profiler take turns; figures are medians. Run it while nothing else uses
the machine. That it costs nothing while off is counted in tests/profile/test_profiler.py.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import replace

import numpy as np

from tensorgrad import Tensor, backend, nn
from tensorgrad.gpu import GpuMonitor, clock_and_watts, clock_and_watts_text
from tensorgrad.models.gpt2 import GPT2
from tensorgrad.optim import AdamW
from tensorgrad.profile import Profiler
from tensorgrad.profile.recording import Recording
from tensorgrad.profile.tables import op_table
from tensorgrad.train.gpt2 import MODELS


class Step:
    """A GPT-2 that trains on one batch of random tokens."""

    def __init__(self, preset: str, batch: int, dtype: str, device: str) -> None:
        config = replace(MODELS[preset], vocab_multiple=128)
        with nn.init.on(device):
            self.model = GPT2(config).to(device, dtype)
        self.optimizer = AdamW(self.model.named_parameters(), 1e-4)
        self.device = device
        tokens = np.random.default_rng(0).integers(0, config.vocab_size, (batch, config.context))
        self.tokens = backend.to_device(tokens.astype(np.int32), device)

    def __call__(self) -> None:
        """Train one step."""
        self.optimizer.zero_grad()
        self.model(Tensor(self.tokens), Tensor(self.tokens)).backward()
        self.optimizer.step(1.0)

    def wait(self) -> None:
        """Wait for the GPU."""
        if self.device != "cpu":
            backend.cupy.cuda.runtime.deviceSynchronize()


def plain(step: Step, steps: int) -> float:
    """Return seconds of a step without a profiler."""
    began = time.perf_counter()
    for _ in range(steps):
        step()
    step.wait()
    return (time.perf_counter() - began) / steps


def profiled(step: Step, steps: int, source: str) -> tuple[float, Recording]:
    """Return seconds of a step with a profiler, and what it recorded."""
    with Profiler(step.model, source=source) as profiler:
        began = time.perf_counter()
        for _ in range(steps):
            with profiler.step():
                step()
        step.wait()
        seconds = (time.perf_counter() - began) / steps
    return seconds, profiler.recording


def main() -> None:
    """Print a line for each source of kernel times."""
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    options.add_argument("--preset", default="small", choices=tuple(MODELS))
    options.add_argument("--batch", type=int, default=8)
    options.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    options.add_argument("--steps", type=int, default=20, help="of a round")
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--device", default="auto")
    given = options.parse_args()
    device = backend.use_device(given.device)
    step = Step(given.preset, given.batch, given.dtype, device)
    for _ in range(3):
        step()
    step.wait()
    print("source    off ms     on ms  cost %   busy ms   gaps ms  kernels and gaps / off")
    for source in ("host",) if device == "cpu" else ("host", "events", "cupti"):
        off, on = [], []
        with GpuMonitor(backend.gpu_index(device), 0.2, busy=True) as monitor:
            for _ in range(given.rounds):
                off.append(plain(step, given.steps))
                seconds, recording = profiled(step, given.steps, source)
                on.append(seconds)
            load = clock_and_watts_text(clock_and_watts(monitor.take()))
        table, without = op_table(recording), statistics.median(off)
        cost = 100 * (statistics.median(on) / without - 1)
        print(
            f"{source:7} {1e3 * without:9.3f} {1e3 * statistics.median(on):9.3f} {cost:7.2f} "
            f"{1e3 * table.busy:9.3f} {1e3 * table.gaps:9.3f} "
            f"{(table.busy + table.gaps) / without:9.4f}  {load}",
            flush=True,
        )


if __name__ == "__main__":
    main()
