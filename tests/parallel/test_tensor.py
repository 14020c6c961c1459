from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensorgrad.parallel import Comm
from tensorgrad.parallel.region import ParallelRegion
from tensorgrad.parallel.tensor import TensorParts, _LayerBoxes, tensor_parallel
from tensorgrad.train.placement import Placement
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


def test_positions_of_the_rows_of_a_rank() -> None:
    comm = Comm()
    comm.size, comm.rank = 2, 1
    ids = np.zeros((2, 4), int)
    for sequence, start, expected in (
        (False, 3, [3, 4, 5, 6]),
        (False, np.array([5, 1]), [[5, 6, 7, 8], [1, 2, 3, 4]]),
        (True, 3, [[3, 4], [5, 6]]),  # the second sequence
    ):
        positions = ParallelRegion(comm, sequence)._positions(ids, start)
        assert positions.tolist() == expected


def test_boxes_that_ranks_share_are_joined_and_whole_ones_stay() -> None:
    class Doubling(Comm):
        """Two ranks with equal arrays."""

        def all_reduce(self, array: Any, *_: Any) -> Any:
            array *= 2

    placements = {
        "part": Placement("part", (3, 2), 0, ((1, 3),)),
        "whole": Placement("whole", (2,)),
    }
    boxes = _LayerBoxes(TensorParts(Doubling(), False, placements))
    own = np.array([[1.0, 2.0], [3.0, 4.0]])
    joined = boxes.join("part", own)
    np.testing.assert_array_equal(joined, [[0, 0], [2, 4], [6, 8]])
    np.testing.assert_array_equal(boxes.cut("part", joined), 2 * own)
    whole = np.array([1.0, 2.0])
    assert boxes.join("whole", whole) is boxes.cut("whole", whole) is whole
    for name, sums in (("part", [2.0]), ("whole", [1.0])):
        added = np.ones(1)
        boxes.add(name, added)
        assert added.tolist() == sums
    assert (boxes.shape("part", (2, 2)), boxes.shape("whole", (2,))) == ((3, 2), (2,))
