"""Arrays and devices. The only module that imports cupy at top level.

The type of an array is its device: `type(a) is numpy.ndarray` is the CPU, anything else is
CuPy on the GPU that holds it. Nothing here remembers a "current" backend.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext, suppress
from contextvars import copy_context
from functools import cache, cached_property
from pathlib import Path
from typing import Any
from weakref import WeakSet

import numpy as np

from tensorgrad.core.dtypes import Dtype, compute_dtype
from tensorgrad.core.errors import DeviceError

try:
    import cupy as cupy
except ImportError:
    cupy = None

__all__ = [
    "Array",
    "Shape",
    "asarray_like",
    "capability",
    "contiguous",
    "device_of",
    "empty",
    "empty_like",
    "gpu_count",
    "is_array",
    "is_numpy",
    "limit_threads",
    "namespace",
    "to_device",
    "to_numpy",
    "use_device",
]

Array = Any  # numpy.ndarray | cupy.ndarray
Shape = tuple[int, ...]
Axis = int | tuple[int, ...] | None

# Elements that the NumPy path works on at a time: few enough that a block and some temporaries
# stay in a core's L2 cache, enough that threads seldom meet at the interpreter's lock.
BLOCK = 131072


def is_numpy(array: Array) -> bool:
    """Whether the array lives on the CPU.

    Args:
        array: a NumPy or CuPy array.

    Returns:
        True for a numpy.ndarray itself, False for any other type.

    Example:
        >>> tg.backend.is_numpy(np.zeros(3))
        True
    """
    return type(array) is np.ndarray


def is_array(value: object) -> bool:
    """Whether the value is a NumPy or CuPy array.

    Args:
        value: anything; a Tensor is no array.

    Returns:
        True or False.

    Example:
        >>> tg.backend.is_array(np.zeros(3)), tg.backend.is_array(tg.zeros(3))
        (True, False)
    """
    return isinstance(value, np.ndarray) or (cupy is not None and isinstance(value, cupy.ndarray))


def namespace(array: Array) -> Any:
    """Return the module, numpy or cupy, whose functions take this array.

    Args:
        array: a NumPy or CuPy array.

    Returns:
        numpy or cupy.

    Example:
        >>> x = np.array([1.0, 4.0])
        >>> tg.backend.namespace(x).sqrt(x)
        array([1., 2.])
    """
    return np if type(array) is np.ndarray else cupy


def namespace_on(device: str) -> Any:
    """Return the module, numpy or cupy, that makes arrays on "cpu", "cuda" or "cuda:N"."""
    return np if gpu_index(device) is None else cupy


@cache
def gpu_count() -> int:
    """Return how many GPUs are usable: 0 without CuPy or without a driver.

    Returns:
        The number, which does not change while the process runs.

    Example:
        >>> device = "cuda" if tg.backend.gpu_count() else "cpu"
        >>> tg.zeros((2, 3), device=device).shape
        (2, 3)
    """
    if cupy is None:
        return 0
    try:
        return int(cupy.cuda.runtime.getDeviceCount())
    except cupy.cuda.runtime.CUDARuntimeError:
        return 0


def device_of(array: Array) -> str:
    """Return the device that holds an array.

    Args:
        array: a NumPy or CuPy array.

    Returns:
        "cpu", or "cuda:N" with the number of the GPU.

    Example:
        >>> tg.backend.device_of(np.zeros(3))
        'cpu'
    """
    return "cpu" if type(array) is np.ndarray else f"cuda:{array.device.id}"


def is_device(value: object) -> bool:
    """Return whether an argument names a device, which may not exist, or is None."""
    return value is None or (isinstance(value, str) and value.partition(":")[0] in ("cpu", "cuda"))


def memory_bytes() -> tuple[int, int]:
    """Return the bytes of the current GPU that arrays use, and those that their pool has reserved.

    The pool keeps what arrays no longer use: the second number is the peak of the first, rounded up
    to the pool's blocks.
    """
    pools = [cupy.get_default_memory_pool(), *_pools]
    used, reserved = zip(*((pool.used_bytes(), pool.total_bytes()) for pool in pools), strict=True)
    return int(sum(used)), int(sum(reserved))


def free_bytes(device: str) -> int | None:
    """Return the memory that new arrays on a device may use; None where it is not known."""
    if device != "cpu":
        used, reserved = memory_bytes()
        return int(cupy.cuda.runtime.memGetInfo()[0]) + reserved - used
    with suppress(OSError, ValueError, StopIteration):
        lines = _MEMINFO.read_text().splitlines()
        line = next(line for line in lines if line.startswith("MemAvailable:"))
        return 1024 * int(line.split()[1])
    return None


_MEMINFO = Path("/proc/meminfo")
_pools: WeakSet[Any] = WeakSet()  # besides the default one


def add_pool(pool: Any) -> None:
    """Let `memory_bytes` count what has `used_bytes()` and `total_bytes()`, while it lives."""
    _pools.add(pool)


def use_device(device: str) -> str:
    """Make a GPU the current one of this thread.

    Args:
        device: "cuda:N"; "cuda" keeps the current GPU, and "cpu" changes nothing. "auto" is "cuda"
            where there is a GPU, else "cpu".

    Returns:
        The device, with "auto" resolved.

    Raises:
        DeviceError: the name is none of these, or there is no such GPU here.

    Example:
        >>> tg.backend.use_device("cpu")
        'cpu'
    """
    if device == "auto":
        device = "cuda" if gpu_count() else "cpu"
    index = _number(device)
    if index is not None and index >= 0:
        cupy.cuda.Device(index).use()
    return device


def gpu_index(device: str) -> int | None:
    """Return None for "cpu", and the number of the current GPU for "cuda" or "cuda:N".

    Raises:
        DeviceError: the name is none of these, there is no such GPU here, or another GPU is the
            current one: kernels could not read its arrays.
    """
    index = _number(device)
    if index is None:
        return None
    current = int(cupy.cuda.Device().id)
    if index not in (current, -1):
        raise DeviceError(
            f"device: got {device!r}, but cuda:{current} is the current GPU, expected that one, or "
            f"tensorgrad.backend.use_device({device!r}) before"
        )
    return current


def _number(device: str) -> int | None:
    """Return None for "cpu", N for "cuda:N", -1 for "cuda"."""
    if (text := device if isinstance(device, str) else "") == "cpu":
        return None
    kind, _, number = text.partition(":")
    if kind != "cuda" or (number and not number.isdigit()):
        raise DeviceError(f"device: got {device!r:.80}, expected 'cpu', 'cuda' or 'cuda:N'")
    count = gpu_count()
    if count == 0:
        missing = "CuPy is not installed" if cupy is None else "no GPU was found"
        raise DeviceError(f"device: got {device!r}, but {missing}; expected 'cpu'")
    index = int(number or -1)
    if index >= count:
        raise DeviceError(f"device: got {device!r}, expected cuda:0 to cuda:{count - 1}")
    return index


def to_device(array: Array, device: str) -> Array:
    """Return the array on `device`: itself when it is there already, else a copy.

    Args:
        array: a NumPy or CuPy array.
        device: "cpu"; "cuda", the current GPU, or "cuda:N", which must be the current one.

    Returns:
        A NumPy or CuPy array of the same shape, dtype and values.

    Raises:
        DeviceError: there is no such device here, or another GPU is the current one.

    Example:
        >>> x = np.arange(3)
        >>> tg.backend.to_device(x, "cpu") is x
        True
    """
    index = gpu_index(device)
    if index is None:
        return array if is_numpy(array) else cupy.asnumpy(array)
    if is_numpy(array):
        if array.ndim == 0:  # CuPy would make +0 of -0
            return cupy.asarray(array.reshape(1)).reshape(())
        return cupy.asarray(array)
    return array if array.device.id == index else array.copy()  # which is on the current GPU


def to_numpy(array: Array) -> np.ndarray[Any, Any]:
    """Return the array on the CPU: itself when it is there already, else a copy.

    Args:
        array: a NumPy or CuPy array.

    Returns:
        A NumPy array of the same shape, dtype and values.

    Example:
        >>> tg.backend.to_numpy(tg.ones(2).data)
        array([1., 1.], dtype=float32)
    """
    return array if is_numpy(array) else cupy.asnumpy(array)


def copy_to_numpy(array: Array, out: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Copy an array into one of the same shape and dtype on the CPU, and return that."""
    if is_numpy(array):
        out[...] = array
    else:
        array.get(out=out)
    return out


