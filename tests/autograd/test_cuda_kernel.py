"""Kernels of one's own: the reference on the CPU, CUDA on a GPU, and errors that name the line."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import tensorgrad as tg
from tensorgrad import Tensor
from tensorgrad.autograd.function import Context
from tensorgrad.core import backend
from tensorgrad.errors import (
    ArgumentError,
    DeviceError,
    DtypeError,
    GradError,
    KernelError,
    ShapeError,
)
from tensorgrad.testing import Case, Ulps, check, sized
from tests.gpu_array import on_gpu

cuda_kernel_module = import_module("tensorgrad.autograd.cuda_kernel")  # the package has a function

# Rows with two results, one of which is of a fixed type, a number, and sizes.
SOURCE = """
// __global__ void softmax(only a comment)
__global__ void __launch_bounds__(128) softmax(
    T* y, float* total, const T* __restrict__ x, double scale, int columns /* of a row */) {
    __shared__ Compute shared[128];
    long long row = (long long)blockIdx.x * columns;
    Compute most = -INFINITY, sum = 0;
    for (int c = 0; c < columns; c++) most = max(most, Compute(scale) * Compute(x[row + c]));
    for (int c = threadIdx.x; c < columns; c += blockDim.x)
        sum += exp(Compute(scale) * Compute(x[row + c]) - most);
    shared[threadIdx.x] = sum;
    for (int width = blockDim.x / 2; width; width /= 2) {
        __syncthreads();
        if (threadIdx.x < width) shared[threadIdx.x] += shared[threadIdx.x + width];
    }
    __syncthreads();
    for (int c = threadIdx.x; c < columns; c += blockDim.x)
        y[row + c] = exp(Compute(scale) * Compute(x[row + c]) - most) / shared[0];
    if (threadIdx.x == 0) total[blockIdx.x] = most + log(shared[0]);
}

__global__ void softmax_backward(T* dx, const T* dy, const T* y, double scale, int columns) {
    long long row = (long long)blockIdx.x * columns;
    __shared__ Compute dot;
    if (threadIdx.x == 0) {
        dot = 0;
        for (int c = 0; c < columns; c++) dot += Compute(dy[row + c]) * Compute(y[row + c]);
    }
    __syncthreads();
    for (int c = threadIdx.x; c < columns; c += blockDim.x)
        dx[row + c] = Compute(scale) * Compute(y[row + c]) * (Compute(dy[row + c]) - dot);
}
"""


def softmax_numpy(x: Any, scale: float) -> tuple[Any, Any]:
    most = (scale * x).max(-1, keepdims=True)
    e = np.exp(scale * x - most)
    total = e.sum(-1, keepdims=True)
    return e / total, (most + np.log(total))[..., 0]


def softmax_backward_numpy(dy: Any, y: Any, scale: float) -> Any:
    return scale * y * (dy - (dy * y).sum(-1, keepdims=True))


ROWS: dict[str, Any] = {
    "threads": 128,
    "blocks": lambda x, *_: x.size // x.shape[-1],
    "sizes": {"columns": lambda x, *_: x.shape[-1]},
}
softmax = tg.cuda_kernel(
    SOURCE, "softmax", softmax_numpy, shapes={"total": lambda x, _: x.shape[:-1]}, **ROWS
)
softmax_backward = tg.cuda_kernel(SOURCE, "softmax_backward", softmax_backward_numpy, **ROWS)


class Softmax(tg.Function):
    @staticmethod
    def forward(ctx: Context, x: Tensor, scale: float) -> Tensor:
        y, _ = softmax(x, scale)
        ctx.scale = scale
        ctx.save_for_backward(y)
        return y  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Context, dy: Tensor) -> tuple[Tensor, None]:
        return softmax_backward(dy, *ctx.saved_tensors, ctx.scale), None


def scaled_softmax(x: Tensor) -> Tensor:
    y: Tensor = Softmax.apply(x, 0.5)
    return y


CASES = [
    Case(
        scaled_softmax,
        [shape],
        lambda x: softmax_numpy(x, 0.5)[0],
        values=Ulps(4),
        gradients=Ulps(4, "row"),
        terms=shape[-1],
        name="softmax",
    )
    for shape in ((1, 1), (3, 31), (2, 3, 33), (2, 1023), (5, 1025))
]

RATIO = """
__global__ void ratio(T* y, const T* x, const T* other, long long n) {
    long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i < n) y[i] = Compute(x[i]) / (1 + Compute(other[i]));
}
"""


def ratio_numpy(x: Any, other: Any) -> Any:
    return x / (1 + other)


ratio = tg.cuda_kernel(RATIO, "ratio", ratio_numpy)
CASES += sized(
    ratio, lambda n: [(n,), (n,)], ratio_numpy, domain=(0.5, 2.0), gradient=False, name="ratio"
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_cases(case: Case) -> None:
    check(case)


def test_results_have_the_declared_shapes_and_types() -> None:
    y, total = softmax(tg.ones((2, 3), "bfloat16"), 2.0)
    assert (y.shape, str(y.dtype)) == ((2, 3), "bfloat16")
    assert (total.shape, str(total.dtype)) == ((2,), "float32")
    assert ratio(np.ones(3), np.ones(3)).dtype == "float64"
    assert not ratio(tg.ones(3), tg.ones(3)).requires_grad


def test_the_source_keeps_its_file_and_lines(tmp_path: Path) -> None:
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    text = ratio.source(tg.bfloat16).splitlines()
    assert text[1:4] == [
        "#include <cuda_bf16.h>",
        "using T = __nv_bfloat16;",
        "using Compute = float;",
    ]
    line = text[4].split()[1]
    assert text[4] == f'#line {line} "{__file__}"'
    assert lines[int(line) - 1] == 'RATIO = """'
    path = tmp_path / "own.cu"
    path.write_text(RATIO)
    assert f'#line 1 "{path}"' in tg.cuda_kernel(path, "ratio", ratio_numpy).source(tg.float32)
    text = ratio.source(tg.float64).splitlines()
    assert text[1:3] == ["using T = double;", "using Compute = double;"]
    assert "using T" not in ratio.source(None)
    assert ratio.source(None).endswith(RATIO + "\n")
    made = tg.cuda_kernel(RATIO.replace("1 +", "1.0f +"), "ratio", ratio_numpy)
    assert '#line 1 "ratio.cu"' in made.source(tg.float32)


