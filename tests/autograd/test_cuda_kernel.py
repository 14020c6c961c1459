"""Kernels of one's own: the reference on the CPU, CUDA on a GPU, and errors that name the line."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

import tensorgrad as tg
from tensorgrad import Tensor
from tensorgrad.autograd.function import Context
from tensorgrad.autograd.functions import jvp
from tensorgrad.core import backend
from tensorgrad.errors import (
    ArgumentError,
    DeviceError,
    DtypeError,
    GradError,
    KernelError,
    ShapeError,
)
from tensorgrad.kernels import compile as compiler
from tensorgrad.kernels import loader, tune, tuned
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

# A template: a warp for each row, several rows in a block.
ROW_NORM = """
template <typename T, int ROWS, bool ROOT>
__global__ void __launch_bounds__(32 * ROWS) row_norm(T* y, const T* x, int rows, int columns) {
    int row = blockIdx.x * ROWS + threadIdx.x / 32;
    if (row >= rows) return;
    Compute sum = 0;
    for (int c = threadIdx.x % 32; c < columns; c += 32) {
        Compute value = x[(long long)row * columns + c];
        sum += value * value;
    }
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
    if (threadIdx.x % 32 == 0) y[row] = ROOT ? sqrt(sum) : sum;
}
"""
NORM_OPTIONS: dict[str, Any] = {
    "threads": lambda _, ROWS: 32 * ROWS,
    "blocks": lambda x, ROWS: -(-x.shape[0] // ROWS),
    "shapes": {"y": lambda x: x.shape[:1]},
    "sizes": {"rows": lambda x: x.shape[0], "columns": lambda x: x.shape[1]},
}


def row_norm_numpy(x: Any, ROOT: bool) -> Any:
    squares = (x * x).sum(-1)
    return np.sqrt(squares) if ROOT else squares


row_norm = tg.cuda_kernel(ROW_NORM, "row_norm", row_norm_numpy, values={"ROWS": 4}, **NORM_OPTIONS)
CASES += [
    Case(
        partial(row_norm, ROWS=rows, ROOT=rows > 1),
        [(5, columns)],
        partial(row_norm_numpy, ROOT=rows > 1),
        gradient=False,
        terms=columns,
        name=f"row_norm of {rows}",
    )
    for rows in (1, 4)
    for columns in (1, 31, 1025)
]

# A template on two types, whose second one only an index has.
TAKE = """
template <typename I, int WIDTH>
__global__ void take(T* y, const T* x, const I* index, long long n) {
    long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i < n) y[i] = x[index[i / WIDTH] * WIDTH + i % WIDTH];
}
"""
take = tg.cuda_kernel(
    TAKE,
    "take",
    lambda x, index, WIDTH: x.reshape(-1, WIDTH)[index].reshape(-1),
    shapes={"y": lambda _, index, WIDTH: (index.size * WIDTH,)},
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
    text = ratio.source(T=tg.bfloat16).splitlines()
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
    assert f'#line 1 "{path}"' in tg.cuda_kernel(path, "ratio", ratio_numpy).source(T=tg.float32)
    text = ratio.source(T=tg.float64).splitlines()
    assert text[1:3] == ["using T = double;", "using Compute = double;"]
    assert "using T" not in ratio.source()
    assert ratio.source().endswith(RATIO + "\n")
    made = tg.cuda_kernel(RATIO.replace("1 +", "1.0f +"), "ratio", ratio_numpy)
    assert '#line 1 "ratio.cu"' in made.source(T=tg.float32)


def test_wrong_calls() -> None:
    x = tg.ones((2, 3))
    with pytest.raises(ArgumentError, match="ratio: got 1 arguments, expected 2: x, other"):
        ratio(x)
    with pytest.raises(ArgumentError, match=r"got scale by name, expected it by position: softm"):
        softmax(x, scale=2.0)
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


HAS_COMPILER = backend.cupy is not None or shutil.which("nvcc") is not None
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


class Launches(NamedTuple):
    """The sources, instances and launches of kernels."""

    launches: list[Any]
    sources: list[str]
    instances: list[str]


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> Launches:
    seen = Launches([], [], [])

    def load_text(name: str, text: str, instance: str) -> Any:
        seen.sources.append(text)
        seen.instances.append(instance)
        return lambda *launch: seen.launches.append(launch)

    monkeypatch.setattr(cuda_kernel_module, "load_text", load_text)
    monkeypatch.setattr(cuda_kernel_module, "number", lambda dtype, value: (dtype, value))
    monkeypatch.setattr(cuda_kernel_module, "capability", lambda device: 90)
    monkeypatch.setattr(cuda_kernel_module, "architecture", lambda: "sm_90")
    runtime = SimpleNamespace(getDevice=lambda: 0)
    namespace = SimpleNamespace(
        empty=lambda shape, dtype: on_gpu(np.empty(shape, dtype)),
        ascontiguousarray=lambda array: on_gpu(np.ascontiguousarray(array)),
        cuda=SimpleNamespace(runtime=runtime),
    )
    monkeypatch.setattr(backend, "cupy", namespace)
    return seen


def test_a_launch_has_results_then_arguments_then_numbers(fake_gpu: Launches) -> None:
    launches, sources, instances = fake_gpu
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
    assert instances == ["softmax"]
    other = tg.cuda_kernel(RATIO, "ratio", ratio_numpy)
    for length, blocks in ((0, None), (1, 1), (256, 1), (257, 2)):
        launches.clear()
        values = Tensor(on_gpu(np.ones(length, np.float32)))
        other(values, values)
        assert [launch[0] for launch in launches] == ([(blocks,)] if blocks else [])


def test_a_template_is_compiled_for_types_and_values(fake_gpu: Launches) -> None:
    launches, sources, instances = fake_gpu
    own = tg.cuda_kernel(
        ROW_NORM,
        "row_norm",
        row_norm_numpy,
        values={"ROWS": lambda x, capability: 8 if capability >= 90 and x.shape[1] < 99 else 2},
        **NORM_OPTIONS,
    )
    short, long = (Tensor(on_gpu(np.ones((9, width), np.float32))) for width in (5, 500))
    own(short, ROOT=True)
    own(long, ROOT=True)
    own(long, ROOT=False, ROWS=1, threads=64)
    own(long, ROOT=np.bool_(True))
    assert [launch[:2] for launch in launches] == [
        ((2,), (256,)),
        ((5,), (64,)),
        ((9,), (64,)),
        ((5,), (64,)),
    ]
    assert instances == [f"row_norm<float, {values}>" for values in ("8, 1", "2, 1", "1, 0")]
    options: dict[str, Any] = {**NORM_OPTIONS, "values": {"ROWS": lambda _: 0.5}}
    wrong = tg.cuda_kernel(ROW_NORM, "row_norm", row_norm_numpy, **options)
    with pytest.raises(ArgumentError, match=r"row_norm: ROWS is 0.5, expected an integer"):
        wrong(short, ROOT=True)
    index = Tensor(on_gpu(np.array([2, 0], np.int16)))
    result = take(Tensor(on_gpu(np.ones(6, np.float16))), index, WIDTH=2)
    assert (result.shape, str(result.dtype)) == ((4,), "float16")
    assert instances[3] == "take<short, 2>"
    assert "#include <cuda_fp16.h>\nusing T = __half;\nusing Compute = float;" in sources[3]


def test_a_template_on_the_cpu() -> None:
    x = tg.tensor([[3.0, 4.0]], "float64")
    assert row_norm(x, ROOT=True).tolist() == [5]
    assert row_norm(x, ROOT=False, ROWS=1).tolist() == [25]
    values = tg.tensor([0.0, 1.0, 2.0, 3.0])
    assert take(values, tg.tensor([1, 1]), WIDTH=2).tolist() == [2, 3, 2, 3]
    other = np.ones(2, np.int32)  # its type is another one than that of x
    assert take(values, other, WIDTH=2).dtype == "float32"


TEMPLATES = [
    ("int N = 4", "f has the template parameter 'int N = 4', expected a name without a default"),
    ("float N", "f has the template parameter 'float N', expected a name without a default af"),
    ("int", "f has the template parameter 'int', expected a name"),
    ("int... N", "f has the template parameter 'int... N', expected a name"),
    ("int threads", "'int threads', .*, bool; threads and capability have a meaning"),
    ("typename U", "f has a template of U, expected an argument of U too"),
]


@pytest.mark.parametrize(("declared", "message"), TEMPLATES)
def test_wrong_templates(declared: str, message: str) -> None:
    with pytest.raises(KernelError, match=message):
        tg.cuda_kernel(
            f"template <{declared}> __global__ void f(T* y, const T* x) {{}}", "f", np.exp
        )


CALLS: list[tuple[dict[str, Any], str]] = [
    ({}, r"row_norm: ROOT is missing, expected row_norm\(..., ROOT=...\), a value of the temp"),
    ({"ROOT": 2}, "row_norm: ROOT is 2, expected True or False"),
    ({"ROOT": True, "ROWS": 2**31}, "row_norm: ROWS is 2147483648, expected one that int holds"),
    ({"ROOT": True, "rows": 2}, "row_norm: got the value 'rows', expected one of ROWS, ROOT, thr"),
    ({"ROOT": True, "threads": 0}, "row_norm: threads is 0, expected 1 or more"),
]


@pytest.mark.parametrize(("values", "message"), CALLS)
def test_wrong_values(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        row_norm(tg.ones((2, 3)), **values)


OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"values": {"rows": 4}}, "values has 'rows', expected names of ROWS, ROOT"),
    ({"values": {"ROWS": "4"}}, "ROWS is '4', expected an integer"),
    ({"values": 4}, "values is 4, expected a dictionary by name"),
    ({"candidates": [{"ROWS": 4}]}, "candidates is .* and tuned is None, expected both, or none"),
    ({"tuned": "x"}, r"candidates is \(\) and tuned is 'x', expected both, or none"),
    ({"candidates": [{"ROW": 4}], "tuned": "x"}, "candidates has 'ROW', expected names of ROWS"),
    ({"candidates": [{"ROWS": 0.5}], "tuned": "x"}, "ROWS is 0.5, expected an integer"),
    (
        {"candidates": [{"ROWS": 4}, {"threads": 4}], "tuned": "x"},
        "candidates has {'threads': 4}, expected the names of the first, ROWS",
    ),
    (
        {"values": {"ROWS": 4}, "candidates": [{"ROWS": 4}], "tuned": "x"},
        "candidates has 'ROWS', expected names of ROOT, threads",
    ),
]


@pytest.mark.parametrize(("options", "message"), OPTIONS)
def test_wrong_options_of_a_template(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=f"cuda_kernel: {message}"):
        tg.cuda_kernel(ROW_NORM, "row_norm", row_norm_numpy, **options)


def tunable(path: Path, rows: Sequence[int] = (1, 2, 4), **options: Any) -> Any:
    candidates = [{"ROWS": count, "threads": 32 * count} for count in rows]
    options = {**NORM_OPTIONS, "candidates": candidates, "tuned": path, **options}
    return tg.cuda_kernel(ROW_NORM, "row_norm", row_norm_numpy, **options)


def test_tuning_stores_what_calls_read(
    fake_gpu: Launches, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "tuned.json"
    x, wide = (Tensor(on_gpu(np.ones((8, width), np.float32))) for width in (5, 500))
    times = iter([3.0, 1.0, 2.0, 2.0, 2.0, 2.0])

    def measure(run: Any) -> float:
        run()
        return next(times)

    monkeypatch.setattr(tune, "measure", measure)
    own = tunable(path)
    own(x, ROOT=True)  # the first candidate, as nothing is stored
    line = own.tune(x, ROOT=True)
    assert "row_norm float32 8x5 ROOT=1" in line
    assert "ROWS=2 threads=64 1000.0 us*" in line
    own.tune(wide, ROOT=True)  # equal times: the first candidate
    own(x, ROOT=True)
    tunable(path)(x, ROOT=True)  # another process would do the same
    tunable(path)(wide, ROOT=True)
    own(x, ROOT=True, ROWS=8, threads=256)  # the call goes before the file
    grids = [launch[0][0] for launch in fake_gpu.launches]
    assert grids == [8, 8, 4, 2, 8, 4, 2, 4, 4, 8, 1]
    assert path.read_text().splitlines()[2:6] == [
        '  "row_norm": {',
        '   "float32 8x5 ROOT=1": "ROWS=2 threads=64",',
        '   "float32 8x500 ROOT=1": "ROWS=1 threads=32"',
        "  }",
    ]
    with pytest.raises(
        KernelError, match="has 'ROWS=2 threads=64' for 'float32 8x5 ROOT=1', expected one of"
    ):
        tunable(path, (4,))(x, ROOT=True)
    path.write_text('{"sm_90": 3}')
    with pytest.raises(KernelError, match=r"tuned.json has other contents, expected"):
        tunable(path)(x, ROOT=True)


def test_a_case_is_what_its_function_says(
    fake_gpu: Launches, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "tuned.json"
    monkeypatch.setattr(tune, "measure", lambda run: 1 / len(run.keywords))
    own = tunable(path, (1,), case=lambda x, ROOT: (x.shape[1] < 99, ROOT))
    own.tune(Tensor(on_gpu(np.ones((8, 5), np.float16))), ROOT=False)
    assert '"float16 (True, False) ROOT=0": "ROWS=1 threads=32"' in path.read_text()


def test_tuning_needs_candidates_and_a_gpu(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"row_norm: candidates is \(\), expected some to me"):
        row_norm.tune(tg.ones((2, 3)), ROOT=True)
    own = tunable(tmp_path / "tuned.json")
    with pytest.raises(DeviceError, match="row_norm: x is on cpu, expected cuda"):
        own.tune(tg.ones((2, 3)), ROOT=True)
    assert own(tg.tensor([[3.0, 4.0]]), ROOT=True).tolist() == [5]
    assert not (tmp_path / "tuned.json").exists()


@pytest.mark.parametrize("arch", [pytest.param("sm_80", marks=pytest.mark.nightly), "sm_90a"])
@pytest.mark.skipif(not HAS_COMPILER, reason="needs NVRTC or nvcc")
def test_instances_compile_without_a_gpu(arch: str) -> None:
    types = {"T": tg.bfloat16}
    values = [{"ROWS": rows, "ROOT": root} for rows, root in ((1, False), (4, True))]
    instances = [row_norm.instance(types, value) for value in values]
    assert instances == ["row_norm<__nv_bfloat16, 1, 0>", "row_norm<__nv_bfloat16, 4, 1>"]
    text = row_norm.source(**types)
    source = loader.Source("row_norm.cu", text, loader.OPTIONS, None, tuple(instances))
    report = compiler._report(compiler._compiler(), source, instances, arch)
    assert (len(report.usage), report.errors) == (2, [])


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


@pytest.mark.gpu
def test_templates_run_on_a_gpu() -> None:
    x = tg.tensor([[3.0, 4.0]] * 5, "bfloat16", device="cuda")
    double = tg.cuda_kernel(
        ROW_NORM, "row_norm", lambda *_: 1 / 0, values={"ROWS": 4}, **NORM_OPTIONS
    )
    for rows in (1, 2, 8):
        for root, expected in ((True, 5.0), (False, 25.0)):
            y = double(x, ROOT=root, ROWS=rows)
            assert backend.to_numpy(y.data).astype(float).tolist() == [expected] * 5
    values = tg.tensor([0.0, 1.0, 2.0, 3.0], device="cuda")
    for dtype in ("int64", "int16", "uint8"):
        index = tg.tensor([1, 0, 1], dtype, device="cuda")
        assert take(values, index, WIDTH=2).tolist() == [2, 3, 0, 1, 2, 3]


@pytest.mark.gpu
def test_tuning_on_a_gpu(tmp_path: Path) -> None:
    path = tmp_path / "tuned.json"
    rng = np.random.default_rng(0)
    x = tg.tensor(rng.standard_normal((4096, 300)), "float32", device="cuda")
    own = tunable(path, (1, 4, 16))
    before = own(x, ROOT=True)
    line = own.tune(x, ROOT=True)
    assert line.count(" us") == 3
    rows = tuned.read(path)
    (words,) = rows[tuned.architecture()]["row_norm"].values()
    assert f"{words} " in line
    assert backend.capability(x.device) == int(tuned.architecture().removeprefix("sm_"))
    # Each row is summed in the same order, whichever candidate was chosen.
    for after in (own(x, ROOT=True), tunable(path, (1, 4, 16))(x, ROOT=True)):
        assert np.array_equal(backend.to_numpy(before.data), backend.to_numpy(after.data))
    text = path.read_text()
    own(x[:7], ROOT=True)
    assert path.read_text() == text  # a call stores nothing


def ratio_tangent(x: Tensor, other: Tensor, tx: Tensor | None, tother: Tensor | None) -> Any:
    terms = [] if tx is None else [ratio(tx, other)]
    terms += [] if tother is None else [-x / (1 + other) ** 2 * tother]
    return sum(terms[1:], terms[0])


def test_a_kernel_with_a_tangent(device: str) -> None:
    kernel = tg.cuda_kernel(RATIO, "ratio", ratio_numpy, tangent=ratio_tangent)
    x, other = (tg.tensor([1.0, 4.0], device=device), tg.tensor([0.0, 1.0], device=device))
    one = tg.ones(2, device=device)
    for f in (kernel, lambda x, other: x / (1 + other)):
        y, t = jvp(lambda x, other, f=f: f(x * x, other), (x, other), (one, one))
        assert (y.tolist(), t.tolist()) == ([1, 8], [1, 0])
        assert jvp(lambda other, f=f: f(x, other), (other,), (one,))[1].tolist() == [-1, -1]
    with pytest.raises(GradError, match="ratio: x requires a gradient"):
        kernel(tg.ones(2, device=device, requires_grad=True), other)
    with pytest.raises(GradError, match=r"ratio: x has a tangent, and the kernel none; give"):
        jvp(lambda x: ratio(x, other), (x,), (one,))
