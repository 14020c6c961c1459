"""Expressions of named values, once as Python and once as CUDA.

An expression is an index into an `Expressions`, which holds equal ones once, so that a common
subexpression is evaluated once.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Protocol

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
_LEAVES = ("name", "constant")
# gelu_tanh(x) is x * sigmoid(angle). The angle and its derivative at a, bounded to +-30: beyond,
# the second derivative of gelu_tanh is 0 in double too, where inf * 0 would be NaN.
_BOUNDED = "minimum(maximum(a, -30), 30)"
_SLOPE = f"(1.5957691216057308 + 0.21406444881780073 * {_BOUNDED} * {_BOUNDED})"
_ANGLE = f"({_BOUNDED} * (1.5957691216057308 + 0.07135481627260025 * {_BOUNDED} * {_BOUNDED}))"
# Gradients of functions that are no rows of the elementwise table, or whose row has another form:
# expressions of dy, the operands a, b, c and the value y; "" where there is none.
GRADIENTS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("logical_not", "int64"), ()),
    **dict.fromkeys(("float32", "float64", "number"), ("dy",)),
    "negative": ("-dy",),
    "expm1": ("dy * exp(a)",),
    "copysign": ("where(sign_bit(a) == sign_bit(b), dy, -dy)", ""),
    "normal_pdf": ("-dy * minimum(maximum(a, -40), 40) * y",),  # inf * 0 is NaN
    "sigmoid": ("dy * y * sigmoid(-a)",),
    "silu_derivative": (
        "dy * sigmoid(a) * sigmoid(-a)"
        " * (2 + minimum(maximum(a, -800), 800) * (sigmoid(-a) - sigmoid(a)))",
    ),
    "gelu_tanh_derivative": (
        f"dy * sigmoid({_ANGLE}) * sigmoid(-{_ANGLE}) * (2 * {_SLOPE} + {_BOUNDED} * ("
        f"0.42812889763560147 * {_BOUNDED}"
        f" + {_SLOPE} * {_SLOPE} * (sigmoid(-{_ANGLE}) - sigmoid({_ANGLE}))))",
    ),
}


class Differentiable(Protocol):
    """A row of the elementwise table; see `Row`."""

    operands: list[str]
    gradients: tuple[str, ...]
    tangents: tuple[str, ...]


ROWS: dict[str, Differentiable] = {}  # the elementwise table, by the value of each row


def rule_of(kind: str) -> tuple[Sequence[str], Sequence[str]]:
    """Return the names of the operands of an operator or function, and its gradients by them."""
    if kind in GRADIENTS:
        return "abc", GRADIENTS[kind]
    values = f"{kind}(x)", f"a {kind} b", f"{kind}(a, b)", f"{kind}(c, a, b)"
    row = next(ROWS[value] for value in values if value in ROWS)
    return row.operands, row.tangents


@lru_cache(maxsize=1024)
def _parsed(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


class Expressions:
    """A growing set of expressions, each held once."""

    def __init__(self) -> None:
        # ("name", x), ("constant", float, "0.5"), ("negative", index), ("+", index, index),
        # ("exp", index): the operator, then its operands; ("row", row, value, index): see `row`
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

    def _negative(self, operand: int) -> int:
        kind, *parts = self._nodes[operand]
        return parts[0] if kind == "negative" else self.node("negative", operand)

    def parse(self, text: str, names: Mapping[str, int]) -> int:
        """Return the expression that Python code stands for, `names` replaced."""

        def convert(node: ast.expr) -> int:
            match node:
                case ast.Name(id="inf" | "nan" as constant):
                    return self.number(float(constant))
                case ast.Name():
                    return names[node.id] if node.id in names else self.name(node.id)
                case ast.Constant(value=value):
                    return self.number(value)  # type: ignore[arg-type]  # no strings in a table
                case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=float() as value)):
                    return self.number(-value)
                case ast.UnaryOp(op=ast.USub()):
                    return self._negative(convert(node.operand))
                case ast.BinOp():
                    return self.node(
                        _BINARY[type(node.op)], convert(node.left), convert(node.right)
                    )
                case ast.Compare(ops=[operator], comparators=[right]):
                    return self.node(_BINARY[type(operator)], convert(node.left), convert(right))
                case ast.Call(func=ast.Name(id=name)):
                    return self.node(name, *[convert(a) for a in node.args])
            raise AssertionError(f"no expression for {ast.dump(node)}")

        return convert(_parsed(text))

    def row(self, row: Differentiable | None, value: int, *operands: int) -> int:
        """Return a value of a row of the table, whose derivatives are the row's.

        Args:
            row: the row; None: gradients stop here.
            value: how to compute it.
            operands: of the row.
        """
        return self.node("row", row, value, *operands)

    def gradients(self, y: int, names: Sequence[str], first: bool = False) -> list[int | None]:
        """Return the gradients of y by named values, expressions of dy; None where it has none.

        Args:
            y: an expression.
            names: the named values.
            first: they are not differentiated in turn.
        """
        order = self._reached([y], self._arguments)
        leads = {self.name(name) for name in names}
        for index in order:
            if not leads.isdisjoint(self._arguments(index)):
                leads.add(index)
        sums = {y: self.name("dy")}
        for index in reversed(order):
            dy, arguments = sums.get(index), self._arguments(index)
            if dy is None or not arguments:
                continue
            letters, texts = self._rule(index, first)
            table = {**dict(zip(letters, arguments, strict=False)), "y": index, "dy": dy}
            for argument, text in zip(arguments, texts, strict=False):
                if text and argument in leads:
                    dx, before = self.parse(text, table), sums.get(argument)
                    sums[argument] = dx if before is None else self.node("+", before, dx)
        return [sums.get(self.name(name)) for name in names]

    def _rule(self, index: int, first: bool) -> tuple[Sequence[str], Sequence[str]]:
        """Return the names of the arguments of an expression, and its gradients by them."""
        kind, row = self._nodes[index][:2]
        if kind == "row":
            return row.operands, row.gradients if first else row.tangents
        return rule_of(kind)

    def copied(self, source: Expressions, index: int, names: Mapping[str, int]) -> int:
        """Return an expression of another set in this one, `names` replaced."""
        copies: dict[int, int] = {}
        for each in source._reached([index], source._all_operands):
            kind, *parts = source._nodes[each]
            if kind == "name":
                copies[each] = names[parts[0]] if parts[0] in names else self.name(parts[0])
            elif kind == "row":
                copies[each] = self.node(kind, parts[0], *[copies[p] for p in parts[1:]])
            else:
                parts = parts if kind == "constant" else [copies[p] for p in parts]
                copies[each] = self.node(kind, *parts)
        return copies[index]

    def names(self, results: Sequence[int]) -> set[str]:
        """Return the named values that the results depend on."""
        plain = [self._plain(index) for index in results]
        nodes = [self._nodes[index] for index in self._reached(plain, self._operands)]
        return {node[1] for node in nodes if node[0] == "name"}

    def lines(
        self, results: Sequence[int], number: Callable[[str], str]
    ) -> tuple[list[tuple[str, str]], list[str]]:
        """Return (name, text) of what is used more than once, and the text of each result.

        Args:
            results: what to compute.
            number: the text of a constant.
        """
        results = [self._plain(index) for index in results]
        needed = self._reached(results, self._operands)
        uses = dict.fromkeys(needed, 0)
        for index in (*results, *(p for n in needed for p in self._operands(n))):
            uses[index] += 1
        texts: dict[int, str] = {}
        named: list[tuple[str, str]] = []
        for index in needed:
            kind, *parts = self._nodes[index]
            if kind in _LEAVES:
                texts[index] = parts[0] if kind == "name" else number(parts[1])
                continue
            parts = [texts[p] for p in self._operands(index)]
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

    def _plain(self, index: int) -> int:
        """Return the expression that computes one; of a row, its value."""
        while self._nodes[index][0] == "row":
            index = self._nodes[index][2]
        return index

    def _operands(self, index: int) -> Sequence[int]:
        """Return what an expression, no row, is computed from."""
        return [self._plain(operand) for operand in self._all_operands(index)]

    def _all_operands(self, index: int) -> Sequence[int]:
        """Return the operands of an expression; of a row, its value as well."""
        kind, *parts = self._nodes[index]
        return () if kind in _LEAVES else parts[1:] if kind == "row" else parts

    def _arguments(self, index: int) -> Sequence[int]:
        """Return the operands that gradients may flow to; of a row, not its value."""
        operands = self._all_operands(index)
        return operands[1:] if self._nodes[index][0] == "row" else operands

    def _reached(
        self, results: Sequence[int], operands: Callable[[int], Sequence[int]]
    ) -> list[int]:
        """Return what the results depend on, operands before what uses them."""
        reached: set[int] = set()
        stack = list(results)
        while stack:
            index = stack.pop()
            if index not in reached:
                reached.add(index)
                stack += operands(index)
        return sorted(reached)  # an operand is older than its user


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
