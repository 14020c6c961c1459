"""Declared signatures: an op says once, in its annotations, what it takes.

    def layer_norm(
        x: Float[ArrayLike, "... C"],
        weight: Float[ArrayLike, "C"] | None = None,
        bias: Float[ArrayLike, "C"] | None = None,
        *,
        eps: NotNegative = 1e-5,
    ) -> Tensor:
        x, weight, bias = takes.layer_norm(x, weight, bias, eps)

with `takes = Signatures(globals())` in the module. The call raises the errors and returns the
operands as tensors. It gets the arguments that declare something, in the order of the signature.

An operand is `ArrayLike`, or says its dtypes and its axes as jaxtyping does: `Float`, `Int`,
`Bool`, `Real` (no complex numbers), `Inexact` (floats and complex numbers) or `Shaped` (any
numbers); a name for the length of an axis, a number, "..." for any axes, "*B" for axes with a name.
A name means the same in all operands, and the first that has it decides. Operands must be on one
device. A literal takes its dtype with the other operands of the same kind, see `operands`.

An option is checked where its type says enough: bool, int, float, a Literal of words, or one of
the ranges below. `**unknown: Never` answers PyTorch's `dim=`.

A `Check` reads its list of arguments each time. Once it has been called often it compiles them to
one condition, which accepts what is right without another call and leaves the rest to the `Check`:
compiling takes a fraction of a millisecond, so it would delay a first step.
Tests: tests/core/test_signature.py.
"""

from __future__ import annotations

import builtins
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, Never, get_args, get_origin

import numpy as np

from tensorgrad.core import backend, instrument
from tensorgrad.core.checks import check_choice, check_flag, check_integer, check_number, unexpected
from tensorgrad.core.dtypes import int64
from tensorgrad.core.errors import ArgumentError, DtypeError, ShapeError
from tensorgrad.core.operands import operands
from tensorgrad.core.tensor import ArrayLike, Tensor

__all__ = ["Bool", "Float", "Inexact", "Int", "Real", "Shaped"]  # for type checkers

_OFTEN = 6  # calls that take as long as compiling
_MOST = 1 << 63


@dataclass(frozen=True)
class Operand:
    """The dtypes and the axes of an operand."""

    kind: str = ""
    axes: str = "..."


@dataclass(frozen=True)
class Interval:
    """The numbers from `low`, below `end`, that an option of a type may be."""

    kind: type
    low: float
    end: float = math.inf


NotNegative = Annotated[float, Interval(float, 0)]
Probability = Annotated[float, Interval(float, 0, 1)]
Size = Annotated[int, Interval(int, 0)]
Count = Annotated[int, Interval(int, 1)]

# For each kind of operand the kinds of its dtypes, V that of bfloat16, and how errors call them.
KINDS = {
    "Float": ("fV", "a float"), "Int": ("iu", "integers"), "Bool": ("b", "bool"),
    "Real": ("fViub", "real numbers"), "Inexact": ("fVc", "floats or complex numbers"),
}  # fmt: skip

_OPERAND = re.compile(rf"({'|'.join(KINDS)})\[ArrayLike, '(.*)'\]")

if TYPE_CHECKING:
    from typing import Annotated as Bool
    from typing import Annotated as Float
    from typing import Annotated as Inexact
    from typing import Annotated as Int
    from typing import Annotated as Real
    from typing import Annotated as Shaped
else:

    class _Notation:
        """A name that makes `Annotated[ArrayLike, Operand(name, axes)]`."""

        def __init__(self, name):
            self.name = name

        def __getitem__(self, item):
            return Annotated[item[0], Operand(self.name, item[1])]

    Float, Int, Bool, Real, Inexact = map(_Notation, KINDS)
    Shaped = _Notation("")


@dataclass(frozen=True, eq=False)
class Argument:
    """An argument that declares what it takes.

    Attributes:
        name: of the parameter.
        takes: an `Operand`, an `Interval`, a tuple of words, or one of bool, int and float; Never
            for `**unknown`.
        optional: whether it may be None.
    """

    name: str
    takes: Any
    optional: bool = False


class Signatures:
    """The checks of a module's functions, by name; each is made when it is first asked for.

    Args:
        functions: the module's globals().
    """

    def __init__(self, functions: Mapping[str, Any]) -> None:
        self._functions = functions

    def __getattr__(self, name: str) -> Callable[..., tuple[Tensor, ...]]:
        if name not in self._functions:
            raise AttributeError(name)
        check = Check(name, declared(self._functions[name]))
        check.often = lambda: setattr(self, name, compiled(check))
        setattr(self, name, check)
        return check


def declared(function: Callable[..., Any]) -> list[Argument]:
    """Return the arguments of a function whose annotations declare what they take."""
    arguments = []
    for name, annotation in function.__annotations__.items():
        takes, optional = _meaning(annotation, function) if name != "return" else (None, False)
        if takes:
            arguments.append(Argument(name, takes, optional))
    return arguments


