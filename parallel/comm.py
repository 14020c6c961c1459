"""Starting ranks, and what carries arrays between them. The only module that imports MPI and NCCL.

MPI starts the ranks, lets them agree and moves what lives on the host. GPU pointers never go to
MPI, which would read them as host memory. NCCL moves GPU arrays, on a stream of its own that
events order after the work already on the current stream and before the work that follows, so
that no call makes the host wait for the GPU.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np

from tensorgrad import backend, dtypes
from tensorgrad.backend import Array
from tensorgrad.errors import CommError, DeviceError
from tensorgrad.parallel.agreement import by_rank
from tensorgrad.parallel.collectives import Comm, GpuTransport
from tensorgrad.parallel.launch import end_all_ranks_on_error, launched_ranks, program_facts

_log = logging.getLogger(__name__)

# MPI moves arrays in parts: they stay in the cache (twice as fast as one call for 120 MB), and
# counts stay below the 2^31 that MPI allowed before version 4.
_PART_BYTES = 4 << 20

# A rank asks so often whether the others have come before it sleeps, in seconds, between questions.
_BUSY_POLLS = 100
_PAUSE = 20e-6

# What is added in a wider type and rounded once: MPI knows no 16-bit floats, NCCL no 16-bit
# integers.
_WIDE_MPI = {dtypes.float16: dtypes.float32, dtypes.bfloat16: dtypes.float32}
_WIDE_NCCL = {dtypes.int16: dtypes.int32, dtypes.uint16: dtypes.uint32}

# ncclDataType_t and ncclRedOp_t of nccl.h.
_NCCL_BYTE = 1
_NCCL_DTYPES = {
    dtypes.int8: 0,
    dtypes.uint8: _NCCL_BYTE,
    dtypes.int32: 2,
    dtypes.uint32: 3,
    dtypes.int64: 4,
    dtypes.uint64: 5,
    dtypes.float16: 6,
    dtypes.float32: 7,
    dtypes.float64: 8,
    dtypes.bfloat16: 9,
}
_NCCL_OPS = {"sum": 0, "max": 2, "mean": 4}


@cache
def world() -> Comm:
    """Return the communicator of all ranks that mpirun started; of one rank when run alone.

    The first call of a program that mpirun started starts MPI, makes an uncaught exception on
    one rank end all ranks with its traceback, and checks that all ranks run the same code.

    Raises:
        CommError: mpi4py is missing or belongs to another MPI than mpirun; or the ranks run
            different versions of Python, NumPy or tensorgrad.
    """
    started = launched_ranks()
    if started == 1:
        return Comm()
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise CommError(
            f"world: {started} ranks were started, but mpi4py cannot be imported ({error}); "
            "expected `pip install tensorgrad[mpi]` on every host"
        ) from error
    if MPI.COMM_WORLD.Get_size() != started:
        library = MPI.Get_library_version().splitlines()[0].rstrip("\0")
        raise CommError(
            f"world: the launcher started {started} ranks, but the MPI of mpi4py ({library}) sees "
            f"{MPI.COMM_WORLD.Get_size()}; expected the mpirun that belongs to that MPI"
        )
    comm = Comm(_Mpi(MPI.COMM_WORLD))
    end_all_ranks_on_error(comm.rank, comm.size, comm.abort)
    atexit.register(comm.leave)
    comm.agree("start", program_facts())
    return comm


class _Mpi:
    """Host arrays over MPI."""

    def __init__(self, group: Any) -> None:
        from mpi4py import MPI

        self._group = group
        self._failure = MPI.Exception
        self._in_place = MPI.IN_PLACE
        self._ops = {"sum": MPI.SUM, "mean": MPI.SUM, "max": MPI.MAX}
        self.rank, self.size = group.Get_rank(), group.Get_size()
        host = group.Split_type(MPI.COMM_TYPE_SHARED, self.rank)
        self.local_rank, self.local_size = host.Get_rank(), host.Get_size()
        host.Free()

    def all_reduce(self, array: Array, op: str) -> None:
        wide = _WIDE_MPI.get(array.dtype)
        with self._errors("all_reduce"):
            for part in _parts(array.reshape(-1)):
                terms = part if wide is None else part.astype(wide)
                self._group.Allreduce(self._in_place, terms, self._ops[op])
                if op == "mean":
                    np.divide(terms, self.size, out=terms)
                if wide is not None:
                    with np.errstate(over="ignore"):  # a sum above the largest float16 is inf
                        part[...] = terms

    def broadcast(self, data: Array, root: int) -> None:
        with self._errors("broadcast"):
            for part in _parts(data):
                self._group.Bcast(part, root)

    def all_gather(self, data: Array, out: Array) -> None:
        rows = out.reshape(self.size, -1)
        begin = 0
        with self._errors("all_gather"):
            for part in _parts(data):
                gathered = np.empty((self.size, part.size), part.dtype)
                self._group.Allgather(part, gathered)
                rows[:, begin : begin + part.size] = gathered
                begin += part.size

    def same(self, number: int) -> bool:
        """Return whether all ranks pass the same number.

        Here ranks wait for each other. MPI waits by asking without pause; where ranks are more
        than cores, that keeps those from working that the others wait for.
        """
        extremes = np.array([number, -number])
        with self._errors("same"):
            request = self._group.Iallreduce(self._in_place, extremes, self._ops["max"])
            polls = 0
            while not request.Test():
                polls += 1
                if polls > _BUSY_POLLS:
                    time.sleep(_PAUSE)
        return bool(extremes[0] == -extremes[1])

    def exchange(self, text: str) -> list[str]:
        """Return the texts of all ranks."""
        mine = np.frombuffer(text.encode(), "uint8")
        sizes = np.empty(self.size, "int64")
        with self._errors("exchange"):
            self._group.Allgather(np.array([mine.size]), sizes)
            joined = np.empty(int(sizes.sum()), "uint8")
            self._group.Allgatherv(mine, (joined, sizes))
        return [part.tobytes().decode() for part in np.split(joined, np.cumsum(sizes)[:-1])]

    def connect_gpus(self, device: int) -> GpuTransport:
        """Join the ranks' GPUs with NCCL; by way of the host where ranks share a GPU."""
        mine = {"gpu": _gpu_identity(device), "nccl": _nccl_version()}
        ranks = [json.loads(text) for text in self.exchange(json.dumps(mine))]
        versions = [rank["nccl"] for rank in ranks]
        if "missing" in versions or len(set(versions)) > 1:
            raise CommError(f"NCCL is {by_rank(versions)}; expected one version on all ranks")
        gpus = len({rank["gpu"] for rank in ranks})
        if gpus < self.size:
            if self.rank == 0:
                _log.warning(
                    "%d ranks share %d GPUs: NCCL needs one GPU a rank, so arrays go from GPU to "
                    "GPU by way of the host, which is slow",
                    self.size,
                    gpus,
                )
            return _OverHost(self)
        unique_id = self.exchange(_nccl_unique_id().hex() if self.rank == 0 else "")[0]
        return _Nccl(bytes.fromhex(unique_id), self.rank, self.size, device)

    def abort(self, status: int) -> None:
        self._group.Abort(status)
        os._exit(status)  # MPICH's Abort can come back; nothing of the program may run then

    @contextmanager
    def _errors(self, op: str) -> Iterator[None]:
        try:
            yield
        except self._failure as error:
            raise CommError(f"{op}: MPI fails with {error}") from error