_copies: list[tuple[Any, Any]] = []  # events, and the memory that is written until then
_copies_lock = threading.Lock()


def to_numpy_later(array: Array) -> Callable[[], np.ndarray[Any, Any]]:
    """Submit a copy to the CPU; return a function that waits for it and returns it.

    It does not wait for what is launched afterwards.

    Args:
        array: contiguous.
    """
    if is_numpy(array):
        copied = array.copy()
        return lambda: copied
    memory = cupy.cuda.alloc_pinned_memory(array.nbytes)
    copied = np.frombuffer(memory, array.dtype, array.size).reshape(array.shape)
    array.get(out=copied, blocking=False)
    arrived = cupy.cuda.get_current_stream().record()
    with _copies_lock:  # nobody may wait for the copy, as after Ctrl-C
        _copies[:] = [copy for copy in _copies if not copy[0].done]
        _copies.append((arrived, memory))

    def found() -> np.ndarray[Any, Any]:
        arrived.synchronize()
        return copied

    return found


def empty(shape: Shape, dtype: Dtype, like: Array) -> Array:
    """Return an uninitialised array on the device of `like`.

    Args:
        shape: the length of each axis.
        dtype: of the elements.
        like: a NumPy or CuPy array, whose device is used.

    Returns:
        A NumPy or CuPy array in C order, whose values are arbitrary.

    Example:
        >>> tg.backend.empty((2, 3), tg.float16, like=np.zeros(1)).shape
        (2, 3)
    """
    return namespace(like).empty(shape, dtype)


