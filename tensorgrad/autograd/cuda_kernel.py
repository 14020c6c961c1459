"""Kernels of one's own: CUDA for arrays on a GPU, a NumPy reference for those on the CPU.

Tests: tests/autograd/test_cuda_kernel.py.
"""

from __future__ import annotations

import inspect
import linecache
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tensorgrad.autograd.tangents import FORWARD_ONLY, Op, tangent_of
from tensorgrad.core import backend
from tensorgrad.core.arrays import cast
from tensorgrad.core.backend import Array, Shape, contiguous, is_numpy, same_device, upcast
from tensorgrad.core.checks import (
    check_flag,
    check_function,
    check_integer,
    check_number,
    check_whole,
    shape_of,
)
from tensorgrad.core.dtypes import ALL, INTEGERS, Dtype, bool_, c_name, compute_dtype
from tensorgrad.core.errors import (
    ArgumentError,
    DeviceError,
    DtypeError,
    GradError,
    KernelError,
    ShapeError,
)
from tensorgrad.core.modes import mode
from tensorgrad.core.operands import tensor_of
from tensorgrad.core.record import record
from tensorgrad.core.tensor import Tensor
from tensorgrad.kernels.device import capability
from tensorgrad.kernels.loader import load_text
from tensorgrad.kernels.structs import number
from tensorgrad.kernels.tuned import Rows, TuningCase, architecture, read, write

Value = int | Callable[..., int]

_DTYPES = {c_name(dtype): dtype for dtype in ALL}
_HEADERS = {"__half": "cuda_fp16.h", "__nv_bfloat16": "cuda_bf16.h"}
_PRELUDE = "#define INFINITY __int_as_float(0x7f800000)"  # which NVRTC lacks
_TEMPLATE = r"(?:template\s*<([^{}();]*)>\s*)?"
_BOUNDS = r"(?:__launch_bounds__\s*\([^)]*\)\s*)?"
_RESERVED = ("threads", "capability")  # names that functions of the arguments may ask for
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)


