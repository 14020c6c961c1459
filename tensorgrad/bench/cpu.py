"""`tensorgrad bench cpu`: a GPT-2 training step on the CPU beside PyTorch eager, float32.

A step is forward, backward, clipping by the global norm and AdamW. The two libraries alternate,
each in a new process, so that they share the machine's state but no threads; figures are medians.
To compare on two cores of a larger machine:
`OMP_NUM_THREADS=2 taskset -c 0,1 tensorgrad bench cpu`. Tests: tests/bench/test_small.py.
"""

from __future__ import annotations

import importlib
import statistics
from collections.abc import Iterator, Sequence
from functools import partial

from tensorgrad.bench import options
from tensorgrad.bench.pictures import bars
from tensorgrad.bench.processes import in_new_process
from tensorgrad.bench.steps import settings_of
from tensorgrad.bench.sweep import Case, Row, Sweep, together
from tensorgrad.bench.timing import phases
from tensorgrad.bench.torch_ddp import TorchTrainer
from tensorgrad.bench.torch_gpt2 import gpt2
from tensorgrad.core import backend
from tensorgrad.profile.training_step import language_step

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
) -> Iterator[Sweep]:
    """Measure a training step of a GPT-2 on the CPU in float32, beside PyTorch eager.

    Args:
        batch: sequences of a step.
        steps: timed steps in each turn.
        turns: of each library, each in a new process.
    """
    sizes = dict(zip(_SIZES, (layers, width, heads, context, batch, vocab, steps), strict=True))
    settings_of(sizes)
    cases = options.crossed(
        part=PARTS, **sizes, turns=turns, peer=options.is_measured(peer), dtype="float32"
    )
    results = "ms", "peer_ms", "ratio", "threads"
    draw = bars("Training step of a GPT-2", "ms", ("part",), results[:2])
    yield Sweep("cpu", cases, together("part", measure_cpu), results, draw)


def step_times(peer: bool, sizes: dict[str, int]) -> list[list[float]]:
    """Return the milliseconds of forward, backward and optimizer of some steps in this process."""
    # Without our optimizer, which changes what malloc keeps, PyTorch's step is as users have it.
    step = language_step(*settings_of(sizes), "cpu", lazy=peer)
    if peer:
        torch = importlib.import_module("torch")
        trainer = TorchTrainer(step.settings, lambda: gpt2(step.model.config), "cpu")
        x, y = (torch.from_numpy(tokens).long() for tokens in step.parts[0])
        parts = partial(trainer.loss, x, y), torch.Tensor.backward, trainer.update
    found = [phases("cpu", *(parts if peer else step.phases())) for _ in range(sizes["steps"] + 2)]
    return [[1e3 * seconds for seconds in times] for times in found[2:]]


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
