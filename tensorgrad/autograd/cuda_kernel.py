"""Kernels of one's own: CUDA for arrays on a GPU, a NumPy reference for those on the CPU.

Tests: tests/autograd/test_cuda_kernel.py.
"""

from __future__ import annotations

import linecache
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tensorgrad.core import backend
from tensorgrad.core.arrays import cast
from tensorgrad.core.backend import Array, Shape, contiguous, is_numpy, same_device, upcast
from tensorgrad.core.checks import check_function, check_integer, check_number, shape_of
from tensorgrad.core.dtypes import ALL, Dtype, c_name, compute_dtype
from tensorgrad.core.errors import ArgumentError, DtypeError, GradError, KernelError, ShapeError
from tensorgrad.core.modes import mode
from tensorgrad.core.operands import tensor_of
from tensorgrad.core.record import record
from tensorgrad.core.tensor import Tensor
from tensorgrad.kernels.loader import load_text
from tensorgrad.kernels.structs import number

_DTYPES = {c_name(dtype): dtype for dtype in ALL}
_HEADERS = {"__half": "cuda_fp16.h", "__nv_bfloat16": "cuda_bf16.h"}
_PRELUDE = "#define INFINITY __int_as_float(0x7f800000)"  # which NVRTC lacks
_BOUNDS = r"(?:__launch_bounds__\s*\([^)]*\)\s*)?"
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)


