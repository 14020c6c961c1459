"""Checks of scatters, messages, handles and groups of ranks; run with collectives.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tensorgrad import dtypes
from tensorgrad.core import backend
from tensorgrad.errors import ArgumentError, CommError, DtypeError, ShapeError
from tensorgrad.parallel import Comm, Handle
from tensorgrad.parallel.comm import messages
from tests.parallel.comm.arrays import Array, Host, same, values

PIECES = ((1,), (33,), (0,), (2, 3), (5, 0), (1025,))


def on(device: str, array: Host) -> Array:
    return backend.to_device(array.copy(), device)


def strided(like: Array) -> Array:
    """Return an array of this shape with gaps between its rows, full of old values."""
    shape = (2 * like.shape[0] + 1, *like.shape[1:])
    return backend.namespace(like).ones(shape, like.dtype)[1::2]


def cases(comm: Comm) -> list[tuple[tuple[int, ...], Any, Host]]:
    """Return shape of a piece, dtype, and the arrays of all ranks."""
    return [
        (shape, dtype, np.stack([values(r, whole, dtype) for r in range(comm.size)]))
        for dtype in (*dtypes.FLOATS, dtypes.int64, dtypes.uint16, dtypes.bool_)
        for shape in PIECES
        for whole in [(comm.size * shape[0], *shape[1:])]
    ]


def check_reduce_scatter(comm: Comm, device: str) -> None:
    for shape, dtype, ranks in cases(comm):
        if dtype == dtypes.bool_:
            total, op = ranks.max(0, keepdims=True), "max"
        else:
            total, op = ranks.astype("float64").sum(0, keepdims=True).astype(dtype), "sum"
        first = comm.rank * shape[0]
        expected = total[0, first : first + shape[0]]
        array = on(device, ranks[comm.rank])
        out = backend.empty(shape, dtype, like=array)
        comm.reduce_scatter(array, out, op)
        same(out, expected)
        same(array, ranks[comm.rank])
        spread = strided(out)
        comm.reduce_scatter(array[::-1].copy()[::-1], spread, op)
        same(spread, expected)
        comm.reduce_scatter(array, array[first : first + shape[0]], op)
        same(array[first : first + shape[0]], expected)


def check_gathering_into_an_array(comm: Comm, device: str) -> None:
    for shape, dtype, ranks in cases(comm):
        rows = ranks[:, : shape[0]]
        expected = rows.reshape(comm.size * shape[0], *shape[1:])
        mine = on(device, rows[comm.rank])
        for out in (backend.empty(expected.shape, dtype, like=mine), strided(on(device, expected))):
            comm.all_gather(mine, out)
            same(out, expected)
        whole = on(device, np.zeros_like(expected))
        own = whole[comm.rank * shape[0] : (comm.rank + 1) * shape[0]]
        own[...] = mine
        comm.all_gather(own, whole)
        same(whole, expected)
    rows = on(device, np.zeros((comm.size, 5), "float32"))
    rows[comm.rank] = comm.rank
    comm.all_gather(rows[comm.rank][None], rows)  # no step along an axis of one
    same(rows, np.repeat(np.arange(comm.size, dtype="float32")[:, None], 5, 1))


def check_all_to_all(comm: Comm, device: str) -> None:
    for shape, dtype, ranks in cases(comm):
        n, mine = shape[0], on(device, ranks[comm.rank])
        expected = np.concatenate([each[comm.rank * n : (comm.rank + 1) * n] for each in ranks])
        for out in (backend.empty(expected.shape, dtype, like=mine), strided(mine)):
            comm.all_to_all(mine, out)
            same(out, expected)


def check_messages(comm: Comm, device: str) -> None:
    """Send around the ring, several at a time in both directions, and longer than a message."""
    if comm.size == 1:
        return
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for first in range(comm.size):  # neighbours on GPUs meet once, and not all round the ring
        second = (first + 1) % comm.size
        if comm.rank == first:
            comm.send(on(device, np.ones(1)), second)
        elif comm.rank == second:
            comm.recv(on(device, np.zeros(1)), first)
    usual, messages._MESSAGE_BYTES = messages._MESSAGE_BYTES, 1000
    for shape, dtype, ranks in cases(comm):
        mine = on(device, ranks[comm.rank])
        found = [backend.empty(mine.shape, dtype, like=mine), strided(mine)]
        handles = [comm.recv(found[0], before, wait=False)]
        handles += [comm.send(mine, other, wait=False) for other in (after, before)]
        handles += [comm.recv(found[1], after, wait=False)]
        for handle in reversed(handles):
            handle.wait()
        same(found[0], ranks[before])
        same(found[1], ranks[after])
        assert shape
    messages._MESSAGE_BYTES = usual
    x = on(device, np.full(7, comm.rank, "float32"))
    if comm.rank:  # along the line, one after the other
        comm.recv(x, comm.rank - 1)
        x += 1
    if comm.rank < comm.size - 1:
        comm.send(x, comm.rank + 1)
    same(x, np.full(7, comm.rank, "float32"))


def check_handles(comm: Comm, device: str) -> None:
    """Pending calls are finished in any order, whatever the rank does in between."""
    ranks = [np.full(1000, 10 * n + comm.rank, "float32") for n in range(6)]
    arrays = [on(device, each) for each in ranks]
    outs = [backend.empty((1000 * comm.size,), arrays[0].dtype, like=arrays[0]) for _ in range(2)]
    piece = backend.empty((1000,), outs[0].dtype, like=outs[0])
    handles = [
        comm.all_reduce(arrays[0], wait=False),
        comm.all_reduce(arrays[1][::2], "max", wait=False),
        comm.broadcast(arrays[2], comm.size - 1, wait=False),
        comm.all_gather(arrays[3], outs[0], wait=False),
        comm.all_to_all(outs[1], backend.empty_like(outs[1]), wait=False),
    ]
    comm.barrier()
    handles[3].wait()
    handles.append(comm.reduce_scatter(outs[0], piece, wait=False))
    order = list(range(6)) if comm.rank % 2 else [5, 3, 0, 4, 2, 1]
    for number in order:
        handles[number].wait()
        handles[number].wait()
        assert isinstance(handles[number], Handle)
    total = sum(range(comm.size))
    same(arrays[0], np.full(1000, total, "float32"))
    same(arrays[1][::2], np.full(500, 10 + comm.size - 1, "float32"))
    same(arrays[1][1::2], np.full(500, 10 + comm.rank, "float32"))
    same(arrays[2], np.full(1000, 20 + comm.size - 1, "float32"))
    same(outs[0], np.repeat(np.arange(comm.size) + 30, 1000).astype("float32"))
    same(piece, np.full(1000, comm.size * (30 + comm.rank), "float32"))
    assert not comm._open


def check_an_all_reduce_is_a_reduce_scatter_to_the_bit(comm: Comm, device: str) -> None:
    """Sums on the host do not depend on how the array is divided, so nor on the buckets."""
    whole = np.random.default_rng(comm.rank).standard_normal(comm.size * 5000).astype("float32")
    piece = np.empty(5000, "float32")
    comm.reduce_scatter(whole, piece, "mean")
    cut = whole.copy()
    for part in np.array_split(cut, 7):
        comm.all_reduce(part, "mean")
    comm.all_reduce(whole, "mean")
    same(whole, cut)
    same(piece, whole[comm.rank * 5000 : (comm.rank + 1) * 5000])
    half = np.full((comm.size, 3), 256 if comm.rank == 0 else 1, dtypes.bfloat16)
    out = np.empty((1, 3), dtypes.bfloat16)
    comm.reduce_scatter(half, out)
    same(out, np.full((1, 3), 255 + comm.size).astype(dtypes.bfloat16))


def check_groups(comm: Comm, device: str) -> None:
    """Pairs of neighbours in reverse order, the even and the odd ranks, one and all ranks."""
    world = list(range(comm.size))
    first = comm.rank - comm.rank % 2
    for group in ([r for r in (first + 1, first) if r < comm.size], world[comm.rank % 2 :: 2]):
        part = comm.split(group)
        assert (part.ranks, part.size, part.ranks[part.rank]) == (
            tuple(group),
            len(group),
            comm.rank,
        )
        assert (part.local_rank, part.local_size) == (comm.local_rank, comm.local_size)
        x = on(device, np.full(3, comm.rank, "float32"))
        part.all_reduce(x)
        same(x, np.full(3, sum(group), "float32"))
        assert part.all_gather_objects(comm.rank) == group
        if part.size == 2:
            y = backend.empty_like(x)
            handle = part.send(on(device, np.full(3, comm.rank, "float32")), 1 - part.rank, False)
            part.recv(y, 1 - part.rank)
            handle.wait()
            same(y, np.full(3, group[1 - part.rank], "float32"))
        x = on(device, np.ones(2, "float32"))
        whole, handle = comm.split(world), comm.all_reduce(x, wait=False)
        z = on(device, np.ones(2, "float32"))
        whole.all_reduce(z)  # while a call of the group that it is a part of is under way
        handle.wait()
        same(x, np.full(2, comm.size, "float32"))
        same(z, np.full(2, comm.size, "float32"))
    alone = comm.split([comm.rank]).split([0])
    x = on(device, np.arange(3.0))
    out = backend.empty_like(x)
    assert alone.size == 1
    alone.all_reduce(x)
    for call in (alone.reduce_scatter, alone.all_gather, alone.all_to_all):
        out[...] = 7
        call(x, out).wait()
        same(out, np.arange(3.0))


def check_groups_that_disagree(comm: Comm, device: str) -> None:
    """Each is an error on all ranks that names them as the world does, and all can continue."""
    if comm.size == 1:
        return
    odd = comm.rank == comm.size - 1
    last, world = comm.size - 1, list(range(comm.size))
    fails(lambda: comm.split(world[::-1] if odd else world), r"split: ranks is \[0, 1.*on rank")
    others = world[:-1]
    fails(lambda: comm.split([last] if odd else world), rf"\] on .*\[{last}\] on rank {last}")
    fails(lambda: comm.barrier() if odd else comm.split(others), f"barrier on rank {last}")
    part = comm.split(world[::-1])  # rank 0 of the group is the last of the world
    x = on(device, np.ones(37 * comm.size + odd * comm.size, "float32"))
    piece = x[: 37 + odd].copy()
    fails(lambda: part.reduce_scatter(x, piece), rf"reduce_scatter\(sum\) .* on rank {last}, red")
    fails(lambda: part.all_to_all(x, x.copy()), rf"all_to_all of .* on rank {last}, all_to")
    fails(lambda: part.all_gather(piece, x), rf"float32 \(38,\) on .* on rank {last}, all_")
    fails(
        lambda: part.all_reduce(x[:9], "max" if odd else "sum", wait=False),
        rf"all_reduce\(max\) of .* on rank {last}, all_reduce\(sum\)",
    )
    fails(
        lambda: part.agree("options", {"lr": 1 + odd}),
        rf"options: lr is 2 on rank {last}, 1 on rank",
    )
    part.all_reduce(x[:3])
    same(x[:3], np.full(3, comm.size, "float32"))


def check_messages_that_disagree(comm: Comm, device: str) -> None:
    """The receiver raises; the two cannot continue in this group. On GPUs NCCL then waits."""
    if device != "cpu":
        return
    wrong = {"dtype": ((4,), "int32"), "shape": ((5,), "float32"), "axes": ((4, 1), "float32")}
    for shape, dtype in wrong.values():
        part = comm.split(range(comm.size))
        if comm.size == 1 or comm.rank > 1:
            continue
        if comm.rank == 1:
            part.send(np.ones(4, "float32"), 0)
            continue
        x = np.zeros(shape, dtype)
        with pytest.raises(CommError, match=rf"rank 0 expects {dtype} \({shape[0]},") as error:
            part.recv(x, 1)
        assert "recv: rank 1 sends float32 (4,) on the CPU, rank 0" in str(error.value)


def fails(call: Callable[[], object], message: str) -> None:
    with pytest.raises(CommError, match=message):
        call()


def check_arrays_that_are_only_read(comm: Comm, device: str) -> None:
    """They may be read-only; GPUs have no such arrays."""
    if device != "cpu":
        return
    x = np.broadcast_to(np.float32(comm.rank + 1), (comm.size, 3))
    total, out = sum(range(1, comm.size + 1)), np.empty((comm.size, 3), "float32")
    comm.reduce_scatter(x, out[:1])
    same(out[:1], np.full((1, 3), total, "float32"))
    comm.all_gather(x[:1], out)
    every = np.repeat(np.arange(1, comm.size + 1, dtype="float32")[:, None], 3, 1)
    same(out, every)
    out[...] = 0
    comm.all_to_all(x, out)
    same(out, every)
    last = comm.size - 1
    comm.broadcast(x if comm.rank == last else out, last)
    same(out, every if comm.rank == last else np.full_like(out, comm.size))
    if comm.rank == last and last:
        comm.send(x, 0)
    elif comm.rank == 0 and last:
        comm.recv(out, last)
        same(out, np.full_like(out, comm.size))
    calls: tuple[Callable[[], object], ...] = (
        lambda: comm.reduce_scatter(out, x[:1]),
        lambda: comm.all_gather(out[:1], x),
        lambda: comm.all_to_all(out, x),
    )
    for call in calls:
        with pytest.raises(ArgumentError, match="out is read-only"):
            call()
    if last:
        with pytest.raises(ArgumentError, match="recv: array is read-only"):
            comm.recv(x, (comm.rank + 1) % comm.size)
        if comm.rank != 0:
            with pytest.raises(ArgumentError, match="broadcast: array is read-only"):
                comm.broadcast(x, 0)


def check_arguments_of_pieces(comm: Comm, device: str) -> None:
    n = comm.size
    x = on(device, np.ones((4 * n, 2), "float32"))
    out = on(device, np.ones((4, 2), "float32"))
    with pytest.raises(ShapeError, match=rf"array has shape \({4 * n}, 2\), expected \({3 * n}, 2"):
        comm.reduce_scatter(x, out[:3])
    with pytest.raises(ShapeError, match=r"out has shape \(\), expected at least one axis"):
        comm.reduce_scatter(x, x[0, 0, ...])
    with pytest.raises(DtypeError, match=r"reduce_scatter: array is float32, expected int32 like"):
        comm.reduce_scatter(x, out.astype("int32"))
    with pytest.raises(ArgumentError, match=f"out overlaps array, expected piece {comm.rank} of"):
        comm.reduce_scatter(x, x[comm.rank * 4 :][:4][::-1])
    with pytest.raises(ArgumentError, match="reduce_scatter: op is 'min'"):
        comm.reduce_scatter(x, out, "min")
    with pytest.raises(ShapeError, match=rf"out has shape \({4 * n}, 2\), expected \({2 * n}, 2\)"):
        comm.all_gather(out[:2], x)
    with pytest.raises(ArgumentError, match="out is None, expected an array with wait=False"):
        comm.all_gather(x, None, wait=False)
    with pytest.raises(ArgumentError, match="out overlaps array, expected memory of its own"):
        comm.all_to_all(x, x)
    if n > 1:
        with pytest.raises(ShapeError, match=rf"\(1, 2\), .* first axis that the {n} ranks"):
            comm.all_to_all(x[:1], out[:1])
    with pytest.raises(ArgumentError, match=f"send: to is {n}, expected 0 to {n - 1}"):
        comm.send(x, n)
    with pytest.raises(ArgumentError, match="this rank, expected another"):
        comm.recv(x, comm.rank)
    with pytest.raises(ArgumentError, match=r"ranks is \[0, 0\], expected different ranks from 0"):
        comm.split([0, 0])
    with pytest.raises(ArgumentError, match=rf"ranks is \[\], expected rank {comm.rank} among"):
        comm.split([])


CHECKS = tuple(check for name, check in sorted(globals().items()) if name.startswith("check_"))
