"""`tensorgrad bench cpu`: a GPT-2 training step on the CPU beside PyTorch eager, float32.

A step is forward, backward, clipping by the global norm and AdamW. The two libraries alternate,
each in a new process, so that they share the machine's state but no threads; figures are medians.
To compare on two cores of a larger machine:
`OMP_NUM_THREADS=2 taskset -c 0,1 tensorgrad bench cpu`. Tests: tests/bench/test_small.py.
"""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from tensorgrad import backend
from tensorgrad.bench.model import Trainee
from tensorgrad.bench.pictures import bars
from tensorgrad.bench.processes import in_new_process
from tensorgrad.bench.steps import StepSettings
from tensorgrad.bench.sweep import Case, Row, Sweep
from tensorgrad.bench.torch_gpt2 import gpt2
from tensorgrad.checks import check_integer
from tensorgrad.models.gpt2 import GPT2Config

PARTS = ("forward", "backward", "optimizer", "step")
_SIZES = ("layers", "width", "heads", "context", "batch", "vocab", "steps")


def cpu_cases(sizes: dict[str, int], turns: int, peer: bool) -> list[Case]:
    """Return the cases of a sweep, one for each part of a step.

    Args: see `tensorgrad bench cpu --help`.
    Raises:
        ArgumentError: a number is out of its range.
    """
    for name, value in {**sizes, "turns": turns}.items():
        check_integer("bench cpu", name, value, 1)
    config_of(sizes)
    return [{"part": part, **sizes, "turns": turns, "peer": peer, "dtype": "float32"}
            for part in PARTS]  # fmt: skip


def config_of(sizes: dict[str, int]) -> GPT2Config:
    """Return the model."""
    names = "vocab", "context", "layers", "heads", "width"
    return GPT2Config(*(sizes[name] for name in names))


def step_times(peer: bool, sizes: dict[str, int]) -> list[list[float]]:
    """Return the milliseconds of forward, backward and optimizer of some steps in this process."""
    settings = StepSettings(config_of(sizes), sizes["batch"])
    if peer:
        step = _torch_step(settings)
    else:
        trainee = Trainee(settings, "cpu")
        trainee.prepare()
        step = trainee.step
    found = [step() for _ in range(sizes["steps"] + 2)][2:]
    return [[1e3 * seconds for seconds in each] for each in found]


def _torch_step(settings: StepSettings) -> Callable[[], list[float]]:
    """Return a step of an equal model in PyTorch, eager, which returns the seconds of its parts."""
    torch: Any = importlib.import_module("torch")
    torch.set_num_threads(backend.threads())
    model = gpt2(settings.config)
    optimizer = torch.optim.AdamW(model.parameters(), 6e-4, (0.9, 0.95), weight_decay=0.1)
    x, y = (torch.from_numpy(each) for each in settings.parts("cpu")[0])
    tokens, targets = x.long(), y.long()

    def step() -> list[float]:
        optimizer.zero_grad()
        moments = [time.perf_counter()]
        loss = model(tokens, targets)
        moments.append(time.perf_counter())
        loss.backward()
        moments.append(time.perf_counter())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        moments.append(time.perf_counter())
        return [after - before for before, after in pairwise(moments)]

    return step


def measure_cpu(case: Case) -> dict[str, Row]:
    """Return the results of all parts of a step."""
    sizes = {name: case[name] for name in _SIZES}
    peers = (False, True) if case["peer"] else (False,)
    times: dict[bool, list[list[float]]] = {peer: [] for peer in peers}
    for _ in range(case["turns"]):
        for peer in peers:
            times[peer] += in_new_process(step_times, {"peer": peer, "sizes": sizes})
    found: dict[str, Row] = {}
    for part in PARTS:
        ms, *others = (_median(rows, part) for rows in times.values())
        found[part] = {"ms": ms, "threads": backend.threads()}
        if others:
            found[part] |= {"peer_ms": others[0], "ratio": others[0] / ms}
    return found


def _median(rows: Sequence[Sequence[float]], part: str) -> float:
    place = PARTS.index(part)
    return statistics.median(sum(row) if part == "step" else row[place] for row in rows)


CPU = Sweep(
    "cpu",
    ("part", *_SIZES, "turns", "peer", "dtype"),
    ("ms", "peer_ms", "ratio", "threads"),
    bars("Training step of a GPT-2", "ms", ("part",), ("ms", "peer_ms")),
)
