"""Sharing memory with NumPy, PyTorch and CuPy."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import numpy as np
import pytest

import tensorgrad
from tensorgrad import Tensor, from_dlpack, nn
from tensorgrad.autograd.functions import jvp
from tensorgrad.compat import interop
from tensorgrad.core import backend
from tensorgrad.errors import ArgumentError, DeviceError, DtypeError, GradError

bfloat16 = tensorgrad.dtypes.bfloat16
DTYPES = ["float64", "float32", "float16", "bfloat16", "int64", "int32", "int8", "uint8", "bool"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_numpy_shares_memory_both_ways(dtype: str) -> None:
    values = np.array([[1, 0, 1], [1, 1, 0]]).astype(tensorgrad.dtypes.as_dtype(dtype))
    x = from_dlpack(Tensor(values))
    assert x.dtype == values.dtype
    assert np.shares_memory(x.data, values)
    assert x.data.flags.writeable
    np.testing.assert_array_equal(x.numpy(), values)
    assert np.shares_memory(np.asarray(x), values)
    if dtype != "bfloat16":
        assert np.shares_memory(np.from_dlpack(x), values)


def test_a_capsule_says_bfloat16_where_the_standard_has_the_type() -> None:
    api = ctypes.pythonapi
    api.PyCapsule_IsValid.argtypes = [ctypes.py_object, ctypes.c_char_p]
    api.PyCapsule_GetPointer.restype = ctypes.c_void_p
    api.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
    places = {b"dltensor": 20, b"dltensor_versioned": 52}
    for version in (None, (1, 0)):
        capsule = Tensor(np.zeros(3, bfloat16)).__dlpack__(max_version=version)
        (name,) = (each for each in places if api.PyCapsule_IsValid(capsule, each))
        header = api.PyCapsule_GetPointer(capsule, name)
        dtype = (ctypes.c_uint8 * 4).from_address(header + places[name])
        assert list(dtype) == [4, 16, 1, 0]  # its code, bits, and lanes of 16 bits


@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_shares_memory_both_ways(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    kind = getattr(torch, dtype)
    source = torch.tensor([[1, 0, 2], [1, 1, 0]]).to(kind)
    x = from_dlpack(source)
    assert str(x.dtype) == dtype
    assert x.tolist() == source.tolist()
    x[0, 1] = 1
    assert source[0, 1].item() == 1
    back = torch.from_dlpack(x)
    assert back.dtype == kind
    back[1, 2] = 1
    assert source[1, 2].item() == x[1, 2].item() == 1
    assert back.data_ptr() == source.data_ptr()


def test_views_cross_with_their_strides() -> None:
    torch = pytest.importorskip("torch")
    x = Tensor(np.arange(12, dtype="float32").reshape(3, 4))
    view = x.T[1:, ::2]
    other = torch.from_dlpack(view)
    assert other.tolist() == view.tolist()
    assert other.stride() == (1, 8)
    np.testing.assert_array_equal(from_dlpack(other).numpy(), view.numpy())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_memory_that_runs_backwards_is_copied(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    x = tensorgrad.tensor([1, 2, 3], dtype)
    backwards = tensorgrad.flip(x)
    assert torch.from_dlpack(backwards).tolist() == [3, 2, 1]
    with pytest.raises(BufferError, match="dlpack: the tensor has negative strides"):
        backwards.__dlpack__(copy=False)


def test_read_only_memory_stays_read_only() -> None:
    values = np.ones(3, "float32")
    values.flags.writeable = False
    x = from_dlpack(values)
    assert np.shares_memory(x.data, values)
    with pytest.raises(ValueError, match="read-only"):
        x[0] = 2


def test_gradients_do_not_notice_where_memory_came_from() -> None:
    torch = pytest.importorskip("torch")
    source = torch.ones(3)
    x = from_dlpack(source)
    x.requires_grad = True
    (x * x).backward(np.ones(3))
    assert x.grad is not None
    assert x.grad.tolist() == [2, 2, 2]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64"])
def test_gpu_memory_is_shared_with_cupy(dtype: str) -> None:
    import cupy

    x = tensorgrad.tensor([1, 2, 3], dtype, device="cuda")
    y = from_dlpack(x)
    assert y.device == x.device
    assert y.dtype == x.dtype
    y[0] = 7
    assert x.tolist() == [7, 2, 3]
    if dtype != "bfloat16":
        assert cupy.from_dlpack(x).data.ptr == x.data.data.ptr


@pytest.mark.gpu
def test_another_stream_reads_what_is_still_being_computed() -> None:
    import cupy

    here, there = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))

    class Exported:
        """Speaks for a tensor that is computed on another stream than the reader's."""

        def __dlpack__(self, **options: Any) -> Any:
            assert options["stream"] == there.ptr
            with here:
                return x.__dlpack__(**options)

        def __dlpack_device__(self) -> Any:
            return x.__dlpack_device__()

    with here:
        x = tensorgrad.zeros(1 << 25, device="cuda")
        for _ in range(100):  # 10 ms and more
            x += 1
    with there:
        total = from_dlpack(Exported()).sum()
        there.synchronize()
    assert total.item() == 100 * (1 << 25)


