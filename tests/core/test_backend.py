"""Which GPU computes. A second one, where there is one, must train like the first."""

from __future__ import annotations

import os
import threading
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import tensorgrad as tg
from tensorgrad import Tensor, autocast, random
from tensorgrad.core import backend
from tensorgrad.core.arrays import add_into
from tensorgrad.core.dtypes import bfloat16
from tensorgrad.errors import DeviceError
from tensorgrad.models.gpt2 import GPT2, GPT2Config
from tensorgrad.models.translation import TranslationConfig, TranslationModel
from tensorgrad.optim import AdamW
from tensorgrad.train.strategy import OneProcess


def test_a_copy_has_the_values_of_its_submission(device: str) -> None:
    array = backend.to_device(np.arange(6).reshape(2, 3), device)
    found = backend.to_numpy_later(array)
    array[...] = 0
    later = backend.to_numpy_later(array)
    assert found().tolist() == [[0, 1, 2], [3, 4, 5]]
    assert not later().any()
    assert type(found()) is np.ndarray


def test_arrays_change_place_type_and_layout(device: str) -> None:
    numbers = np.arange(6.0).reshape(2, 3)
    array = backend.to_device(numbers, device)
    assert (backend.is_array(array), backend.is_array([1.0])) == (True, False)
    assert backend.is_numpy(array) == (device == "cpu")
    assert backend.to_device(array, device) is array
    assert backend.device_of(array) == ("cpu" if device == "cpu" else "cuda:0")
    out = np.zeros((2, 3))
    assert backend.copy_to_numpy(array, out) is out
    np.testing.assert_array_equal(out, numbers)
    assert backend.contiguous(array) is array
    for same in (backend.contiguous(array.T), backend.empty_like(array.T)):
        assert (same.flags.c_contiguous, same.shape, same.dtype) == (True, (3, 2), np.float64)
    np.testing.assert_array_equal(backend.to_numpy(backend.contiguous(array.T)), numbers.T)
    first, last = backend.byte_bounds(array[:, ::-1])
    assert (first, last) == backend.byte_bounds(array)
    assert last - first == array.nbytes
    for dtype, wide in (("float16", "float32"), (bfloat16, "float32"), ("float64", "float64")):
        narrow = backend.asarray_like(numbers.astype(dtype), array)
        wider = backend.upcast(narrow)
        assert wider.dtype == wide
        assert (wider is narrow) == (dtype == wide)
        np.testing.assert_array_equal(backend.to_numpy(wider), numbers)
        add_into(narrow, array)
        np.testing.assert_array_equal(backend.to_numpy(narrow).astype(float), 2 * numbers)
    assert backend.empty((4,), np.dtype("int8"), array).nbytes == 4
    assert backend.total_memory(device) > 2**28


def test_threads_are_those_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for words, count in (("3", 3), ("1", 1), ("0", None), ("many", None), ("", None)):
        monkeypatch.setenv("OMP_NUM_THREADS", words)
        assert backend.threads() == (len(os.sched_getaffinity(0)) if count is None else count)
    monkeypatch.delattr(os, "sched_getaffinity")
    for cores, count in ((3, 3), (None, 1)):
        monkeypatch.setattr(os, "cpu_count", lambda cores=cores: cores)
        assert backend.threads() == count


