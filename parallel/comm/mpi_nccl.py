"""MPI and NCCL communicators: the only module that imports mpi4py and NCCL.

MPI starts the ranks, compares what they pass, and moves host arrays. It never gets GPU pointers,
which it would read as host memory. NCCL moves GPU arrays on a stream of its own. Events order this
stream after the work already submitted to the current stream and before the work that follows, so
no call makes the host wait for the GPU.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from typing import Any

import numpy as np

from tensorgrad import graph
from tensorgrad.core import backend, dtypes
from tensorgrad.core.backend import Array
from tensorgrad.core.errors import ArgumentError, CommError, DeviceError
from tensorgrad.io.command import open_standard_streams
from tensorgrad.parallel.comm import launch, watchdog_client
from tensorgrad.parallel.comm.agreement import by_rank
from tensorgrad.parallel.comm.collectives import Comm
from tensorgrad.parallel.comm.messages import HostTransport, ProgressEngine, parts_of
from tensorgrad.parallel.comm.transport import CommCall, Finish, Transport
from tensorgrad.parallel.comm.watchdog import Message
from tensorgrad.startup.distribution import install

_log = logging.getLogger(__name__)
_connecting = threading.Lock()

# Priority of NCCL's stream: its kernels run before waiting kernels of other streams, since a late
# transfer delays other ranks.
_FIRST = -1

# Hardware queues of CUDA. Streams that share a queue may wait for each other, and a mesh has more
# streams than the default of 8.
_QUEUES = "32"

# Seconds for which a rank that fails before MPI has started waits for all to start.
_TO_MEET = 30.0

# Seconds between ranks that fail where they cannot agree on which of them says so.
_STAGGER = 0.8

# Seconds that MPI has to end all ranks.
_TO_ABORT = 5.0

# Reductions in a wider type, rounded once: NCCL has no 16-bit integers.
_WIDE = {dtypes.int16: dtypes.int32, dtypes.uint16: dtypes.uint32}

# CuPy counts the bytes of a broadcast in a 32-bit int.
_BROADCAST_BYTES = 1 << 30

# ncclDataType_t in the order of nccl.h, and ncclRedOp_t.
_NCCL_DTYPES = {
    dtype: number
    for number, dtype in enumerate(
        (
            *(dtypes.int8, dtypes.uint8, dtypes.int32, dtypes.uint32, dtypes.int64, dtypes.uint64),
            *(dtypes.float16, dtypes.float32, dtypes.float64, dtypes.bfloat16),
        )
    )
}
_NCCL_BYTE = _NCCL_DTYPES[dtypes.uint8]
_NO_MPI = (ImportError, RuntimeError)  # mpi4py is missing; it finds no MPI library
_NCCL_OPS = {"sum": 0, "max": 2, "mean": 4}


def world(timeout: float | None = None) -> Comm:
    """Return the communicator of all ranks that mpirun started; of one rank without mpirun.

    The first call starts MPI and the watchdog, and checks that all ranks run the same code. From
    then on an uncaught exception or the loss of one rank ends all ranks.

    Args:
        timeout: seconds. When a rank has waited for longer in one call, all ranks end with a report
            of what each does. The default is 600; None keeps the value. The first call also waits
            for at most this time until all ranks have started.

    Returns:
        The communicator, the same object in each call.

    Raises:
        ArgumentError: timeout is not above 0.
        CommError: mpi4py is missing or belongs to another MPI than mpirun; or the ranks run
            different versions of Python, NumPy or tensorgrad.

    Example:
        >>> comm = tg.parallel.world()
        >>> comm.rank, comm.size  # a program without mpirun
        (0, 1)
    """
    if timeout is not None and not timeout > 0:
        raise ArgumentError(f"world: timeout is {timeout}, expected seconds above 0")
    _wait_for_all_ranks(watchdog_client.TIMEOUT if timeout is None else timeout)
    comm, watching = _start()
    if timeout is not None and watching is not None:
        watching.timeout = timeout
    return comm


def _wait_for_all_ranks(timeout: float) -> None:
    """Start MPI, which waits for all ranks; end this one if another does not start in time."""
    if launch.launched_ranks() > 1 and "mpi4py.MPI" not in sys.modules:
        with launch.time_limit(timeout), suppress(*_NO_MPI):  # _start reports a failed import
            import mpi4py.MPI  # noqa: F401


def _abort_before_start(status: int, why: str) -> None:
    """End all ranks, some of which may wait for this one to start MPI: start it, then abort."""
    rank, size = launch.launched_rank(), launch.launched_ranks()
    if rank == 0:  # no lower rank can fail
        launch.write_failure(rank, size, why)
        why = ""
    started: list[Comm] = []

    def connect() -> None:
        with suppress(Exception), _connecting:  # the error to report is this rank's first
            started.append(_connect()[0])

    connecting = threading.Thread(target=connect, daemon=True)
    with suppress(RuntimeError):  # a process that cannot start threads must end too
        connecting.start()
        connecting.join(_TO_MEET)
    if started:
        started[0].abort(status, why)
    if why:  # not all ranks start MPI, or none can
        time.sleep(_STAGGER * min(rank, 4))
        launch.write_failure(rank, size, why)
    os._exit(status)


def _abort_mpi(status: int) -> None:
    """End all ranks; this one ends even if MPI cannot reach the others, or returns."""
    from mpi4py import MPI

    with launch.time_limit(_TO_ABORT, show=False):
        MPI.COMM_WORLD.Abort(status)
    os._exit(status)


@cache
def _start() -> tuple[Comm, watchdog_client.WatchdogClient | None]:
    """Start MPI, once; the watchdog is None for one rank, or where rank 0 cannot be reached."""
    if launch.launched_ranks() == 1:
        return Comm(), None
    with _connecting:
        comm, watching = _connect()
    comm.agree("start", launch.program_facts())  # no rank continues where one has failed
    return comm, watching


@cache
def _connect() -> tuple[Comm, watchdog_client.WatchdogClient | None]:
    """Start MPI and the watchdog, one thread at a time."""
    started = launch.launched_ranks()
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", _QUEUES)  # read when CUDA starts
    try:
        from mpi4py import MPI
    except _NO_MPI as error:
        raise CommError(
            f"world: {started} ranks were started, but mpi4py cannot be imported ({error}); "
            f"run {install('mpi')} on every host"
        ) from error
    if MPI.COMM_WORLD.Get_size() != started:
        library = MPI.Get_library_version().splitlines()[0].rstrip("\0")
        raise CommError(
            f"world: the launcher started {started} ranks, but the MPI of mpi4py ({library}) sees "
            f"{MPI.COMM_WORLD.Get_size()}; expected the mpirun that belongs to that MPI"
        )
    everyone = MPI.COMM_WORLD
    place = _place_on_host(everyone)
    network = _MpiNetwork(everyone, range(started), ProgressEngine(), place)
    comm = Comm(network)
    launch.end_all_ranks_on_error(comm.abort)
    network.watchdog = watchdog_client.start(network, network.last)
    atexit.register(comm.leave)
    return comm, network.watchdog


class _MpiNetwork(HostTransport):
    """Host arrays over MPI, comparison of calls, groups, and the connection of GPUs."""

    def __init__(
        self, group: Any, ranks: Sequence[int], progress: ProgressEngine, place: tuple[int, int]
    ) -> None:
        from mpi4py import MPI

        super().__init__(group.Dup(), ranks, MPI.Exception, progress)
        self._meeting, self._everyone = group, MPI.COMM_WORLD
        self._in_place, self._max = MPI.IN_PLACE, MPI.MAX
        self.last = progress.last
        self.watchdog: watchdog_client.WatchdogClient | None = None
        self._place = self.local_rank, self.local_size = place

    def begin_call(self, call: str) -> None:
        self.last.begin(call)

    def same(self, number: int) -> bool:
        extremes = np.array([number, -number])
        with self._errors("same"):
            request = self._meeting.Iallreduce(self._in_place, extremes, self._max)
            self._progress.wait_for(request.Test, meets=True)
        return bool(extremes[0] == -extremes[1])

    def exchange(self, text: str) -> list[str]:
        mine = np.frombuffer(text.encode(), "uint8")
        sizes = np.empty(self.size, "int64")
        with self._errors("exchange"):
            self._meeting.Allgather(np.array([mine.size]), sizes)
            joined = np.empty(int(sizes.sum()), "uint8")
            self._meeting.Allgatherv(mine, (joined, sizes))
        return [part.tobytes().decode() for part in np.split(joined, np.cumsum(sizes)[:-1])]

    def split(self, ranks: Sequence[int]) -> _MpiNetwork:
        with self._errors("split"):
            group = self._meeting.Split(min(ranks), ranks.index(self.rank))
        part = _MpiNetwork(group, [self.ranks[rank] for rank in ranks], self._progress, self._place)
        part.watchdog = self.watchdog
        return part

    def connect_gpus(self, device: int) -> Transport:
        """Connect the ranks' GPUs with NCCL, or through the host where ranks share a GPU."""
        mine = {"gpu": _gpu_identity(device), "nccl": nccl_version()}
        ranks = [json.loads(text) for text in self.exchange(json.dumps(mine))]
        versions = [rank["nccl"] for rank in ranks]
        if "missing" in versions or len(set(versions)) > 1:
            raise CommError(
                f"NCCL is {by_rank(versions, self.ranks)}; expected one version on all ranks"
            )
        gpus = len({rank["gpu"] for rank in ranks})
        if gpus < self.size:
            if self.rank == 0:
                _log.warning(
                    "%d ranks share %d GPUs: NCCL needs one GPU for each rank, so arrays go "
                    "through the host, which is slow",
                    self.size,
                    gpus,
                )
            return self
        unique_id = self.exchange(_nccl_unique_id().hex() if self.rank == 0 else "")[0]
        return _NcclTransport(self, bytes.fromhex(unique_id), device)

    def leave(self) -> None:
        if self.watchdog is not None:
            self.watchdog.leave()

    def abort(self, status: int, why: str) -> None:
        """End all ranks, also those of other groups."""
        if why:
            rank, size = self._everyone.Get_rank(), self._everyone.Get_size()
            if self.watchdog is not None:
                self.watchdog.wait_for_permission()
            else:
                time.sleep(_STAGGER * min(rank, 4))
            launch.write_failure(rank, size, why)
        if self.watchdog is not None:
            self.watchdog.leave(Message.ABORT)
        _abort_mpi(status)


