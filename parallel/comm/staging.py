"""Staging: GPU arrays sent through the host, for ranks that share a GPU, which NCCL forbids."""

from __future__ import annotations

import numpy as np

from tensorgrad import backend
from tensorgrad.backend import Array
from tensorgrad.parallel.comm.transport import Finish, Transport


class HostStaging:
    """Copies to the host, sends there, and copies back when the transfer is finished.

    Args:
        host: the transport of host arrays.
    """

    def __init__(self, host: Transport) -> None:
        """Send over `host`."""
        self._host = host

    def all_reduce(self, array: Array, op: str) -> Finish:
        """Reduce in place."""
        copy = backend.to_numpy(array)
        return then_copy(self._host.all_reduce(copy, op), copy, array)

    def reduce_scatter(self, array: Array, out: Array, op: str) -> Finish:
        """Reduce piece r of the flat `array` into `out` of rank r, which may be that piece."""
        copy = np.empty(out.shape, out.dtype)
        return then_copy(self._host.reduce_scatter(backend.to_numpy(array), copy, op), copy, out)

    def all_gather(self, data: Array, out: Array) -> Finish:
        """Put the bytes of all ranks into `out`, one after the other."""
        copy = np.empty(out.shape, out.dtype)
        return then_copy(self._host.all_gather(backend.to_numpy(data), copy), copy, out)

    def broadcast(self, data: Array, root: int) -> Finish:
        """Send the bytes of `root` to all."""
        copy = backend.to_numpy(data)
        return then_copy(self._host.broadcast(copy, root), copy, data)

    def all_to_all(self, data: Array, out: Array) -> Finish:
        """Put piece r of the bytes of rank s into piece s of `out` of rank r."""
        copy = np.empty(out.shape, out.dtype)
        return then_copy(self._host.all_to_all(backend.to_numpy(data), copy), copy, out)

    def send(self, data: Array, to: int) -> Finish:
        """Send bytes to one rank."""
        return self._host.send(backend.to_numpy(data), to)

    def recv(self, data: Array, source: int) -> Finish:
        """Receive bytes from one rank."""
        copy = np.empty(data.shape, data.dtype)
        return then_copy(self._host.recv(copy, source), copy, data)

    def close(self) -> None:
        """Do nothing: finished transfers are copied already."""


def then_copy(finish: Finish, copy: Array, array: Array) -> Finish:
    """Return a function that finishes a transfer and copies its result to another array."""

    def finish_and_copy() -> None:
        finish()
        array[...] = backend.asarray_like(copy, array)

    return finish_and_copy