def _meaning(text: str, function: Callable[..., Any]) -> tuple[Any, bool]:
    """Return what an annotation declares, None for nothing, and whether it may be None."""
    plain = text.removesuffix(" | None")
    operand = _OPERAND.fullmatch(plain)  # read as text, which takes a tenth of the time
    takes = Operand(*operand.groups()) if operand else _declaration(plain, function.__globals__)
    return takes, text != plain


def _declaration(text: str, names: dict[str, Any]) -> Any:
    kind = names.get(text) or getattr(builtins, text, None) or eval(text, names)
    if kind is ArrayLike:
        return Operand()
    if get_origin(kind) is Annotated:
        return kind.__metadata__[0]
    if get_origin(kind) is Literal:
        return get_args(kind)
    return kind if kind in (bool, int, float, Never) else None


class Check:
    """The check of an op's arguments; it returns the operands as tensors.

    Attributes:
        op: for errors.
        arguments: those that it is called with, in this order.
        often: what to call once it has been called often.
    """

    often: Callable[[], None] = staticmethod(lambda: None)

    def __init__(self, op: str, arguments: Sequence[Argument]) -> None:
        self.op = op
        self.arguments = arguments
        self._calls = 0

    def __call__(self, *values: Any) -> tuple[Tensor, ...]:
        """Return the operands among the arguments as tensors, or raise the error."""
        self._calls += 1
        if self._calls == _OFTEN:
            self.often()
        tensors: dict[Argument, Any] = {}
        for argument, value in zip(self.arguments, values, strict=True):
            if isinstance(argument.takes, Operand):
                tensors[argument] = value
            elif value is not None or not argument.optional:
                self._option(argument, value)
        literal = [value for value in tensors.values() if not isinstance(value, Tensor)]
        if literal or instrument.observer is not None:
            self._convert(tensors)
        lengths: dict[str, Any] = {}
        arrays = {a: tensor.data for a, tensor in tensors.items() if tensor is not None}
        for argument, array in arrays.items():
            self._operand(argument, array, lengths)
        if len(arrays) > 1:
            backend.same_device(self.op, [a.name for a in arrays], list(arrays.values()))
        return tuple(tensors.values())

    def _option(self, argument: Argument, value: Any) -> None:
        """Raise the error of an option."""
        takes, name = argument.takes, argument.name
        if takes is Never:
            if value:
                raise unexpected(self.op, value)
        elif isinstance(takes, tuple):
            check_choice(self.op, name, value, takes)
        elif isinstance(takes, Interval):
            _TYPES[takes.kind](self.op, name, value)
            if not takes.low <= value < takes.end:
                raise ArgumentError(f"{self.op}: {name} is {value}, expected {limits(name, takes)}")
        else:
            _TYPES[takes](self.op, name, value)

    def _convert(self, tensors: dict[Argument, Any]) -> None:
        """Make tensors of operands; literals share the dtype of others of their kind."""
        present = {a: v for a, v in tensors.items() if v is not None or not a.optional}
        for kind in {argument.takes.kind for argument in present}:
            given = [argument for argument in present if argument.takes.kind == kind]
            values = [present[argument] for argument in given]
            made = operands(self.op, [argument.name for argument in given], values)
            for argument, tensor in zip(given, made, strict=True):
                if kind == "Int" and not tensor.size and tensor is not present[argument]:
                    tensor = Tensor(tensor.data.astype(int64))  # NumPy makes an empty list float64
                tensors[argument] = tensor

    def _operand(self, argument: Argument, array: Any, lengths: dict[str, Any]) -> None:
        """Raise the error of an operand's dtype or shape; note the lengths that it decides."""
        kinds, what = KINDS.get(argument.takes.kind, (array.dtype.kind, ""))
        if array.dtype.kind not in kinds:
            got = f"{self.op}: {argument.name} has dtype {array.dtype}"
            raise DtypeError(f"{got}, expected {what}")
        if argument.takes.axes == "...":
            return
        known = dict(lengths)
        places = _places(argument.takes.axes, array.ndim)
        right = places is not None
        for axis, place in places or ():
            length = array.shape[place]
            lengths.setdefault(axis, (int(axis) if axis.isdigit() else length, argument))
            right &= lengths[axis][0] == length
        if not right:
            got = f"{self.op}: {argument.name} has shape {array.shape}"
            raise ShapeError(f"{got}, expected {_shape(argument, known)}")


def limits(name: str, takes: Interval) -> str:
    """Return the numbers of a range in words."""
    if takes.end < math.inf:
        return f"{takes.low} <= {name} < {takes.end}"
    return f"{takes.low} or more" if takes.kind is int else f"a finite number from {takes.low}"


_TYPES: dict[Any, Callable[..., None]] = {
    bool: check_flag, int: check_integer, float: check_number,
}  # fmt: skip


def _places(axes: str, ndim: int) -> list[tuple[str, Any]] | None:
    """Return each named axis with its place in a shape; None if the number of axes is wrong."""
    names = axes.split()
    several = [i for i, name in enumerate(names) if name[0] in ".*"]
    extra = ndim - len(names) + len(several)
    if extra < 0 or (extra and not several):
        return None
    places: list[Any] = list(range(ndim))
    for i in several:
        places[i : i + extra] = [slice(i, i + extra)]
    return [pair for pair in zip(names, places, strict=True) if pair[0] != "..."]