@pytest.fixture
def blas(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a BLAS in the place of NumPy's, whose numbers of threads are noted."""
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    library = types.SimpleNamespace(num_threads=5, counts=[5])

    def set_num_threads(count: int) -> None:
        library.num_threads = count
        library.counts.append(count)

    library.set_num_threads = set_num_threads
    threads = backend._BlasThreads()
    threads.libraries = [library]
    monkeypatch.setattr(backend, "_blas", threads)
    return library


def test_blas_has_one_thread_where_blocks_multiply(blas: Any) -> None:
    def run(piece: slice) -> None:
        backend.parallel_blocks(lambda inner: seen.append((inner, blas.num_threads)), 1, 1, True)

    def fail(piece: slice) -> None:
        raise ZeroDivisionError

    seen: list[Any] = []
    backend.parallel_blocks(run, 1, 1, multiplies=True)
    assert seen == [(slice(0, 1), 1)]
    assert blas.counts == [5, 1, 5]
    with pytest.raises(ZeroDivisionError):
        backend.parallel_blocks(fail, 1, 1, multiplies=True)
    assert blas.counts == [5, 1, 5, 1, 5]


def test_a_limit_of_threads_holds_for_blas(blas: Any) -> None:
    assert backend.limit_threads(3)
    assert (backend.threads(), blas.counts) == (3, [5, 3])
    held: list[bool] = []
    backend.parallel_blocks(lambda _: held.append(backend.limit_threads(2)), 1, 1, multiplies=True)
    assert held == [True]
    assert (backend.threads(), blas.counts) == (2, [5, 3, 1, 2])
    backend._blas.libraries = []
    assert not backend.limit_threads(7)
    assert backend.threads() == 7


def test_where_blas_cannot_be_limited_one_thread_runs_all_blocks(blas: Any) -> None:
    seen: list[Any] = []
    backend._blas.libraries = []
    backend.parallel_blocks(
        lambda piece: seen.append((piece, threading.current_thread())), 5, 2, multiplies=True
    )
    here = threading.current_thread()
    assert seen == [(slice(0, 2), here), (slice(2, 4), here), (slice(4, 5), here)]


def test_the_blas_of_numpy_is_found() -> None:
    threads = backend._BlasThreads()
    if not threads.libraries:
        pytest.skip("NumPy has a BLAS that threadpoolctl does not know")
    before = threads.get()
    threads.set([1] * len(before))
    assert threads.get() == [1] * len(before)
    threads.set(before)
    assert threads.get() == before


def test_training_has_the_same_bits_with_any_number_of_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng = np.random.default_rng(0)
    batch = [rng.integers(0, 300, (8, 80), np.int32) for _ in range(2)]
    config = GPT2Config(vocab_size=300, context=80, layers=1, heads=2, width=64, dropout=0.1)
    found, used = [], set()
    blocks = backend.parallel_blocks

    def watched(function: Any, length: int, *options: Any, **named: Any) -> None:
        def run(piece: slice) -> None:
            used.add(threading.current_thread().name)
            function(piece)

        blocks(run, length, *options, **named)

    monkeypatch.setattr(backend, "parallel_blocks", watched)
    for count in (1, 2, 3, 8):
        monkeypatch.setattr(backend, "threads", lambda count=count: count)
        backend._pool.cache_clear()
        random.seed(1)
        found.append(trained(GPT2(config), "cpu", batch))
        if (pool := backend._pool(os.getpid())) is not None:
            pool.shutdown()
    backend._pool.cache_clear()
    assert found[1:] == found[:1] * 3
    assert len(used) > 3


class OnGPU:
    """Otherwise what is sent next would be overwritten on its way."""

    data = types.SimpleNamespace(ptr=100)
    shape, strides, itemsize = (2, 3), (-24, 8), 8

    def __init__(self, index: int = 0) -> None:
        self.device = types.SimpleNamespace(id=index)


def test_arrays_of_two_devices_are_named() -> None:
    x: Any = np.zeros(2)
    backend.same_device("op", ("a", "b"), (x, x))
    backend.same_device("op", ("a", "b"), (OnGPU(1), OnGPU(1)))
    for first, second, message in (
        (x, OnGPU(1), "op: b is on cuda:1, expected cpu like a"),
        (OnGPU(1), x, "op: b is on cpu, expected cuda:1 like a"),
        (OnGPU(0), OnGPU(2), "op: b is on cuda:2, expected cuda:0 like a"),
    ):
        with pytest.raises(DeviceError, match=message):
            backend.same_device("op", ("a", "b"), (first, second))
        with pytest.raises(DeviceError, match=message.replace(" b ", " c ")):
            backend.same_device("op", ("a", "b", "c"), (first, first, second))


def test_bytes_of_views_and_pools_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert backend.byte_bounds(OnGPU()) == (76, 124)

    class Pool:
        def __init__(self, *nbytes: int) -> None:
            self.used_bytes, self.total_bytes = (lambda n=n: n for n in nbytes)

    monkeypatch.setattr(
        backend, "cupy", types.SimpleNamespace(get_default_memory_pool=lambda: Pool(1, 10))
    )
    monkeypatch.setattr(backend, "_pools", type(backend._pools)())
    assert backend.memory_bytes() == (1, 10)
    own = Pool(5, 70)
    backend.add_pool(own)
    assert backend.memory_bytes() == (6, 80)


@pytest.mark.parametrize(("devices", "cpu"), [((None, "cpu", "cuda", "cuda:1"), True),
                                              (("gpu", 1, "float32", "xcpu"), False)])  # fmt: skip
def test_names_of_devices(devices: tuple[Any, ...], cpu: bool) -> None:
    assert [backend.is_device(value) for value in devices] == [cpu] * len(devices)


@pytest.mark.gpu
def test_a_copy_that_nobody_waits_for_keeps_its_memory() -> None:
    """Otherwise what is sent next would be overwritten on its way."""
    array, size = backend.cupy.ones(64), 1 << 12
    busy = backend.cupy.ones((size, size))
    for _ in range(20):
        busy = busy @ busy * 1e-4  # for milliseconds
    backend.to_numpy_later(array)
    sent = [backend.to_device(np.full(64, number), "cuda") for number in range(2, 50)]
    assert [int(backend.to_numpy(each).sum()) for each in sent] == [64 * n for n in range(2, 50)]


@pytest.fixture
def three_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let there be three GPUs, of which the first is the current one."""
    current = [0]

    class Device:
        def __init__(self, index: int | None = None) -> None:
            self.id = current[0] if index is None else index

        def use(self) -> None:
            current[0] = self.id

    monkeypatch.setattr(backend, "gpu_count", lambda: 3)
    cupy = types.SimpleNamespace(cuda=types.SimpleNamespace(Device=Device))
    monkeypatch.setattr(backend, "cupy", cupy)


@pytest.mark.usefixtures("three_gpus")
def test_the_current_gpu_computes() -> None:
    assert [backend.gpu_index(name) for name in ("cpu", "cuda", "cuda:0")] == [None, 0, 0]
    with pytest.raises(DeviceError, match=r"got 'cuda:2', but cuda:0 is .*use_device\('cuda:2'\)"):
        backend.gpu_index("cuda:2")
    assert backend.use_device("cuda:2") == "cuda:2"
    assert backend.use_device("auto") == "cuda"
    assert backend.use_device("cpu") == "cpu"
    assert [backend.gpu_index(name) for name in ("cuda", "cuda:2")] == [2, 2]
    with pytest.raises(DeviceError, match="got 'cuda:0', but cuda:2 is the current GPU"):
        tg.zeros(3, device="cuda:0")
    with pytest.raises(DeviceError, match="got 'cuda:3', expected cuda:0 to cuda:2"):
        backend.use_device("cuda:3")
    for name in ("gpu", "cuda:-1", "cuda:x", "auto"):
        with pytest.raises(DeviceError, match=f"got '{name}', expected 'cpu'"):
            backend.gpu_index(name)


def test_there_may_be_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "gpu_count", lambda: 0)
    assert backend.use_device("auto") == "cpu"
    for name in ("cuda", "cuda:0"):
        with pytest.raises(DeviceError, match=f"got '{name}', but .*; expected 'cpu'"):
            backend.use_device(name)


@pytest.fixture
def first_gpu_afterwards() -> Iterator[None]:
    yield
    backend.use_device("cuda:0")


def trained(model: Any, device: str, batch: Any) -> list[bytes]:
    """Return the loss and the parameters after two steps."""
    random.seed(2)
    model.to(device)
    optimizer = OneProcess().prepare(model, lambda flat: AdamW(flat, 1e-2))
    arrays = [Tensor(backend.to_device(array, device)) for array in batch]
    for _ in range(2):
        optimizer.zero_grad()
        with autocast("bfloat16"):
            loss = model.forward(*arrays)
        loss.backward()
        optimizer.step(1.0)
    return [t.numpy().tobytes() for t in (loss, *model.parameters())]


@pytest.mark.gpu
@pytest.mark.skipif(backend.gpu_count() < 2, reason="needs two GPUs")
@pytest.mark.usefixtures("first_gpu_afterwards")
@pytest.mark.parametrize("name", ["gpt2", "translation"])
def test_a_second_gpu_trains_like_the_first(name: str) -> None:
    rng = np.random.default_rng(0)
    batch = [rng.integers(0, 64, (4, 32), np.int32) for _ in range(2)]
    found = []
    for device in ("cuda:0", "cuda:1"):
        assert backend.use_device(device) == device
        random.seed(1)
        model: Any = (
            GPT2(GPT2Config(vocab_size=64, context=32, layers=2, heads=2, width=128, dropout=0.1))
            if name == "gpt2"
            else TranslationModel(TranslationConfig(64, 32, 2, 2, 2, 128, prefix=True, dropout=0.1))
        )
        found.append(trained(model, device, batch))
    assert found[0] == found[1]
    there = tg.zeros(3, device="cuda:1")
    backend.use_device("cuda:0")
    assert there.to("cuda:0").device == "cuda:0"
    assert there.to("cpu").device == "cpu"


@pytest.fixture
def fresh_pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the worker threads, four at most, be started anew in a test, and again after it."""
    monkeypatch.setattr(backend, "threads", lambda: 4)
    backend._pool.cache_clear()
    yield
    pool = backend._pool(os.getpid())
    if pool is not None:
        pool.shutdown()
    backend._pool.cache_clear()


@pytest.mark.usefixtures("fresh_pool")
@pytest.mark.parametrize("allowed", [0, 1, 3, 4])
def test_where_few_threads_can_be_started_those_do_the_work(
    allowed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start
    started: list[threading.Thread] = []  # here, whatever other threads come and go

    def limited(thread: threading.Thread) -> None:
        if sum(each.is_alive() for each in started) >= allowed:
            raise RuntimeError("can't start new thread")
        start(thread)
        started.append(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    y = np.zeros(1000, int)
    for _ in range(3):

        def run(piece: slice) -> None:
            y[piece] += np.arange(1000)[piece]

        backend.parallel_blocks(run, 1000, 7)
    np.testing.assert_array_equal(y, 3 * np.arange(1000))
    pool = backend._pool(os.getpid())
    assert (pool and len(pool._threads)) == {0: None, 1: 1, 3: 2, 4: 4}[allowed]


@pytest.mark.usefixtures("fresh_pool")
@pytest.mark.parametrize(
    ("length", "block", "starts"),
    [(0, 3, []), (3, 3, [0]), (4, 3, [0, 3]), (5, 1, [0, 1, 2, 3, 4]), (20, 3, [*range(0, 20, 3)])],
)
def test_blocks_cover_what_there_is_once(length: int, block: int, starts: list[int]) -> None:
    seen: list[slice] = []
    backend.parallel_blocks(seen.append, length, block)
    pieces = [slice(start, min(start + block, length)) for start in starts]
    assert sorted(seen, key=lambda piece: piece.start) == pieces


@pytest.mark.usefixtures("fresh_pool")
def test_blocks_may_have_blocks_of_their_own() -> None:
    """All workers are busy with the outer ones."""
    y = np.zeros((20, 30), int)

    def run(outer: slice) -> None:
        def add(inner: slice) -> None:
            y[outer, inner] += 1

        backend.parallel_blocks(add, 30, 4)

    backend.parallel_blocks(run, 20, 1)
    np.testing.assert_array_equal(y, 1)


@pytest.mark.usefixtures("fresh_pool")
def test_whoever_is_free_takes_the_next_block() -> None:
    rest = threading.Event()
    seen: list[int] = []

    def run(piece: slice) -> None:
        seen.append(piece.start)
        if piece.start == 0:
            assert rest.wait(60)
        elif len(seen) == 20:
            rest.set()

    backend.parallel_blocks(run, 20, 1)
    assert sorted(seen) == list(range(20))


@pytest.mark.usefixtures("fresh_pool")
def test_errstate_holds_in_all_threads() -> None:
    y = np.ones(8)

    def run(piece: slice) -> None:
        y[piece] /= 0

    with np.errstate(divide="raise"), pytest.raises(FloatingPointError):
        backend.parallel_blocks(run, 8, 1)
    with np.errstate(divide="ignore"):
        backend.parallel_blocks(run, 8, 1)
    assert np.isinf(y).all()


@pytest.mark.usefixtures("fresh_pool")
def test_no_thread_works_on_after_an_error() -> None:
    """So what it writes to may be used otherwise."""
    all_began, done = threading.Barrier(4), []

    def run(piece: slice) -> None:
        all_began.wait(60)
        if piece.start == 0:
            raise KeyboardInterrupt
        np.ones(1_000_000).sum()
        done.append(piece.start)

    with pytest.raises(KeyboardInterrupt):
        backend.parallel_blocks(run, 4, 1)
    assert sorted(done) == [1, 2, 3]