def cuda_kernel(
    source: str | Path,
    name: str,
    reference: Callable[..., Any],
    *,
    threads: Value = 256,
    blocks: Callable[..., int | Shape] | None = None,
    shapes: Mapping[str, Callable[..., Any]] | None = None,
    sizes: Mapping[str, Callable[..., int]] | None = None,
    values: Mapping[str, Value] | None = None,
    candidates: Sequence[Mapping[str, int]] = (),
    tuned: str | Path | None = None,
    case: Callable[..., Any] | None = None,
    tangent: Callable[..., Any] | None = None,
) -> CudaKernel:
    """Return a function of tensors that a CUDA kernel computes on a GPU, and NumPy on the CPU.

    The parameters of the kernel say what it takes. Pointers are results, in memory that is not
    initialized; pointers to const are the arguments, in C order; then come numbers. In the source,
    `T` is the type of the first argument that is declared with it, and `Compute` the type to
    compute in: float where T has 16 bits, else T. `INFINITY` is defined too. The kernel is compiled
    for each T on first use, and launched on the current stream.

    The kernel may be a template. Its types stand for dtypes as T does. Its numbers are integers and
    bools, whose values come from `values`, from `candidates`, or from the call, which goes before
    the others: `f(x, ROWS=4)`. A call may set `threads` in the same way.

    The functions below take the arguments of the call. Those with further parameters get, by name,
    what they ask for: numbers of the template, `threads`, and `capability`, the compute capability
    of the GPU, such as 90. `reference` and `shapes`, which are called on the CPU too, get only the
    numbers that the call names.

    The result has no gradient: `tg.Function` makes an op of two kernels. With `tangent` it has a
    derivative in forward mode, `tg.jvp`.

    Args:
        source: CUDA C++, or the path of a file of it.
        name: of the kernel, a `__global__ void` function of the source.
        reference: the same in NumPy. It takes arrays, of which 16-bit floats come as float32, and
            numbers, and returns an array or a tuple of several, which are cast.
        threads: of a block, or a function that returns them.
        blocks: takes the arguments and returns how many blocks, as one number or up to three.
            Default: as many as give each element of the first result a thread.
        shapes: for the names of results, functions that take the arguments and return the shape.
            Default: that of the first argument.
        sizes: for the names of numbers, functions that take the arguments and return the number.
            The others are given in the call, after the arrays; but `n` is the number of elements
            of the first result.
        values: for the names of numbers of the template, the value, or a function that returns it.
        candidates: values of numbers of the template and of `threads`, the same names in each. The
            first ones are used where `tune` has not stored others as the fastest.
        tuned: the file in which `tune` stores the fastest candidates. It is read once, by the first
            launch, and need not exist.
        case: takes the arguments and returns what distinguishes cases that are tuned apart, besides
            the dtypes. Default: the shapes of the arrays.
        tangent: takes the arguments of the call as tensors, then for each array its tangent, None
            where it is constant. It returns the tangent of the result in ops, of several results a
            tuple; None for one that is constant. It may call the kernel, where that is linear.

    Returns:
        A function of the arrays and the numbers, which returns a tensor, or a tuple of several.

    Raises:
        KernelError: the source has no such kernel, or a parameter of a type that is not known.
        ArgumentError: `shapes`, `sizes`, `values` or `candidates` has a name that is not a
            parameter, `threads` is not a number from 1, or there are candidates without a file.

    Example:
        >>> source = '''
        ... __global__ void scale(T* y, const T* x, float factor, long long n) {
        ...     long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
        ...     if (i < n) y[i] = Compute(x[i]) * factor;
        ... }
        ... '''
        >>> scale = tg.cuda_kernel(source, "scale", reference=lambda x, factor: x * factor)
        >>> scale(tg.tensor([1.0, 2.0]), 3.0)
        tensor([3., 6.], dtype=float32)
    """
    functions = {"reference": reference, "blocks": blocks, "case": case, "tangent": tangent}
    for what, function in functions.items():
        if function is not None or what == "reference":
            check_function("cuda_kernel", function, name=what)
    if not isinstance(source, (str, Path)):
        raise ArgumentError(f"cuda_kernel: source is {source!r:.80}, expected a str or a Path")
    if not isinstance(name, str):
        raise ArgumentError(f"cuda_kernel: name is {name!r:.80}, expected that of a kernel")
    text = source.read_text(encoding="utf-8") if isinstance(source, Path) else source
    place = (str(source), 1) if isinstance(source, Path) else _place(text, name)
    parameters = _parameters(text, name)
    for what, kind, given in (
        ("shapes", "output", shapes),
        ("sizes", "number", sizes),
        ("values", "value", values),
    ):
        names = [p.name for p in parameters if p.kind == kind]
        _check_names(what, {} if given is None else given, names)
    if not isinstance(candidates, (list, tuple)):
        raise ArgumentError(
            f"cuda_kernel: candidates is {candidates!r:.80}, expected a list of dictionaries"
        )
    for candidate in candidates:
        free = [p.name for p in parameters if p.kind == "value" and p.name not in (values or {})]
        _check_names("candidates", candidate, [*free, "threads"])
        if candidate.keys() != candidates[0].keys():
            raise ArgumentError(
                f"cuda_kernel: candidates has {dict(candidate)}, expected the names of the first, "
                f"{', '.join(candidates[0])}"
            )
    if bool(candidates) != (tuned is not None):
        raise ArgumentError(
            f"cuda_kernel: candidates is {candidates!r:.80} and tuned is {tuned!r:.80}, expected "
            "both, or none"
        )
    return CudaKernel(
        name,
        text,
        place,
        parameters,
        reference,
        blocks,
        shapes or {},
        sizes or {},
        {**(values or {}), "threads": threads},
        candidates,
        None if tuned is None else Path(tuned),
        case,
        tangent,
    )


class KernelParameter(NamedTuple):
    """A parameter of a kernel, or of its template.

    Attributes:
        name: in the source.
        kind: "output", "input" or "number"; of the template "type" or "value".
        dtype: of the elements or of the number; None where a type says it.
        type_name: the type, such as T, that stands for the dtype of an argument; or "".
    """

    name: str
    kind: str
    dtype: Dtype | None
    type_name: str = ""


