"""cuBLASLt through ctypes: products with an addition, a bias or GELU in the same kernel.

CuPy's own calls to cuBLAS cannot be captured into a CUDA graph, round partial sums to 16 bits and
have no epilogues. The library comes with CuPy's. Matrices are in column-major order. Operands of 8
bits have a factor each, in device memory; Hopper takes the first transposed, the second not.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from ctypes import (
    byref,
    c_double,
    c_float,
    c_int,
    c_int8,
    c_int32,
    c_int64,
    c_size_t,
    c_uint64,
    c_void_p,
)
from functools import cache
from typing import Any, NamedTuple

from tensorgrad.core import backend
from tensorgrad.core.dtypes import Dtype, bfloat16, float16, float32, float64
from tensorgrad.core.errors import KernelError
from tensorgrad.kernels.device import capability, sm_count
from tensorgrad.kernels.fp8 import float8_e4m3, float8_e5m2

# From library_types.h and cublasLt.h
_TYPES = {float32: 0, float64: 1, float16: 2, bfloat16: 14, float8_e4m3: 28, float8_e5m2: 29}
_COMPUTE_32F, _COMPUTE_64F, _COMPUTE_TF32 = 68, 70, 77
_TRANSPOSE_A, _TRANSPOSE_B, _EPILOGUE, _BIAS, _AUX, _AUX_LEADING, _AUX_STEP, _BIAS_TYPE = (
    3, 4, 7, 8, 11, 12, 13, 26,
)  # fmt: skip
_A_FACTOR, _B_FACTOR, _FAST = 17, 18, 25
_BATCH, _STEP = 5, 6
_MOST_WORKSPACE, _REDUCTIONS, _ALIGNMENT_A = 1, 3, 5
_TILE = 1  # the attribute of an algorithm
_IN_PLACE_OR_WIDE = 1 | 2  # split-K partial sums stay in float32
_WORKSPACE = 32 * 1024 * 1024  # bytes, as NVIDIA advises for Hopper
_PROPOSALS = 8  # that the library is asked for: it has no more
# Values of cublasLtMatmulTile_t:
_TILES_OF_SHORT_SUMS = (20, 29, 201, 24)  # 128 x 128, 128 x 160, 176 x 128, 256 x 128
_SQUARE, _NARROW = 209, 247  # 192 x 192, 320 x 64
_TILES_OF_8_BITS = (29, 20)  # the first takes twice as long with a bias and a residual
_SHORT_SUMS_OF_8_BITS = 1024  # terms
_DEFAULT, _WITH_BIAS, _AUXILIARY = 1, 4, 128
EPILOGUES = {
    "": 0,
    "gelu": 32,
    "gelu, stored": 32 | _AUXILIARY,
    "derivative of gelu": 64 | _AUXILIARY,
}


class Matrix(NamedTuple):
    """A batch of column-major matrices: `leading` elements from one column to the next."""

    dtype: Dtype
    rows: int
    columns: int
    leading: int
    batch: int
    step: int


class CublasProduct(NamedTuple):
    """d = op(a) op(b) + beta c and its epilogue; op transposes or not."""

    a: Matrix
    b: Matrix
    d: Matrix  # c has the same layout
    transpose_a: bool
    transpose_b: bool
    alignment: int  # alignment of all addresses: bytes, a power of two
    bias: Dtype | None  # dtype of a number for each row
    gelu: str  # a key of EPILOGUES; an auxiliary array has the layout of d
    tf32: bool = False  # whether float32 operands are rounded to TF32
    fast: bool = False  # whether sums of 8-bit operands stay in the tensor cores, with 14 bits


class _Heuristic(ctypes.Structure):
    """An algorithm that the library proposes for a product."""

    _fields_ = (
        ("algorithm", c_uint64 * 8),
        ("workspace", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


class CublasPlan(NamedTuple):
    """A product that is ready to run, on one device."""

    handle: c_void_p
    operation: c_void_p
    a: c_void_p  # layouts
    b: c_void_p
    d: c_void_p
    algorithm: Any
    workspace: int  # bytes
    one: Any  # 1 and 0 in the type of alpha and beta
    zero: Any
    lock: threading.Lock  # pointers of the epilogue and of factors are part of the operation


def run(
    plan: CublasPlan,
    a: int,
    b: int,
    c: int,
    d: int,
    add: bool,
    bias: int = 0,
    auxiliary: int = 0,
    factors: tuple[int, int] | None = None,
) -> None:
    """Run a product on the current stream; operands and results are addresses.

    Args:
        plan: of the product.
        a, b, c, d: of the matrices.
        add: whether beta is 1, else 0.
        bias, auxiliary: of what the epilogue has; 0 without.
        factors: of the float32 numbers that a and b of 8 bits are multiplied with.
    """
    if bias or auxiliary or factors is not None:
        with plan.lock:
            if bias:
                _set(plan.operation, _BIAS, c_void_p(bias))
            if auxiliary:
                _set(plan.operation, _AUX, c_void_p(auxiliary))
            if factors is not None:
                _set(plan.operation, _A_FACTOR, c_void_p(factors[0]))
                _set(plan.operation, _B_FACTOR, c_void_p(factors[1]))
            _multiply(plan, a, b, c, d, add)
    else:
        _multiply(plan, a, b, c, d, add)


def _multiply(plan: CublasPlan, a: int, b: int, c: int, d: int, add: bool) -> None:
    """Call the library."""
    cuda, size = backend.cupy.cuda, plan.workspace
    memory = cuda.alloc(size) if size else None
    status = _library().cublasLtMatmul(
        plan.handle, plan.operation, plan.one, a, plan.a, b, plan.b,
        plan.one if add else plan.zero, c, plan.d, d, plan.d,
        plan.algorithm, memory.ptr if memory else None, size, cuda.get_current_stream().ptr,
    )  # fmt: skip
    if status:
        _check(status, "cublasLtMatmul")


def prepare(product: CublasProduct, device: int) -> CublasPlan:
    """Return a plan for a device, which is the current one.

    The algorithm is the library's first proposal, or on Hopper another one; see `preferred`.

    Raises:
        KernelError: the library proposes none.
    """
    found = proposals(product, device)
    if _splits(product, device) or capability(device) != 90:
        return found[0].plan
    tiles = [algorithm.tile for algorithm in found]
    return found[preferred(product, tiles, sm_count(device))].plan


class Proposal(NamedTuple):
    """An algorithm that the library proposes, and its tile, as in cublasLtMatmulTile_t."""

    plan: CublasPlan
    tile: int


def proposals(product: CublasProduct, device: int) -> list[Proposal]:
    """Return what the library proposes on a device, which is the current one; the best first.

    Raises:
        KernelError: there is nothing.
    """
    double = product.d.dtype == float64
    library, handle = _library(), _handle(device)
    operation, preference = c_void_p(), c_void_p()
    compute = _COMPUTE_64F if double else _COMPUTE_TF32 if product.tf32 else _COMPUTE_32F
    scale = _TYPES[float64 if double else float32]
    _check(library.cublasLtMatmulDescCreate(byref(operation), compute, scale), "create")
    _set(operation, _TRANSPOSE_A, c_int32(product.transpose_a))
    _set(operation, _TRANSPOSE_B, c_int32(product.transpose_b))
    epilogue = EPILOGUES[product.gelu] | (_WITH_BIAS if product.bias else 0)
    _set(operation, _EPILOGUE, c_int32(epilogue or _DEFAULT))
    if product.bias:
        _set(operation, _BIAS_TYPE, c_int32(_TYPES[product.bias]))
    if product.a.dtype.itemsize == 1:  # the proposals are for operands with factors, or without
        for factor in (_A_FACTOR, _B_FACTOR):
            _set(operation, factor, c_void_p(_one(device).data.ptr))
    if product.fast:
        _set(operation, _FAST, c_int8(1))
    if epilogue & _AUXILIARY:
        _set(operation, _AUX_LEADING, c_int64(product.d.leading))
        _set(operation, _AUX_STEP, c_int64(product.d.step))
    layouts = _layout(product.a), _layout(product.b), _layout(product.d)
    _check(library.cublasLtMatmulPreferenceCreate(byref(preference)), "create")
    workspace = _WORKSPACE if _splits(product, device) else 0
    wishes: list[tuple[int, Any]] = [
        (_MOST_WORKSPACE, c_uint64(workspace)),
        (_REDUCTIONS, c_int32(_IN_PLACE_OR_WIDE)),
    ]
    wishes += [(_ALIGNMENT_A + i, c_int32(product.alignment)) for i in range(4)]  # a, b, c, d
    for name, value in wishes:
        _set(preference, name, value, "cublasLtMatmulPreferenceSetAttribute")
    choices, count = (_Heuristic * _PROPOSALS)(), c_int()
    status = library.cublasLtMatmulAlgoGetHeuristic(
        handle, operation, *layouts, layouts[2], preference, _PROPOSALS, choices, byref(count)
    )
    library.cublasLtMatmulPreferenceDestroy(preference)
    usable = [] if status else [choice for choice in choices[: count.value] if not choice.state]
    if not usable:
        raise KernelError(f"matmul: cuBLASLt got {product}, expected a product that it can do")
    number = c_double if double else c_float
    plan = CublasPlan(
        handle, operation, *layouts, None, 0, byref(number(1)), byref(number(0)), threading.Lock()
    )
    return [
        Proposal(
            plan._replace(algorithm=choice.algorithm, workspace=choice.workspace), _tile(choice)
        )
        for choice in usable
    ]


def _splits(product: CublasProduct, device: int) -> bool:
    """Whether algorithms may divide the terms.

    They zero a part of the memory first: for 1558M 300 memsets in a step, and nothing gained where
    tiles occupy all SMs. Measured in 16 bits alone.
    """
    tiles = product.d.batch * product.d.rows * product.d.columns / 128**2
    return bool(product.a.dtype.itemsize > 2 or tiles < 2 * sm_count(device))


def preferred(product: CublasProduct, tiles: Sequence[int], processors: int) -> int:
    """Return which proposal to take for a product with tiles for all SMs of Hopper.

    The first, with three exceptions, measured on an H200: for short sums other tiles, as the
    library's estimates do not hold where the GPU is at its limit of power; and 320 x 64 instead of
    192 x 192 where the busiest SM then computes less of d; and 128 x 160, or 128 x 128 with a bias,
    for short sums of 8-bit operands, which take up to a tenth less then. See
    docs/chapters/matmul.md, "Choosing among cuBLASLt's proposals".

    Args:
        product: of operands of 8 or 16 bits.
        tiles: of the proposals, as in cublasLtMatmulTile_t.
        processors: SMs of the GPU.
    """
    if product.gelu:
        return 0
    if product.a.dtype.itemsize == 1:
        wanted = _TILES_OF_8_BITS[product.bias is not None :]
        found = [tiles.index(tile) for tile in wanted if tile in tiles]
        return found[0] if found and _terms(product) <= _SHORT_SUMS_OF_8_BITS else 0
    forward = product.transpose_a and not product.transpose_b  # the layout of x W^T
    most = 4096 if product.d.dtype == float32 else 2048 if forward else 1024
    if _terms(product) <= most:
        return next((tiles.index(tile) for tile in _TILES_OF_SHORT_SUMS if tile in tiles), 0)
    if tiles[0] == _SQUARE and _NARROW in tiles:
        square = _largest_share(product.d, 192, 192, processors)
        if _largest_share(product.d, 320, 64, processors) < 0.95 * square:
            return tiles.index(_NARROW)
    return 0


def _largest_share(d: Matrix, rows: int, columns: int, processors: int) -> int:
    """Return the elements in the tiles of the SM that computes the most of d."""
    tiles = d.batch * -(-d.rows // rows) * -(-d.columns // columns)
    return -(-tiles // processors) * rows * columns


def _terms(product: CublasProduct) -> int:
    """Return the number of terms of each sum."""
    return product.a.rows if product.transpose_a else product.a.columns


def _tile(proposal: _Heuristic) -> int:
    """Return the tile of an algorithm, as in cublasLtMatmulTile_t."""
    value = c_int32()
    status = _library().cublasLtMatmulAlgoConfigGetAttribute(
        byref(proposal.algorithm), _TILE, byref(value), ctypes.sizeof(value), None
    )
    _check(status, "cublasLtMatmulAlgoConfigGetAttribute")
    return value.value


def _layout(matrix: Matrix) -> c_void_p:
    """Return the library's description of matrices."""
    layout, library = c_void_p(), _library()
    _check(
        library.cublasLtMatrixLayoutCreate(
            byref(layout), _TYPES[matrix.dtype], matrix.rows, matrix.columns, matrix.leading
        ),
        "cublasLtMatrixLayoutCreate",
    )
    for name, value in ((_BATCH, c_int32(matrix.batch)), (_STEP, c_int64(matrix.step))):
        _set(layout, name, value, "cublasLtMatrixLayoutSetAttribute")
    return layout


