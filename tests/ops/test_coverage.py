"""Every public op has a case in tests/ops, and is exported."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest

import tensorgrad
from tensorgrad import ops
from tests.opcheck import Case

HERE = Path(__file__).parent


def modules() -> list[str]:
    return [f"tests.ops.{path.stem}" for path in sorted(HERE.glob("test_*.py"))
            if path.stem != Path(__file__).stem]  # fmt: skip


def cases() -> Iterator[Case]:
    for module in modules():
        yield from getattr(importlib.import_module(module), "CASES", [])


def begins_with(name: str, op: str) -> bool:
    """Whether a case's name is the op's, or goes on with something that is no part of a word."""
    return name.startswith(op) and not (name[len(op) :][:1].isalnum() or name[len(op) :][:1] == "_")


COVERED = [(case.function, case.name) for case in cases()]


@pytest.mark.parametrize("op", ops.__all__)
def test_has_a_case(op: str) -> None:
    function = getattr(ops, op)
    assert any(f is function or begins_with(name, op) for f, name in COVERED), (
        f"{op} has no Case: add one to CASES in tests/ops/test_*.py"
    )


@pytest.mark.parametrize("module", modules())
def test_cases_are_checked(module: str) -> None:
    source = inspect.getsource(importlib.import_module(module))
    called = {node.func.id for node in ast.walk(ast.parse(source))
              if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}  # fmt: skip
    assert "CASES" not in source or "check" in called, f"{module} never calls check(case)"


def test_ops_are_exported_once_and_at_the_root() -> None:
    assert len(set(ops.__all__)) == len(ops.__all__)
    assert [op for op in ops.__all__ if getattr(tensorgrad, op, None) is not getattr(ops, op)] == []
    assert set(ops.__all__) < set(tensorgrad.__all__)


def test_ops_are_documented_and_typed() -> None:
    for op in ops.__all__:
        function = getattr(ops, op)
        assert (function.__doc__ or "").strip(), op
        annotations = inspect.get_annotations(function)
        assert set(annotations) == {*inspect.signature(function).parameters, "return"}, op
