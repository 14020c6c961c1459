"""Every public op has a case in tests/ops, and is exported."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path

import numpy as np

import tensorgrad
from tensorgrad.compat import aliases
from tensorgrad.ops import diagonals, stacking, statistics
from tensorgrad.testing import SIZES, Case
from tests.source_tree import library

HERE = Path(__file__).parent
FAMILIES = [
    importlib.import_module(source.module)
    for source in library()
    if source.module.startswith("tensorgrad.ops.")
]
OPS: list[str] = [
    name
    for family in FAMILIES
    if family is not aliases
    for name in getattr(family, "__all__", ())
    if name not in {"broadcast_shapes"}  # a function of shapes alone
]


def modules() -> list[str]:
    return [f"tests.ops.{path.stem}" for path in sorted(HERE.glob("test_*.py"))
            if path.stem != Path(__file__).stem and "derivatives" not in path.stem]  # fmt: skip


def cases() -> Iterator[Case]:
    for module in modules():
        yield from getattr(importlib.import_module(module), "CASES", [])


def begins_with(name: str, op: str) -> bool:
    """Whether a case's name is the op's, or continues with something other than a letter."""
    return name.startswith(op) and not (name[len(op) :][:1].isalnum() or name[len(op) :][:1] == "_")


ALL_CASES = list(cases())
# Ops that lay out an array anew without a look at its elements, or fill one.
ANY_LENGTH = {
    "arange", "asarray", "broadcast_to", "copy", "cumulative_prod", "cumulative_sum", "empty",
    "empty_like", "expand_dims", "eye", "full", "full_like", "geomspace", "identity", "imag",
    "indices", "linspace", "logspace", "moveaxis", "ones", "ones_like", "ravel", "reshape", "split",
    "squeeze", "swapaxes", "tensor", "to", "transpose", "zeros", "zeros_like",
}  # fmt: skip
# Functions made of ops that have cases of all lengths, or of NumPy's and CuPy's own.
COMPOSED = {name for family in (diagonals, stacking, statistics)
            for name in family.__all__}  # fmt: skip
COMPOSED |= {
    "allclose", "array_equal", "array_equiv", "intersect1d", "isclose", "isin", "setdiff1d",
    "setxor1d", "union1d", "unique", "unique_all", "unique_counts", "unique_inverse",
    "unique_values",
}  # fmt: skip
# Functions that have no result, or none with a gradient, for nothing at all.
NEEDS_ELEMENTS = {
    "argmax", "argmin", "cross_entropy", "nll_loss", "one_hot", "put_along_axis", "searchsorted",
    "take", "topk",
}  # fmt: skip


def cases_of(op: str) -> list[Case]:
    function = getattr(tensorgrad, op)
    return [c for c in ALL_CASES if c.function is function or begins_with(c.name, op)]


def test_each_op_has_a_case() -> None:
    missing = [op for op in OPS if not cases_of(op)]
    assert missing == [], "add a Case of each to CASES in tests/ops/test_*.py"


def lengths_without_a_case(op: str) -> set[int]:
    lengths = {
        length
        for case in cases_of(op)
        for given in case.inputs
        for length in (given.shape if isinstance(given, np.ndarray) else given)
    }
    wanted = set(SIZES) - ({0} if op in NEEDS_ELEMENTS else set())
    return wanted - lengths


def test_ops_have_cases_of_odd_lengths_and_of_none() -> None:
    missing = {op: lengths_without_a_case(op) for op in sorted(set(OPS) - ANY_LENGTH - COMPOSED)}
    assert {op: lengths for op, lengths in missing.items() if lengths} == {}, "see testing.sized"


def never_checks(module: str) -> bool:
    source = inspect.getsource(importlib.import_module(module))
    called = {node.func.id for node in ast.walk(ast.parse(source))
              if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}  # fmt: skip
    return "CASES" in source and "check" not in called


def test_cases_are_checked() -> None:
    assert [module for module in modules() if never_checks(module)] == []


def test_ops_are_exported_once_and_at_the_root() -> None:
    assert len(set(OPS)) == len(OPS)
    for family in FAMILIES:
        for op in getattr(family, "__all__", ()):
            assert getattr(tensorgrad, op) is getattr(family, op)
    assert set(OPS) < set(tensorgrad.__all__)


def test_an_alias_is_the_op_itself() -> None:
    ops = [getattr(tensorgrad, op) for op in OPS]
    assert [name for name in aliases.__all__ if getattr(tensorgrad, name) not in ops] == []


def test_ops_are_documented_and_typed() -> None:
    for op in OPS:
        function = getattr(tensorgrad, op)
        assert (function.__doc__ or "").strip(), op
        annotations = inspect.get_annotations(function)
        assert set(annotations) == {*inspect.signature(function).parameters, "return"}, op