class _Nccl:
    """Arrays on one GPU a rank over NCCL."""

    def __init__(self, unique_id: bytes, rank: int, size: int, device: int) -> None:
        from cupy.cuda import nccl

        cuda = backend.cupy.cuda
        self._failure = nccl.NcclError
        self._device = device
        with cuda.Device(device):
            self._nccl = nccl.NcclCommunicator(size, unique_id, rank)
            self._stream = cuda.Stream(non_blocking=True)
            self._ready = cuda.Event(disable_timing=True)
            self._done = cuda.Event(disable_timing=True)

    def all_reduce(self, array: Array, op: str) -> None:
        wide = _WIDE_NCCL.get(array.dtype)
        terms = array if wide is None else array.astype(wide)
        kind, pointer = _NCCL_DTYPES[terms.dtype], terms.data.ptr
        with self._ordered("all_reduce", array) as stream:
            self._nccl.allReduce(pointer, pointer, terms.size, kind, _NCCL_OPS[op], stream)
        if wide is not None:
            array[...] = terms

    def broadcast(self, data: Array, root: int) -> None:
        pointer = data.data.ptr
        with self._ordered("broadcast", data) as stream:
            self._nccl.broadcast(pointer, pointer, data.size, _NCCL_BYTE, root, stream)

    def all_gather(self, data: Array, out: Array) -> None:
        with self._ordered("all_gather", data) as stream:
            self._nccl.allGather(data.data.ptr, out.data.ptr, data.size, _NCCL_BYTE, stream)

    def close(self) -> None:
        """Finish what was begun, and leave the communicator to the end of the process.

        To destroy it would wait for ever for CUDA graphs that hold captured collectives; CuPy
        does so when the object goes, which the extra reference prevents.
        """
        self._stream.synchronize()
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._nccl))

    @contextmanager
    def _ordered(self, op: str, array: Array) -> Iterator[int]:
        """Order NCCL's stream after the current one, and then the current one after NCCL's.

        The wait at the end also keeps the memory pool from giving the array's memory to others
        too early: the pool hands it out again only to work that follows on the current stream.
        """
        if array.device.id != self._device:
            raise DeviceError(
                f"{op}: array is on {backend.device_of(array)}, expected cuda:{self._device} "
                "as in the first call of this rank"
            )
        current = backend.cupy.cuda.get_current_stream(self._device)
        self._ready.record(current)
        self._stream.wait_event(self._ready)
        try:
            yield self._stream.ptr
        except self._failure as error:
            raise CommError(f"{op}: NCCL fails with {error}") from error
        self._done.record(self._stream)
        current.wait_event(self._done)