class Elsewhere:
    def __dlpack__(self, **kwargs: Any) -> None: ...

    def __dlpack_device__(self) -> tuple[int, int]:
        return (8, 0)


def test_what_cannot_be_shared() -> None:
    with pytest.raises(DtypeError, match="from_dlpack: x is a list, expected one with __dlpack__"):
        from_dlpack([1.0])
    with pytest.raises(DeviceError, match="from_dlpack: x is on a device of DLPack type 8, expec"):
        from_dlpack(Elsewhere())
    with pytest.raises(DtypeError, match=r"x has a dtype that NumPy lacks|dtype: got"):
        from_dlpack(np.ones(3, "clongdouble"))


def test_dtypes_that_numpy_lacks() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(DtypeError, match="from_dlpack: x has a dtype that NumPy lacks"):
        from_dlpack(torch.ones(3).to(torch.float8_e4m3fn))


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def both_outputs(x: Any, y: Any, scale: float) -> tuple[Any, Any]:
    """Return two results, of which the second is differentiable in y alone."""
    return (x * x * y).sum(1), scale * y


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_torch_differentiates_a_function_of_ours(dtype: str, device: str) -> None:
    torch = pytest.importorskip("torch")
    values = [np.random.default_rng(i).integers(-4, 5, (3, 4)).tolist() for i in range(2)]

    def gradients(function: Any) -> list[Any]:
        x, y = (
            torch.tensor(v, dtype=getattr(torch, dtype), device=device, requires_grad=True)
            for v in values
        )
        first, second = function(x + 0, y, 2.0)
        (first.sum() * 3 + (second * second).sum()).backward()
        return [t.float().tolist() for t in (first.detach(), second.detach(), x.grad, y.grad)]

    assert gradients(interop.as_torch_function(both_outputs)) == gradients(both_outputs)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ours_differentiates_a_function_of_torch(dtype: str, device: str) -> None:
    pytest.importorskip("torch")
    values = [np.random.default_rng(i).integers(-4, 5, (3, 4)) for i in range(2)]

    def gradients(function: Any) -> list[Any]:
        x, y = (tensorgrad.tensor(v, dtype, device=device, requires_grad=True) for v in values)
        first, second = function(x + 0, y, 2.0)
        (first.sum() * 3 + (second * second).sum()).backward()
        assert x.grad is not None
        assert y.grad is not None
        assert x.grad.dtype == first.dtype == x.dtype
        return [a.tolist() for a in (first, second, x.grad, y.grad)]

    assert gradients(interop.from_torch_function(both_outputs)) == gradients(both_outputs)


