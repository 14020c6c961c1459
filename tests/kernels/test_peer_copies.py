"""Meetings and sums of an all-reduce by copy engines; here ranks are streams of one GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tensorgrad.core import backend
from tensorgrad.dtypes import Dtype, bfloat16, float16, float32, float64
from tensorgrad.kernels import peer_copies


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [float32, float64, float16, bfloat16], ids=str)
@pytest.mark.parametrize(("ranks", "rank"), [(2, 0), (2, 1), (3, 1), (8, 7)])
@pytest.mark.parametrize("size", [8, 4096, 333_336])
def test_copies_are_added_in_the_order_of_the_ranks(
    dtype: Dtype, ranks: int, rank: int, size: int
) -> None:
    rng = np.random.default_rng(size + ranks)
    terms = [rng.standard_normal(size + 64).astype(dtype) for _ in range(ranks)]
    own = backend.cupy.asarray(terms[rank])
    copies = backend.cupy.asarray(np.stack(terms[:rank] + terms[rank + 1 :]))
    for scale in (1.0, 1 / ranks):
        own.set(terms[rank])
        peer_copies.add(own[:size], copies, rank, scale)
        wide = "float64" if dtype == float64 else "float32"
        total = np.zeros(size, wide)
        for term in terms:
            total += term[:size].astype(wide)
        total *= np.asarray(scale, wide)
        assert np.array_equal(own.get()[:size], total.astype(dtype))
        assert np.array_equal(own.get()[size:], terms[rank][size:])


def test_ranks_know_where_the_others_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_copies, "by_value", lambda value: value)
    found = peer_copies.peers([1000, 2000, 3000], 1)
    assert (found.rank, found.ranks, found.meetings) == (1, 3, 2000 + 4 * 8)
    assert list(found.met) == [1000, 2000, 3000, 0, 0, 0, 0, 0]
    launched: list[Any] = []

    def load(file: str, kernel: str) -> Any:
        return lambda *given: launched.append((file, kernel, *given))

    monkeypatch.setattr(peer_copies, "load", load)
    peer_copies.meet(found)
    own, copies = np.zeros(2049, "float32"), np.zeros((2, 3000), "float32")
    peer_copies.add(own, copies, 1, 0.5)
    (file, kernel, grid, block, arguments), sums = launched[0], launched[1]
    assert (file, kernel, grid, block) == ("peer_copies.cu", "meet_ranks", (1,), (32,))
    assert arguments == (found,)
    assert sums[1:4] == ("add_copies<float>", (3,), (256,))
    assert sums[4][0] is own
    assert sums[4][2:] == (1, 3, 2049, 3000, 0.5)


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [2, 8])
def test_a_rank_waits_for_the_others(ranks: int) -> None:
    cupy = backend.cupy
    states = [cupy.zeros(peer_copies.STATE, "uint32") for _ in range(ranks)]
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(ranks)]
    addresses = [int(state.data.ptr) for state in states]
    cupy.cuda.Device().synchronize()
    for last in (0, ranks - 1, 0):  # again: they count further
        done = [cupy.cuda.Event() for _ in range(ranks)]
        for rank in [*range(last), *range(last + 1, ranks), last]:
            if rank == last:
                assert not any(done[other].done for other in range(ranks) if other != last)
            with streams[rank]:
                peer_copies.meet(peer_copies.peers(addresses, rank))
                done[rank].record(streams[rank])
        for stream in streams:
            stream.synchronize()
        assert all(event.done for event in done)
