"""`tensorgrad bench cpu`: a GPT-2 training step on the CPU beside PyTorch eager, float32.

A step is forward, backward, clipping by the global norm and AdamW. The two libraries alternate,
each in a new process, so that they share the machine's state but no threads; figures are medians.
To compare on two cores of a larger machine:
`OMP_NUM_THREADS=2 taskset -c 0,1 tensorgrad bench cpu`. Tests: tests/bench/test_small.py.
"""

from __future__ import annotations

import importlib
import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from tensorgrad import backend
from tensorgrad.bench import options
from tensorgrad.bench.pictures import bars
from tensorgrad.bench.processes import in_new_process
from tensorgrad.bench.steps import PhasedStep, StepSettings
from tensorgrad.bench.sweep import Case, Measurement, Row, Sweep, Together
from tensorgrad.bench.timing import phases
from tensorgrad.bench.torch_ddp import TorchTrainer
from tensorgrad.bench.torch_gpt2 import gpt2
from tensorgrad.models.gpt2 import GPT2Config

PARTS = ("forward", "backward", "optimizer", "step")
_SIZES = ("layers", "width", "heads", "context", "batch", "vocab", "steps")


def cpu_sweep(
    *,
    layers: options.Layers = 6,
    width: options.Width = 384,
    heads: options.Heads = 6,
    context: options.Context = 256,
    batch: int = 8,
    vocab: options.Vocab = 4096,
    steps: int = 6,
    turns: int = 3,
    peer: options.Peer = None,
) -> Iterator[Measurement]:
    """Measure a training step of a GPT-2 on the CPU in float32, beside PyTorch eager.

    Args:
        batch: sequences of a step.
        steps: timed steps in each turn.
        turns: of each library, each in a new process.
    """
    sizes = dict(zip(_SIZES, (layers, width, heads, context, batch, vocab, steps), strict=True))
    options.check_counts("cpu", **sizes, turns=turns)
    settings_of(sizes)
    cases = options.crossed(
        part=PARTS, **sizes, turns=turns, peer=options.is_measured(peer), dtype="float32"
    )
    yield Measurement(CPU, cases, Together("part", measure_cpu))


def settings_of(sizes: dict[str, int]) -> StepSettings:
    """Return the model and the batch."""
    names = "vocab", "context", "layers", "heads", "width"
    return StepSettings(GPT2Config(*(sizes[name] for name in names)), sizes["batch"])


def step_times(peer: bool, sizes: dict[str, int]) -> list[list[float]]:
    """Return the milliseconds of forward, backward and optimizer of some steps in this process."""
    settings = settings_of(sizes)
    step: Callable[[], list[float]]
    if peer:
        step = _torch_step(settings)
    else:
        ours = step = PhasedStep(settings, "cpu")
        ours.prepare()
    found = [step() for _ in range(sizes["steps"] + 2)][2:]
    return [[1e3 * seconds for seconds in each] for each in found]


def _torch_step(settings: StepSettings) -> Callable[[], list[float]]:
    """Return a step of an equal model in PyTorch, eager; it returns the seconds of its phases."""
    torch: Any = importlib.import_module("torch")
    trainer = TorchTrainer(torch, gpt2(settings.config), "cpu")
    x, y = (torch.from_numpy(tokens).long() for tokens in settings.parts("cpu")[0])
    forward, backward = partial(trainer.loss, x, y), torch.Tensor.backward
    return partial(phases, "cpu", forward, backward, trainer.update)


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
