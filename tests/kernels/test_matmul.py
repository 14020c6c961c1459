"""Each kernel for matrix products against float64, in every layout and at awkward sizes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import tensorgrad
import tensorgrad as tg
from tensorgrad import Tensor
from tensorgrad.core import backend
from tensorgrad.errors import ArgumentError, KernelError
from tensorgrad.kernels import loader
from tensorgrad.kernels import matmul as matmul_cuda
from tensorgrad.kernels.matmul.problem import problem
from tests.kernels.compiled import compile_all

FLOATS = ("float64", "float32", "float16", "bfloat16")
CASES = [
    *(("tiled", dtype) for dtype in FLOATS),
    *(("cublas", dtype) for dtype in FLOATS),
    ("tf32", "float32"),
    ("mma tf32", "float32"),
]
NAMED = [case for case in CASES if case[0] != "mma tf32"]
TF32 = ("mma tf32", "tf32")  # operands are rounded to it, by half a unit of its last bit
SIZES = (1, 2, 8, 31, 33, 64, 127, 129, 200, 257)
EPSILON = {
    "float64": 2.0**-53, "float32": 2.0**-24, "tf32": 2.0**-11, "float16": 2.0**-11,
    "bfloat16": 2.0**-8,
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """All instantiations, compiled on all cores at once."""
    if backend.gpu_count():
        files = ("matmul/tiled.cu", "matmul/sm80.cu")
        compile_all([(f, k) for f in files for k in loader._read(f).kernels])


def draw(rng: Any, shape: tuple[int, ...], dtype: str) -> Any:
    """Return random numbers and, for the GPU, the same."""
    values = rng.standard_normal(shape).astype(tensorgrad.dtypes.as_dtype(dtype))
    return values, backend.cupy.asarray(values)


def run(p: Any, kernel: str) -> None:
    """Compute y; "mma tf32" is the tiled kernel with operands that are rounded to TF32."""
    if kernel == "mma tf32":
        matmul_cuda.run(p._replace(tf32=True), "tiled")
    else:
        matmul_cuda.run(p, kernel)


def exact(a: Any, b: Any) -> tuple[Any, Any]:
    """Return the product in float64, and the sums of the magnitudes of its terms."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    return a @ b, np.abs(a) @ np.abs(b)


def assert_close(got: Any, a: Any, b: Any, kernel: str, dtype: str) -> None:
    expected, magnitude = exact(a, b)
    y = backend.to_numpy(got).astype(np.float64)
    stored = EPSILON[str(got.dtype)]
    # Fractions of the sum of the terms' magnitudes: what their sum rounds off, and what TF32 does.
    inside = EPSILON["float64" if dtype == "float64" else "float32"] * (4 + 2 * a.shape[-1] ** 0.5)
    inside += 2 * EPSILON["tf32"] * (kernel in TF32)
    bound = 1.01 * stored * np.abs(expected) + inside * magnitude + 1e-30
    if str(got.dtype) == "float16":
        bound += 2.0**-25  # subnormal
    assert y.shape == expected.shape
    worst = np.max(np.abs(y - expected) / bound, initial=0)
    assert worst <= 1, f"{kernel} {dtype} {a.shape} {b.shape}: {worst:.2f} times the bound"


def guarded(shape: tuple[int, ...], dtype: Any) -> tuple[Any, Any]:
    """Return an array full of NaN, and the memory that it lies in the middle of."""
    size, edge = int(np.prod(shape)), 64
    room = backend.cupy.full(size + 2 * edge, np.nan, dtype)
    return room[edge : edge + size].reshape(shape), room


def stored(values: Any, layout: str) -> Any:
    """Return an equal GPU matrix, in C ("n") or Fortran ("t") order."""
    return values if layout == "n" else values.swapaxes(-1, -2).copy().swapaxes(-1, -2)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