def _set(
    target: c_void_p, name: int, value: Any, function: str = "cublasLtMatmulDescSetAttribute"
) -> None:
    """Set an attribute of an operation, or of what another function is for."""
    status = getattr(_library(), function)(target, name, byref(value), ctypes.sizeof(value))
    _check(status, function)


def _check(status: int, what: str) -> None:
    """Raise unless the call succeeded."""
    if status:
        raise KernelError(f"matmul: {what} got cuBLAS error {status}, expected 0")


@cache
def _handle(device: int) -> c_void_p:
    """Return the library's context on a device, which is the current one."""
    handle = c_void_p()
    _check(_library().cublasLtCreate(byref(handle)), f"cublasLtCreate on GPU {device}")
    return handle


@cache
def _one(device: int) -> Any:
    """Return 1 on a device, float32."""
    return backend.cupy.ones(1, float32)


@cache
def _library() -> Any:
    """Return cuBLASLt with the types of its functions."""
    from cuda import pathfinder  # comes with CuPy

    library = ctypes.CDLL(pathfinder.load_nvidia_dynamic_lib("cublasLt").abs_path)
    pointer = c_void_p
    for name, types in {
        "Create": (pointer,),
        "MatmulDescCreate": (pointer, c_int, c_int),
        "MatmulDescSetAttribute": (pointer, c_int, pointer, c_size_t),
        "MatrixLayoutCreate": (pointer, c_int, c_uint64, c_uint64, c_int64),
        "MatrixLayoutSetAttribute": (pointer, c_int, pointer, c_size_t),
        "MatmulPreferenceCreate": (pointer,),
        "MatmulPreferenceDestroy": (pointer,),
        "MatmulPreferenceSetAttribute": (pointer, c_int, pointer, c_size_t),
        "MatmulAlgoGetHeuristic": (*[pointer] * 7, c_int, pointer, pointer),
        "MatmulAlgoConfigGetAttribute": (pointer, c_int, pointer, c_size_t, pointer),
        "Matmul": (*[pointer] * 14, c_size_t, pointer),
    }.items():
        function = getattr(library, f"cublasLt{name}")
        function.argtypes, function.restype = types, c_int
    return library
