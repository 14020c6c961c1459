"""Literals in every operand of every public function: what a tensor would give, to the bit.

Beside float64 or integers, a number of Python or a list of floats is float64, beside float32 it is
float32. The numbers here are not exact in fewer bits than they have.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import tensorgrad as tg
import tensorgrad.nn.functional as F
from tensorgrad import Tensor, fft, linalg
from tests.fuzz.cases import cases
from tests.fuzz.literal_calls import CALLS, OTHERWISE, words

INTEGERS = [1, 2, 3, 5, 2**53 + 1]
NUMBERS = [0.1, 1 / 3, 1e-7, 2**53 + 1, 0.7, -1.1, -0.3, 3.3e5, 1e10 / 3, 2, -7, 0.0, 1 + 1e-15]
FRACTIONS = [0.1, 1 / 3, 1e-7, 0.7, 2 / 3, 0.99]
DTYPES = ["float64", "float64", "float64", "float32", "int64"]
SHAPES: list[tuple[int, ...]] = [(), (3,), (2, 3), (2, 1)]


@given(st.sampled_from(sorted(CALLS)), st.integers(0, 2**64 - 1))
@cases(600)
def test_a_literal_takes_its_dtype_with_the_other_operands(name: str, seed: int) -> None:
    check(name, np.random.default_rng(seed))


def test_each_function_takes_literals() -> None:
    for name in sorted(CALLS):
        results = [check(name, np.random.default_rng(seed)) for seed in range(4)]
        assert any(isinstance(result, list) for result in results), (name, results)


def check(name: str, rng: np.random.Generator) -> Any:
    """Compare a call with some literals to the same call with tensors alone; return its outcome."""
    function, text = CALLS[name]
    operands = text.split(" ")
    dtype = DTYPES[rng.integers(len(DTYPES))]
    literal = [rng.random() < 0.6 and "!" not in operand for operand in operands]
    if all(literal):
        literal[rng.integers(len(literal))] = False
    mixed, tensors = [], []
    for operand, use in zip(operands, literal, strict=True):
        value = drawn(rng, operand, dtype == "int64" and not use)
        array = np.asarray(value, None if dtype == "int64" or "?" in operand else dtype)
        use = use and not (dtype == "float32" and array.ndim == 0)  # computed with as it is
        tensors.append(tg.tensor(array))
        as_array = rng.random() < 0.2 and "!" not in operand
        mixed.append(value if use else array if as_array else tensors[-1])
    with np.errstate(all="ignore"):
        result = outcome(function, mixed)
        assert result == outcome(function, tensors), (name, mixed)
    return result


def outcome(function: Any, operands: list[Any]) -> Any:
    """Return the bits of the results of a call, or the error that it raises."""
    try:
        return list(bits(function(*operands)))
    except tg.errors.TensorgradError as error:
        return type(error)


def bits(result: Any) -> Iterator[Any]:
    if isinstance(result, tuple | list):
        for part in result:
            yield from bits(part)
    else:
        array = result.numpy() if isinstance(result, Tensor) else np.asarray(result)
        array = np.where(np.isnan(array), np.nan, array) if array.dtype.kind == "f" else array
        yield array.shape, array.dtype, array.tobytes()


def drawn(rng: np.random.Generator, operand: str, integers: bool) -> Any:
    """Return a number, or lists and tuples of them, as the word for an operand says."""
    lengths = operand.rstrip("+%<.!?")
    if lengths == "*":
        shape = SHAPES[rng.integers(len(SHAPES))]
    else:
        shape = tuple(map(int, lengths.split("x"))) if lengths else ()
    pool = INTEGERS if integers else FRACTIONS if "%" in operand else NUMBERS
    flat = [pool[i] for i in rng.integers(len(pool), size=int(np.prod(shape)))]
    if rng.random() < 0.3 and "%" not in operand and not integers:
        flat = rng.standard_normal(len(flat)).tolist()
    if "." in operand:  # whole numbers alone would be integers, which a mask refuses
        flat = [float(number) for number in flat]
    if "+" in operand and not integers:
        flat = [abs(number) + 1e-9 for number in flat]
    if "<" in operand:
        flat = sorted(flat)
    return nested(rng, flat, shape)


def nested(rng: np.random.Generator, flat: list[Any], shape: tuple[int, ...]) -> Any:
    if not shape:
        return flat[0]
    size = len(flat) // shape[0]
    kind = tuple if rng.random() < 0.3 else list
    return kind(nested(rng, flat[i * size : (i + 1) * size], shape[1:]) for i in range(shape[0]))


def several_operands() -> Iterator[str]:
    """Yield the names of public functions and methods that take more than one operand."""
    modules = {"": tg, "linalg.": linalg, "fft.": fft, "F.": F}
    functions: dict[str, Any] = {
        f"{prefix}{name}": getattr(module, name)
        for prefix, module in modules.items()
        for name in module.__all__
        if prefix != "F." or getattr(tg, name, None) is not getattr(F, name)
    }
    methods = {
        f"Tensor.{name}": function
        for name, function in vars(Tensor).items()
        if not name.startswith("__") or name in (f"__{n.strip('_')}__" for n in OPERATORS)
    }
    for name, function in {**functions, **methods}.items():
        if not inspect.isfunction(function):
            continue
        parameters = inspect.signature(function).parameters.values()
        count = sum(p.name == "self" or str(p.annotation) == "Any" for p in parameters)
        many = any(
            p.kind == p.VAR_POSITIONAL or str(p.annotation) == "Sequence[Any]" for p in parameters
        )
        if count > 1 or many:
            yield name


BINARY = [
    "add",
    "and",
    "divmod",
    "floordiv",
    "lshift",
    "matmul",
    "mod",
    "mul",
    "or",
    "pow",
    "rshift",
    "sub",
    "truediv",
    "xor",
]
OPERATORS = [
    *BINARY, *(f"r{name}" for name in BINARY), *(f"i{name}" for name in BINARY if name != "divmod"),
    *words("eq ne lt le gt ge setitem getitem"),
]  # fmt: skip


def test_every_function_of_several_operands_is_called_or_says_why_not() -> None:
    listed = {name.split(",")[0] for name in CALLS} | set(itertools.chain(*OTHERWISE.values()))
    methods = {f"Tensor.{name}" for name in listed}  # methods of the same op, see ops/methods.py
    assert set(several_operands()) - listed - methods == set()