class _NcclTransport:
    """GPU arrays over NCCL, one GPU for each rank.

    The collectives of a group share a communicator and its stream. Each ordered pair of ranks that
    exchange messages has its own, made for the first message. On a shared stream, a message that
    waits for its receiver would block those that the receiver waits for.
    """

    def __init__(self, mpi: _MpiNetwork, unique_id: bytes, device: int) -> None:
        self._mpi, self._device = mpi, device
        self._group = _NcclCommunicator(unique_id, mpi.rank, mpi.size, device, mpi.last)
        self._pairs: dict[tuple[int, int], _NcclCommunicator] = {}

    def begin(self, call: CommCall) -> Finish:
        if call.launch is not None:
            return self._group.begin(call, ())
        if call.op:
            return self._reduce(call)
        line, here = self._group, self._mpi.rank
        if call.name in ("send", "recv"):
            ends = (here, call.root) if call.name == "send" else (call.root, here)
            line = self._pair(*ends)
        return line.begin(call, self._rows(call))

    def _reduce(self, call: CommCall) -> Finish:
        wide = _WIDE.get(call.out.dtype)
        terms = call.data if wide is None else call.data.astype(wide)
        in_place = call.name == "all_reduce"
        total = terms if in_place else call.out if wide is None else call.out.astype(wide)
        name = "allReduce" if in_place else "reduceScatter"
        how = total.size, _NCCL_DTYPES[terms.dtype], _NCCL_OPS[call.op]
        row = name, terms.data.ptr, total.data.ptr, *how
        finish = self._group.begin(call._replace(data=terms, out=total), [row])

        def finish_and_narrow() -> None:
            finish()
            call.out[...] = total

        return finish if wide is None else finish_and_narrow

    def _rows(self, call: CommCall) -> Iterator[tuple[Any, ...]]:
        """Yield the calls of NCCL, each its name and arguments, for a transfer of bytes."""
        data, out, size = call.data, call.out, self._mpi.size
        if call.name == "all_gather":
            yield "allGather", data.data.ptr, out.data.ptr, data.size, _NCCL_BYTE
        elif call.name == "broadcast":
            for part in parts_of(out, _BROADCAST_BYTES):
                yield "broadcast", part.data.ptr, *_span(part), call.root
        elif call.name == "all_to_all":
            for rank, (piece, row) in enumerate(
                zip(data.reshape(size, -1), out.reshape(size, -1), strict=True)
            ):
                yield "send", *_span(piece), rank
                yield "recv", *_span(row), rank
        else:
            yield call.name, *_span(data), int(call.name == "send")

    def close(self) -> None:
        for stream in (self._group, *self._pairs.values()):
            stream.close()

    def _pair(self, source: int, to: int) -> _NcclCommunicator:
        """Return the communicator of messages from `source` (its rank 0) to `to` (its rank 1)."""
        if (source, to) not in self._pairs:
            self._connect(source, to)
        return self._pairs[source, to]

    def _connect(self, *ranks: int) -> None:
        """Create the communicators of both directions; both ranks of the pair call it.

        NCCL connects at the first message, which both hosts wait for. So this sends one message in
        each direction. Later no call makes the host wait, in whatever order messages follow.
        """
        low, high = sorted(ranks)
        told = np.empty((2, 128), "uint8")
        if self._mpi.rank == low:
            for row in told:
                row[...] = np.frombuffer(_nccl_unique_id(), "uint8")
        name, other = ("send", high) if self._mpi.rank == low else ("recv", low)
        self._mpi.begin(CommCall(name, told.reshape(-1), told.reshape(-1), root=other))()
        for unique_id, (source, to) in zip(told, ((low, high), (high, low)), strict=True):
            sends = self._mpi.rank == source
            pair = _NcclCommunicator(
                unique_id.tobytes(), 1 - sends, 2, self._device, self._mpi.last
            )
            self._pairs[source, to] = pair
            data = backend.cupy.zeros(1, "uint8")
            name, other = ("send", to) if sends else ("recv", source)
            self.begin(CommCall(name, data, data, root=other))()


