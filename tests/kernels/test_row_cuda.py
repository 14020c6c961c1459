"""Generated elementwise kernels compile, without a GPU."""

from __future__ import annotations

from typing import Any

import pytest

from tensorgrad import ops
from tensorgrad.dtypes import bfloat16, bool_, compute_dtype, float16, float32, float64, int64
from tensorgrad.errors import KernelError
from tensorgrad.kernels import compile as kernel_check
from tensorgrad.kernels.loader import OPTIONS, Source
from tensorgrad.ops.activation import GELU_ERF, GELU_TANH, SIGMOID, SILU
from tensorgrad.ops.elementwise import POWER, TANH, WHERE
from tensorgrad.ops.fuse import _row
from tensorgrad.ops.row_cuda import _kernel_name, _Layout, _plan, source


def mixed(x: Any, bias: Any, ids: Any) -> Any:
    z = ops.gelu(x + bias) * (ids == 2)
    return ops.where(z > 0, ops.softplus(z), float("-inf")).astype("float32")


FUSED = _row(mixed, [bfloat16, bfloat16, int64], {})[0]
ROWS = (6, 8)
BROADCAST, _ = _plan(ROWS, ((ROWS, (16, 2), 2), ((8,), (2,), 2), ((6, 1), (8, 8), 8)), 8)
KERNELS: dict[str, Any] = {
    "fused": (FUSED._formula, BROADCAST, [float64, float32, bfloat16, bfloat16, int64], 1),
    "halves": (
        GELU_ERF._gradients_of((True,)).formula,
        _Layout(8, False, (("1",), ("1",))), [float32, float16, float16, float16], 1,
    ),
    "numbers": (
        WHERE._formula,
        _Layout(4, True, (("1",), ("s",), None)), [float64, float64, bool_, float64, None], 1,
    ),
    **{
        f"{row.name}_{dtype}": (
            row._gradients_of((True,)).formula,
            _Layout(4, False, (("1",), ("1",))), [compute_dtype(dtype), dtype, dtype, dtype], 1,
        )
        for row in (SIGMOID, SILU, TANH, GELU_TANH)
        for dtype in (bfloat16, float32, float64)
    },
    "two": (
        POWER._gradients_of((True, True)).formula,
        _Layout(4, False, (("1",),) * 4), [float32] * 7, 2,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", KERNELS)
def test_generated_kernels_compile(name: str) -> None:
    try:
        compiler = kernel_check._compiler()
    except KernelError as error:
        pytest.skip(str(error))
    formula, layout, kinds, outs = KERNELS[name]
    text = source(formula, layout, kinds, outs, name)
    log, _ = compiler(Source(f"{name}.cu", text, OPTIONS, None, (name,)), (name,), "sm_80")
    assert "error" not in log
    assert " 0 bytes spill stores" in log


def test_names_of_functions_become_names_of_kernels() -> None:
    names = ["gelu_float32", "<lambda>_float32", "größe_float32"]
    kernels = ["gelu_float32", "_lambda__float32", "gr__e_float32"]
    assert [_kernel_name(name) for name in names] == kernels