def _shape(argument: Argument, known: Mapping[str, tuple[Any, Argument]]) -> str:
    """Return the shape that an operand should have, and where its lengths come from."""
    names = argument.takes.axes.split()
    lengths: list[Any] = []
    for name in names:
        length = known[name][0] if name in known else name
        lengths += length if isinstance(length, tuple) else [length]
    shape = f"({', '.join(map(str, lengths))}{',' if len(lengths) == 1 else ''})"
    origins = {name: known[name][1] for name in names if name in known}
    for origin in origins.values():
        if origin.takes.axes == argument.takes.axes:
            return f"{shape} like {origin.name}"
    places = []
    for name, origin in origins.items():
        axes = origin.takes.axes.split()
        place = "last axis" if name == axes[-1] else f"axis {axes.index(name)}"
        places.append(f"{'axes' if name[0] == '*' else place} of {origin.name}")
    return f"{shape} ({', '.join(places)})" if places else shape


def compiled(check: Check) -> Callable[..., tuple[Tensor, ...]]:
    """Return a function that accepts what is surely right and leaves the rest to a check."""
    operands = [a for a in check.arguments if isinstance(a.takes, Operand)]
    tests = ["instrument.observer is None"]
    known: set[str] = set()
    for argument in check.arguments:
        operand = argument in operands
        test = _tensor(argument, known) if operand else _option(argument.name, argument.takes)
        tests.append(f"({argument.name} is None or {test})" if argument.optional else test)
    if len(operands) > 1:
        tests.append(_together(operands))
    names = ", ".join(argument.name for argument in check.arguments)
    results = "".join(f"{argument.name}, " for argument in operands)
    source = f"""
def {check.op}({names}):
    if {" and ".join(tests)}:
        return ({results})
    return check({names})
"""
    scope: dict[str, Any] = dict(_SCOPE, check=check)
    exec(source, scope)
    return scope[check.op]  # type: ignore[no-any-return]


def _option(name: str, takes: Any) -> str:
    """Return the condition, in Python, that an option is right."""
    if takes is Never:
        return f"not {name}"
    if takes is bool:
        return f"({name} is True or {name} is False)"
    if isinstance(takes, tuple):
        return f"type({name}) is str and {name} in {takes}"
    if takes is float:
        return f"({name}.__class__ is float or {name}.__class__ is int)"
    limits = takes if isinstance(takes, Interval) else Interval(int, -_MOST, _MOST)
    end = min(limits.end, _MOST) if limits.kind is int else limits.end
    kind = _option(name, float) if limits.kind is float else f"{name}.__class__ is int"
    return f"{kind} and {limits.low} <= {name} < {end}"


def _tensor(argument: Argument, known: set[str]) -> str:
    """Return the condition, in Python, that an operand is right; note the lengths it decides."""
    name, takes = argument.name, argument.takes
    tests = [f"isinstance({name}, Tensor)"]
    if takes.kind:
        tests.append(f"{name}.data.dtype.kind in {KINDS[takes.kind][0]!r}")
    axes = takes.axes.split()
    shape = f"{name}.data.shape"
    if all(axis.strip("*") in known for axis in axes):
        tests.append(f"{shape} == ({''.join(f'{axis}, ' for axis in axes)})")
        return " and ".join(tests)
    several = next((i for i, axis in enumerate(axes) if axis[0] in ".*"), len(axes))
    after = len(axes) - 1 - several
    tests.append(f"len({shape}) {'==' if after < 0 else '>='} {len(axes) - (after >= 0)}")
    for i, axis in enumerate(axes):
        place = str(i if i < several else i - len(axes))
        if i == several:
            place = f"{i}:{f'len({shape}) - {after}' if after else ''}"
        axis = axis.strip("*")
        if axis in known or axis.isdigit():
            tests.append(f"{shape}[{place}] == {axis}")
        elif axis != "...":
            tests.append(f"({axis} := {shape}[{place}]) is not None")
            if argument.optional:
                raise TypeError(f"{axis} is first named by an optional operand, {name}")
            known.add(axis)
    return " and ".join(test for test in tests if not test.endswith(">= 0"))


def _together(operands: Sequence[Argument]) -> str:
    """Return the condition, in Python, that operands are on one device."""
    on_cpu = [
        f"({a.name} is None or type({a.name}.data) is ndarray)"
        if a.optional
        else f"type({a.name}.data) is ndarray"
        for a in operands
    ]
    names = ", ".join(a.name for a in operands)
    tests = [" and ".join(on_cpu), f"on_one_device({names})"]
    if sum(not a.optional for a in operands) == 1:
        tests.insert(0, " and ".join(f"{a.name} is None" for a in operands if a.optional))
    return f"({' or '.join(tests)})"


def _on_one_device(*tensors: Tensor | None) -> bool:
    return len({backend.place(tensor.data) for tensor in tensors if tensor is not None}) == 1


_SCOPE = {
    "Tensor": Tensor, "inf": math.inf, "instrument": instrument, "ndarray": np.ndarray,
    "on_one_device": _on_one_device,
}  # fmt: skip
