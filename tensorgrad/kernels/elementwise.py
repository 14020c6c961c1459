"""Elementwise kernels, generated from formulas, with any number of results.

Each thread computes a vector of adjacent elements. Arrays of the shape of the results, and those
that are broadcast to it, are read 16 bytes at a time where their layout allows it; others element
by element. Axes that are contiguous in every array are merged first: (B, T, C) plus a bias (C,) has
two axes, arrays of one layout have one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np

from tensorgrad.core import backend
from tensorgrad.core.backend import Array, Shape
from tensorgrad.core.dtypes import Dtype, c_name, float32
from tensorgrad.kernels.expression import Formula
from tensorgrad.kernels.loader import FOLDER, inline, load_text
from tensorgrad.kernels.structs import number

_SCALARS = frozenset((bool, int, float))
_THREADS = 256


class _OperandLayout(NamedTuple):
    """The layouts of its operands that a kernel is compiled for.

    Args:
        vector: elements that a thread takes at once.
        wide: whether the elements are counted in 64 bits.
        strides: for each operand and axis: "0" where it is broadcast, "1" where the last axis is
            contiguous, "s" for any stride. ("1",) is an array with the layout of the results,
            whatever their axes; None a number.
    """

    vector: int
    wide: bool
    strides: tuple[tuple[str, ...] | None, ...]


def launch(
    formula: Formula, operands: Sequence[Any], outs: Sequence[Array], compute: Dtype
) -> None:
    """Compute the results of a formula.

    Args:
        formula: what to compute.
        operands: arrays on one GPU that broadcast to the shape of the results, and numbers.
        outs: contiguous; written with =.
        compute: the type to compute in.
    """
    first = outs[0]
    shape, size = first.shape, first.size
    if not size:
        return
    kinds: list[Any] = [compute, *[out.dtype for out in outs]]
    arguments: list[Any] = list(outs)
    pointers, flat = 0, size < 2**32
    for operand in operands:
        if type(operand) in _SCALARS or isinstance(operand, np.generic):
            kinds.append(None)
            arguments.append(compute.type(operand))
            continue
        kinds.append(operand.dtype)
        arguments.append(operand)
        pointers |= operand.data.ptr
        if flat and (operand.shape != shape or not operand.flags.c_contiguous):
            flat = False
    key = (backend.cupy.cuda.runtime.getDevice(), *kinds)
    try:
        vector, unaligned, kernel = formula.kernels[key]
    except KeyError:
        vector, unaligned = _vector(kinds)
        layout = _OperandLayout(
            vector, False, tuple([None if k is None else ("1",) for k in kinds[len(outs) + 1 :]])
        )
        kernel = _compile(formula, layout, kinds, len(outs))
        formula.kernels[key] = vector, unaligned, kernel
    numbers: Sequence[Any] = (number("u4", size),) if flat else ()
    if not flat or pointers & unaligned:
        laid = [
            None if kind is None else (a.shape, a.strides, kind.itemsize)
            for a, kind in zip(operands, kinds[len(outs) + 1 :], strict=True)
        ]
        layout, numbers = _plan(shape, tuple(laid), 1 if pointers & unaligned else vector)
        vector = layout.vector
        try:
            kernel = formula.kernels[layout, key]
        except KeyError:
            kernel = formula.kernels[layout, key] = _compile(formula, layout, kinds, len(outs))
    kernel((-(-size // (_THREADS * vector)),), (_THREADS,), (*arguments, *numbers))


def _vector(kinds: Sequence[Any]) -> tuple[int, int]:
    """Return how many elements a thread takes, and the address bits that must be 0 for that."""
    sizes = [kind.itemsize for kind in kinds[1:] if kind is not None]
    vector = 16 // max(min(sizes), min(2, max(sizes)))
    return vector, vector * max(sizes) - 1


@lru_cache(maxsize=4096)
def _plan(
    shape: Shape, laid: tuple[tuple[Shape, tuple[int, ...], int] | None, ...], vector: int
) -> tuple[_OperandLayout, tuple[Any, ...]]:
    """Return the layout of arrays that differ, and lengths and strides for the kernel."""
    strides = [None if array is None else _broadcast_strides(shape, *array) for array in laid]
    given = [s for s in strides if s is not None]
    lengths: list[int] = []
    merged: list[list[int]] = [[] for _ in given]
    for axis in range(len(shape)):
        if shape[axis] == 1:
            continue
        now = [s[axis] for s in given]
        if not lengths or any(m[-1] != s * shape[axis] for m, s in zip(merged, now, strict=True)):
            lengths.append(1)
            for m in merged:
                m.append(0)
        lengths[-1] *= shape[axis]
        for m, s in zip(merged, now, strict=True):
            m[-1] = s
    if not lengths:
        lengths, merged = [1], [[0] for _ in given]
    if lengths[-1] % vector or any(
        m[-1] not in (0, 1) or (m[-1] and any(s % vector for s in m[:-1])) for m in merged
    ):
        vector = 1
    size = int(np.prod(lengths, dtype=object))
    wide = size >= 2**32
    count = np.uint64 if wide else np.uint32
    inner = [*lengths[1:-1], lengths[-1] // vector] if len(lengths) > 1 else []
    numbers: list[Any] = [count(n) for n in (size, *inner)]
    dense = [int(np.prod(lengths[axis + 1 :], dtype=object)) for axis in range(len(lengths))]
    rows = iter(merged)
    names: list[tuple[str, ...] | None] = []
    for array in laid:
        if array is None:
            names.append(None)
            continue
        row = next(rows)
        if row == dense:
            names.append(("1",))
            continue
        last = {0: "0", 1: "1"}.get(row[-1], "s")
        names.append((*["0" if s == 0 else "s" for s in row[:-1]], last))
        numbers += [
            np.int64(s) for s, name in zip(row, names[-1] or (), strict=True) if name == "s"
        ]
    return _OperandLayout(vector, wide, tuple(names)), tuple(numbers)


def _broadcast_strides(
    shape: Shape, own: Shape, strides: tuple[int, ...], itemsize: int
) -> list[int]:
    """Return an array's strides in elements along the axes of the result."""
    missing = len(shape) - len(own)
    steps = [0 if n == 1 else s // itemsize for n, s in zip(own, strides, strict=True)]
    return [0] * missing + steps


def _compile(formula: Formula, layout: _OperandLayout, kinds: Sequence[Any], outs: int) -> Any:
    name = _kernel_name(f"{formula.name}_{kinds[0].name}")
    return load_text(name, source(formula, layout, kinds, outs, name)).kernel


def _kernel_name(name: str) -> str:
    """Return a name that CUDA takes: Python's may have letters that are not in ASCII."""
    return re.sub(r"\W", "_", name, flags=re.ASCII)


@cache
def _preamble() -> str:
    return inline(FOLDER / "elementwise.cuh")


def source(
    formula: Formula, layout: _OperandLayout, kinds: Sequence[Any], outs: int, name: str
) -> str:
    """Return CUDA for a formula.

    Args:
        formula: what to compute.
        layout: see `_OperandLayout`.
        kinds: the dtype to compute in, those of the results and of the operands (None: a number).
        outs: the number of results.
        name: of the kernel.
    """
    vector = layout.vector
    parameters = list(zip(formula.parameters, kinds[outs + 1 :], layout.strides, strict=True))
    rank = max([len(s) for s in layout.strides if s is not None], default=1)
    results = [(f"out{i}", c_name(kind)) for i, kind in enumerate(kinds[1 : outs + 1])]
    declared = [f"{t}* __restrict__ {n}_" for n, t in results]
    taken = [f"Compute<{t}>& {n}" for n, t in results]
    loads, here, last = [], [], []  # here: what an element is computed from; last: in the tail
    for n, kind, strides in parameters:
        taken.append(f"const {'bool' if n == 'c' else 'C'} {n}")
        if strides is None:
            declared.append(f"const C {n}_")
            here.append(f"{n}_")
            last.append(f"{n}_")
            continue
        declared.append(f"const {c_name(kind)}* __restrict__ {n}_")
        width = vector if strides[-1] == "1" else 1
        loads.append(f"const auto {n}_v = load<{width}>({n}_ + {_offset(n, strides, vector)});")
        here.append(_number(n, f"{n}_v.values[{'j' if width > 1 else 0}]"))
        last.append(_number(n, f"{n}_[{'i' if width > 1 else 0}]"))
    declared += ["Index size", *[f"Index length{axis}" for axis in range(1, rank)]]
    declared += [
        f"long long {n}_stride{axis}"
        for n, _, strides in parameters
        for axis, s in enumerate(strides or ())
        if s == "s"
    ]
    statements, texts = formula.cuda()
    statements += [
        f"{n} = Compute<{t}>({text});" for text, (n, t) in zip(texts, results, strict=True)
    ]
    tail = f"""
    if (v < size % N) {{   // what does not fill a vector
        const Index i = vectors * N + v;
        {_lines([f"Compute<{t}> {n};" for n, t in results], 8)}
        compute({", ".join([*[n for n, _ in results], *last])});
        {_lines([f"{n}_[i] = from_compute<{t}>({n});" for n, t in results], 8)}
    }}"""
    rough = kinds[0] == float32 and all(kind.itemsize == 2 for kind in kinds[1 : outs + 1])
    return f"""constexpr bool ROUGH = {"true" if rough else "false"};
{_preamble()}
typedef {c_name(kinds[0])} C;
typedef {"unsigned long long" if layout.wide else "unsigned int"} Index;
constexpr int N = {vector};
__device__ inline C number(C x) {{ return x; }}

__device__ inline void compute({", ".join(taken)}) {{
    {_lines(statements, 4)}
}}

extern "C" __global__ void __launch_bounds__({_THREADS})
{name}({", ".join(declared)}) {{
    const Index v = Index(blockIdx.x) * {_THREADS} + threadIdx.x, vectors = size / N;
    if (v < vectors) {{
        {_lines(_indices(rank), 8)}
        {_lines(loads, 8)}
        {_lines([f"Compute<{t}> {n}[N];" for n, t in results], 8)}
        #pragma unroll
        for (int j = 0; j < N; ++j)
            compute({", ".join([*[f"{n}[j]" for n, _ in results], *here])});
        {_lines([f"store_rounded({n}_ + v * (long long)N, {n});" for n, _ in results], 8)}
    }}{tail if vector > 1 and rank == 1 else ""}
}}
"""


def _lines(lines: Sequence[str], indent: int) -> str:
    return ("\n" + " " * indent).join(lines)


def _number(name: str, element: str) -> str:
    """Return an element as `compute` takes it."""
    return f"bool({element})" if name == "c" else f"C(to_compute({element}))"


def _indices(rank: int) -> list[str]:
    """Return code that takes the number of a vector apart into one index an axis."""
    lines, rest = [], "v"
    for axis in range(rank - 1, 0, -1):
        lines.append(
            f"const Index i{axis} = {rest} % length{axis}, r{axis} = {rest} / length{axis};"
        )
        rest = f"r{axis}"
    return [*lines, f"const Index i0 = {rest};"]


def _offset(name: str, strides: tuple[str, ...], vector: int) -> str:
    """Return where an operand's elements are."""
    if strides == ("1",):
        return f"v * (long long){vector}"
    terms = []
    for axis, stride in enumerate(strides):
        if stride == "1":
            terms.append(f"i{axis} * (long long){vector}")
        elif stride == "s":
            terms.append(f"i{axis} * {name}_stride{axis}")
    return " + ".join(terms) or "0"