@pytest.mark.parametrize(("kernel", "dtype"), CASES)
def test_shapes_and_layouts(kernel: str, dtype: str, layout: str) -> None:
    rng = np.random.default_rng(len(kernel) * 7 + ord(layout[0]) + 3 * ord(layout[1]))
    shapes = [tuple(int(n) for n in rng.choice(SIZES, 3)) for _ in range(30)]
    shapes += [(1023, 70, 1025), (130, 1000, 264), (2048, 96, 2304), (0, 3, 4), (3, 0, 4)]
    for rows, width, columns in shapes:
        a, a_gpu = draw(rng, (rows, width), dtype)
        b, b_gpu = draw(rng, (width, columns), dtype)
        a_gpu, b_gpu = stored(a_gpu, layout[0]), stored(b_gpu, layout[1])
        wide = tensorgrad.dtypes.compute_dtype(a.dtype)
        for out in {a.dtype, wide}:
            y, room = guarded((rows, columns), out)
            run(problem(a_gpu, b_gpu, y), kernel)
            assert_close(y, a, b, kernel, dtype)
            assert int(backend.cupy.isnan(room.astype("float32")).sum()) == 128, "wrote outside"
            again = backend.cupy.full_like(y, np.nan)
            run(problem(a_gpu, b_gpu, again), kernel)
            assert again.tobytes() == y.tobytes()


def views(array: Any) -> dict[str, Any]:
    """Return views of a GPU array (B, 66, 66) of shape (B, 33, 33) with all kinds of strides."""
    return {
        "columns apart": array[:, :33, ::2],
        "rows apart": array[:, ::2, :33],
        "both apart": array[:, ::2, ::2],
        "turned": array[:, :33, ::2].swapaxes(1, 2),
        "backwards": array[:, 32::-1, 32::-1],
        "misaligned": array[:, 1:34, 1:34],
        "one row": backend.cupy.broadcast_to(array[:, :1, :33], (len(array), 33, 33)),
        "one column": backend.cupy.broadcast_to(array[:, :33, :1], (len(array), 33, 33)),
        "one matrix": backend.cupy.broadcast_to(array[:1, :33, :33], (len(array), 33, 33)),
        "last first": array[::-1, :33, :33],
    }


@pytest.mark.gpu
@pytest.mark.parametrize(("kernel", "dtype"), CASES)
def test_strides_are_read_in_place(kernel: str, dtype: str) -> None:
    rng = np.random.default_rng(5)
    left, right = (backend.cupy.asarray(draw(rng, (3, 66, 66), dtype)[0]) for _ in range(2))
    for (one, a), (two, b) in itertools.product(views(left).items(), views(right).items()):
        y = backend.cupy.full((3, 33, 33), np.nan, a.dtype)
        run(problem(a, b, y), kernel)
        try:
            assert_close(y, backend.to_numpy(a), backend.to_numpy(b), kernel, dtype)
        except AssertionError as error:
            raise AssertionError(f"{one}, {two}") from error


BATCHES = [
    ((5, 40, 24), (5, 24, 72)),
    ((5, 40, 24), (24, 72)),
    ((40, 24), (5, 24, 72)),
    ((2, 3, 40, 24), (2, 3, 24, 72)),
    ((2, 1, 40, 24), (3, 24, 72)),
    ((2, 3, 40, 24), (3, 24, 72)),
    ((1, 40, 24), (7, 24, 72)),
    ((300, 8, 8), (300, 8, 8)),
    ((0, 8, 8), (0, 8, 8)),
    ((24,), (3, 24, 72)),
    ((3, 40, 24), (24,)),
]


@pytest.mark.gpu
@pytest.mark.parametrize("shapes", BATCHES)
@pytest.mark.parametrize(("kernel", "dtype"), NAMED)
def test_batches(kernel: str, dtype: str, shapes: Any) -> None:
    rng = np.random.default_rng(11)
    (a, a_gpu), (b, b_gpu) = (draw(rng, shape, dtype) for shape in shapes)
    y = tensorgrad.matmul(Tensor(a_gpu), Tensor(b_gpu), kernel=kernel)
    assert_close(y.data, a, b, kernel, dtype)
    turned = a_gpu.swapaxes(0, 1).copy().swapaxes(0, 1) if a.ndim > 2 else a_gpu
    y = tensorgrad.matmul(Tensor(turned), Tensor(b_gpu), kernel=kernel)
    assert_close(y.data, a, b, kernel, dtype)


def slope_of_gelu(x: Any) -> Any:
    scale = np.sqrt(2 / np.pi)
    tanh = np.tanh(scale * (x + 0.044715 * x**3))
    return 0.5 * (1 + tanh) + 0.5 * x * (1 - tanh**2) * scale * (1 + 3 * 0.044715 * x**2)


