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
        widened = backend.widened(narrow)
        assert widened.dtype == wide
        assert (widened is narrow) == (dtype == wide)
        np.testing.assert_array_equal(backend.to_numpy(widened), numbers)
        add_into(narrow, array)
        np.testing.assert_array_equal(backend.to_numpy(narrow).astype(float), 2 * numbers)
    assert backend.empty((4,), np.dtype("int8"), array).nbytes == 4
    assert backend.total_memory(device) > 2**28


def test_threads_are_those_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for words, count in (("3", 3), ("1", 1), ("0", None), ("many", None), ("", None)):
        monkeypatch.setenv("OMP_NUM_THREADS", words)
        assert backend.threads() == (len(os.sched_getaffinity(0)) if count is None else count)


@pytest.mark.gpu
def test_a_copy_that_nobody_waits_for_keeps_its_memory() -> None:
    """Else what is sent next would be overwritten on its way."""
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
def test_no_thread_works_on_after_an_error() -> None:
    """So what it writes to may be used otherwise."""
    failed, done = threading.Event(), []

    def run(piece: slice) -> None:
        if piece.start == 0:
            failed.set()
            raise KeyboardInterrupt
        failed.wait()
        np.ones(1_000_000).sum()
        done.append(piece.start)

    with pytest.raises(KeyboardInterrupt):
        backend.parallel_blocks(run, 4, 1)
    assert sorted(done) == [1, 2, 3]