def empty_like(array: Array) -> Array:
    """Return an uninitialised C-contiguous array of the same shape, dtype and device.

    Args:
        array: a NumPy or CuPy array, whose memory may have any strides.

    Returns:
        A NumPy or CuPy array in C order, whose values are arbitrary.

    Example:
        >>> tg.backend.empty_like(np.ones((2, 3)).T).flags.c_contiguous
        True
    """
    return namespace(array).empty(array.shape, array.dtype)


def asarray_like(value: Any, like: Array) -> Array:
    """Return the value as an array on the device of `like`, dtype kept.

    Args:
        value: an array, or what `numpy.asarray` takes: numbers, nested lists.
        like: a NumPy or CuPy array, whose device is used; its dtype does not count.

    Returns:
        A NumPy or CuPy array; the value itself when it is one on that device.

    Example:
        >>> tg.backend.asarray_like([1, 2], like=np.zeros(3, "float32"))
        array([1, 2])
    """
    return namespace(like).asarray(value)


def byte_bounds(array: Array) -> tuple[int, int]:
    """Return the addresses of the first byte of the array and of the one past its last."""
    if is_numpy(array):
        return np.lib.array_utils.byte_bounds(array)
    first = last = int(array.data.ptr)
    for length, stride in zip(array.shape, array.strides, strict=True):
        if stride < 0:
            first += (length - 1) * stride
        else:
            last += (length - 1) * stride
    return first, last + int(array.itemsize)


def upcast(array: Array) -> Array:
    """Return 16-bit floats as float32, anything else as it is."""
    dtype = compute_dtype(array.dtype)
    return array if dtype is array.dtype else array.astype(dtype, copy=False)


def contiguous(array: Array) -> Array:
    """Return the array in C order, itself when it is so already.

    Args:
        array: a NumPy or CuPy array.

    Returns:
        An array of the same shape, dtype and values on the same device.

    Example:
        >>> tg.backend.contiguous(np.ones((2, 3)).T).strides
        (16, 8)
    """
    return array if array.flags.c_contiguous else namespace(array).ascontiguousarray(array)


def total_memory(device: str) -> int:
    """Return the bytes of memory of a GPU, or of this host for "cpu"."""
    index = gpu_index(device)
    if index is None:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with cupy.cuda.Device(index):
        return int(cupy.cuda.runtime.memGetInfo()[1])


def capability(device: str) -> int:
    """Return the compute capability of a GPU, to choose a kernel by it.

    Args:
        device: "cuda", "cuda:N" or "cpu", as `Tensor.device` says it.

    Returns:
        An int, such as 80 or 90; 0 for "cpu".

    Raises:
        DeviceError: there is no such GPU here, or another one is the current one.

    Example:
        >>> tg.backend.capability(tg.zeros(3).device) >= 90
        False
    """
    index = gpu_index(device)
    return 0 if index is None else int(cupy.cuda.Device(index).compute_capability)


def threads() -> int:
    """Return how many threads the NumPy path may use: OMP_NUM_THREADS, else the usable cores."""
    limit = os.environ.get("OMP_NUM_THREADS", "")
    if limit.isdigit() and int(limit) > 0:
        return int(limit)
    usable = getattr(os, "sched_getaffinity", None)  # only Linux reports the usable cores
    return len(usable(0)) if usable else os.cpu_count() or 1


def limit_threads(count: int) -> bool:
    """Use at most `count` threads on the CPU from now on, as OMP_NUM_THREADS does from the start.

    Args:
        count: 1 or more.

    Returns:
        Whether the limit holds for NumPy's BLAS too.

    Example:
        >>> import os
        >>> holds_for_blas = tg.backend.limit_threads(1)
        >>> os.environ["OMP_NUM_THREADS"]
        '1'
    """
    os.environ["OMP_NUM_THREADS"] = str(count)
    with _blas.lock:
        _blas.before = [count] * len(_blas.libraries)
        if _blas.users == 0:
            _blas.set(_blas.before)
    return bool(_blas.libraries)


