"""Sharing memory with NumPy, PyTorch and CuPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tensorgrad
from tensorgrad import Tensor, from_dlpack
from tensorgrad.errors import DeviceError, DtypeError

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

    x = tensorgrad.tensor([1, 2, 3], dtype, "cuda")
    y = from_dlpack(x)
    assert y.device == x.device
    assert y.dtype == x.dtype
    y[0] = 7
    assert x.tolist() == [7, 2, 3]
    if dtype != "bfloat16":
        assert cupy.from_dlpack(x).data.ptr == x.data.data.ptr


class Elsewhere:
    def __dlpack__(self, **kwargs: Any) -> None: ...

    def __dlpack_device__(self) -> tuple[int, int]:
        return (8, 0)


def test_what_cannot_be_shared() -> None:
    with pytest.raises(DtypeError, match="from_dlpack: x is a list, expected one with __dlpack__"):
        from_dlpack([1.0])
    with pytest.raises(DeviceError, match="from_dlpack: x is on a device of DLPack type 8, expec"):
        from_dlpack(Elsewhere())
    with pytest.raises(DtypeError, match="dtype: got complex64, expected one of float64"):
        from_dlpack(np.ones(3, "complex64"))


def test_dtypes_that_numpy_lacks() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(DtypeError, match="from_dlpack: x has a dtype that NumPy lacks"):
        from_dlpack(torch.ones(3).to(torch.float8_e4m3fn))
