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
# The derivatives by the operands a, b, c of those that have some; "" for one that is 0.
_DERIVATIVES: dict[str, tuple[str, ...]] = {
    "negative": ("-1.0",), "+": ("1.0", "1.0"), "-": ("1.0", "-1.0"), "*": ("b", "a"),
    "/": ("1.0 / b", "-a / (b * b)"), "where": ("", "where(a, 1.0, 0.0)", "where(a, 0.0, 1.0)"),
    "positive": ("1.0",), "float32": ("1.0",), "float64": ("1.0",), "number": ("1.0",),
    "exp": ("exp(a)",), "expm1": ("exp(a)",), "exp2": ("0.6931471805599453 * exp2(a)",),
    "log": ("1.0 / a",), "log1p": ("1.0 / (1.0 + a)",), "log2": ("1.4426950408889634 / a",),
    "log10": ("0.4342944819032518 / a",), "sqrt": ("0.5 / sqrt(a)",),
    "cbrt": ("1.0 / (3.0 * cbrt(a) * cbrt(a))",), "square": ("2.0 * a",),
    "logaddexp": ("exp(a - logaddexp(a, b))", "exp(b - logaddexp(a, b))"),
    "hypot": ("a / hypot(a, b)", "b / hypot(a, b)"),
    "power": ("where(b == 0.0, 0.0, b * power(a, b - 1.0))",
              "where(a == 0.0, 0.0, power(a, b) * log(where(a == 0.0, 1.0, a)))"),
    "sin": ("cos(a)",), "cos": ("-sin(a)",), "tan": ("1.0 + tan(a) * tan(a)",),
    "sinh": ("cosh(a)",), "cosh": ("sinh(a)",), "tanh": ("1.0 - tanh(a) * tanh(a)",),
    "asin": ("1.0 / sqrt((1.0 - a) * (1.0 + a))",), "acos": ("-1.0 / sqrt((1.0 - a) * (1.0 + a))",),
    "atan": ("1.0 / (1.0 + a * a)",), "atan2": ("b / (a * a + b * b)", "-a / (a * a + b * b)"),
    "asinh": ("1.0 / hypot(a, 1.0)",), "acosh": ("1.0 / (sqrt(a - 1.0) * sqrt(a + 1.0))",),
    "atanh": ("1.0 / ((1.0 - a) * (1.0 + a))",),
    "maximum": ("where(a > b, 1.0, where(a == b, 0.5, 0.0))",
                "where(b > a, 1.0, where(a == b, 0.5, 0.0))"),
    "minimum": ("where(a < b, 1.0, where(a == b, 0.5, 0.0))",
                "where(b < a, 1.0, where(a == b, 0.5, 0.0))"),
    "absolute": ("sign(a)",), "copysign": ("copysign(1.0, a) * copysign(1.0, b)", ""),
    "floor_modulo": ("1.0", "-round_down(a / b)"), "modulo": ("1.0", "-round_toward_zero(a / b)"),
    "erf": ("1.1283791670955126 * exp(-a * a)",), "normal_cdf": ("normal_pdf(a)",),
    "normal_pdf": ("-a * normal_pdf(a)",), "sigmoid": ("sigmoid(a) * (1.0 - sigmoid(a))",),
    "silu_derivative": ("sigmoid(a) * (1.0 - sigmoid(a)) * (2.0 + a * (1.0 - 2.0 * sigmoid(a)))",),
    "softplus": ("sigmoid(a)",), "gelu_tanh": ("gelu_tanh_derivative(a)",),
    "gelu_tanh_derivative": ("",),
}  # fmt: skip


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

    def gradients(self, result: int, names: Sequence[str], dy: int) -> list[int | None]:
        """Return dy times the derivative of an expression by each name; None where it is 0."""
        sums: dict[int, int] = {result: dy}
        for index in reversed(self._needed([result])):
            operator, *operands = self._nodes[index]
            if index not in sums or operator in ("name", "constant"):
                continue
            names_of = dict(zip("abc", operands, strict=False))
            for operand, text in zip(operands, _DERIVATIVES.get(operator, ()), strict=False):
                if not text:
                    continue
                part = self._times(sums[index], self.parse(text, names_of))
                before = sums.get(operand)
                sums[operand] = part if before is None else self.node("+", before, part)
        return [sums.get(self.name(name)) for name in names]

    def _times(self, dy: int, factor: int) -> int:
        """Return a product, without a factor of 1 or -1."""
        one, minus_one = self.number(1.0), self.number(-1.0)
        if factor == one:
            return dy
        return self.node("negative", dy) if factor == minus_one else self.node("*", dy, factor)

    def replaced(self, index: int, name: str, by: int) -> int:
        """Return an expression with another one in the place of a name."""
        found: dict[int, int] = {}
        for each in self._needed([index]):
            operator, *operands = self._nodes[each]
            if operator == "name" and operands[0] == name:
                found[each] = by
            elif operator in ("name", "constant"):
                found[each] = each
            else:
                found[each] = self.node(operator, *[found[operand] for operand in operands])
        return found[index]

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
