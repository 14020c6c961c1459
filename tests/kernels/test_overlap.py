"""Kernels that start before the one before them ends: the same bits as one after the other."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import tensorgrad as tg
from tensorgrad import Tensor, no_grad
from tensorgrad.core import backend
from tensorgrad.dtypes import bfloat16
from tensorgrad.kernels import overlap
from tensorgrad.kernels.structs import CacheStrides
from tensorgrad.ops.decode import attend
from tensorgrad.testing import Capture
from tests.gpu_array import on_gpu


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return how kernels are launched from now on: none is."""
    found: list[str] = []
    stream = SimpleNamespace(ptr=7)
    cuda = SimpleNamespace(
        runtime=SimpleNamespace(getDevice=lambda: 0), get_current_stream=lambda: stream
    )
    monkeypatch.setattr(backend, "cupy", SimpleNamespace(cuda=cuda, ndarray=np.ndarray))
    monkeypatch.setattr(overlap, "_is_supported", lambda device: True)
    monkeypatch.setattr(overlap, "_launch", lambda *_: found.append("overlapped"))
    monkeypatch.setattr(overlap, "_written", {})
    return found


def test_what_the_kernel_before_writes_is_not_read_early(launches: list[str]) -> None:
    memory = on_gpu(np.zeros(100, np.float32))
    weight, other, y = memory[:40], memory[40:60], memory[60:]

    def launch(**options: Any) -> str:
        overlap.launch(
            lambda *_: launches.append("plain"), (1,), (32,), (), prefetch=[weight, None], **options
        )
        return launches[-1]

    assert launch(writes=[y]) == "overlapped"
    assert launch(writes=[None, memory[39:41]]) == "overlapped"
    assert launch() == "plain"  # and it writes nothing that is known
    assert launch(writes=[other]) == "plain"
    assert launch() == "overlapped"
    assert launch(writes=[weight[::2]]) == "overlapped"
    assert launch(writes=[y], trigger_early=True) == "plain"  # all before it have ended
    assert launch(writes=[weight]) == "overlapped"
    assert launch(writes=[weight]) == "plain"
    backend.cupy.cuda.get_current_stream().ptr = 8
    assert launch() == "overlapped"
    backend.cupy.cuda.get_current_stream().ptr = 7
    assert launch() == "plain"


def test_kernels_that_start_the_next_at_once_pass_on_what_was_written(launches: list[str]) -> None:
    memory = on_gpu(np.zeros(100, np.float32))
    weight, other, y = memory[:40], memory[40:60], memory[60:]

    def launch(reads: Any, writes: Any, trigger_early: bool = False) -> str:
        overlap.launch(
            lambda *_: launches.append("plain"), (1,), (32,), (), prefetch=[reads], writes=[writes],
            trigger_early=trigger_early,
        )  # fmt: skip
        return launches[-1]

    assert launch(other, weight) == "overlapped"
    assert launch(other, y, trigger_early=True) == "overlapped"
    assert launch(other, y, trigger_early=True) == "overlapped"
    assert launch(weight, other) == "plain"  # the first may still write it
    assert launch(weight, other) == "overlapped"
    assert launch(weight, weight, trigger_early=True) == "overlapped"
    assert launch(other, y) == "plain"  # the launch before that one
    assert launch(weight, other) == "overlapped"


def test_a_chain_of_kernels_that_start_the_next_at_once_is_cut(launches: list[str]) -> None:
    y = on_gpu(np.zeros(8, np.float32))
    for _ in range(200):
        overlap.launch(
            lambda *_: launches.append("plain"), (1,), (32,), (), writes=[y, y[:4]],
            trigger_early=True,
        )  # fmt: skip
        assert all(len(written) <= 20 for written in overlap._written.values())
    assert launches.count("overlapped") > launches.count("plain") > 0