def gelu(x: Any) -> Any:
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


@pytest.mark.gpu
@pytest.mark.parametrize(("kernel", "dtype"), CASES)
def test_products_are_captured(kernel: str, dtype: str) -> None:
    cupy, rng = backend.cupy, np.random.default_rng(7)
    (a, a_gpu), (b, b_gpu) = draw(rng, (128, 512), dtype), draw(rng, (512, 64), dtype)
    a_gpu.fill(0)
    y = cupy.full((128, 64), np.nan, a.dtype)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.runtime.deviceSynchronize()  # it does not wait for the stream that filled the arrays
    with stream:
        run(problem(a_gpu, b_gpu, y), kernel)
        stream.begin_capture()
        run(problem(a_gpu, b_gpu, y), kernel)
        graph = stream.end_capture()
        a_gpu.set(a, stream=stream)
        graph.launch(stream)
    stream.synchronize()
    assert_close(y, a, b, kernel, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [64, 65, 136, 520])
@pytest.mark.parametrize(("kernel", "dtype"), [case for case in CASES if case[0] != "cublas"])
def test_what_follows_the_product(kernel: str, dtype: str, columns: int) -> None:
    rng = np.random.default_rng(columns)
    (a, a_gpu), (b, b_gpu) = draw(rng, (2, 70, 40), dtype), draw(rng, (2, 40, columns), dtype)
    wide = tensorgrad.dtypes.compute_dtype(a.dtype)
    inside = EPSILON[str(wide)] * (4 + 2 * a.shape[-1] ** 0.5)
    inside += 2 * EPSILON["tf32"] * (kernel in TF32)
    product, magnitude = exact(a, b)

    def close(got: Any, expected: Any) -> None:
        """Compare; an error of the product counts up to 1.2 times, as gelu's slope is at most."""
        bound = 3 * EPSILON[str(got.dtype)] * np.abs(expected)
        bound += 1.2 * inside * (magnitude + 4)
        worst = (np.abs(got.get().astype(float) - expected) / bound).max()
        assert worst <= 1, f"{worst:.2f} times the bound"

    for out in {a.dtype, wide}:
        bias, bias_gpu = draw(rng, (columns,), dtype)
        residual, residual_gpu = draw(rng, product.shape, str(out))
        y, before = (backend.cupy.full(product.shape, np.nan, out) for _ in range(2))
        bias, residual = bias.astype(float), residual.astype(float)

        run(problem(a_gpu, b_gpu, y, bias=bias_gpu), kernel)
        close(y, product + bias)
        p = problem(a_gpu, b_gpu, y, bias=bias_gpu.astype(wide), before_gelu=before)
        run(p, kernel)
        close(before, product + bias)
        close(y, gelu(product + bias))
        y.fill(np.nan)
        run(problem(a_gpu, b_gpu, y, gelu=True), kernel)
        close(y, gelu(product))
        run(problem(a_gpu, b_gpu, y, gelu_of=residual_gpu), kernel)
        close(y, product * slope_of_gelu(residual))
        run(problem(a_gpu, b_gpu, y, residual=residual_gpu), kernel)
        close(y, product + residual)
        if kernel != "cublas":
            p = problem(a_gpu, b_gpu, y, bias=bias_gpu, gelu=True, residual=residual_gpu)
            run(p, kernel)
            close(y, gelu(product + bias) + residual)


@pytest.mark.gpu
@pytest.mark.parametrize(("kernel", "dtype"), CASES)
def test_products_are_added_to_what_is_there(kernel: str, dtype: str) -> None:
    rng = np.random.default_rng(3)
    for columns in (72, 71):
        (a, a_gpu), (b, b_gpu) = draw(rng, (150, 300), dtype), draw(rng, (300, columns), dtype)
        wide = tensorgrad.dtypes.compute_dtype(a.dtype)
        y = backend.cupy.full((150, columns), 1000, wide)
        run(problem(a_gpu, b_gpu, y, add=True), kernel)
        bound = 0.1 if kernel in TF32 else 1e-3 if wide == np.float32 else 1e-10
        np.testing.assert_allclose(y.get(), 1000 + exact(a, b)[0], rtol=0, atol=bound)
        empty = problem(a_gpu[:, :0], b_gpu[:0], y, add=True)
        before = y.get()
        run(empty, kernel)
        np.testing.assert_array_equal(y.get(), before)


