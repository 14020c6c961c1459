"""Expressions of named values, once as Python and once as CUDA.

An expression is an index into an `Expressions`, which holds equal ones once, so that a common
subexpression is evaluated once.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tensorgrad.kernels import special

# Names that expressions may call; kernels/elementwise.cuh defines the same ones.
_NUMPY = (
    "exp", "expm1", "exp2", "log", "log1p", "log2", "log10", "logaddexp", "sqrt", "cbrt", "hypot",
    "sin", "cos", "tan", "sinh", "cosh", "tanh", "power", "square", "maximum", "minimum",
    "absolute", "sign", "positive", "copysign", "nextafter", "logical_and", "logical_or",
    "logical_xor", "logical_not", "bitwise_and", "bitwise_or", "bitwise_xor", "invert",
    "left_shift", "right_shift", "int64", "float32", "float64", "inf", "nan",
)  # fmt: skip
_SPECIAL = (
    "erf", "sigmoid", "silu_derivative", "softplus", "gelu_tanh", "gelu_tanh_derivative",
    "normal_cdf", "normal_pdf", "where", "number",
)  # fmt: skip
FUNCTIONS: dict[str, Any] = {
    **{name: getattr(np, name) for name in _NUMPY},
    **{name: getattr(special, name) for name in _SPECIAL},
    "round_down": np.floor, "round_up": np.ceil, "round_nearest": special.rint,
    "round_toward_zero": np.trunc,
    "asin": np.arcsin, "acos": np.arccos, "atan": np.arctan, "atan2": np.arctan2,
    "asinh": np.arcsinh, "acosh": np.arccosh, "atanh": np.arctanh,
    "floor_quotient": np.floor_divide, "floor_modulo": np.remainder, "modulo": np.fmod,
    "sign_bit": np.signbit, "is_nan": np.isnan, "is_inf": np.isinf, "is_finite": np.isfinite,
}  # fmt: skip
_BINARY: dict[type, str] = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/",
    ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!=",
}  # fmt: skip
_SYMBOLS = frozenset(_BINARY.values())


class Expressions:
    """A growing set of expressions, each held once."""

    def __init__(self) -> None:
        # ("name", x), ("constant", float, "0.5"), ("negative", index), ("+", index, index),
        # ("exp", index): the operator, then its operands
        self._nodes: list[tuple[Any, ...]] = []
        self._indices: dict[tuple[Any, ...], int] = {}

    def name(self, name: str) -> int:
        """Return the expression that is a named value."""
        return self.node("name", name)

    def number(self, value: float) -> int:
        """Return the expression that is a constant."""
        return self.node("constant", type(value), repr(value))

    def node(self, *parts: Any) -> int:
        """Return the expression of these parts, an operator or function and its operands."""
        index = self._indices.setdefault(parts, len(self._nodes))
        if index == len(self._nodes):
            self._nodes.append(parts)
        return index

    def parse(self, text: str, names: Mapping[str, int]) -> int:
        """Return the expression that Python code stands for, `names` replaced."""

        def convert(node: ast.expr) -> int:
            match node:
                case ast.Name():
                    return names[node.id] if node.id in names else self.name(node.id)
                case ast.Constant(value=value):
                    return self.number(value)  # type: ignore[arg-type]  # no strings in a table
                case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=float() as value)):
                    return self.number(-value)
                case ast.UnaryOp(op=ast.USub()):
                    return self.node("negative", convert(node.operand))
                case ast.BinOp():
                    return self.node(
                        _BINARY[type(node.op)], convert(node.left), convert(node.right)
                    )
                case ast.Compare(ops=[operator], comparators=[right]):
                    return self.node(_BINARY[type(operator)], convert(node.left), convert(right))
                case ast.Call(func=ast.Name(id=name)):
                    return self.node(name, *[convert(a) for a in node.args])
            raise AssertionError(f"no expression for {ast.dump(node)}")

        return convert(ast.parse(text, mode="eval").body)

    def names(self, results: Sequence[int]) -> set[str]:
        """Return the named values that the results depend on."""
        nodes = [self._nodes[index] for index in self._needed(results)]
        return {node[1] for node in nodes if node[0] == "name"}

    def lines(
        self, results: Sequence[int], number: Callable[[str], str]
    ) -> tuple[list[tuple[str, str]], list[str]]:
        """Return (name, text) of what is used more than once, and the text of each result.

        Args:
            results: what to compute.
            number: the text of a constant.
        """
        needed = self._needed(results)
        uses = dict.fromkeys(needed, 0)
        for index in (*results, *(p for n in needed for p in self._operands(n))):
            uses[index] += 1
        texts: dict[int, str] = {}
        named: list[tuple[str, str]] = []
        for index in needed:
            kind, *operands = self._nodes[index]
            if kind in ("name", "constant"):
                texts[index] = operands[0] if kind == "name" else number(operands[1])
                continue
            parts = [texts[p] for p in operands]
            if kind == "negative":
                text = f"(-{parts[0]})"
            elif kind in _SYMBOLS:
                text = f"({parts[0]} {kind} {parts[1]})"
            else:
                text = f"{kind}({', '.join(parts)})"
            if uses[index] > 1:
                named.append((f"t{len(named)}", text))
                text = named[-1][0]
            texts[index] = text
        return named, [texts[index] for index in results]

    def _operands(self, index: int) -> Sequence[int]:
        kind, *operands = self._nodes[index]
        return () if kind in ("name", "constant") else operands

    def _needed(self, results: Sequence[int]) -> list[int]:
        """Return what the results depend on, operands before what uses them."""
        needed: set[int] = set()
        stack = list(results)
        while stack:
            index = stack.pop()
            if index not in needed:
                needed.add(index)
                stack += self._operands(index)
        return sorted(needed)  # an operand is older than its user


class Formula:
    """Some expressions as a function of named parameters.

    Args:
        name: of the op, for the names of kernels.
        parameters: names. A parameter called `c` is a condition: it is tested, not computed with.
        expressions: where the results are.
        results: what the function returns; None stands for itself.

    Attributes:
        kernels: what `elementwise` has compiled.
    """

    __slots__ = ("expressions", "kernels", "name", "parameters", "results")

    def __init__(
        self,
        name: str,
        parameters: Sequence[str],
        expressions: Expressions,
        results: Sequence[int | None],
    ) -> None:
        self.name = name
        self.parameters = parameters
        self.expressions = expressions
        self.results = results
        self.kernels: dict[Any, Any] = {}

    def function(self) -> Callable[..., tuple[Any, ...]]:
        """Return a NumPy function that returns a tuple of the results."""
        named, texts = self._lines(str)
        found = iter(texts)
        values = [next(found) if r is not None else "None" for r in self.results]
        return self._python(named, f"({''.join(f'{value}, ' for value in values)})")

    def value(self) -> Callable[..., Any]:
        """Return a NumPy function that returns the only result."""
        named, (text,) = self._lines(str)
        return self._python(named, text)

    def _python(self, named: Sequence[tuple[str, str]], result: str) -> Callable[..., Any]:
        body = "".join(f" {name} = {text}\n" for name, text in named)
        scope = dict(FUNCTIONS)
        exec(f"def run({', '.join(self.parameters)}):\n{body} return {result}", scope)
        return scope["run"]  # type: ignore[no-any-return]

    def cuda(self) -> tuple[list[str], list[str]]:
        """Return statements in the compute type C, and the text of each result."""
        named, texts = self._lines(_cuda_number)
        return [f"const auto {name} = {text};" for name, text in named], texts

    def _lines(self, number: Callable[[str], str]) -> tuple[list[tuple[str, str]], list[str]]:
        return self.expressions.lines([r for r in self.results if r is not None], number)


def _cuda_number(text: str) -> str:
    """Return a constant of the compute type; true and false are C++'s."""
    huge = "infinity<float>()"
    return f"C({text.lower().replace('inf', huge).replace('nan', f'{huge} - {huge}')})"