def cuda_kernel(
    source: str | Path,
    name: str,
    reference: Callable[..., Any],
    *,
    threads: int = 256,
    blocks: Callable[..., int | Shape] | None = None,
    shapes: Mapping[str, Callable[..., Any]] | None = None,
    sizes: Mapping[str, Callable[..., int]] | None = None,
) -> CudaKernel:
    """Return a function of tensors that a CUDA kernel computes on a GPU, and NumPy on the CPU.

    The parameters of the kernel say what it takes. Pointers are results, in memory that is not
    initialized; pointers to const are the arguments, in C order; then come numbers. In the source,
    `T` is the type of the first argument that is declared with it, and `Compute` the type to
    compute in: float where T has 16 bits, else T. `INFINITY` is defined too. The kernel is compiled
    for each T on first use, and launched on the current stream.

    The result has no gradient: `tg.Function` makes an op of two kernels.

    Args:
        source: CUDA C++, or the path of a file of it. Without templates of the kernel itself.
        name: of the kernel, a `__global__ void` function of the source.
        reference: the same in NumPy. It takes arrays, of which 16-bit floats come as float32, and
            numbers, and returns an array or a tuple of several, which are cast.
        threads: of a block.
        blocks: takes the arguments and returns how many blocks, as one number or up to three.
            Default: as many as give each element of the first result a thread.
        shapes: for the names of results, functions that take the arguments and return the shape.
            Default: that of the first argument.
        sizes: for the names of numbers, functions that take the arguments and return the number.
            The others are given in the call, after the arrays; but `n` is the number of elements
            of the first result.

    Returns:
        A function of the arrays and the numbers, which returns a tensor, or a tuple of several.

    Raises:
        KernelError: the source has no such kernel, or a parameter of a type that is not known.
        ArgumentError: `shapes` or `sizes` has a name that is not a parameter.

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
    check_function("cuda_kernel", reference, name="reference")
    if not isinstance(source, (str, Path)):
        raise ArgumentError(f"cuda_kernel: source is {source!r:.80}, expected a str or a Path")
    if not isinstance(name, str):
        raise ArgumentError(f"cuda_kernel: name is {name!r:.80}, expected that of a kernel")
    check_integer("cuda_kernel", "threads", threads, 1)
    text = source.read_text(encoding="utf-8") if isinstance(source, Path) else source
    place = (str(source), 1) if isinstance(source, Path) else _place(text, name)
    parameters = _parameters(text, name)
    for what, kinds, given in (("shapes", "output", shapes), ("sizes", "number", sizes)):
        if given is not None and not isinstance(given, Mapping):
            raise ArgumentError(
                f"cuda_kernel: {what} is {given!r:.80}, expected a dictionary by name"
            )
        names = [p.name for p in parameters if p.kind == kinds]
        wrong = [name for name in given or {} if name not in names]
        if wrong:
            raise ArgumentError(
                f"cuda_kernel: {what} has {wrong[0]!r}, expected names of {', '.join(names)}"
            )
    return CudaKernel(
        name, text, place, parameters, reference, threads, blocks, shapes or {}, sizes or {}
    )


class KernelParameter(NamedTuple):
    """A parameter of a kernel.

    Attributes:
        name: in the source.
        kind: "output", "input" or "number".
        dtype: of the elements; None for T.
    """

    name: str
    kind: str
    dtype: Dtype | None


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
        threads: int,
        blocks: Callable[..., int | Shape] | None,
        shapes: Mapping[str, Callable[..., Any]],
        sizes: Mapping[str, Callable[..., int]],
    ) -> None:
        self.__name__ = name
        self.reference = reference
        self._text, self._place = text, place
        self._outputs = [p for p in parameters if p.kind == "output"]
        self._inputs = [p for p in parameters if p.kind == "input"]
        self._numbers = [p for p in parameters if p.kind == "number"]
        self._threads, self._blocks = threads, blocks
        self._shapes, self._sizes = dict(shapes), dict(sizes)
        self._given = [p for p in self._numbers if p.name not in {*sizes, "n"}]
        self._compiled: dict[tuple[int, Dtype | None], Any] = {}

    def __call__(self, *args: Any) -> Any:
        """Return the result, or a tuple of several.

        Args:
            args: a tensor or array for each pointer to const, on one device; then the numbers.

        Raises:
            ArgumentError: the number of arguments is wrong, or a number does not fit its type.
            DtypeError: an argument has another dtype than the kernel declares, or two have
                different ones for T.
            ShapeError: the reference returns other shapes than `shapes` says.
            DeviceError: arguments are on different devices.
            GradError: an argument requires a gradient, which would be lost.
            KernelError: the kernel does not compile; with the lines of the source.
        """
        tensors, numbers = self._checked(args)
        arrays = [tensor.data for tensor in tensors]
        given = (*arrays, *numbers)
        kind = self._type(arrays)
        results = [
            (self._shape(p, given), p.dtype if p.dtype is not None else kind) for p in self._outputs
        ]
        run = self._run_reference if is_numpy(arrays[0]) else self._launch
        outputs = run(arrays, numbers, results, kind)
        return record(
            self.__name__, outputs if len(outputs) > 1 else outputs[0], tensors, _none, ()
        )

    def _checked(self, args: Sequence[Any]) -> tuple[list[Tensor], tuple[Any, ...]]:
        """Return the tensors and the numbers of a call."""
        op = self.__name__
        expected = [*self._inputs, *self._given]
        if len(args) != len(expected):
            known = ", ".join([p.name for p in expected])
            raise ArgumentError(
                f"{op}: got {len(args)} arguments, expected {len(expected)}: {known}"
            )
        count = len(self._inputs)
        names = [p.name for p in self._inputs]
        free = [x for p, x in zip(self._inputs, args[:count], strict=True) if p.dtype is None]
        tensors = [
            tensor_of(op, p.name, x, *(free if p.dtype is None else [np.empty(0, p.dtype)]))
            for p, x in zip(self._inputs, args[:count], strict=True)
        ]
        same_device(op, names, [x.data for x in tensors])
        if mode.grad_enabled and any([x.requires_grad for x in tensors]):
            name = next(n for n, x in zip(names, tensors, strict=True) if x.requires_grad)
            raise GradError(
                f"{op}: {name} requires a gradient, which a kernel alone does not have; call it in "
                "the forward of a tensorgrad.Function, or detach() the argument"
            )
        for parameter, value in zip(self._given, args[count:], strict=True):
            check_number(op, parameter.name, value)
        return tensors, tuple(args[count:])

    def _type(self, arrays: Sequence[Array]) -> Dtype | None:
        """Return the dtype that T stands for; None where no argument is declared with it."""
        kind: Dtype | None = None
        for parameter, array in zip(self._inputs, arrays, strict=True):
            expected = parameter.dtype or kind or array.dtype
            if array.dtype != expected:
                raise DtypeError(
                    f"{self.__name__}: {parameter.name} has dtype {array.dtype}, expected "
                    f"{expected}"
                )
            kind = kind or (array.dtype if parameter.dtype is None else None)
        return kind

    def _shape(self, parameter: KernelParameter, given: Sequence[Any]) -> Shape:
        """Return the shape of a result."""
        found = self._shapes.get(parameter.name)
        if found is None:
            shape: Shape = given[0].shape
            return shape
        return shape_of(self.__name__, found(*given), f"the shape of {parameter.name}")

    def _run_reference(
        self, arrays: list[Array], numbers: Any, results: Any, kind: Dtype | None
    ) -> tuple[Array, ...]:
        """Return what NumPy computes, checked and cast."""
        found = self.reference(*map(upcast, arrays), *numbers)
        found = found if isinstance(found, tuple) else (found,)
        if len(found) != len(results):
            raise ShapeError(
                f"{self.__name__}: the reference returned {len(found)} arrays, expected "
                f"{len(results)}: {', '.join([p.name for p in self._outputs])}"
            )
        outputs = []
        for parameter, y, (shape, dtype) in zip(self._outputs, found, results, strict=True):
            y = np.asarray(y)
            if y.shape != shape:
                raise ShapeError(
                    f"{self.__name__}: the reference returned {parameter.name} with shape "
                    f"{y.shape}, expected {shape}"
                )
            outputs.append(cast(y, dtype))
        return tuple(outputs)

    def _launch(
        self, arrays: list[Array], numbers: Any, results: Any, kind: Dtype | None
    ) -> tuple[Array, ...]:
        """Return what the kernel computes."""
        outputs = tuple([backend.empty(shape, dtype, arrays[0]) for shape, dtype in results])
        given = (*arrays, *numbers)
        found = iter(numbers)
        passed = []
        for parameter in self._numbers:
            if parameter.name in self._sizes:
                value: Any = self._sizes[parameter.name](*given)
            else:
                value = outputs[0].size if parameter.name == "n" else next(found)
            passed.append(self._number(parameter, value))
        blocks = self._blocks(*given) if self._blocks else -(-outputs[0].size // self._threads)
        grid = blocks if isinstance(blocks, tuple) else (blocks,)
        if all(grid):
            inputs = [contiguous(x) for x in arrays]
            self._kernel(kind)(grid, (self._threads,), (*outputs, *inputs, *passed))
        return outputs

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

    def _kernel(self, kind: Dtype | None) -> Any:
        """Return the function on the current GPU, compiled for a type."""
        key = (backend.cupy.cuda.runtime.getDevice(), kind)
        if key not in self._compiled:
            self._compiled[key] = load_text(self.__name__, self.source(kind))
        return self._compiled[key]

    def source(self, kind: Dtype | None) -> str:
        """Return what is compiled where T stands for a dtype."""
        file, line = self._place
        lines = [_PRELUDE]
        if kind is not None:
            name = c_name(kind)
            lines += [f"#include <{_HEADERS[name]}>"] if name in _HEADERS else []
            lines += [f"using T = {name};", f"using Compute = {c_name(compute_dtype(kind))};"]
        return "\n".join([*lines, f'#line {line} "{file}"', self._text, ""])


def _none(dy: Array, saved: tuple[Any, ...], needs: Sequence[Any]) -> Any:
    """Stand for a backward: nothing that requires a gradient comes here."""
    raise AssertionError


def _place(text: str, name: str) -> tuple[str, int]:
    """Return the file and line where the caller of `cuda_kernel` wrote the text."""
    file = sys._getframe(2).f_code.co_filename
    before, found, _ = "".join(linecache.getlines(file)).partition(text)
    if not found:  # made by a program, or with escapes
        return f"{name}.cu", 1
    return file.replace("\\", "/"), before.count("\n") + 1


def _parameters(text: str, name: str) -> list[KernelParameter]:
    """Return the parameters of a kernel: results, then arguments, then numbers."""
    bare = _COMMENT.sub(" ", text)
    pattern = rf"__global__\s+{_BOUNDS}void\s+{_BOUNDS}{re.escape(name)}\s*\(([^)]*)\)"
    match = re.search(pattern, bare)
    if match is None:
        raise KernelError(
            f"cuda_kernel: the source has no `__global__ void {name}(...)`, expected that of name"
        )
    found = [_parameter(name, parameter) for parameter in match[1].split(",")]
    order = [("output", "input", "number").index(p.kind) for p in found]
    if order != sorted(order) or order[:1] != [0] or 1 not in order:
        raise KernelError(
            f"cuda_kernel: {name} has {[p.kind for p in found]}, expected pointers for the "
            "results, then pointers to const for the arguments, at least one of each, then numbers"
        )
    if any(p.dtype is None for p in found) and not any(
        p.dtype is None and p.kind == "input" for p in found
    ):
        raise KernelError(f"cuda_kernel: {name} has a result of T, expected an argument of T too")
    return found


def _parameter(kernel: str, text: str) -> KernelParameter:
    """Return one parameter from its declaration."""
    words = re.findall(r"\w+|\*", text.replace("__restrict__", " "))
    kind = "number" if "*" not in words else "input" if "const" in words else "output"
    names = [word for word in words if word not in ("const", "*")]
    c_type, name = " ".join(names[:-1]), names[-1] if names else ""
    known = c_type in _DTYPES or (c_type == "T" and kind != "number")
    if not known or words.count("*") > 1 or (kind == "number" and c_type in _HEADERS):
        expected = ", ".join(name for name in _DTYPES if kind != "number" or name not in _HEADERS)
        also = "T, " if kind != "number" else ""
        raise KernelError(
            f"cuda_kernel: {kernel} has the parameter {text.strip()!r}, expected a name after one "
            f"of {also}{expected}" + (", or a pointer to one" if kind == "number" else "")
        )
    return KernelParameter(name, kind, None if c_type == "T" else _DTYPES[c_type])