class _NcclCommunicator:
    """An NCCL communicator and the stream of its calls."""

    def __init__(
        self, unique_id: bytes, rank: int, size: int, device: int, last: watchdog_client.LastCall
    ) -> None:
        from cupy.cuda import nccl

        cuda = backend.cupy.cuda
        self._library = nccl
        self._device, self._last = device, last
        with cuda.Device(device):
            self._nccl = nccl.NcclCommunicator(size, unique_id, rank)
            self._stream = cuda.Stream(non_blocking=True, priority=_FIRST)
            self._ready = cuda.Event(disable_timing=True)

    def begin(self, call: CommCall, rows: Iterable[tuple[Any, ...]]) -> Finish:
        """Submit calls of NCCL to its stream, after the work on the current stream.

        The returned function makes the then current stream wait for them. It holds the arrays,
        so the memory pool reuses their memory only for work that follows on that stream.

        Args:
            call: which device its arrays are on is checked.
            rows: the name and the arguments of each call of NCCL, without the stream.
        """
        for array in (call.data, call.out):
            if array.device.id != self._device:
                raise DeviceError(
                    f"{call.name}: array is on {backend.device_of(array)}, expected "
                    f"cuda:{self._device} as in the first call of this rank"
                )
        cuda = backend.cupy.cuda
        self._ready.record(cuda.get_current_stream(self._device))
        self._stream.wait_event(self._ready)
        is_group = call.name == "all_to_all"  # so that no send waits for its recv
        try:
            if is_group:
                self._library.groupStart()
            for name, *given in rows:
                getattr(self._nccl, name)(*given, self._stream.ptr)
            if call.launch is not None:
                with self._stream:
                    call.launch()
            if is_group:
                self._library.groupEnd()
        except self._library.NcclError as error:
            raise CommError(f"{call.name}: NCCL fails with {error}") from error
        done = cuda.Event(disable_timing=True)
        done.record(self._stream)
        self._last.event = _Event(done, self._device)
        graph.on_replay(self._last, self._replayed)

        def finish(held: CommCall = call) -> None:
            cuda.get_current_stream(self._device).wait_event(done)

        return finish

    def _replayed(self) -> None:
        """Let the watchdog see a captured step, whose calls do not come here again."""
        done = backend.cupy.cuda.Event(disable_timing=True)
        done.record(backend.cupy.cuda.get_current_stream(self._device))
        self._last.begin("the collectives of a captured step")
        self._last.event = _Event(done, self._device)

    def close(self) -> None:
        """Finish all calls. The communicator stays until the process exits.

        Destroying it would hang while CUDA graphs hold captured collectives. CuPy destroys it with
        the last reference, so one reference is never released.
        """
        self._stream.synchronize()
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._nccl))