@pytest.mark.gpu
@pytest.mark.parametrize(("kernel", "dtype"), [case for case in NAMED if case[0] != "tf32"])
def test_gradients_are_computed_by_the_same_kernel(
    kernel: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = []
    chosen = matmul_cuda.KERNELS[kernel]

    def counted(p: Any) -> None:
        used.append(p)
        chosen.multiply(p)

    monkeypatch.setitem(matmul_cuda.KERNELS, kernel, chosen._replace(multiply=counted))
    rng = np.random.default_rng(1)
    (x, x_gpu), (w, w_gpu) = draw(rng, (4, 30, 64), dtype), draw(rng, (48, 64), dtype)
    dy, dy_gpu = draw(rng, (4, 30, 48), dtype)
    tensors = Tensor(x_gpu, requires_grad=True), Tensor(w_gpu, requires_grad=True)
    tg.linear(*tensors, kernel=kernel).backward(dy_gpu)
    assert len(used) == 3
    dx, dw = (tensor.grad for tensor in tensors)
    assert dx is not None
    assert_close(dx.reshape(-1, 64), dy.reshape(-1, 48), w, kernel, dtype)
    assert_close(dw, dy.reshape(-1, 48).T, x.reshape(-1, 64), kernel, dtype)


@pytest.mark.gpu
def test_tf32_is_kept_for_backward_and_float32_stays_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    rounded: list[bool] = []
    fastest = matmul_cuda._fastest

    def noted(p: Any) -> Any:
        rounded.append(p.tf32)
        return fastest(p)

    monkeypatch.setattr(matmul_cuda, "_fastest", noted)
    rng = np.random.default_rng()
    (x, x_gpu), (w, w_gpu) = draw(rng, (30, 65), "float32"), draw(rng, (48, 65), "float32")
    dy, dy_gpu = draw(rng, (30, 48), "float32")
    for inside in (True, False):
        monkeypatch.setattr(matmul_cuda, "_chosen", {})
        rounded.clear()
        tensors = Tensor(x_gpu, requires_grad=True), Tensor(w_gpu, requires_grad=True)
        with tg.autocast("tf32", enabled=inside):
            y = tg.linear(*tensors)
        y.backward(dy_gpu)
        assert rounded == [inside] * 3
        kernel = "tf32" if inside else "cublas"
        dx, dw = (tensor.grad for tensor in tensors)
        assert_close(y.data, x, w.T, kernel, "float32")
        assert_close(dx, dy, w, kernel, "float32")
        assert_close(dw, dy.T, x, kernel, "float32")
        error = np.abs(y.numpy() - x.astype(float) @ w.T.astype(float)).max()
        assert (error > 1e-4) == inside


@pytest.mark.gpu
def test_every_product_of_a_layer_is_in_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss and gradients of fused layers in TF32, beside the same in float64 on the CPU."""
    asked: list[str | None] = []
    own_run = matmul_cuda.run

    def noted(p: Any, kernel: str | None = None) -> None:
        asked.append(kernel)
        own_run(p, kernel)

    monkeypatch.setattr(matmul_cuda, "run", noted)
    rng = np.random.default_rng()
    shapes = (37, 96), (200, 96), (96, 200), (200, 96), (515, 96), (200,), (96,)
    scales = (1, 0.1, 0.1, 0.1, 0.1, 1, 1)
    arrays = [scale * rng.standard_normal(s) for s, scale in zip(shapes, scales, strict=True)]
    targets = rng.integers(0, 515, 37)

    def gradients(device: str, dtype: str, precision: str | None) -> list[Any]:
        leaves: list[Any] = [
            Tensor(backend.to_device(a.astype(dtype), device), requires_grad=True) for a in arrays
        ]
        x, up, down, gate, head, up_bias, down_bias = leaves
        for leaf in leaves[1:]:
            leaf.grad = backend.to_device(np.zeros(leaf.shape, dtype), device)
        with tg.autocast(precision or "tf32", enabled=precision is not None):
            y = tg.feed_forward(x, up, up_bias, down, down_bias, residual=x)
            gated = tg.gated_linear(y, up, gate)
            y = tg.linear_gelu(gated, down, down_bias) + tg.einsum("nh,hc->nc", gated, gate)
            loss = tg.linear_cross_entropy(y, head, backend.to_device(targets, device))
        loss.backward()
        found = [loss.data, *(leaf.grad for leaf in leaves)]
        return [backend.to_numpy(each).astype(np.float64) for each in found]

    expected = gradients("cpu", "float64", None)
    wide = gradients("cuda", "float32", None)
    assert set(asked) == {None}
    asked.clear()
    rounded = gradients("cuda", "float32", "tf32")
    assert set(asked) == {"tf32"}

    def errors(found: list[Any]) -> list[float]:
        return [
            float(np.linalg.norm(a - b) / np.linalg.norm(b))
            for a, b in zip(found, expected, strict=True)
        ]

    assert max(errors(wide)) < 1e-5
    assert max(errors(rounded)) < 4e-3  # 1e-3 where every operand is rounded, more if cut off
    assert min(errors(rounded)[1:]) > 1e-4


SMALL = (0, 1, 2, 3, 7, 8, 9, 16, 33)


def placed(values: Any, offset: int) -> Any:
    """Return the GPU's copy of an array, begun `offset` elements after aligned memory."""
    room = backend.cupy.empty(values.size + offset, values.dtype)
    view = room[offset:].reshape(values.shape)
    view.set(values) if values.size else None
    return view


def near(got: Any, expected: Any, magnitude: Any, eps: float) -> bool:
    """Whether results are as exact as their dtype, given the sums of the magnitudes of terms."""
    found = backend.to_numpy(got).astype(np.float64)
    assert found.shape == expected.shape
    roundings = 4 if eps > 2.0**-20 else 16  # sums of up to 33 terms are wide for 16 bits alone
    return bool((np.abs(found - expected) <= roundings * eps * magnitude).all())


@pytest.fixture
def kind(dtype: str) -> Iterator[Any]:
    """The dtype of arrays; for "tf32" float32, in a block of `autocast`."""
    with tg.autocast("tf32", enabled=dtype == "tf32"):
        yield tensorgrad.dtypes.as_dtype("float32" if dtype == "tf32" else dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("dtype", [*FLOATS, "tf32"])
def test_linear_layers_of_every_small_size(dtype: str, offset: int, kind: Any) -> None:
    """Epilogues of a product, and gradients, where no kernel is at home: 1, odd, misaligned."""
    rng, eps = np.random.default_rng(offset), EPSILON[dtype]
    wide = tensorgrad.dtypes.compute_dtype(kind)
    for sizes in itertools.product(SMALL, SMALL, SMALL):
        rows, columns, width = sizes
        shapes = (rows, width), (columns, width), (columns,), (rows, columns), (rows, columns)
        arrays = [rng.standard_normal(shape).astype(kind) for shape in shapes]
        x, w, b, residual, dy = [placed(array, offset) for array in arrays]
        x64, w64, b64, residual64, dy64 = [array.astype(np.float64) for array in arrays]
        pre = x64 @ w64.T + b64
        size = np.abs(x64) @ np.abs(w64).T + np.abs(b64) + 1

        tensors = [Tensor(array, requires_grad=True) for array in (x, w, b, residual)]
        y = tg.linear(tensors[0], tensors[1], tensors[2], residual=tensors[3])
        assert near(y.data, pre + residual64, size + np.abs(residual64), eps), sizes
        for tensor in tensors:  # gradients that products add to themselves
            tensor.grad = backend.cupy.ones(tensor.shape, wide)
        y.backward(dy)
        dx, dw, db, dresidual = (tensor.grad for tensor in tensors)
        assert near(dx, 1 + dy64 @ w64, 1 + np.abs(dy64) @ np.abs(w64), eps), sizes
        assert near(dw, 1 + dy64.T @ x64, 1 + np.abs(dy64).T @ np.abs(x64), eps), sizes
        assert near(db, 1 + dy64.sum(0), 1 + np.abs(dy64).sum(0), eps), sizes
        assert near(dresidual, 1 + dy64, 1 + np.abs(dy64), eps), sizes

        slope = dy64 * slope_of_gelu(pre)
        steep = np.abs(dy64) * (size + 2)  # that the slope may change by as pre is rounded
        for biased in (True, False) if rows and columns else (True,):
            pre_here = pre if biased else pre - b64
            slope = dy64 * slope_of_gelu(pre_here)
            tensors = [Tensor(array, requires_grad=True) for array in (x, w, b)[: 2 + biased]]
            operands: Any = tensors
            with tensorgrad.no_grad():
                assert near(tg.linear_gelu(*operands).data, gelu(pre_here), size, eps), sizes
            y = tg.linear_gelu(*operands)
            assert near(y.data, gelu(pre_here), size, eps), sizes
            y.backward(dy)
            assert near(tensors[0].grad, slope @ w64, steep @ np.abs(w64), eps), sizes
            assert near(tensors[1].grad, slope.T @ x64, steep.T @ np.abs(x64), eps), sizes
        fused = kind.itemsize == 2 or dtype == "tf32"
        if rows and columns and width and fused:  # the product of feed_forward's backward
            total = placed(np.full((rows, columns), np.nan, kind), offset)
            kernel = "tf32" if dtype == "tf32" else None
            matmul_cuda.run(problem(x, w.T, total, gelu_of=residual), kernel)
            product = (pre - b64) * slope_of_gelu(residual64)
            assert near(total, product, 2 * size, eps), sizes


@pytest.mark.gpu
@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("dtype", FLOATS)
def test_batches_of_small_sizes(dtype: str, offset: int) -> None:
    rng, eps = np.random.default_rng(offset), EPSILON[dtype]
    kind = tensorgrad.dtypes.as_dtype(dtype)
    for sizes in itertools.product((0, 1, 3, 8, 33), repeat=3):
        rows, width, columns = sizes
        for left, right in (((3,), (3,)), ((3,), ()), ((), (2,))):
            shapes = (*left, rows, width), (*right, width, columns)
            a, b = (rng.standard_normal(shape).astype(kind) for shape in shapes)
            tensors = [Tensor(placed(array, offset), requires_grad=True) for array in (a, b)]
            y = tensorgrad.matmul(tensors[0], tensors[1])
            expected, magnitude = exact(a, b)
            assert near(y.data, expected, magnitude + 1, eps), sizes
            dy = rng.standard_normal(y.shape).astype(kind)
            y.backward(placed(dy, offset))
            for tensor, factors in zip(
                tensors, ((dy, b.swapaxes(-1, -2)), (a.swapaxes(-1, -2), dy)), strict=True
            ):
                expected, magnitude = (summed(each, tensor.shape) for each in exact(*factors))
                assert near(tensor.grad, expected, magnitude + 1, eps), sizes
        gates = [rng.standard_normal(s).astype(kind)
                 for s in ((rows, width), (columns, width), (columns, width))]  # fmt: skip
        tensors = [Tensor(placed(array, offset), requires_grad=True) for array in gates]
        y = tg.gated_linear(*tensors)
        dy = np.ones(y.shape, kind)
        y.backward(placed(dy, offset))
        wide = [Tensor(array.astype(np.float64), requires_grad=True) for array in gates]
        expected = tg.gated_linear(*wide)
        expected.backward(dy.astype(np.float64))
        size = (width + 4) ** 2 * (columns + 2) * 4  # a bound of what is added up, not a close one
        assert near(y.data, expected.data, size, eps), sizes
        for tensor, reference in zip(tensors, wide, strict=True):
            assert near(tensor.grad, reference.grad, size, eps), sizes


def summed(values: Any, shape: tuple[int, ...]) -> Any:
    """Return the gradient of what was broadcast along the leading axis."""
    return values.sum(0) if values.ndim > len(shape) else values


def test_what_cublas_refuses_when_called_the_tiled_kernel_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    used: list[str] = []

    def refused(p: Any) -> None:
        used.append("cublas")
        raise KernelError("matmul: cublasLtMatmul got cuBLAS error 7, expected 0")

    def tiled(p: Any) -> None:
        used.append("tiled")

    kernels = {
        "cublas": matmul_cuda.Implementation(lambda p: None, refused),
        "tiled": matmul_cuda.Implementation(lambda p: None, tiled),
        "wgmma": matmul_cuda.Implementation(lambda p: None, refused),
    }
    monkeypatch.setattr(matmul_cuda, "KERNELS", kernels)
    monkeypatch.setattr(matmul_cuda, "_chosen", {})
    p: Any = SimpleNamespace(y=np.zeros(1), signature=lambda: ("one",))
    monkeypatch.setattr(matmul_cuda, "_fastest", lambda p: kernels["cublas"])
    matmul_cuda.run(p)
    matmul_cuda.run(p)
    assert used == ["cublas", "tiled", "tiled"]
    p = SimpleNamespace(y=np.zeros(1), signature=lambda: ("two",))
    monkeypatch.setattr(matmul_cuda, "_fastest", lambda p: kernels["wgmma"])
    with pytest.raises(KernelError, match="error 7"):  # from our own kernels that is a fault
        matmul_cuda.run(p)


@pytest.mark.gpu
def test_a_kernel_that_does_not_do_the_product() -> None:
    a = Tensor(backend.cupy.ones((4, 4), "float16"))
    with pytest.raises(ArgumentError, match="matmul: kernel is 'tf32', which needs float32 op"):
        tensorgrad.matmul(a, a, kernel="tf32")
    wide = backend.cupy.ones((4, 4))
    follows = problem(wide, wide, wide.copy(), bias=wide[0])
    with pytest.raises(ArgumentError, match="kernel is 'cublas', which needs another dtype than"):
        matmul_cuda.run(follows, "cublas")
    integers = Tensor(backend.cupy.ones((4, 4), "int32"))
    with pytest.raises(ArgumentError, match="matmul: kernel is 'tiled', expected None for int32"):
        tensorgrad.matmul(integers, integers, kernel="tiled")


@pytest.mark.parametrize(
    ("shape", "batch", "expected"),
    [
        ((5, 7), (), (0, 7, 1)),
        ((5, 7), (2, 3), (0, 7, 1)),
        ((3, 5, 7), (3,), (35, 7, 1)),
        ((2, 3, 5, 7), (2, 3), (35, 7, 1)),
        ((1, 5, 7), (3,), (0, 7, 1)),
        ((1, 1, 5, 7), (2, 3), (0, 7, 1)),
    ],
)
def test_steps_between_matrices(shape: Any, batch: Any, expected: Any) -> None:
    array = np.zeros(shape, "float32")
    assert operand(broadcast(array, batch), batch)[1:] == expected
    turned = np.zeros((*shape[:-2], 7, 5), "float32").swapaxes(-1, -2)
    found = operand(broadcast(turned, batch), batch)[1:]
    assert found == (expected[0], 1, 5)


def broadcast(array: Any, batch: Any) -> Any:
    return array if array.ndim == 2 else np.broadcast_to(array, (*batch, *array.shape[-2:]))


def operand(array: Any, batch: Any) -> Any:
    y = np.zeros((*batch, array.shape[-2], 1), "float32")
    return problem(array, np.zeros((array.shape[-1], 1), "float32"), y).a


def test_matrices_that_no_single_step_leads_to_are_copied() -> None:
    array = np.broadcast_to(np.arange(70, dtype="float32").reshape(2, 1, 5, 7), (2, 3, 5, 7))
    found = operand(array, (2, 3))
    assert found[1:] == (35, 7, 1)
    np.testing.assert_array_equal(found.array, array)
    assert found.array.flags.c_contiguous


def test_there_is_no_such_kernel() -> None:
    a = np.ones((2, 2), "float32")
    with pytest.raises(ArgumentError, match="matmul: kernel is 'fast', expected None or one of "
                       "'cublas', 'tiled'"):  # fmt: skip
        matmul_cuda.run(problem(a, a, a), "fast")


@pytest.mark.parametrize("function", [tg.matmul, tg.linear])
def test_the_cpu_has_no_choice_of_kernels(function: Any) -> None:
    with pytest.raises(ArgumentError, match="kernel is 'tiled', expected None for arrays on a"):
        function(np.ones((2, 2), "float32"), np.ones((2, 2), "float32"), kernel="tiled")
