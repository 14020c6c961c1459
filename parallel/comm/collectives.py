"""Collectives: all-reduce, reduce-scatter, all-gather, broadcast, all-to-all, send and receive.

Ranks that call different collectives would deadlock. So `Comm` begins each call with an all-reduce
of a 16-byte digest of the call (some 10 us over MPI), and a mismatch is an error that names both
calls. It does so every time for NumPy arrays. For CuPy arrays it does so the first time with each
shape, because later calls must not make the host wait.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import overload

import numpy as np

from tensorgrad.core import backend, instrument
from tensorgrad.core.backend import Array
from tensorgrad.core.errors import ArgumentError, CommError, ShapeError
from tensorgrad.parallel.comm import agreement, arguments
from tensorgrad.parallel.comm.agreement import Json
from tensorgrad.parallel.comm.handle import Handle
from tensorgrad.parallel.comm.launch import share_cores, write_failure
from tensorgrad.parallel.comm.peer_memory import SharedArray, share
from tensorgrad.parallel.comm.transport import CommCall, Finish, Network, Transport

_END = "the end of the program"


class Comm:
    """A group of ranks and its collectives. All ranks must call the same ones in the same order.

    Args:
        network: the transport of host arrays; None for a single process, which needs no MPI.

    Attributes:
        rank, size: this rank, 0 to size - 1, and the number of ranks.
        ranks: the numbers of this group's ranks in `world()`, which errors name.
        local_rank, local_size: rank and size among all ranks of this host.

    Example:
        >>> comm = tg.parallel.Comm()  # a single process; world() has all that mpirun started
        >>> x = np.array([1.0, 2.0])
        >>> handle = comm.all_reduce(x, "mean")
        >>> comm.rank, comm.size, x
        (0, 1, array([1., 2.]))
    """

    def __init__(self, network: Network | None = None) -> None:
        """Use the network, on every rank."""
        self.rank, self.size, self.local_rank, self.local_size = 0, 1, 0, 1
        self.ranks: tuple[int, ...] = (0,)
        self._network = network
        self._gpus: Transport | None = None
        self._agreed: set[str] = set()
        self._open: set[Handle] = set()
        self._parts: list[Comm] = []
        self._shared: weakref.WeakSet[SharedArray] = weakref.WeakSet()
        self._among = ""
        if network is not None:
            self.rank, self.size, self.ranks = network.rank, network.size, network.ranks
            self.local_rank, self.local_size = network.local_rank, network.local_size

    def select_device(self, device: str = "auto") -> str:
        """Return the device of this rank, and make it CuPy's current one if it is a GPU.

        Ranks on the CPU divide the cores of their host equally.

        Args:
            device: "cpu"; "cuda": the GPU with the number of the local rank, modulo the number of
                GPUs; "cuda:N"; "auto": "cuda" where there is a GPU, else "cpu".
        Returns:
            "cpu" or "cuda:N".
        Raises:
            DeviceError: the device does not exist.
        """
        if device in ("auto", "cuda") and (count := backend.gpu_count()):
            device = f"cuda:{self.local_rank % count}"
        device = backend.use_device(device)
        if device == "cpu":
            share_cores(self.local_size, self.rank == 0)
        return device

    def split(self, ranks: Sequence[int]) -> Comm:
        """Return the communicator of a group of these ranks, with a network of its own.

        All ranks call it together, each with its own group, so one call divides all ranks into
        groups: `comm.split(mesh.line("dp"))`.

        Args:
            ranks: the ranks of this rank's group, in their order in the new communicator.
        Raises:
            CommError: ranks of one group pass different groups.
            ArgumentError: this rank is not in its group, or a rank does not exist.
        """
        group = [int(rank) for rank in ranks]
        if sorted(set(group)) != sorted(group) or not set(group) <= set(range(self.size)):
            raise ArgumentError(
                f"split: ranks is {group}, expected different ranks from 0 to {self.size - 1}"
            )
        if self.rank not in group:
            raise ArgumentError(f"split: ranks is {group}, expected rank {self.rank} among them")
        groups = self._gather("split", group)
        if any(groups[rank] != group for group in groups for rank in group):
            found = agreement.by_rank(list(map(str, groups)), self.ranks)
            raise CommError(f"split: ranks is {found}; expected the same on all ranks of a group")
        part = Comm(None if self._network is None else self._network.split(group))
        part._among = f" among {agreement.name_ranks(part.ranks)}"
        self._parts.append(part)
        return part

    def all_reduce(self, array: Array, op: str = "sum", wait: bool = True) -> Handle:
        """Replace the array on every rank by the sum, mean or maximum over the ranks.

        Equal inputs give equal bits, the same on all ranks. On the host 16-bit floats are added in
        float32 and rounded once; on GPUs NCCL adds them in their own dtype. NaN propagates through
        sum and mean; through max it may or may not.

        Args:
            array: any shape and layout, the same shape and dtype on all ranks; written in place.
            op: "sum", "mean" (floats only) or "max" (for bool: any).
            wait: whether to finish the call, or to return a pending handle.
        Raises:
            ArgumentError, DtypeError: not an array, read-only, or op does not apply to the dtype.
            CommError: the ranks disagree, or the network fails.
        """
        array = arguments.checked("all_reduce", "array", array, written=True)
        arguments.check_reduction("all_reduce", array, op)
        return self._begin("all_reduce", array, array, wait, op=op)

    def share(self, array: Array) -> SharedArray | None:
        """Let the GPUs of all ranks reach an array in each other's memory.

        As long as the result lives, copy engines move what an `all_reduce` with "sum" or "mean" and
        `wait=False` reduces of it, in 1 MB or more. They leave the SMs to the kernels
        that run beside. The sum is taken in the order of the ranks, 16 bits in float32. All ranks
        share an array of the same size, and reduce the same parts of it.

        Args:
            array: any shape, in C order.
        Returns:
            What keeps the array shared. None for a CPU, and where a GPU cannot reach the memory of
            another, as on two hosts: then NCCL serves the array as any other.
        Raises:
            ArgumentError: not an array, or not in C order.
            CommError: the ranks disagree.
        """
        array = arguments.checked("share", "array", array, written=True)
        if not array.flags.c_contiguous:
            raise ArgumentError("share: array is a view with gaps, expected an array in C order")
        transport = self._enter("share", array)
        if transport is None or transport is self._network or array.size == 0:
            return None
        shared = share(array, self.rank, partial(self._gather, "share"))
        if shared is not None:
            self._shared.add(shared)
        return shared

    def reduce_scatter(
        self, array: Array, out: Array, op: str = "sum", wait: bool = True
    ) -> Handle:
        """Write the sum, mean or maximum over the ranks of piece r to `out` of rank r.

        The first axis of `array` is divided into one equal piece for each rank. On the host the
        result has the same bits as the pieces of an `all_reduce`.

        Args:
            array: (size * n, ...), any layout, the same shape and dtype on all ranks.
            out: (n, ...), dtype and device of `array`; written. It may be this rank's own piece
                of `array`, which otherwise stays unchanged.
            op: "sum", "mean" (floats only) or "max" (for bool: any).
            wait: whether to finish the call, or to return a pending handle.
        Raises:
            ArgumentError, ShapeError, DtypeError, DeviceError: array and out do not match.
            CommError: the ranks disagree, or the network fails.
        """
        array = arguments.checked("reduce_scatter", "array", array, written=False)
        out = arguments.checked("reduce_scatter", "out", out, written=True)
        arguments.check_reduction("reduce_scatter", array, op)
        arguments.check_piece("reduce_scatter", ("out", "array"), out, array, self.rank, self.size)
        return self._begin("reduce_scatter", array, out, wait, op=op)

    @overload
    def all_gather(self, array: Array) -> Array: ...

    @overload
    def all_gather(self, array: Array, out: Array, wait: bool = True) -> Handle: ...

    def all_gather(
        self, array: Array, out: Array | None = None, wait: bool = True
    ) -> Array | Handle:
        """Concatenate the arrays of all ranks, in the order of ranks, on every rank.

        Args:
            array: any shape and layout, the same shape and dtype on all ranks.
            out: (size * n, ...) for an array (n, ...), its dtype and device; written. `array` may
                be this rank's own piece of it. None: a new array.
            wait: whether to finish the call, or to return a pending handle; only with `out`.
        Returns:
            Without `out` the arrays stacked along a new first axis, (size, *array.shape).
        Raises:
            ArgumentError, ShapeError, DtypeError, DeviceError: array and out do not match.
            CommError: the ranks disagree, or the network fails.
        """
        array = arguments.checked("all_gather", "array", array, written=False)
        if out is None:
            if not wait:
                raise ArgumentError("all_gather: out is None, expected an array with wait=False")
            target = backend.empty((self.size, *array.shape), array.dtype, like=array)
        else:
            target = arguments.checked("all_gather", "out", out, written=True)
            arguments.check_piece(
                "all_gather", ("array", "out"), array, target, self.rank, self.size
            )
        handle = self._begin("all_gather", array, target, wait)
        return target if out is None else handle

    def broadcast(self, array: Array, root: int = 0, wait: bool = True) -> Handle:
        """Replace the array on every rank by that of `root`.

        Args:
            array: any shape and layout, the same shape and dtype on all ranks; written in place.
            root: the rank that sends.
            wait: whether to finish the call, or to return a pending handle.
        Raises:
            ArgumentError, DtypeError: not an array, read-only, or the root does not exist.
            CommError: the ranks disagree, or the network fails.
        """
        array = arguments.checked("broadcast", "array", array, written=self.rank != root)
        self._check_rank("broadcast", "root", root)
        if self.rank == root:
            array = backend.contiguous(array)  # it may be read-only: nothing is copied back
        return self._begin("broadcast", array, array, wait, root=root)

    def all_to_all(self, array: Array, out: Array, wait: bool = True) -> Handle:
        """Write piece r of `array` of rank s to piece s of `out` of rank r.

        The first axis of both is divided into one equal piece for each rank.

        Args:
            array: (size * n, ...), any layout, the same shape and dtype on all ranks.
            out: shape, dtype and device of `array`; written. The two must not overlap.
            wait: whether to finish the call, or to return a pending handle.
        Raises:
            ArgumentError, ShapeError, DtypeError, DeviceError: array and out do not match.
            CommError: the ranks disagree, or the network fails.
        """
        array = arguments.checked("all_to_all", "array", array, written=False)
        out = arguments.checked("all_to_all", "out", out, written=True)
        if array.ndim == 0 or array.shape[0] % self.size:
            raise ShapeError(
                f"all_to_all: array has shape {array.shape}, expected a first axis that the "
                f"{self.size} ranks divide"
            )
        arguments.check_like("all_to_all", ("array", "out"), array, out, array.shape)
        if arguments.overlap(array, out):
            raise ArgumentError("all_to_all: out overlaps array, expected memory of its own")
        return self._begin("all_to_all", array, out, wait)

    def send(self, array: Array, to: int, wait: bool = True) -> Handle:
        """Send an array to one rank, which calls `recv`. Arrays arrive in the order sent.

        Two ranks that both send to each other first, with `wait`, may deadlock. The first GPU array
        between two ranks makes both hosts wait until the other has called `send` or `recv` too.

        Args:
            array: any shape and layout.
            to: the rank that receives.
            wait: whether to finish the call, or to return a pending handle.
        Raises:
            ArgumentError, DtypeError: not an array, or `to` is not another rank.
            CommError: the network fails.
        """
        array = arguments.checked("send", "array", array, written=False)
        self._check_other("send", "to", to)
        call, transport, announced = self._agree_on_message("send", to, array)
        data = arguments.as_bytes(self._staged(array, transport))
        sent = transport.begin(CommCall("send", data, data, root=to)) if array.size else None
        return self._handle(call, [announced, sent], wait)

    def recv(self, array: Array, source: int, wait: bool = True) -> Handle:
        """Replace an array by what one rank sends with `send`.

        Args:
            array: any layout, shape and dtype of what is sent; written in place.
            source: the rank that sends.
            wait: whether to finish the call, or to return a pending handle.
        Raises:
            ArgumentError, DtypeError: not an array, read-only, or `source` is not another rank.
            CommError: the sent array has another shape, dtype or kind of device, or the network
                fails. NumPy arrays are always checked, CuPy arrays the first time with each shape
                and dtype. After this error the two ranks cannot communicate any more.
        """
        array = arguments.checked("recv", "array", array, written=True)
        self._check_other("recv", "source", source)
        call, transport, announced = self._agree_on_message("recv", source, array)
        whole = self._staged(array, transport, reads=False)
        data = arguments.as_bytes(whole)
        received = (
            transport.begin(CommCall("recv", data, data, root=source)) if array.size else None
        )
        return self._handle(call, [announced, received, _copy_back(whole, array)], wait)

    def barrier(self) -> None:
        """Wait until every rank has called it. It orders hosts, not the work of their GPUs."""
        self._enter("barrier")

    def all_gather_objects(self, value: Json) -> list[Json]:
        """Return the values of all ranks, in the order of ranks, on every rank.

        Args:
            value: anything that JSON can hold; tuples come back as lists.
        Raises:
            ArgumentError: JSON cannot hold the value.
        """
        return self._gather("all_gather_objects", value)

    def gather_objects(self, value: Json, root: int = 0) -> list[Json] | None:
        """Return the values of all ranks, in the order of ranks, on `root`; None on the others."""
        self._check_rank("gather_objects", "root", root)
        values = self._gather(f"gather_objects(root={root})", value)
        return values if self.rank == root else None

    def broadcast_object(self, value: Json, root: int = 0) -> Json:
        """Return the value of `root`; the values of the other ranks are ignored."""
        self._check_rank("broadcast_object", "root", root)
        call = f"broadcast_object(root={root})"
        return self._gather(call, value if self.rank == root else None)[root]

    def _gather(self, call: str, value: Json) -> list[Json]:
        text = agreement.to_json(call.partition("(")[0], value)
        self._enter(call)
        return [json.loads(reply) for reply in self._exchange(text)]

    def agree(self, what: str, facts: Mapping[str, Json]) -> None:
        """Check that all ranks pass the same facts, such as the options of a run.

        Args:
            what: what the facts describe; the error begins with it.
            facts: anything that JSON can hold, by name.
        Raises:
            CommError: they differ; the message names the fact and the ranks.
        """
        text = agreement.to_json(what, facts)
        self._enter(f"agree on {what}")
        if self._same(text):
            return
        facts_of_ranks = [json.loads(reply) for reply in self._exchange(text)]
        found = agreement.differences(facts_of_ranks, self.ranks)
        raise CommError(f"{what}: {found}; expected the same on all ranks")

    def abort(self, status: int = 1, why: str = "") -> None:
        """End all ranks at once, this one included, with an exit status other than 0.

        Args:
            status: of the program, above 0.
            why: written to the standard error first, as `rank 1 of 4: <why>`. Where several ranks
                fail, only the lowest of them writes.
        """
        if self._network is None:
            if why:
                write_failure(self.rank, self.size, why)
            raise SystemExit(status)
        self._network.abort(status, why)

    def leave(self) -> None:
        """Wait until all ranks end; `world` calls it when the program exits.

        While this rank waits here, any other call of another rank is an error that names it.
        """
        try:
            self._finish_all()
            self._record(_END)
            while not self._same(_END):  # another rank made another call, which is its error
                self._exchange(_END)
        except CommError:
            return  # a transfer failed: the ranks that wait for it raise this too, and abort
        self._close()
        self._enter("closed")  # transfers of other ranks need this process until they are done
        if self._network is not None:
            self._network.leave()

    def _finish_all(self) -> None:
        for handle in list(self._open):
            handle.wait()
        for part in self._parts:
            part._finish_all()

    def _close(self) -> None:
        if self._gpus is not None:
            self._gpus.close()
        for part in self._parts:
            part._close()

    def _begin(
        self, name: str, array: Array, out: Array, wait: bool, op: str = "", root: int | None = None
    ) -> Handle:
        """Begin a collective of `array` that writes `out`; a single rank copies `array` there."""
        call = name + (f"({op})" if op else "" if root is None else f"({root=})")
        shared = None
        if name == "all_reduce" and op in ("sum", "mean") and not wait:
            shared, place = self._shared_part(array)
            call += f" at byte {place} of a shared array" if shared is not None else ""
        view = arguments.as_numbers if op else arguments.as_bytes
        with instrument.phase("communication"):
            transport = self._enter(call, array)
            if transport is None:
                if out is not array:
                    out[...] = array
                return Handle()
            if array.size == 0:
                return Handle()
            done = (
                None
                if instrument.observer is None
                else instrument.observer.transfer(call, int(out.nbytes))
            )
            data = self._staged(array, transport)
            whole = data if out is array else self._staged(out, transport, reads=False)
            launch = None if shared is None else partial(shared.all_reduce, data, op == "mean")
            finish = transport.begin(CommCall(name, view(data), view(whole), op, root or 0, launch))
        return self._handle(call, [finish, _copy_back(whole, out), done], wait)

    def _shared_part(self, array: Array) -> tuple[SharedArray | None, int]:
        """Return the shared array that an array is a part of, and the bytes before the part."""
        for shared in self._shared if not backend.is_numpy(array) else ():
            place = shared.place(array)
            if place is not None:
                return shared, place
        return None, 0

    def _staged(self, array: Array, transport: Transport, reads: bool = True) -> Array:
        """Return the array in C order and where the transport can move it: itself or a copy.

        GPU arrays go through the host where ranks share a GPU, which NCCL forbids.
        """
        if transport is not self._network or backend.is_numpy(array):
            return backend.contiguous(array)
        return backend.to_numpy(array) if reads else np.empty(array.shape, array.dtype)

    def _handle(self, call: str, finishes: Sequence[Finish | None], wait: bool) -> Handle:
        def finish() -> None:
            if not wait:
                self._record(f"wait for {call}")
            with instrument.phase("communication"):
                for finish in finishes:
                    if finish is not None:
                        finish()

        handle = Handle(finish, self._open)
        if wait:
            handle.wait()
        return handle

    def _enter(self, call: str, array: Array | None = None) -> Transport | None:
        """Check that all ranks make this call, and return the transport of the array."""
        if self.size == 1:
            return None
        if array is None:
            self._record(call)
            self._check_call(call)
            return None
        on_host = backend.is_numpy(array)
        call = f"{call} of {_described(array)}"
        self._record(call)
        if on_host:
            self._check_call(call)
            return self._network
        gpus = self._connected(array)
        if call not in self._agreed:
            self._check_call(call)
            self._agreed.add(call)
        return gpus

    def _agree_on_message(
        self, op: str, other: int, array: Array
    ) -> tuple[str, Transport, Finish | None]:
        """Announce or expect a message; return its name, its transport, and the check to finish."""
        assert self._network is not None  # there are several ranks
        text = _described(array)
        call = f"{op} {'to' if op == 'send' else 'from'} rank {self.ranks[other]} of {text}"
        self._record(call)
        tell = self._network.announce if op == "send" else self._network.expect
        if backend.is_numpy(array):
            return call, self._network, tell(text, other)
        gpus = self._connected(array)
        if call in self._agreed:
            return call, gpus, None
        self._agreed.add(call)
        return call, gpus, tell(text, other)

    def _record(self, call: str) -> None:
        if self._network is not None:
            self._network.begin_call(call + self._among)

    def _connected(self, array: Array) -> Transport:
        """Return the transport of GPU arrays; all ranks connect their GPUs before the first."""
        assert self._network is not None
        if self._gpus is None:
            self._check_call("its first call with a GPU array")
            self._gpus = self._network.connect_gpus(int(array.device.id))
        return self._gpus

    def _check_call(self, call: str) -> None:
        if not self._same(call):
            raise CommError(
                f"{call.partition(' ')[0]}: the ranks made different calls: "
                f"{agreement.by_rank(self._exchange(call), self.ranks)}; expected one"
            )

    def _same(self, text: str) -> bool:
        """Return on all ranks whether all pass the same text."""
        return self._network is None or self._network.same(agreement.digest(text))

    def _exchange(self, text: str) -> list[str]:
        return [text] if self._network is None else self._network.exchange(text)

    def _check_rank(self, op: str, name: str, rank: int) -> None:
        if not 0 <= rank < self.size:
            raise ArgumentError(f"{op}: {name} is {rank}, expected 0 to {self.size - 1}")

    def _check_other(self, op: str, name: str, rank: int) -> None:
        self._check_rank(op, name, rank)
        if rank == self.rank:
            raise ArgumentError(f"{op}: {name} is {rank}, this rank, expected another")


def _copy_back(whole: Array, array: Array) -> Finish | None:
    """Return a function that copies a staged copy back to its array, or None without a copy."""
    if whole is array:
        return None

    def copy() -> None:
        array[...] = backend.asarray_like(whole, array)

    return copy


def _described(array: Array) -> str:
    where = "the CPU" if backend.is_numpy(array) else "a GPU"
    return f"{array.dtype} {array.shape} on {where}"