def test_wrong_calls() -> None:
    x = tg.ones((2, 3))
    with pytest.raises(ArgumentError, match="ratio: got 1 arguments, expected 2: x, other"):
        ratio(x)
    with pytest.raises(DtypeError, match="ratio: other has dtype int64, expected float32"):
        ratio(x, np.ones((2, 3), "int64"))
    with pytest.raises(ArgumentError, match="softmax: scale is 'two', expected a number"):
        softmax(x, "two")
    with pytest.raises(GradError, match="softmax: x requires a gradient, which a kernel alone"):
        softmax(x.requires_grad_(), 1.0)
    with tg.no_grad():
        softmax(x, 1.0)
    wrong = tg.cuda_kernel(RATIO, "ratio", lambda x, other: x[:1])
    with pytest.raises(ShapeError, match=r"the reference returned y with shape \(1, 3\), expected"):
        wrong(x.detach(), x.detach())
    wrong = tg.cuda_kernel(RATIO, "ratio", lambda x, other: (x, x))
    with pytest.raises(ShapeError, match="ratio: the reference returned 2 arrays, expected 1: y"):
        wrong(x.detach(), x.detach())


DECLARATIONS = [
    ("T* y, const T* x", "the source has no `__global__ void f", "g"),
    ("const T* x, T* y", "expected pointers for the results, then pointers to const", "f"),
    ("T* y, const T** x", r"has the parameter 'const T\*\* x'", "f"),
    ("T* y, const size_t* x", "expected a name after one of T, double, float", "f"),
    ("T* y, const T* x, __half scale", "has the parameter '__half scale', expected a name a", "f"),
    ("T* y", "expected pointers for the results, then pointers to const for the argum", "f"),
    ("T* y, int n", "expected pointers for the results, then pointers to const for the a", "f"),
    ("T* y, int n, const T* x", "has .*'output', 'number', 'input'.*, expected pointers", "f"),
    ("T* y, const T* x, T scale", "has the parameter 'T scale', expected a name after", "f"),
    ("T* y, const float* x", "has a result of T, expected an argument of T too", "f"),
]


FLOATS_16 = "__half, __nv_bfloat16"
ALL_TYPES = tuple(cuda_kernel_module._DTYPES)


@pytest.mark.parametrize("pointer", [True, False])
def test_a_wrong_type_is_answered_with_those_there_are(pointer: bool) -> None:
    wrong = "const size_t* n" if pointer else "size_t n"
    names = [each for each in ALL_TYPES if pointer or each not in FLOATS_16.split(", ")]
    expected = f"one of {'T, ' if pointer else ''}{', '.join(names)}"
    expected += "" if pointer else ", or a pointer to one"
    with pytest.raises(KernelError, match=re.escape(expected) + "$"):
        tg.cuda_kernel(f"__global__ void f(T* y, const T* x, {wrong}) {{}}", "f", np.exp)


