from __future__ import annotations

import weakref
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tensorgrad.errors import ArgumentError
from tensorgrad.models.gpt2 import GPT2
from tensorgrad.parallel import Comm, Handle
from tensorgrad.parallel.mesh import Mesh
from tensorgrad.parallel.program import check_model, make_strategy
from tensorgrad.train.language import LanguageSettings
from tensorgrad.train.strategy import OneProcess
from tests.parallel import strategies
from tests.parallel.threads import on_ranks
from tests.ranks import run_ranks

pytestmark = pytest.mark.slow


@pytest.mark.mpi
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_strategy_on_ranks(ranks: int, tmp_path: Path) -> None:
    out = run_ranks(Path(strategies.__file__), ranks, [tmp_path, "cpu"], timeout=300).stdout
    assert out == f"{len(strategies.checks(ranks, 'cpu'))} checks on {ranks} ranks, cpu\n"


@pytest.mark.mpi
@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_strategy_on_gpus(ranks: int, tmp_path: Path) -> None:
    out = run_ranks(Path(strategies.__file__), ranks, [tmp_path, "cuda"], timeout=300).stdout
    assert out == f"{len(strategies.checks(ranks, 'cuda'))} checks on {ranks} ranks, cuda:0\n"


def test_strategies_work_on_one_rank() -> None:
    alone = strategies.train(OneProcess(), steps=3)
    for make in strategies.STRATEGIES.values():
        strategies.same(strategies.train(make(Comm()), steps=3), alone)


@pytest.mark.parametrize("name", strategies.STRATEGIES)
def test_nothing_holds_the_parameters_from_before(name: str) -> None:
    model = GPT2(strategies.ODD)
    before = [weakref.ref(parameter.data) for parameter in model.parameters()]
    strategies.STRATEGIES[name](Comm()).prepare(model, strategies.adamw)
    assert not any(array() is not None for array in before)


class Recording(Comm):
    """A rank that records which memory its collectives use."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, ...]] = []

    def all_reduce(self, array: Any, op: str = "sum", wait: bool = True) -> Handle:
        self._note("all_reduce", array, op, wait)
        return super().all_reduce(array, op, wait)

    def reduce_scatter(self, array: Any, out: Any, op: str = "sum", wait: bool = True) -> Handle:
        self._note("reduce_scatter", array, op, wait)
        return super().reduce_scatter(array, out, op, wait)

    def all_gather(self, array: Any, out: Any = None, wait: bool = True) -> Any:
        self._note("all_gather", out, wait)
        return super().all_gather(array, out, wait)

    def _note(self, op: str, array: Any, *rest: Any) -> None:
        scratch = array.ndim == 0  # the norm: each step allocates it
        self.calls.append((op, array.size, 0 if scratch else array.ctypes.data, *rest))


@pytest.mark.parametrize("name", strategies.STRATEGIES)
def test_every_step_sends_the_same_memory_in_the_same_order(name: str) -> None:
    """A captured step can be replayed: nothing depends on time, nothing is allocated."""
    comm = Recording()
    strategy = strategies.STRATEGIES[name](comm)
    run = strategies.train(strategy, steps=1, accumulate=2)
    steps: list[list[tuple[Any, ...]]] = []
    early = []
    for step in range(3):
        comm.calls.clear()
        run.optimizer.zero_grad()
        parts = strategies.parts_of(strategies.batch(step, strategies.ODD), strategy, 2)
        with strategy.no_sync():
            run.model(*parts[0]).backward()
        run.model(*parts[1]).backward()
        early.append(len(comm.calls))
        strategy.reduce_gradients()
        in_all = len(comm.calls)
        run.optimizer.step(1.0, None, strategy.reduce_norm)
        strategy.after_step()
        steps.append(list(comm.calls))
    assert steps[0] == steps[1] == steps[2]
    if name in strategies.OVERLAPPING:
        assert in_all > 3
        assert early[0] >= 0.6 * in_all, "little was sent during backward"
        sent = [call for call in comm.calls[:in_all] if call[1] and call[0] != "all_reduce"]
        assert name == "overlap" or not any(call[-1] for call in sent[:-1]), "waited for"
    else:
        assert early[0] == 0 or name == "one bucket"


@pytest.mark.parametrize("mesh", [{}, {"parallel": "zero2"}, {"pp": 2}, {"tp": 2}], ids=str)
def test_ranks_have_float32_gradients(mesh: dict[str, Any]) -> None:
    settings = LanguageSettings(dtype="bfloat16-parameters", grad_dtype="bfloat16", **mesh)
    with pytest.raises(ArgumentError, match="--grad-dtype: got bfloat16 with 2 ranks, expected"):
        on_ranks(2, partial(make_strategy, settings))


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"hidden": 27}, "blocks.0.feed_forward.up has 27 outputs, expected a multiple of the 2"),
        ({"model": "transformer-lm", "kv_heads": 1}, "kv_heads of blocks.0.attention is 1, exp"),
    ],
    ids=str,
)
def test_layers_that_ranks_cannot_share_are_an_error_at_once(
    sizes: dict[str, Any], said: str
) -> None:
    with pytest.raises(ArgumentError, match=f"--tp: got 2 where {said}"):
        check_model(LanguageSettings(tp=2, **sizes), Mesh(tp=2))
    check_model(LanguageSettings(tp=2, vocab=259), Mesh(tp=2))  # the text may have fewer tokens