@cache
def _pool(process: int) -> ThreadPoolExecutor | None:
    """Return the worker threads of one process (threads do not survive a fork).

    All are started here, so that none has to start in the middle of an op. Where the system allows
    fewer (`ulimit -u`), there are fewer, or the result is None.
    """
    count = threads()
    while count:
        pool, gate = ThreadPoolExecutor(count, thread_name_prefix="tensorgrad"), threading.Event()
        try:
            for _ in range(count):
                pool.submit(gate.wait)  # no thread is free, so this starts one
            return pool
        except RuntimeError:
            gate.set()
            pool.shutdown()
            count //= 2
        finally:
            gate.set()
    return None


def parallel_blocks(
    function: Callable[[slice], None], length: int, block: int, multiplies: bool = False
) -> None:
    """Call `function` on slices of at most `block` that cover [0, length), on all cores.

    Blocks that fit the cache keep the temporaries of a NumPy expression out of memory. What
    `function` writes must depend on its slice alone, so the result is the same for any number
    of threads. NumPy's errstate holds in the workers as in the caller. When this returns or
    raises, all of them have finished.

    `multiplies` says that `function` calls matrix products. Threads that each call a multithreaded
    BLAS spend most of their time waiting for each other: so BLAS is limited to one thread, and
    where that is not possible, all blocks run in this thread, with the threads of BLAS.
    """
    if 0 < length <= block and not multiplies:
        function(slice(0, length))
        return
    helpers = max(0, min(threads(), -(-length // block)) - 1)
    ends = [None] * (helpers + 1)
    blocks = deque([*range(0, length, block), *ends])  # whoever is free takes the next one

    def run() -> None:
        for start in iter(blocks.popleft, None):
            function(slice(start, min(start + block, length)))

    with _single_threaded_blas() if multiplies else nullcontext(True) as may_share:
        pool = _pool(os.getpid()) if may_share and helpers > 0 else None
        others: list[Future[None]] = []
        try:
            if pool is not None:
                for _ in range(helpers):
                    others.append(pool.submit(copy_context().run, run))
            run()
        finally:
            blocks.extendleft(ends)  # after an error nobody begins another
            wait(others := [other for other in others if not other.cancel()])
        for other in others:
            other.result()


class _BlasThreads:
    """How many threads NumPy's BLAS uses, which is one number for the whole process."""

    def __init__(self) -> None:
        self.users, self.before = 0, [0]
        self.lock = threading.Lock()

    @cached_property
    def libraries(self) -> list[Any]:
        """The libraries that threadpoolctl controls: OpenBLAS, MKL, BLIS; none for another BLAS."""
        from threadpoolctl import ThreadpoolController

        return list(ThreadpoolController().select(user_api="blas").lib_controllers)

    def get(self) -> list[int]:
        """Return the number of threads of each library."""
        return [library.num_threads for library in self.libraries]

    def set(self, counts: Sequence[int]) -> None:
        """Let each library use a number of threads."""
        for library, count in zip(self.libraries, counts, strict=True):
            library.set_num_threads(count)


_blas = _BlasThreads()


@contextmanager
def _single_threaded_blas() -> Iterator[bool]:
    """Let BLAS use one thread inside the `with` block; yields False where that is not possible."""
    if not _blas.libraries:
        yield False
        return
    with _blas.lock:
        if _blas.users == 0:
            _blas.before = _blas.get()
            _blas.set([1] * len(_blas.before))
        _blas.users += 1
    try:
        yield True
    finally:
        with _blas.lock:
            _blas.users -= 1
            if _blas.users == 0:
                _blas.set(_blas.before)


def same_device(op: str, names: Sequence[str], arrays: Sequence[Array]) -> None:
    """Raise DeviceError unless all arrays live on the device of the first."""
    for array in arrays:
        if type(array) is not np.ndarray:
            break
    else:
        return
    first = place(arrays[0])
    for name, array in zip(names[1:], arrays[1:], strict=True):
        if place(array) != first:
            raise DeviceError(
                f"{op}: {name} is on {device_of(array)}, expected {device_of(arrays[0])} like "
                f"{names[0]}"
            )


def place(array: Array) -> int:
    """Return the number of the array's GPU, -1 for the CPU."""
    return -1 if type(array) is np.ndarray else int(array.device.id)
