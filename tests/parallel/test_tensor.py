from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tensorgrad.parallel import Comm
from tensorgrad.parallel.tensor import tensor_parallel
from tests.parallel import tensor_ranks
from tests.ranks import run_ranks


@pytest.mark.mpi
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_on_the_cpu(ranks: int) -> None:
    out = run_ranks(Path(tensor_ranks.__file__), ranks).stdout
    assert out == f"{len(tensor_ranks.CHECKS)} checks on {ranks} ranks\n"


def test_one_rank_has_the_whole_model() -> None:
    tokens = np.arange(tensor_ranks.T)[None]
    for make in tensor_ranks.MODELS:
        model, other = make(), make()
        parts = tensor_parallel(model, Comm(), sequence=True)
        assert repr(model) == repr(other)
        assert model(tokens, tokens).item() == other(tokens, tokens).item()
        assert set(parts.placements) == {name for name, _ in other.named_parameters()}
        assert all(part.ranges is None for part in parts.placements.values())
        assert (parts.replicated, parts.summed) == (frozenset(), frozenset())
