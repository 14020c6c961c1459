"""`Comm`: the collectives that users call, checked so that a wrong call is an error, not a hang.

Ranks that come to different calls would wait for each other for ever. So each call begins with
an all-reduce of a 16-byte digest of itself (some 10 us over MPI): every time for NumPy arrays,
the first time with each shape for CuPy arrays, whose calls must not make the host wait.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from typing import Protocol

import numpy as np

from tensorgrad import backend, dtypes
from tensorgrad.backend import Array
from tensorgrad.errors import ArgumentError, CommError, DtypeError
from tensorgrad.parallel.agreement import Json, by_rank, differences, digest, to_json

_log = logging.getLogger(__name__)
_OPS = ("sum", "mean", "max")
_END = "the end of the program"


class Transport(Protocol):
    """Moves contiguous arrays that are not empty, once all ranks agree on the call."""

    def all_reduce(self, array: Array, op: str) -> None:
        """Reduce in place. `op` is "sum", "mean" or "max"; bool comes as uint8."""

    def broadcast(self, data: Array, root: int) -> None:
        """Send the bytes of `root` to all."""

    def all_gather(self, data: Array, out: Array) -> None:
        """Put the bytes of all ranks into `out`, one after the other."""


class GpuTransport(Transport, Protocol):
    """The transport of GPU arrays."""

    def close(self) -> None:
        """Finish all transfers, at the end of the program."""


class Network(Transport, Protocol):
    """The transport of host arrays, which also starts the ranks and connects their GPUs."""

    rank: int
    size: int
    local_rank: int
    local_size: int

    def same(self, number: int) -> bool:
        """Return, on all ranks alike, whether all ranks pass the same number of 62 bits."""

    def exchange(self, text: str) -> list[str]:
        """Return the texts of all ranks."""

    def connect_gpus(self, device: int) -> GpuTransport:
        """Return what carries the arrays of GPU `device`; every rank calls it."""

    def abort(self, status: int) -> None:
        """End all ranks at once."""


class Comm:
    """A group of ranks and its collectives. All ranks call the same ones in the same order.

    Args:
        network: what carries host arrays; None for a single process, which needs no MPI.
    Attributes:
        rank, size: this rank, 0 to size - 1, and the number of ranks.
        local_rank, local_size: the same among the ranks of this host.
    """

    def __init__(self, network: Network | None = None) -> None:
        """Take over the network; every rank does so."""
        self.rank, self.size, self.local_rank, self.local_size = 0, 1, 0, 1
        self._network = network
        self._gpus: GpuTransport | None = None
        self._agreed: set[str] = set()
        if network is not None:
            self.rank, self.size = network.rank, network.size
            self.local_rank, self.local_size = network.local_rank, network.local_size

    def select_device(self, device: str = "auto") -> str:
        """Return the device of this rank, and make it CuPy's current one if it is a GPU.

        Ranks on the CPU get equal shares of their host's cores.

        Args:
            device: "cpu"; "cuda": the GPU whose number is the local rank, counted round where
                there are fewer GPUs; "cuda:N"; "auto": "cuda" where there is a GPU, else "cpu".
        Returns:
            "cpu" or "cuda:N".
        Raises:
            DeviceError: there is no such device.
        """
        if device == "auto":
            device = "cuda" if backend.gpu_count() else "cpu"
        if device == "cuda" and backend.gpu_count():
            device = f"cuda:{self.local_rank % backend.gpu_count()}"
        index = backend.gpu_index(device)
        if index is None:
            self._share_cores()
        else:
            backend.cupy.cuda.Device(index).use()
        return device

    def all_reduce(self, array: Array, op: str = "sum") -> None:
        """Replace the array on every rank by the sum, mean or maximum over the ranks.

        Equal inputs give equal bits, the same on all ranks. 16-bit floats on the host are added
        in float32 and rounded once; on GPUs NCCL adds them in their own type. NaN spreads through
        sum and mean; through max it may or may not.

        Args:
            array: any shape and layout, the same shape and dtype on all ranks; written in place.
            op: "sum", "mean" (floats only) or "max" (for bool: any).
        Raises:
            ArgumentError, DtypeError: not an array, read-only, or op and dtype do not fit.
            CommError: the ranks disagree, or the network fails.
        """
        array = _checked("all_reduce", array, written=True)
        if op not in _OPS:
            raise ArgumentError(f"all_reduce: op is {op!r}, expected one of {', '.join(_OPS)}")
        if op == "mean" and not dtypes.is_float(array.dtype):
            raise DtypeError(f"all_reduce: array is {array.dtype}, expected floats for a mean")
        if op == "sum" and array.dtype == dtypes.bool_:
            raise DtypeError("all_reduce: array is bool, expected numbers, or op 'max' for any")
        transport = self._enter(f"all_reduce({op})", array)
        if transport is None or array.size == 0:
            return
        whole = backend.contiguous(array)
        transport.all_reduce(whole.view("uint8") if whole.dtype == dtypes.bool_ else whole, op)
        if whole is not array:
            array[...] = whole

    def broadcast(self, array: Array, root: int = 0) -> None:
        """Replace the array on every rank by that of `root`.

        Args:
            array: any shape and layout, the same shape and dtype on all ranks; written in place.
            root: the rank that sends.
        Raises:
            ArgumentError, DtypeError: not an array, read-only, or there is no such rank.
            CommError: the ranks disagree, or the network fails.
        """
        array = _checked("broadcast", array, written=self.rank != root)
        self._check_root("broadcast", root)
        transport = self._enter(f"broadcast(root={root})", array)
        if transport is None or array.size == 0:
            return
        whole = backend.contiguous(array)
        transport.broadcast(_as_bytes(whole), root)
        if whole is not array and self.rank != root:
            array[...] = whole

    def all_gather(self, array: Array) -> Array:
        """Return the arrays of all ranks, stacked along a new first axis in the order of ranks.

        Args:
            array: any shape and layout, the same shape and dtype on all ranks.
        Returns:
            (size, *array.shape), on the device of `array`, the same on every rank.
        Raises:
            ArgumentError, DtypeError: not an array of a known dtype.
            CommError: the ranks disagree, or the network fails.
        """
        array = _checked("all_gather", array, written=False)
        transport = self._enter("all_gather", array)
        out = backend.empty((self.size, *array.shape), array.dtype, like=array)
        if transport is None:
            out[0] = array
        elif array.size:
            transport.all_gather(_as_bytes(backend.contiguous(array)), _as_bytes(out))
        return out

    def barrier(self) -> None:
        """Wait until every rank has come here. It orders hosts, not what their GPUs still do."""
        self._enter("barrier")

    def all_gather_objects(self, value: Json) -> list[Json]:
        """Return what each rank passed, in the order of ranks, on every rank.

        Args:
            value: anything that JSON can hold; tuples come back as lists.
        Raises:
            ArgumentError: JSON cannot hold the value.
        """
        text = to_json("all_gather_objects", value)
        self._enter("all_gather_objects")
        return [json.loads(each) for each in self._exchange(text)]

    def gather_objects(self, value: Json, root: int = 0) -> list[Json] | None:
        """Return what each rank passed, in the order of ranks, on `root`; None on the others."""
        text = to_json("gather_objects", value)
        self._check_root("gather_objects", root)
        self._enter(f"gather_objects(root={root})")
        texts = self._exchange(text)
        return [json.loads(each) for each in texts] if self.rank == root else None

    def broadcast_object(self, value: Json, root: int = 0) -> Json:
        """Return what `root` passed; what the other ranks passed is ignored."""
        self._check_root("broadcast_object", root)
        text = to_json("broadcast_object", value) if self.rank == root else ""
        self._enter(f"broadcast_object(root={root})")
        return json.loads(self._exchange(text)[root])

    def agree(self, what: str, facts: Mapping[str, Json]) -> None:
        """Check that all ranks pass the same facts, as the options of a run by name.

        Args:
            what: what the facts describe; the error begins with it.
            facts: anything that JSON can hold, by name.
        Raises:
            CommError: they differ; it says which fact is what on which ranks.
        """
        text = to_json(what, facts)
        self._enter(f"agree on {what}")
        if self._same(text):
            return
        facts_of_ranks = [json.loads(each) for each in self._exchange(text)]
        raise CommError(f"{what}: {differences(facts_of_ranks)}; expected the same on all ranks")

    def abort(self, status: int = 1) -> None:
        """End all ranks at once, this one included, with an exit status that is not 0."""
        if self._network is None:
            raise SystemExit(status)
        self._network.abort(status)

    def leave(self) -> None:
        """Wait for the end of all ranks; `world` calls it when the program ends.

        While this rank waits here, any other call of another rank is an error that names it.
        """
        try:
            self._enter(_END)
        except CommError:
            return  # the ranks that are not at their end raise it too: they show it and abort
        if self._gpus is not None:
            self._gpus.close()
            self._enter("closed")  # a process that is gone cannot help the others to finish

    def _enter(self, call: str, array: Array | None = None) -> Transport | None:
        """Check that all ranks have come to this call, and return what carries the array."""
        if self._network is None:
            return None
        if array is None:
            self._check_call(call)
            return None
        if backend.is_numpy(array):
            self._check_call(f"{call} of {array.dtype} {array.shape} on the CPU")
            return self._network
        call = f"{call} of {array.dtype} {array.shape} on a GPU"
        if call not in self._agreed:
            self._check_call(call)
            self._agreed.add(call)
            if self._gpus is None:
                self._gpus = self._network.connect_gpus(int(array.device.id))
        return self._gpus

    def _check_call(self, call: str) -> None:
        if not self._same(call):
            raise CommError(
                f"{call.partition(' ')[0]}: the ranks have come to different calls: "
                f"{by_rank(self._exchange(call))}; expected one"
            )

    def _same(self, text: str) -> bool:
        """Return, on all ranks alike, whether all ranks pass the same text."""
        return self._network is None or self._network.same(digest(text))

    def _exchange(self, text: str) -> list[str]:
        return [text] if self._network is None else self._network.exchange(text)

    def _share_cores(self) -> None:
        """Give each CPU rank its share of the host's cores, unless OMP_NUM_THREADS was set.

        Ranks with a thread for every core wait for each other's threads most of the time.
        """
        share = max(1, (os.cpu_count() or 1) // self.local_size)
        if "OMP_NUM_THREADS" in os.environ or backend.threads() <= share:
            return
        if not backend.limit_threads(share) and self.rank == 0:
            _log.warning(
                "%d ranks share the cores and this BLAS does not say how to limit its threads; "
                "start them with OMP_NUM_THREADS=%d",
                *(self.local_size, share),
            )

    def _check_root(self, op: str, root: int) -> None:
        if not 0 <= root < self.size:
            raise ArgumentError(f"{op}: root is {root}, expected 0 to {self.size - 1}")


def _checked(op: str, array: Array, written: bool) -> Array:
    """Return the array, a subclass of numpy.ndarray such as a memory map as the plain array."""
    if not backend.is_array(array):
        raise ArgumentError(
            f"{op}: array is a {type(array).__name__}, expected a NumPy or CuPy array "
            "(of a Tensor, its .data)"
        )
    dtypes.as_dtype(array.dtype)  # raises for what no transport can carry
    if not isinstance(array, np.ndarray):
        return array
    if written and not array.flags.writeable:
        raise ArgumentError(f"{op}: array is read-only, expected one that can be written")
    return np.asarray(array)


def _as_bytes(array: Array) -> Array:
    """View a contiguous array as bytes: what only moves data need not know the dtype."""
    return array.reshape(-1).view("uint8")