def test_steps_that_are_not_captured_launch_as_usual(
    launches: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def kernel(*given: Any) -> None:
        asked.append(given)

    y = on_gpu(np.zeros(8, np.float32))
    for captures, expected in ((False, []), (True, ["overlapped"])):
        monkeypatch.setattr(overlap, "is_capturing", lambda captures=captures: captures)
        overlap.launch_in_graph(kernel, (2,), (32,), [y], 5, writes=[y])
        assert launches == expected
    assert asked == [((2,), (32,), (y,), 5)]
    ((_, written),) = overlap._written.items()
    assert written == [backend.byte_bounds(y)]


@pytest.mark.parametrize(
    ("chip", "driver", "supported"),
    [(90, 12030, True), (100, 13000, True), (89, 12030, False), (90, 12029, False)],
)
def test_launches_may_overlap_from_hopper_on(
    chip: int, driver: int, supported: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = SimpleNamespace(driverGetVersion=lambda: driver)
    monkeypatch.setattr(backend, "cupy", SimpleNamespace(cuda=SimpleNamespace(runtime=runtime)))
    monkeypatch.setattr(overlap, "capability", lambda device: chip)
    assert overlap._is_supported.__wrapped__(0) is supported


def test_the_driver_gets_sizes_and_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ctypes.sizeof(overlap._LaunchAttribute) == 72
    assert ctypes.sizeof(overlap._LaunchConfig) == 56
    found: list[Any] = []

    def launch(config: Any, kernel: Any, arguments: Any, extra: Any) -> int:
        given = ctypes.cast(config, ctypes.POINTER(overlap._LaunchConfig)).contents
        sizes = [getattr(given, each[0]) for each in given._fields_[:7]]
        kind = ctypes.c_int.from_address(given.attributes).value
        value = ctypes.c_int.from_address(given.attributes + 8).value
        pointers = (ctypes.c_void_p * 2).from_address(arguments.value)
        values = [ctypes.c_int64.from_address(each).value for each in pointers if each]
        found.append(
            (sizes, given.stream, given.attribute_count, kind, value, kernel.value, values)
        )
        return len(found) - 1

    class DriverError(Exception):
        pass

    cuda = SimpleNamespace(driver=SimpleNamespace(CUDADriverError=DriverError))
    monkeypatch.setattr(backend, "cupy", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(overlap, "driver", lambda: SimpleNamespace(cuLaunchKernelEx=launch))
    kernel: Any = SimpleNamespace(ptr=77)
    arguments = [np.int64(-3), np.int32(4)]
    overlap._launch(kernel, (2, 3), (32,), arguments, 100, 7)
    assert found == [([2, 3, 1, 32, 1, 1, 100], 7, 1, 6, 1, 77, [-3, 4])]
    with pytest.raises(DriverError, match="1"):
        overlap._launch(kernel, (2, 3, 4), (8, 8, 2), arguments, 0, 0)
    assert found[1][0] == [2, 3, 4, 8, 8, 2, 0]


def test_arguments_are_laid_out_as_the_driver_takes_them() -> None:
    array = on_gpu(np.zeros(3, np.float32))
    strides = CacheStrides(1, 2, 3)
    for argument, expected in (
        (array, np.uintp(array.data.ptr).tobytes()),
        (np.int32(-5), np.int32(-5).tobytes() + bytes(4)),
        (np.bool_(True), b"\1" + bytes(7)),
        (np.float64(0.5), np.float64(0.5).tobytes()),
        (strides, np.array([1, 2, 3]).tobytes()),
        (SimpleNamespace(value=np.asarray(np.float32(2))), np.float32(2).tobytes() + bytes(4)),
        (SimpleNamespace(value=strides), np.array([1, 2, 3]).tobytes()),
    ):
        assert overlap._bytes_of(argument) == expected


def chain(arrays: dict[str, Any]) -> Any:
    """Return the result of kernels each of which needs what the one before has written."""
    x = Tensor(arrays["x"])
    with no_grad():
        for number in range(12):
            w = arrays["weights"][number % 3]
            x, y = tg.add_layer_norm(x, None, *arrays["norm"])
            width = x.shape[1]
            y = tg.linear(y, w[: 3 * width])  # (rows, 3 * width)
            keys, values = arrays["caches"][number]
            mixed = attend(y.data, keys, values, arrays["lengths"], counters=arrays["counters"])
            x, y = tg.add_rms_norm(x, tg.linear(Tensor(mixed), w[:width]), arrays["norm"][0])
            x = tg.feed_forward(y, w, None, w.T.copy(), None, x)
            x = tg.layer_norm(x, *arrays["norm"])  # keeps what follows finite
            weight = tg.linear(arrays["left"], x)  # (24, rows); x was written just before
            weight = tg.linear(weight, arrays["middle"])  # (24, width)
            x = tg.linear(tg.linear(x, weight), arrays["right"])
    return x.data


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", bfloat16], ids=str)
@pytest.mark.parametrize(
    ("rows", "heads"), [(1, 3), (5, 3), (13, 3), (32, 3), (1, 25), (2, 25), (8, 25)]
)
def test_results_are_those_of_kernels_one_after_the_other(
    rows: int, heads: int, dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cupy, rng, width = backend.cupy, np.random.default_rng(rows), 64 * heads

    def draw(*shape: int, scale: float = 1.0) -> Any:
        return cupy.asarray((rng.standard_normal(shape) * scale).astype(dtype))

    steps = 150
    caches = [[draw(rows, heads, steps, 64) for _ in range(2)] for _ in range(12)]
    arrays = {
        "x": draw(rows, width),
        "weights": [draw(4 * width, width, scale=width**-0.5) for _ in range(3)],
        "norm": (draw(width), draw(width)),
        "left": draw(24, width, scale=width**-0.5),
        "middle": draw(width, rows, scale=rows**-0.5),
        "right": draw(width, 24, scale=0.2),
        "lengths": cupy.asarray(rng.integers(0, steps, rows).astype("int32")),
        "counters": cupy.zeros(heads * rows, "uint32"),
        "caches": caches,
    }
    before = [[each.copy() for each in cache] for cache in caches]
    found = []
    for kind in ("plain", "overlapped", "captured"):
        if kind == "plain":
            monkeypatch.setattr(overlap, "_is_supported", lambda device: False)
        else:
            monkeypatch.undo()
        for _ in range(10):
            for cache, old in zip(caches, before, strict=True):
                for array, values in zip(cache, old, strict=True):
                    array[...] = values
            if kind == "captured":
                launch = Capture(lambda: chain(arrays))
                launch()
                y = launch.result
            else:
                y = chain(arrays)
            state = [backend.to_numpy(each).tobytes() for cache in caches for each in cache]
            found.append((backend.to_numpy(y).tobytes(), state))
            assert not arrays["counters"].any()
        assert np.isfinite(backend.to_numpy(y).astype("float64")).all()
    assert all(each == found[0] for each in found)


@pytest.mark.gpu
def test_a_fill_may_come_before_in_a_graph() -> None:
    cupy = backend.cupy
    x, w = cupy.ones((2, 64), "float32"), cupy.ones((8, 64), "float32")

    def step() -> Any:
        x.fill(3)
        y = cupy.zeros(4, "float32")
        with no_grad():
            return tg.linear(Tensor(x), Tensor(w)).data, y

    launch = Capture(step)
    launch()
    assert (launch.result[0] == 192).all()
