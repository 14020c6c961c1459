from __future__ import annotations

from pathlib import Path

import pytest

from tensorgrad.parallel import Comm
from tensorgrad.train.ranks import OneProcess
from tests.parallel import strategies
from tests.ranks import run_ranks


@pytest.mark.mpi
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_strategy_on_ranks(ranks: int, tmp_path: Path) -> None:
    out = run_ranks(Path(strategies.__file__), ranks, [tmp_path], timeout=300).stdout
    assert out == f"{len(strategies.checks(ranks))} checks on {ranks} ranks\n"


def test_strategies_work_on_one_rank() -> None:
    alone = strategies.train(OneProcess(), steps=3)
    for make in strategies.STRATEGIES.values():
        strategies.same(strategies.train(make(Comm()), steps=3), alone)