@pytest.mark.parametrize(("declared", "message", "name"), DECLARATIONS)
def test_wrong_declarations(declared: str, message: str, name: str) -> None:
    with pytest.raises(KernelError, match=message):
        tg.cuda_kernel(f"__global__ void {name}({declared}) {{}}", "f", np.exp)


def test_wrong_names() -> None:
    with pytest.raises(ArgumentError, match="sizes has 'rows', expected names of n"):
        tg.cuda_kernel(RATIO, "ratio", ratio_numpy, sizes={"rows": lambda *_: 1})
    with pytest.raises(ArgumentError, match=r"shapes has 'x', expected names of y$"):
        tg.cuda_kernel(RATIO, "ratio", ratio_numpy, shapes={"x": lambda *_: (1,)})
    for threads, message in ((0, "threads is 0, expected 1 or more"), (None, "threads is None")):
        with pytest.raises(ArgumentError, match=f"cuda_kernel: {message}"):
            tg.cuda_kernel(RATIO, "ratio", ratio_numpy, threads=threads)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="cuda_kernel: reference is a int, expected a function"):
        tg.cuda_kernel(RATIO, "ratio", 3)  # type: ignore[arg-type]


def test_a_launch_has_results_then_arguments_then_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    launches: list[Any] = []
    sources: list[str] = []

    def load_text(name: str, text: str) -> Any:
        sources.append(text)
        return lambda *launch: launches.append(launch)

    monkeypatch.setattr(cuda_kernel_module, "load_text", load_text)
    monkeypatch.setattr(cuda_kernel_module, "number", lambda dtype, value: (dtype, value))
    runtime = SimpleNamespace(getDevice=lambda: 0)
    namespace = SimpleNamespace(
        empty=lambda shape, dtype: on_gpu(np.empty(shape, dtype)),
        ascontiguousarray=lambda array: on_gpu(np.ascontiguousarray(array)),
        cuda=SimpleNamespace(runtime=runtime),
    )
    monkeypatch.setattr(backend, "cupy", namespace)
    own = tg.cuda_kernel(
        SOURCE, "softmax", softmax_numpy, shapes={"total": lambda x, _: x.shape[:-1]}, **ROWS
    )
    x = Tensor(on_gpu(np.asfortranarray(np.ones((3, 300), np.float16))))
    y, total = own(x, 2.0)
    own(x, 3.0)
    grid, block, (first, second, given, *numbers) = launches[0]
    assert (grid, block) == ((3,), (128,))
    assert first is y.data
    assert second is total.data
    assert (y.shape, y.dtype, total.shape, total.dtype) == ((3, 300), "float16", (3,), "float32")
    assert given.flags.c_contiguous
    assert numbers == [("<f8", 2.0), ("<i4", 300)]
    assert len(launches) == 2
    assert len(sources) == 1  # it is compiled once for each T
    assert "using T = __half;" in sources[0]
    other = tg.cuda_kernel(RATIO, "ratio", ratio_numpy)
    for length, blocks in ((0, None), (1, 1), (256, 1), (257, 2)):
        launches.clear()
        values = Tensor(on_gpu(np.ones(length, np.float32)))
        other(values, values)
        assert [launch[0] for launch in launches] == ([(blocks,)] if blocks else [])


@pytest.mark.gpu
def test_errors_on_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    wrong = tg.cuda_kernel(
        """
__global__ void wrong(T* y, const T* x, int n) {
    y[0] = missing;
}
""",
        "wrong",
        np.exp,
    )
    x = tg.ones(3, device="cuda")
    with pytest.raises(KernelError) as caught:
        wrong(x)
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    place = f"{__file__}({lines.index('    y[0] = missing;') + 1})"
    assert f'{place}: error: identifier "missing" is undefined' in str(caught.value)
    assert "y[0] = missing;" in str(caught.value)
    with pytest.raises(DeviceError, match="ratio: other is on cpu, expected cuda"):
        ratio(x, tg.ones(3))
    large = tg.cuda_kernel(RATIO.replace("long long n", "int n"), "ratio", ratio_numpy,
                           sizes={"n": lambda *_: 2**31})  # fmt: skip
    with pytest.raises(ArgumentError, match="ratio: n is 2147483648, expected one that int holds"):
        large(x, x)


@pytest.mark.gpu
def test_the_kernel_ran_and_not_the_reference() -> None:
    double = tg.cuda_kernel(RATIO, "ratio", lambda *_: 1 / 0)
    x = tg.tensor([2.0, 3.0], "float64", device="cuda")
    assert backend.to_numpy(double(x, x).data).tolist() == [2 / 3, 0.75]