class CudaKernel:
    """The result of `cuda_kernel`; call it.

    Attributes:
        reference: the NumPy function.
    """

    def __init__(
        self,
        name: str,
        text: str,
        place: tuple[str, int],
        parameters: Sequence[KernelParameter],
        reference: Callable[..., Any],
        blocks: Callable[..., int | Shape] | None,
        shapes: Mapping[str, Callable[..., Any]],
        sizes: Mapping[str, Callable[..., int]],
        values: Mapping[str, Value],
        candidates: Sequence[Mapping[str, int]],
        tuned: Path | None,
        case: Callable[..., Any] | None,
        tangent: Callable[..., Any] | None,
    ) -> None:
        self.__name__ = name
        self._tangent = tangent
        self.reference = reference
        self._text, self._place = text, place
        self._outputs = [p for p in parameters if p.kind == "output"]
        self._inputs = [p for p in parameters if p.kind == "input"]
        self._numbers = [p for p in parameters if p.kind == "number"]
        self._template = [p for p in parameters if p.kind in ("type", "value")]
        self._given = [p for p in self._numbers if p.name not in {*sizes, "n"}]
        by_name = partial(_by_name, count=len(self._inputs) + len(self._given))
        self._reference = by_name(reference)
        self._blocks = by_name(blocks) if blocks is not None else None
        self._shapes = {name: by_name(shape) for name, shape in shapes.items()}
        self._sizes = {name: by_name(size) for name, size in sizes.items()}
        self._values = {
            name: by_name(value) if callable(value) else value for name, value in values.items()
        }
        self._choices = {p.name: p.dtype for p in self._template if p.kind == "value"}
        self._candidates = {_words(candidate): candidate for candidate in candidates}
        self._tuned, self._case = tuned, by_name(case) if case is not None else None
        constants = {name: value for name, value in values.items() if not callable(value)}
        for fixed in (constants, *candidates):
            self._check_values("cuda_kernel", fixed)
        tunable = candidates[0] if candidates else {}
        self._required = [name for name in self._choices if name not in {*values, *tunable}]
        self._rows: Rows | None = None
        self._compiled: dict[tuple[Any, ...], Any] = {}

    def __call__(self, *args: Any, **values: Any) -> Any:
        """Return the result, or a tuple of several.

        Args:
            args: a tensor or array for each pointer to const, on one device; then the numbers.
            values: numbers of the template, and `threads`; those that nothing else decides must be
                given.

        Raises:
            ArgumentError: the number of arguments is wrong, a number does not fit its type, or a
                value is missing or unknown.
            DtypeError: an argument has another dtype than the kernel declares, or two have
                different ones for T.
            ShapeError: the reference returns other shapes than `shapes` says.
            DeviceError: arguments are on different devices.
            GradError: an argument requires a gradient, which would be lost, or has a tangent and
                the kernel none.
            KernelError: the kernel does not compile; with the lines of the source. Or the file of
                tuned values has one that is not a candidate.
        """
        tensors, numbers = self._checked(args, values)
        arrays = [tensor.data for tensor in tensors]
        given = (*arrays, *numbers)
        types = self._types(arrays)
        results = [
            (self._shape(p, given, values), p.dtype or types[p.type_name]) for p in self._outputs
        ]
        run = self._run_reference if is_numpy(arrays[0]) else self._launch
        outputs = run(arrays, numbers, results, types, values)
        data: Any = outputs if len(outputs) > 1 else outputs[0]
        return record(self.__name__, data, tensors, _none, (self._tangent, arrays, numbers))

    def tune(self, *args: Any, **values: Any) -> str:
        """Measure the candidates for these arguments, and store the fastest in the file `tuned`.

        Calls for arguments of the same case use it from then on, also in other processes that start
        later. Nothing else measures. One process at a time may tune with a file.

        Args:
            args: as in a call, on a GPU.
            values: as in a call.

        Returns:
            A line with the time of each candidate, the chosen one marked.

        Raises:
            ArgumentError: there are no candidates; or as in a call.
            DeviceError: the arguments are on the CPU.
            KernelError: a candidate does not compile, or the file cannot be read or written.
        """
        from tensorgrad.kernels import tune  # with what measures matrix products

        op = self.__name__
        if self._tuned is None:
            raise ArgumentError(f"{op}: candidates is (), expected some to measure")
        tensors, numbers = self._checked(args, values)
        arrays = [tensor.data for tensor in tensors]
        if is_numpy(arrays[0]):
            raise DeviceError(f"{op}: {self._inputs[0].name} is on cpu, expected cuda")
        name = self._case_name(arrays, numbers, self._types(arrays), values)
        runs = {
            words: partial(self, *args, **{**candidate, **values})
            for words, candidate in self._candidates.items()
        }
        (answer,) = tune.answer_all(
            iter([TuningCase(op, name, next(iter(runs)), runs)]), tune.measure
        )
        rows = read(self._tuned) if self._tuned.exists() else {}
        rows.setdefault(architecture(), {}).setdefault(op, {})[name] = answer.best
        write(self._tuned, rows)
        self._rows = rows
        return tune.table([answer])

    def _checked(
        self, args: Sequence[Any], values: Mapping[str, Any]
    ) -> tuple[list[Tensor], tuple[Any, ...]]:
        """Return the tensors and the numbers of a call."""
        op = self.__name__
        expected = [*self._inputs, *self._given]
        named = [p.name for p in expected if p.name in values]
        if named:
            raise ArgumentError(
                f"{op}: got {named[0]} by name, expected it by position: "
                f"{op}({', '.join([p.name for p in expected])})"
            )
        if len(args) != len(expected):
            known = ", ".join([p.name for p in expected])
            raise ArgumentError(
                f"{op}: got {len(args)} arguments, expected {len(expected)}: {known}"
            )
        count = len(self._inputs)
        names = [p.name for p in self._inputs]
        of_type: dict[str, list[Any]] = {}
        for p, x in zip(self._inputs, args[:count], strict=True):
            of_type.setdefault(p.type_name, []).append(x)
        tensors = [
            tensor_of(op, p.name, x, *([np.empty(0, p.dtype)] if p.dtype else of_type[p.type_name]))
            for p, x in zip(self._inputs, args[:count], strict=True)
        ]
        same_device(op, names, [x.data for x in tensors])
        if mode.grad_enabled:
            for name, x in zip(names, tensors, strict=True):
                self._check_constant(name, x)
        for parameter, value in zip(self._given, args[count:], strict=True):
            check_number(op, parameter.name, value)
        self._check_values(op, values)
        for name in self._required:
            if name not in values:
                raise ArgumentError(
                    f"{op}: {name} is missing, expected {op}(..., {name}=...), a value of the "
                    "template"
                )
        return tensors, tuple(args[count:])

    def _check_constant(self, name: str, x: Tensor) -> None:
        """Raise GradError where a gradient, or a tangent, would be lost."""
        if not x.requires_grad or (x.node is FORWARD_ONLY and self._tangent is not None):
            return
        if x.node is FORWARD_ONLY:
            raise GradError(
                f"{self.__name__}: {name} has a tangent, and the kernel none; give cuda_kernel "
                "tangent=, a function in ops, or detach() the argument"
            )
        raise GradError(
            f"{self.__name__}: {name} requires a gradient, which a kernel alone does not have; "
            "call it in the forward of a tensorgrad.Function, or detach() the argument"
        )

    def _check_values(self, op: str, values: Mapping[str, Any]) -> None:
        """Raise ArgumentError unless the values are numbers of the template, or threads."""
        for name, value in values.items():
            dtype = self._choices.get(name)
            if name == "threads":
                check_integer(op, name, value, 1)
            elif dtype is None:
                known = ", ".join([*self._choices, "threads"])
                raise ArgumentError(f"{op}: got the value {name!r}, expected one of {known}")
            elif dtype == bool_:
                check_flag(op, name, value)
            else:
                check_whole(op, name, value)
                limits = np.iinfo(dtype)
                if not limits.min <= value <= limits.max:
                    raise ArgumentError(
                        f"{op}: {name} is {value}, expected one that {c_name(dtype)} holds"
                    )

    def _types(self, arrays: Sequence[Array]) -> dict[str, Dtype]:
        """Return the dtypes that T and the types of the template stand for."""
        types: dict[str, Dtype] = {}
        for parameter, array in zip(self._inputs, arrays, strict=True):
            expected = parameter.dtype or types.setdefault(parameter.type_name, array.dtype)
            if array.dtype != expected:
                raise DtypeError(
                    f"{self.__name__}: {parameter.name} has dtype {array.dtype}, expected "
                    f"{expected}"
                )
        return types

    def _shape(
        self, parameter: KernelParameter, given: Sequence[Any], values: Mapping[str, Any]
    ) -> Shape:
        """Return the shape of a result."""
        shape_rule = self._shapes.get(parameter.name)
        if shape_rule is None:
            shape: Shape = given[0].shape
            return shape
        return shape_of(self.__name__, shape_rule(given, values), f"the shape of {parameter.name}")

    def _run_reference(
        self, arrays: list[Array], numbers: Any, results: Any, types: Any, values: Any
    ) -> tuple[Array, ...]:
        """Return what NumPy computes, checked and cast."""
        computed = self._reference((*map(upcast, arrays), *numbers), values)
        computed = computed if isinstance(computed, tuple) else (computed,)
        if len(computed) != len(results):
            raise ShapeError(
                f"{self.__name__}: the reference returned {len(computed)} arrays, expected "
                f"{len(results)}: {', '.join([p.name for p in self._outputs])}"
            )
        outputs = []
        for parameter, y, (shape, dtype) in zip(self._outputs, computed, results, strict=True):
            y = np.asarray(y)
            if y.shape != shape:
                raise ShapeError(
                    f"{self.__name__}: the reference returned {parameter.name} with shape "
                    f"{y.shape}, expected {shape}"
                )
            outputs.append(cast(y, dtype))
        return tuple(outputs)

    def _launch(
        self, arrays: list[Array], numbers: Any, results: Any, types: Any, values: Any
    ) -> tuple[Array, ...]:
        """Return what the kernel computes."""
        outputs = tuple([backend.empty(shape, dtype, arrays[0]) for shape, dtype in results])
        given = (*arrays, *numbers)
        values = self._decide(arrays, numbers, types, values)
        remaining = iter(numbers)
        passed = []
        for parameter in self._numbers:
            if parameter.name in self._sizes:
                value: Any = self._sizes[parameter.name](given, values)
            else:
                value = outputs[0].size if parameter.name == "n" else next(remaining)
            passed.append(self._number(parameter, value))
        threads = values["threads"]
        blocks = self._blocks(given, values) if self._blocks else -(-outputs[0].size // threads)
        grid = blocks if isinstance(blocks, tuple) else (blocks,)
        if all(grid):
            inputs = [contiguous(x) for x in arrays]
            self._kernel(types, values)(grid, (threads,), (*outputs, *inputs, *passed))
        return outputs

    def _decide(
        self, arrays: Any, numbers: Any, types: Any, values: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return all numbers of the template, threads and capability for a launch."""
        device = backend.cupy.cuda.runtime.getDevice()
        candidate = self._candidate(arrays, numbers, types, values)
        decided: dict[str, Any] = {"capability": capability(device), **candidate, **values}
        for name, value in self._values.items():  # threads last
            if name not in decided and callable(value):
                decided[name] = value((*arrays, *numbers), decided)
                self._check_values(self.__name__, {name: decided[name]})
            decided.setdefault(name, value)
        return decided

    def _candidate(
        self, arrays: Any, numbers: Any, types: Any, values: Mapping[str, Any]
    ) -> Mapping[str, int]:
        """Return the fastest candidate that is known: that of the file, or the first."""
        if self._tuned is None:
            return {}
        first = next(iter(self._candidates.values()))
        if first.keys() <= values.keys():  # the call decides
            return {}
        if self._rows is None:
            self._rows = read(self._tuned) if self._tuned.exists() else {}
        name = self._case_name(arrays, numbers, types, values)
        words = self._rows.get(architecture(), {}).get(self.__name__, {}).get(name)
        if words is not None and words not in self._candidates:
            raise KernelError(
                f"{self.__name__}: {self._tuned} has {words!r} for {name!r}, expected one of "
                f"{', '.join(map(repr, self._candidates))}; tune it again"
            )
        return first if words is None else self._candidates[words]

    def _case_name(
        self, arrays: Any, numbers: Any, types: Mapping[str, Dtype], values: Mapping[str, Any]
    ) -> str:
        """Return the words that a case has in the file of tuned values."""
        case: Any = ", ".join(["x".join(map(str, x.shape)) for x in arrays])
        if self._case is not None:
            case = self._case((*arrays, *numbers), values)
        return " ".join([*map(str, types.values()), str(case), _words(values)]).strip()

    def _number(self, parameter: KernelParameter, value: Any) -> Any:
        """Return a number as an argument of the launch."""
        dtype = parameter.dtype
        assert dtype is not None, "numbers are declared by their own types"
        try:
            return number(dtype.str, value)
        except OverflowError as error:
            raise ArgumentError(
                f"{self.__name__}: {parameter.name} is {value}, expected one that {c_name(dtype)} "
                "holds"
            ) from error

    def _kernel(self, types: Mapping[str, Dtype], values: Mapping[str, Any]) -> Any:
        """Return the function on the current GPU, compiled for types and values."""
        chosen = [values[name] for name in self._choices]
        key = (backend.cupy.cuda.runtime.getDevice(), *types.values(), *chosen)
        if key not in self._compiled:
            instance = self.instance(types, values)
            self._compiled[key] = load_text(self.__name__, self.source(**types), instance)
        return self._compiled[key]

    def instance(self, types: Mapping[str, Dtype], values: Mapping[str, Any]) -> str:
        """Return what is compiled of a template, such as "scale<float, 4>"; else the name.

        Args:
            types: dtypes by the names of types of the template.
            values: values by the names of its numbers.

        Example:
            >>> source = "template <int N> __global__ void f(T* y, const T* x) {}"
            >>> tg.cuda_kernel(source, "f", abs).instance({"T": tg.float32}, {"N": 4})
            'f<4>'
        """
        arguments = [
            c_name(types[p.name]) if p.kind == "type" else str(int(values[p.name]))
            for p in self._template
        ]
        return f"{self.__name__}<{', '.join(arguments)}>" if arguments else self.__name__

    def source(self, **types: Dtype) -> str:
        """Return what is compiled.

        Args:
            types: the dtypes that T, where arguments are declared with it, and the types of the
                template stand for.
        """
        file, line = self._place
        lines = [_PRELUDE]
        names = {c_name(dtype) for dtype in types.values()}
        lines += [f"#include <{header}>" for name, header in _HEADERS.items() if name in names]
        if (kind := types.get("T")) is not None:
            lines += [
                f"using T = {c_name(kind)};",
                f"using Compute = {c_name(compute_dtype(kind))};",
            ]
        return "\n".join([*lines, f'#line {line} "{file}"', self._text, ""])


def _check_names(what: str, given: Any, names: Sequence[str]) -> None:
    """Raise ArgumentError unless an option is a dictionary by some of these names."""
    if not isinstance(given, Mapping):
        raise ArgumentError(f"cuda_kernel: {what} is {given!r:.80}, expected a dictionary by name")
    if wrong := [name for name in given if name not in names]:
        raise ArgumentError(
            f"cuda_kernel: {what} has {wrong[0]!r}, expected names of {', '.join(names)}"
        )


def _by_name(
    function: Callable[..., Any], count: int
) -> Callable[[Sequence[Any], Mapping[str, Any]], Any]:
    """Return the function as one of `count` arguments and of the values that it has names for."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # some builtins have no signature
        parameters = []
    names = [
        p.name
        for place, p in enumerate(parameters)
        if p.kind is p.KEYWORD_ONLY or (p.kind is p.POSITIONAL_OR_KEYWORD and place >= count)
    ]
    return lambda given, values: function(*given, **{n: values[n] for n in names if n in values})


def _words(values: Mapping[str, int]) -> str:
    """Return the name of a candidate."""
    return " ".join([f"{name}={int(value)}" for name, value in values.items()])


def _none(dy: Array, saved: tuple[Any, ...], needs: Sequence[Any]) -> Any:
    """Stand for a backward: nothing that requires a gradient comes here."""
    raise AssertionError


@tangent_of(_none)
def _tangent_of_kernel(op: Op, *tangents: Tensor | None) -> Any:
    tangent, arrays, numbers = op.saved
    inputs = [op.input(i, array) for i, array in enumerate(arrays)]
    return tangent(*inputs, *numbers, *tangents)


def _place(text: str, name: str) -> tuple[str, int]:
    """Return the file and line where the caller of `cuda_kernel` wrote the text."""
    file = sys._getframe(2).f_code.co_filename
    before, matched, _ = "".join(linecache.getlines(file)).partition(text)
    if not matched:  # made by a program, or with escapes
        return f"{name}.cu", 1
    return file.replace("\\", "/"), before.count("\n") + 1


def _parameters(text: str, name: str) -> list[KernelParameter]:
    """Return the parameters of a kernel: results, arguments, numbers, those of its template."""
    bare = _COMMENT.sub(" ", text)
    pattern = rf"{_TEMPLATE}__global__\s+{_BOUNDS}void\s+{_BOUNDS}{re.escape(name)}\s*\(([^)]*)\)"
    match = re.search(pattern, bare)
    if match is None:
        raise KernelError(
            f"cuda_kernel: the source has no `__global__ void {name}(...)`, expected that of name"
        )
    declared = match[1].split(",") if match[1] else []
    template = [_template_parameter(name, parameter) for parameter in declared]
    types = ["T", *(p.name for p in template if p.kind == "type" and p.name != "T")]
    of_kernel = [_parameter(name, parameter, types) for parameter in match[2].split(",")]
    order = [("output", "input", "number").index(p.kind) for p in of_kernel]
    if order != sorted(order) or order[:1] != [0] or 1 not in order:
        raise KernelError(
            f"cuda_kernel: {name} has {[p.kind for p in of_kernel]}, expected pointers for the "
            "results, then pointers to const for the arguments, at least one of each, then numbers"
        )
    of_arguments = {p.type_name for p in of_kernel if p.kind == "input"}
    for p in (*of_kernel, *template):
        if p.type_name not in {"", *of_arguments}:
            what = "a result" if p.kind == "output" else "a template"
            raise KernelError(
                f"cuda_kernel: {name} has {what} of {p.type_name}, expected an argument of "
                f"{p.type_name} too"
            )
    return [*of_kernel, *template]


def _template_parameter(kernel: str, text: str) -> KernelParameter:
    """Return one parameter of a template from its declaration."""
    *words, name = re.findall(r"\w+", text) or [""]
    allowed = {c_name(dtype): dtype for dtype in (*INTEGERS, bool_)}
    dtype = allowed.get(" ".join(words))
    is_type = words in (["typename"], ["class"])
    if re.search(r"[^\w\s]", text) or not (is_type or dtype) or name in _RESERVED:
        raise KernelError(
            f"cuda_kernel: {kernel} has the template parameter {text.strip()!r}, expected a name "
            f"without a default after one of typename, {', '.join(allowed)}"
            + (f"; {' and '.join(_RESERVED)} have a meaning" if name in _RESERVED else "")
        )
    return KernelParameter(name, "type" if is_type else "value", dtype, name if is_type else "")


def _parameter(kernel: str, text: str, types: Sequence[str]) -> KernelParameter:
    """Return one parameter from its declaration."""
    words = re.findall(r"\w+|\*", text.replace("__restrict__", " "))
    kind = "number" if "*" not in words else "input" if "const" in words else "output"
    names = [word for word in words if word not in ("const", "*")]
    c_type, name = " ".join(names[:-1]), names[-1] if names else ""
    known = c_type in _DTYPES or (c_type in types and kind != "number")
    if not known or words.count("*") > 1 or (kind == "number" and c_type in _HEADERS):
        expected = ", ".join(name for name in _DTYPES if kind != "number" or name not in _HEADERS)
        also = "".join(f"{letter}, " for letter in types) if kind != "number" else ""
        raise KernelError(
            f"cuda_kernel: {kernel} has the parameter {text.strip()!r}, expected a name after one "
            f"of {also}{expected}" + (", or a pointer to one" if kind == "number" else "")
        )
    if c_type in types:
        return KernelParameter(name, kind, None, c_type)
    return KernelParameter(name, kind, _DTYPES[c_type])