def test_a_derivative_that_torch_lacks_is_named() -> None:
    pytest.importorskip("torch")
    f = interop.from_torch_function(both_outputs)
    x, y = Tensor(np.ones((2, 3))), Tensor(np.ones((2, 3)))
    expected = r"from_torch_function\(both_outputs\): the function of PyTorch has gradients and no"
    with pytest.raises(GradError, match=expected):
        jvp(lambda x: f(x, y, 2.0)[0], (x,), (y,))
    gradient = tensorgrad.grad(lambda x: f(x, y, 2.0)[0].sum())
    assert gradient(x).tolist() == (2 * x).tolist()
    with pytest.raises(GradError, match=expected):
        tensorgrad.grad(lambda x: (gradient(x) * x).sum())(x)


def test_parameters_of_the_other_side_get_their_gradients() -> None:
    torch = pytest.importorskip("torch")
    layer, peer = nn.Linear(3, 2), torch.nn.Linear(3, 2)
    pairs: Any = [(layer.weight, peer.weight), (layer.bias, peer.bias)]
    for own, other in pairs:
        other.data.copy_(torch.from_dlpack(own.detach()))
    x = np.random.default_rng(0).standard_normal((4, 3), "float32")
    ours, theirs = interop.as_torch_function(layer), interop.from_torch_function(peer)
    for _ in range(2):  # the second time both add to what is there
        outside = ours(torch.from_numpy(x))  # the input wants no gradient, the parameters do
        outside.square().sum().backward()
        inside = theirs(Tensor(x))
        (inside * inside).sum().backward()
        np.testing.assert_allclose(inside.numpy(), outside.detach().numpy(), rtol=1e-6)
        for own, other in pairs:
            np.testing.assert_allclose(own.grad, other.grad.numpy(), rtol=1e-5)


def test_nothing_is_recorded_where_no_gradient_is_wanted() -> None:
    torch = pytest.importorskip("torch")
    x = torch.ones(3, requires_grad=True)
    double = interop.as_torch_function(lambda x: x * 2)
    with torch.no_grad():
        assert not double(x).requires_grad
    assert not interop.as_torch_function(lambda x: x > 0)(x).requires_grad
    assert not double(torch.ones(3, dtype=torch.int64)).requires_grad
    inside = interop.from_torch_function(lambda x: x * 2)
    assert not inside(tensorgrad.ones(3)).requires_grad
    with tensorgrad.no_grad():
        assert not inside(Tensor(np.ones(3), requires_grad=True)).requires_grad


def test_gradients_stop_where_they_are_not_wanted() -> None:
    torch = pytest.importorskip("torch")
    x, y = torch.ones(2, requires_grad=True), torch.ones(2)
    interop.as_torch_function(lambda x, y: x * y)(x, y).sum().backward()
    assert x.grad.tolist() == [1, 1]
    assert y.grad is None
    a, b = Tensor(np.ones(2), requires_grad=True), Tensor(np.ones(2))
    interop.from_torch_function(lambda x, y: x * y)(a, b).sum().backward()
    assert a.grad is not None
    assert a.grad.tolist() == [1, 1]
    assert b.grad is None


def test_bad_functions_across_libraries() -> None:
    torch = pytest.importorskip("torch")
    for wrap in (interop.as_torch_function, interop.from_torch_function):
        with pytest.raises(ArgumentError, match=f"{wrap.__name__}: f is a int, expected a functi"):
            wrap(3)  # type: ignore[arg-type]
    with pytest.raises(DtypeError, match="the function returned float, expected tensors"):
        interop.as_torch_function(lambda x: 1.0)(torch.ones(2))
    with pytest.raises(DtypeError, match="the function returned NoneType, expected PyTorch"):
        interop.from_torch_function(lambda x: None)(tensorgrad.ones(2))
    with pytest.raises(DtypeError, match="the function returned tuple, expected PyTorch tensors"):
        interop.from_torch_function(lambda x: ())(tensorgrad.ones(2))
    with pytest.raises(DtypeError, match="complex64 with requires_grad, expected a float"):
        interop.as_torch_function(lambda x: x)(
            torch.ones(2, dtype=torch.complex64, requires_grad=True)
        )


def test_a_second_backward_is_one_error() -> None:
    torch = pytest.importorskip("torch")
    y = interop.as_torch_function(lambda x: x * x)(torch.ones(2, requires_grad=True)).sum()
    y.backward(retain_graph=True)
    with pytest.raises(GradError, match="as_torch_function: backward came a second time"):
        y.backward()


