"""One GPT-2 training step on the CPU, tensorgrad beside PyTorch eager, float32.

    python -m examples.bench.step_cpu            # 6 layers, C 384, T 256, B 8
    python -m examples.bench.step_cpu --profile  # and where tensorgrad's time goes

A step is forward, backward, clipping by the global norm and AdamW. The two libraries alternate,
each in a new process, so that they share the machine's state but no threads; figures are medians.
To compare on two cores of a larger machine:
`OMP_NUM_THREADS=2 taskset -c 0,1 python -m examples.bench.step_cpu`.
"""

from __future__ import annotations

import argparse
import cProfile
import importlib.util
import itertools
import json
import platform
import pstats
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from tqdm import tqdm

from tensorgrad import backend
from tensorgrad.bench.torch_gpt2 import gpt2
from tensorgrad.models.gpt2 import GPT2, GPT2Config
from tensorgrad.optim import AdamW

Step = Callable[[], dict[str, float]]


def options() -> argparse.Namespace:
    """Return the sizes from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    sizes = {"layers": 6, "width": 384, "heads": 6, "context": 256, "batch": 8, "vocab": 4096}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--steps", type=int, default=6, help="timed steps in each turn")
    parser.add_argument("--turns", type=int, default=3, help="turns of each library")
    parser.add_argument("--only", choices=STEPS, help="time one library here; prints JSON")
    parser.add_argument("--profile", action="store_true", help="print a profile of tensorgrad")
    return parser.parse_args()


def tensorgrad_step(config: GPT2Config, tokens: Any, targets: Any) -> Step:
    """Return a function that trains tensorgrad's GPT-2 for one step and times its parts."""
    model = GPT2(config)
    optimizer = AdamW(model.named_parameters(), lr=6e-4, weight_decay=0.1)

    def step() -> dict[str, float]:
        times = [time.perf_counter()]
        optimizer.zero_grad()
        loss = model(tokens, targets)
        times.append(time.perf_counter())
        loss.backward()
        times.append(time.perf_counter())
        optimizer.step(max_norm=1.0)
        times.append(time.perf_counter())
        return parts(times)

    return step


def torch_step(config: GPT2Config, tokens: Any, targets: Any) -> Step:
    """Return the same for an equal model in PyTorch, eager."""
    import torch

    torch.set_num_threads(backend.threads())
    model = gpt2(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, weight_decay=0.1)
    tokens, targets = torch.from_numpy(tokens), torch.from_numpy(targets)

    def step() -> dict[str, float]:
        times = [time.perf_counter()]
        optimizer.zero_grad()
        loss = model(tokens, targets)
        times.append(time.perf_counter())
        loss.backward()
        times.append(time.perf_counter())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        times.append(time.perf_counter())
        return parts(times)

    return step


def parts(times: list[float]) -> dict[str, float]:
    """Return the milliseconds of each part of a step."""
    forward, backward, update = ((b - a) * 1e3 for a, b in itertools.pairwise(times))
    return {
        "forward": forward,
        "backward": backward,
        "optimizer": update,
        "step": (times[-1] - times[0]) * 1e3,
    }


def median(rows: list[dict[str, float]]) -> dict[str, float]:
    """Return the median of each part."""
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]}


STEPS = {"tensorgrad": tensorgrad_step, "PyTorch": torch_step}


def time_steps(name: str, sizes: argparse.Namespace) -> list[dict[str, float]]:
    """Time some steps of one library in this process."""
    rng = np.random.default_rng(0)
    tokens, targets = rng.integers(0, sizes.vocab, (2, sizes.batch, sizes.context))
    config = GPT2Config(sizes.vocab, sizes.context, sizes.layers, sizes.heads, sizes.width)
    step = STEPS[name](config, tokens, targets)
    rows = [step() for _ in range(sizes.steps + 2)][2:]
    if sizes.profile:
        profile = cProfile.Profile()
        profile.runcall(step)
        pstats.Stats(profile, stream=sys.stderr).sort_stats("tottime").print_stats(25)
    return rows


def main() -> None:
    """Print the table."""
    sizes = options()
    if sizes.only:
        print(json.dumps(time_steps(sizes.only, sizes)))
        return
    names = list(STEPS) if importlib.util.find_spec("torch") else ["tensorgrad"]
    measured: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for name in tqdm(names * sizes.turns, desc="turns"):
        command = [sys.executable, "-m", "examples.bench.step_cpu", *sys.argv[1:], "--only", name]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        measured[name] += json.loads(done.stdout)
    print(f"{platform.processor() or platform.machine()}, {backend.threads()} threads; ms, median")
    print(f"{'':12}" + "".join(f"{part:>11}" for part in measured["tensorgrad"][0]))
    for name, rows in measured.items():
        print(f"{name:12}" + "".join(f"{value:11.1f}" for value in median(rows).values()))
    if len(measured) == 2:
        ours, theirs = (median(rows) for rows in measured.values())
        print(f"{'ratio':12}" + "".join(f"{ours[part] / theirs[part]:11.2f}" for part in ours))


if __name__ == "__main__":
    main()