def _span(array: Array) -> tuple[int, int, int]:
    """Return what NCCL takes for bytes: their address, number and type."""
    return array.data.ptr, array.size, _NCCL_BYTE


class _Event:
    """A CUDA event that another thread may query, which has no context on other ranks' GPUs."""

    __slots__ = ("_device", "_event")

    def __init__(self, event: Any, device: int) -> None:
        self._event, self._device = event, device

    @property
    def done(self) -> bool:
        """Whether the GPU has reached the event."""
        backend.cupy.cuda.Device(self._device).use()
        return bool(self._event.done)


def _place_on_host(everyone: Any) -> tuple[int, int]:
    """Return this rank's number among the ranks of its host, and how many there are."""
    from mpi4py import MPI

    host = everyone.Split_type(MPI.COMM_TYPE_SHARED, everyone.Get_rank())
    place = host.Get_rank(), host.Get_size()
    host.Free()
    return place


def _gpu_identity(device: int) -> str:
    """Return the UUID of a GPU, which does not depend on its number in this process."""
    properties = backend.cupy.cuda.runtime.getDeviceProperties(device)
    return bytes(properties["uuid"]).hex()


def nccl_version() -> str:
    """Return the version of the NCCL that CuPy loads, or "missing"."""
    from cupy.cuda import nccl

    return str(nccl.get_version()) if nccl.available else "missing"


def _nccl_unique_id() -> bytes:
    from cupy.cuda import nccl

    return bytes(nccl.get_unique_id())


if launch.launched_ranks() > 1:  # errors before the first call of world end all ranks too
    open_standard_streams()  # before MPI opens sockets
    launch.end_all_ranks_on_error(_abort_before_start)