def test_torch_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ArgumentError, match="as_torch_function: PyTorch is not installed; run"):
        interop.as_torch_function(abs)


def test_copies_through_dlpack(device: str) -> None:
    x = Tensor(backend.to_device(np.arange(3.0), device))
    assert x.__dlpack__(copy=True) is not None
    y = np.from_dlpack(x, device="cpu")
    np.testing.assert_array_equal(y, x.numpy())
    if device != "cpu":
        with pytest.raises(BufferError, match="dlpack: the tensor is on a GPU, expected copy=None"):
            x.__dlpack__(copy=False, dl_device=(1, 0))


def test_strides_and_copies_through_numpy() -> None:
    values = np.arange(3.0)
    still = Tensor(np.lib.stride_tricks.as_strided(values, (2, 3), (0, 8)))
    assert np.shares_memory(np.from_dlpack(still), values)  # a stride of 0 runs nowhere
    for dtype in ("float32", "bfloat16"):
        backwards = tensorgrad.flip(tensorgrad.tensor([1, 2, 3], dtype))
        assert from_dlpack(backwards).tolist() == [3, 2, 1]
        with pytest.raises(BufferError, match="dlpack: the tensor has negative strides, expected"):
            backwards.__dlpack__(copy=False)
    assert np.shares_memory(from_dlpack(values).data, values)
    for copy, device in ((None, None), (False, None), (None, "cpu"), (False, "cpu")):
        assert np.shares_memory(from_dlpack(values, copy=copy, device=device).data, values)
    for device in (None, "cpu"):
        copied = from_dlpack(values, copy=True, device=device)
        assert not np.shares_memory(copied.data, values)
        assert copied.tolist() == [0, 1, 2]


def test_a_move_is_the_only_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    values, moved = np.arange(3.0), np.arange(3.0)
    monkeypatch.setattr(backend, "to_device", lambda array, device: moved)
    assert from_dlpack(values, device="cuda").data is moved
    assert from_dlpack(values, device="cuda", copy=True).data is moved
    with pytest.raises(ArgumentError, match="copy is False, expected the device of x"):
        from_dlpack(values, device="cuda", copy=False)


def test_results_of_functions_are_tensors_in_a_tuple() -> None:
    x, y = tensorgrad.ones(2), tensorgrad.zeros(2)
    right: list[tuple[Any, Any]] = [(x, (x,)), ([x, y], (x, y)), ((y,), (y,))]
    for result, expected in right:
        found = interop._several("f", result, Tensor, "tensors")
        assert type(found) is tuple
        assert all(one is two for one, two in zip(found, expected, strict=True))
    wrong: list[tuple[Any, str]] = [
        (1.0, "float"), ((x, x.data), "ndarray"), ((), "tuple"), ([], "list"),
    ]  # fmt: skip
    for result, name in wrong:
        with pytest.raises(DtypeError, match=f"f: the function returned {name}, expected tensors"):
            interop._several("f", result, Tensor, "tensors")


def test_backward_begins_at_several_results() -> None:
    values = np.array([1.0, 2.0])
    leaf = interop._leaf(Tensor(values), True)
    assert leaf.requires_grad
    assert not interop._leaf(Tensor(values), False).requires_grad
    assert np.shares_memory(leaf.data, values)
    outputs = (leaf * 3, leaf * leaf, leaf * 1e9)
    with tensorgrad.no_grad():
        interop._backward_from(outputs, [np.array([1.0, 10.0]), np.ones(2), None])
    np.testing.assert_array_equal(leaf.grad, [3 + 2, 30 + 4])


@pytest.mark.parametrize("wrap", [interop.as_torch_function, interop.from_torch_function])
def test_what_wraps_functions_names_what_is_missing(
    wrap: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ArgumentError, match=f"{wrap.__name__}: f is a int, expected a function"):
        wrap(3)
    with pytest.raises(ArgumentError, match=f"{wrap.__name__}: PyTorch is not installed; run `pip"):
        wrap(abs)
