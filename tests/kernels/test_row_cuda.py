"""Generated elementwise kernels compile, without a GPU."""

from __future__ import annotations

from typing import Any

import pytest

import tensorgrad as tg
from tensorgrad.dtypes import (
    bfloat16,
    bool_,
    compute_dtype,
    float16,
    float32,
    float64,
    int8,
    int64,
    uint64,
)
from tensorgrad.errors import KernelError
from tensorgrad.kernels import compile as kernel_check
from tensorgrad.kernels.elementwise import _kernel_name, _OperandLayout, _plan, source
from tensorgrad.kernels.expression import GRADIENTS, Expressions, Formula
from tensorgrad.kernels.loader import OPTIONS, Source
from tensorgrad.ops import elementwise
from tensorgrad.ops.elementwise import POWER, WHERE, activation
from tensorgrad.ops.elementwise.activation import GELU_ERF
from tensorgrad.ops.elementwise.fuse import row_of
from tensorgrad.ops.elementwise.row import Row


def several(name: str, parameters: str, *texts: str) -> Formula:
    """Return one formula of several expressions."""
    expressions = Expressions()
    table = {parameter: expressions.name(parameter) for parameter in parameters.split()}
    places = [expressions.parse(text, table) for text in texts]
    return Formula(name, list(table), expressions, places)


SLOPES = several(
    "slopes", "x", "silu_derivative(x)", "gelu_tanh_derivative(x)",
    "round_down(x)", "round_up(x)", "round_nearest(x)", "square(x)", "round_toward_zero(x)",
    "floor_quotient(x, 2)", "floor_modulo(x, 2)", "modulo(x, 2)", "sign_bit(x)", "positive(x)",
    "tan(x)", "asin(x)", "acos(x)", "atan(x)", "atan2(x, 2)", "sinh(x)", "cosh(x)", "asinh(x)",
    "acosh(x)", "atanh(x)", "log2(x)", "log10(x)", "exp2(x)", "cbrt(x)", "logaddexp(x, 2)",
    "hypot(x, 2)", "copysign(x, 2)", "nextafter(x, 2)", "is_inf(x)",
)  # fmt: skip
LOGIC = several(
    "logic", "a b", "bitwise_and(a, b)", "bitwise_or(a, b)", "bitwise_xor(a, b)", "invert(a)"
)
BITS = several(
    "bits", "a b", "bitwise_and(a, b)", "bitwise_or(a, b)", "bitwise_xor(a, b)", "invert(a)",
    "left_shift(a, b)", "right_shift(a, b)", "round_down(a)", "round_up(a)", "round_nearest(a)",
    "square(a)", "power(a, b)", "floor_quotient(a, b)", "floor_modulo(a, b)", "modulo(a, b)",
    "sign_bit(a)", "positive(a)", "round_toward_zero(a)",
)  # fmt: skip


def mixed(x: Any, bias: Any, ids: Any) -> Any:
    z = tg.gelu(x + bias) * (ids == 2)
    return tg.where(z > 0, tg.softplus(z), float("-inf")).astype("float32")


def masked(x: Any, ids: Any) -> Any:
    odd = ~((ids & 1) == 0) & (x > 0)
    return tg.where(odd | (ids >> 2 == 1), x, 0) + (ids << 1) * tg.round(ids)


def table() -> Formula:
    """Return all values, gradients and tangents of the table, and the gradients of functions."""
    values = [*vars(elementwise).values(), *vars(activation).values()]
    values += [cell.cell_contents for f in values for cell in getattr(f, "__closure__", None) or ()]
    names = ["dy", "y", "a", "b", "d", "e"]
    expressions = Expressions()
    operands = [expressions.name(name) for name in names]
    results = [
        expressions.parse(text, dict(zip(["dy", "y", *row.operands], operands, strict=False)))
        for row in values
        if isinstance(row, Row) and row._differentiable and row.operands[0] != "c"
        for text in (row.text, *row.gradients, *row.tangents)
        if text
    ]
    results += [
        expressions.parse(text, dict(zip(["dy", "y", "a", "b", "c"], operands, strict=False)))
        for texts in GRADIENTS.values()
        for text in texts
        if text
    ]
    return Formula("table", names, expressions, list(dict.fromkeys(results)))


MASKED = row_of(masked, [float16, int64], {})[0]
FUSED = row_of(mixed, [bfloat16, bfloat16, int64], {})[0]
TABLE = table()
ROWS = (6, 8)
BROADCAST, _ = _plan(ROWS, ((ROWS, (16, 2), 2), ((8,), (2,), 2), ((6, 1), (8, 8), 8)), 8)
KERNELS: dict[str, Any] = {
    "fused": (FUSED._formula, BROADCAST, [float64, float32, bfloat16, bfloat16, int64], 1),
    "halves": (
        GELU_ERF._gradients_of((True,)).formula,
        _OperandLayout(8, False, (("1",), ("1",))), [float32, float16, float16, float16], 1,
    ),
    "half_condition": (
        WHERE._formula,
        _OperandLayout(8, False, (("1",),) * 3),
        [float32, bfloat16, bfloat16, bfloat16, bfloat16], 1,
    ),
    "numbers": (
        WHERE._formula,
        _OperandLayout(4, True, (("1",), ("s",), None)),
        [float64, float64, bool_, float64, None], 1,
    ),
    **{
        f"slopes_{dtype}": (SLOPES, _OperandLayout(4, False, (("1",),)), [compute_dtype(dtype),
                            *[dtype] * (len(SLOPES.results) + 1)], len(SLOPES.results))
        for dtype in (bfloat16, float32, float64)
    },
    **{
        f"bits_{dtype}": (formula, _OperandLayout(1, False, (("1",), ("1",))), [dtype,
                          *[dtype] * (len(formula.results) + 2)], len(formula.results))
        for formula, dtype in ((LOGIC, bool_), (BITS, int8), (BITS, int64), (BITS, uint64))
    },
    "masked": (
        MASKED._formula,
        _OperandLayout(1, False, (("1",), ("1",))), [float64, float64, float16, int64], 1,
    ),
    "table": (
        TABLE, _OperandLayout(1, False, (("1",),) * 6), [float32] * (7 + len(TABLE.results)),
        len(TABLE.results),
    ),
    "two": (
        POWER._gradients_of((True, True)).formula,
        _OperandLayout(4, False, (("1",),) * 4), [float32] * 7, 2,
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
    assert " 0 bytes spill stores" in log or name == "table"


def test_names_of_functions_become_names_of_kernels() -> None:
    names = ["gelu_float32", "<lambda>_float32", "größe_float32"]
    kernels = ["gelu_float32", "_lambda__float32", "gr__e_float32"]
    assert [_kernel_name(name) for name in names] == kernels