class _OverHost:
    """GPU arrays over MPI, by way of the host."""

    def __init__(self, mpi: _Mpi) -> None:
        self._mpi = mpi

    def all_reduce(self, array: Array, op: str) -> None:
        host = backend.to_numpy(array)
        self._mpi.all_reduce(host, op)
        array[...] = backend.asarray_like(host, array)

    def broadcast(self, data: Array, root: int) -> None:
        host = backend.to_numpy(data)
        self._mpi.broadcast(host, root)
        data[...] = backend.asarray_like(host, data)

    def all_gather(self, data: Array, out: Array) -> None:
        host = np.empty(out.shape, out.dtype)
        self._mpi.all_gather(backend.to_numpy(data), host)
        out[...] = backend.asarray_like(host, out)

    def close(self) -> None:
        """Do nothing: each call has finished its transfers."""


def _parts(flat: Array) -> Iterator[Array]:
    step = _PART_BYTES // flat.itemsize
    for begin in range(0, flat.size, step):
        yield flat[begin : begin + step]


def _gpu_identity(device: int) -> str:
    """Return what names a GPU among all GPUs, whatever its number in this process."""
    properties = backend.cupy.cuda.runtime.getDeviceProperties(device)
    return bytes(properties["uuid"]).hex()


def _nccl_version() -> str:
    """Return the version of the NCCL that CuPy loads, or "missing"."""
    from cupy.cuda import nccl

    return str(nccl.get_version()) if nccl.available else "missing"


def _nccl_unique_id() -> bytes:
    from cupy.cuda import nccl

    return bytes(nccl.get_unique_id())
