"""Arrays that the GPUs of one host share: all-reduce by copy engines, beside a backward pass.

NCCL's kernels take some 24 SMs from the kernels that they run beside. Products whose
tiles just fill the GPU then take twice as long. Copy engines take none. The ranks exchange handles
of their memory once (CUDA's interprocess communication), and each opens the memory of the others.
Then each rank owns one part of what is reduced:

    meet            the arrays of all ranks are complete
    copy            this rank's part of each other rank, to a buffer
    add             to this rank's own, in the order of the ranks
    meet            the parts of all ranks are sums
    copy            from each other rank the part that it owns
    meet            nobody reads this rank's array any more

Each link carries what a ring would send over it. Equal inputs give equal bits, the same on all
ranks. Tests: tests/parallel/comm/test_collectives.py, tests/kernels/test_peer_copies.py.
"""

from __future__ import annotations

import ctypes
import socket
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tensorgrad.core import backend
from tensorgrad.core.backend import Array
from tensorgrad.kernels import peer_copies
from tensorgrad.kernels.device import driver
from tensorgrad.kernels.structs import Peers

Gather = Callable[[Any], list[Any]]
_LEAST = 1 << 20  # bytes; NCCL is faster for less


class SharedArray:
    """A GPU array of this rank, and those of the other ranks, whose memory this process has opened.

    Args:
        array: of this rank, in C order.
        state: of this rank, STATE zeros of kernels/peer_copies.py.
        arrays, states: the addresses of those of all ranks, in this process.
        rank: this rank.
        opened: what to close in the end.
    """

    def __init__(
        self,
        array: Array,
        state: Array,
        arrays: list[int],
        states: list[int],
        rank: int,
        opened: list[int],
    ) -> None:
        """Keep the arrays."""
        self._array, self._state, self._arrays, self._rank = array, state, arrays, rank
        self._peers = peer_copies.peers(states, rank)
        # For copies of other ranks: the last one, and smaller ones that may still be in use.
        self._buffers = [backend.empty((len(arrays) - 1, 0), array.dtype, like=array)]
        close = backend.cupy.cuda.runtime.ipcCloseMemHandle
        weakref.finalize(self, lambda: [close(address) for address in opened]).atexit = False

    def place(self, array: Array) -> int | None:
        """Return how many bytes of the shared array are before a part; None if it is not one."""
        place, bytes_ = int(array.data.ptr - self._array.data.ptr), int(array.nbytes)
        inside = place >= 0 and place + bytes_ <= self._array.nbytes
        aligned = not (place | bytes_) % peer_copies.ALIGNED
        alike = array.dtype == self._array.dtype and array.flags.c_contiguous
        return place if inside and aligned and alike and bytes_ >= _LEAST else None

    def all_reduce(self, part: Array, mean: bool) -> None:
        """Replace a part of the array on all ranks by its sum or mean, on the current stream.

        Args:
            part: one that has a `place`.
            mean: whether to divide by the number of ranks.
        """
        ranks, place = len(self._arrays), part.data.ptr - self._array.data.ptr
        pieces = list(_pieces(part, ranks))
        own = pieces[self._rank]
        if self._buffers[-1].shape[1] < own.size:
            self._buffers.append(backend.empty((ranks - 1, own.size), part.dtype, like=part))
        copies = self._buffers[-1]
        others = [rank for rank in range(ranks) if rank != self._rank]
        peer_copies.meet(self._peers)
        for rank, copy in zip(others, copies, strict=True):
            self._copy(copy[: own.size], rank, place + own.data.ptr - part.data.ptr)
        if own.size:
            peer_copies.add(own, copies, self._rank, 1 / ranks if mean else 1.0)
        peer_copies.meet(self._peers)
        for rank in others:
            self._copy(pieces[rank], rank, place + pieces[rank].data.ptr - part.data.ptr)
        peer_copies.meet(self._peers)

    def _copy(self, to: Array, rank: int, place: int) -> None:
        """Copy from the array of another rank."""
        cuda = backend.cupy.cuda
        stream = cuda.get_current_stream().ptr
        device_to_device = cuda.runtime.memcpyDeviceToDevice
        if to.size:
            cuda.runtime.memcpyAsync(
                to.data.ptr, self._arrays[rank] + place, to.nbytes, device_to_device, stream
            )


def share(array: Array, rank: int, gather: Gather) -> SharedArray | None:
    """Open an array on all ranks; every rank calls it. None: a GPU cannot reach another's memory.

    Args:
        array: in C order, on a GPU, of the same size on all ranks.
        rank: this rank.
        gather: returns what all ranks pass, which JSON can hold.
    """
    runtime = backend.cupy.cuda.runtime
    state = backend.cupy.zeros(peer_copies.STATE, np.uint32)
    try:
        own = [_handle(array), _handle(state)]
    except runtime.CUDARuntimeError:  # memory of an allocator without handles
        own = []
    runtime.deviceSynchronize()  # the state is 0 before another rank writes to it
    ranks = gather([_host(), own])
    hosts, handles = {host for host, _ in ranks}, [pair for _, pair in ranks]
    fails = len(hosts) > 1 or len(ranks) > Peers.MOST or not all(handles)
    fails = fails or array.dtype not in peer_copies.DTYPES
    opened: dict[str, int] = {}
    try:
        for handle in [h for number, pair in enumerate(handles) if number != rank for h, _ in pair]:
            if handle not in opened and not fails:
                opened[handle] = runtime.ipcOpenMemHandle(bytes.fromhex(handle))
    except runtime.CUDARuntimeError:  # there is no way to its memory
        fails = True
    if any(gather(fails)):
        for address in opened.values():
            runtime.ipcCloseMemHandle(address)
        return None
    pairs = [[opened.get(handle, 0) + place for handle, place in pair] for pair in handles]
    pairs[rank] = [array.data.ptr, state.data.ptr]
    arrays, states = ([pair[part] for pair in pairs] for part in (0, 1))
    return SharedArray(array, state, arrays, states, rank, list(opened.values()))


def _handle(array: Array) -> tuple[str, int]:
    """Return the handle of the memory that an array is in, and how many bytes are before it."""
    begin, size = ctypes.c_uint64(), ctypes.c_size_t()
    pointer = ctypes.c_uint64(array.data.ptr)
    driver().cuMemGetAddressRange_v2(ctypes.byref(begin), ctypes.byref(size), pointer)
    handle = backend.cupy.cuda.runtime.ipcGetMemHandle(array.data.ptr)
    return handle.hex(), array.data.ptr - begin.value


def _host() -> str:
    """Return what no two running hosts share: their names may be equal."""
    boot = Path("/proc/sys/kernel/random/boot_id")  # Linux only
    return f"{socket.gethostname()} {boot.read_text().strip() if boot.exists() else ''}"


def _pieces(part: Array, ranks: int) -> Iterator[Array]:
    """Yield one piece for each rank, of a multiple of ALIGNED bytes; the last may be shorter."""
    part = part.reshape(-1)
    unit = peer_copies.ALIGNED // part.itemsize
    length = -(-part.size // (ranks * unit)) * unit
    for rank in range(ranks):
        yield part[rank * length : (rank + 1) * length]
