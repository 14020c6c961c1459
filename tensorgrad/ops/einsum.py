"""einsum, tensordot, outer and dot: products summed over labelled axes.

Every axis of an operand has a label. `_contract` multiplies two arrays and sums over the labels
that the result lacks, as one (batched) matrix product. The gradient of one operand is such a
product too: of dy with the other operand, summed to the labels of the first.
Tests: tests/ops/test_einsum.py.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Sequence
from functools import lru_cache
from itertools import chain
from math import prod
from typing import Any

from tensorgrad.amp import cast_operands, product_kernel
from tensorgrad.autograd.tangents import Op, tangent_of
from tensorgrad.core import instrument
from tensorgrad.core.backend import Array, Shape, namespace, same_device
from tensorgrad.core.checks import axis_tuple, check_integer, promoted
from tensorgrad.core.dtypes import Dtype, compute_dtype
from tensorgrad.core.errors import ArgumentError, ShapeError
from tensorgrad.core.gradient import Gradients, Needs, Saved
from tensorgrad.core.modes import mode
from tensorgrad.core.operands import operands as operands_of
from tensorgrad.core.record import record
from tensorgrad.core.signature import Signatures
from tensorgrad.core.tensor import ArrayLike, Tensor
from tensorgrad.ops.elementwise import multiply
from tensorgrad.ops.matmul import cast_like, product
from tensorgrad.ops.shape import ravel

__all__ = ["dot", "einsum", "outer", "tensordot"]

takes = Signatures(globals())

Labels = list[Hashable]


def einsum(subscripts: str, *operands: Any) -> Tensor:
    """Return products of the operands' elements, summed over the labels the result lacks.

    einsum("bik,bkj->bij", a, b)[b, i, j] = sum_k a[b, i, k] b[b, k, j]

    A label that one operand repeats runs along its diagonal. `...` stands for axes without a
    label, which broadcast. Without "->", the result has the labels that appear once, in
    alphabetical order. More than two operands are multiplied from left to right.

    Args:
        subscripts: letters for the axes of each operand, separated by commas.
        operands: tensors; axes with the same label have the same length, or length 1.

    Returns:
        The axes that the subscripts name, in the dtype that NumPy promotes to.

    Raises:
        ArgumentError: the subscripts are malformed or for another number of operands.
        ShapeError: an operand has another number of axes, or lengths differ under one label.

    Example:
        >>> tg.einsum("ij,j->i", [[1, 2], [3, 4]], [1, 10]).tolist()
        [21, 43]
    """
    if not isinstance(subscripts, str):
        raise ArgumentError(f"einsum: subscripts is {subscripts!r}, expected a string")
    names = [f"operands[{i}]" for i in range(len(operands))]
    tensors = list(operands_of("einsum", names, operands))
    labels, out = _parse(subscripts, tuple([t.data.shape for t in tensors]))
    if mode.autocast is not None:
        tensors = list(cast_operands(*tensors))
    y: Tensor = tensors[0]
    own = labels[0]
    if len(tensors) == 1:
        return _labelled("einsum", [y], [own], out)
    for i in range(1, len(tensors)):
        last = i == len(tensors) - 1
        later = {*out, *chain.from_iterable(labels[i + 1 :])}
        both = dict.fromkeys([*own, *labels[i]])
        kept = out if last else [label for label in both if label in later]
        y, own = _labelled("einsum", [y, tensors[i]], [own, labels[i]], kept), kept
    return y


def tensordot(a: ArrayLike, b: ArrayLike, axes: int | tuple[Any, Any] = 2) -> Tensor:
    """Return the products of a and b summed over pairs of axes.

    Args:
        a, b: tensors.
        axes: n for the last n axes of a with the first n of b, in order; or two sequences (or
            integers): axes of a and the axes of b that they go with.

    Returns:
        The other axes of a, then the other axes of b.

    Raises:
        DeviceError: the operands are on different devices.
        ShapeError: lengths of a pair differ.
        ArgumentError: an axis does not exist, or the sequences differ in length.

    Example:
        >>> tg.tensordot([[1, 2], [3, 4]], [1, 10], axes=1).tolist()
        [21, 43]
    """
    a, b = takes.tensordot(a, b)
    if not isinstance(axes, (tuple, list)):
        check_integer("tensordot", "axes", axes)
        axes = (range(a.ndim - axes, a.ndim), range(axes))
    if len(axes) != 2:
        raise ArgumentError(f"tensordot: axes is {axes}, expected an integer or two sequences")
    of_a = axis_tuple("tensordot", _listed(axes[0]), a.ndim, "axes[0]")
    of_b = axis_tuple("tensordot", _listed(axes[1]), b.ndim, "axes[1]")
    if len(of_a) != len(of_b):
        raise ArgumentError(
            f"tensordot: axes[1] has {len(of_b)} axes, expected {len(of_a)} like axes[0]"
        )
    for i, j in zip(of_a, of_b, strict=True):
        if a.shape[i] != b.shape[j]:
            raise ShapeError(
                f"tensordot: axis {j} of b has length {b.shape[j]}, expected {a.shape[i]} "
                f"as axis {i} of a"
            )
    return _over_pairs(a, b, of_a, of_b)


def _over_pairs(a: Tensor, b: Tensor, of_a: Sequence[int], of_b: Sequence[int]) -> Tensor:
    """Return the products summed over axes of a with those of b, of the same lengths."""
    labels_a: Labels = list(range(a.ndim))
    pairs = dict(zip(of_b, of_a, strict=True))
    labels_b: Labels = [pairs.get(j, a.ndim + j) for j in range(b.ndim)]
    summed = set(of_a)
    out = [label for label in (*labels_a, *labels_b) if label not in summed]
    if mode.autocast is not None:
        a, b = cast_operands(a, b)
    return _labelled("tensordot", [a, b], [labels_a, labels_b], out)


def outer(a: ArrayLike, b: ArrayLike) -> Tensor:
    """Return y[i, j] = a[i] b[j] of the flattened operands.

    Args:
        a, b: tensors, arrays or numbers of any shape, M and N elements.

    Returns:
        (M, N), in the dtype that NumPy promotes to.

    Raises:
        DeviceError: the operands are on different devices.

    Example:
        >>> tg.outer([1, 2], [3, 4]).tolist()
        [[3, 4], [6, 8]]
    """
    a, b = takes.outer(a, b)
    return _labelled("outer", [ravel(a), ravel(b)], [["i"], ["j"]], ["i", "j"])


def dot(a: ArrayLike, b: ArrayLike) -> Tensor:
    """Return the sum of products over the last axis of a and the second-to-last of b.

    For vectors that is the inner product, for matrices the matrix product; a scalar multiplies.

    Args:
        a, b: tensors, arrays or numbers; the two axes have one length. A vector b has one axis.

    Returns:
        The other axes of a, then those of b, in the dtype that NumPy promotes to.

    Raises:
        DeviceError: the operands are on different devices.
        ShapeError: these axes differ in length.

    Example:
        >>> tg.dot([1, 2], [3, 4]).item()
        11
    """
    a, b = takes.dot(a, b)
    if not a.ndim or not b.ndim:
        return multiply(a, b)
    axis = b.ndim - min(b.ndim, 2)
    if a.shape[-1] != b.shape[axis]:
        raise ShapeError(
            f"dot: axis {axis} of b has length {b.shape[axis]}, expected {a.shape[-1]} "
            "as the last axis of a"
        )
    return _over_pairs(a, b, (a.ndim - 1,), (axis,))


def _listed(axes: Any) -> list[Any]:
    return list(axes) if isinstance(axes, (tuple, list, range)) else [operator.index(axes)]


@lru_cache(maxsize=4096)
def _parse(subscripts: str, shapes: tuple[Shape, ...]) -> tuple[list[Labels], Labels]:
    """Return the labels of each operand and of the result; unnamed axes get negative numbers."""
    left, arrow, right = subscripts.replace(" ", "").partition("->")
    terms = left.split(",")
    for term in (*terms, right):
        letters = term.replace("...", "", 1)
        if letters and not (letters.isascii() and letters.isalpha()):
            raise ArgumentError(
                f"einsum: subscripts is {subscripts!r}, expected letters and ... like 'ij,jk->ik'"
            )
    if len(terms) != len(shapes):
        raise ArgumentError(
            f"einsum: got {len(shapes)} operands, expected {len(terms)} for {subscripts!r}"
        )
    labels: list[Labels] = []
    most = 0
    for i, (term, shape) in enumerate(zip(terms, shapes, strict=True)):
        letters = term.replace("...", "")
        unnamed = len(shape) - len(letters)
        if unnamed < 0 or (unnamed and "..." not in term):
            raise ShapeError(
                f"einsum: operands[{i}] has shape {shape}, expected {len(letters)} axes "
                f"for {term!r}"
            )
        most = max(most, unnamed)
        before, _, after = term.partition("...")
        labels.append([*before, *range(-unnamed, 0), *after])
    if not arrow:
        once = [c for c in sorted(set(left) - {",", "."}) if left.count(c) == 1]
        return labels, [*range(-most, 0), *once]
    if most and "..." not in right:
        raise ArgumentError(
            f"einsum: subscripts is {subscripts!r}, expected ... in the result as in the operands"
        )
    before, dots, after = right.partition("...")
    out: Labels = [*before, *(range(-most, 0) if dots else ()), *after]
    if len(set(out)) != len(out) or not set(out) <= set(chain.from_iterable(labels)):
        raise ArgumentError(
            f"einsum: subscripts is {subscripts!r}, expected each label of the result once and "
            "in an operand"
        )
    return labels, out


def _labelled(
    op: str, tensors: list[Tensor], labels: list[Labels], out: Labels, kernel: str | None = None
) -> Tensor:
    """Record the product of one or two operands, summed to the labels `out`."""
    if instrument.observer is not None:
        instrument.observer.enter(op)
    arrays = [t.data for t in tensors]
    both = ("operands[0]", "operands[1]") if op == "einsum" else ("a", "b")
    names = both[: len(arrays)]
    same_device(op, names, arrays)
    dtype = promoted(op, names, arrays)
    sizes = _sizes(op, arrays, labels)
    factors = list(zip(arrays, labels, strict=True))
    kernel = kernel or product_kernel(*arrays)
    y = _evaluate(factors, out, sizes, compute_dtype(dtype), kernel).astype(dtype, copy=False)
    return record(op, y, tensors, _backward, (*arrays, kernel, labels, out, sizes))


def _backward(dy: Array, saved: Saved, needs: Needs) -> Gradients:
    *arrays, kernel, labels, out, sizes = saved
    operands = list(zip(arrays, labels, strict=True))
    grads: list[Array | None] = []
    for i, need in enumerate(needs):
        if not need:
            grads.append(None)
            continue
        factors = [(dy, out), *operands[:i], *operands[i + 1 :]]
        known = {label for factor in factors for label in _plain(*factor, sizes)[1]}
        own = [label for label in _plain(*operands[i], sizes)[1] if label in known]
        dx = _evaluate(factors, own, sizes, compute_dtype(dy.dtype), kernel)
        grads.append(_spread(dx, own, *operands[i]))
    return grads


@tangent_of(_backward)
def _tangent(op: Op, *tangents: Tensor | None) -> Tensor:
    *arrays, kernel, labels, out, _ = op.saved
    terms = []
    for i, t in enumerate(tangents):
        if t is not None:
            factors = [op.input(j, array) for j, array in enumerate(arrays)]
            factors[i] = cast_like(t, arrays[i])
            terms.append(_labelled(op.node.name, factors, labels, out, kernel))
    return terms[0] if len(terms) == 1 else terms[0] + terms[1]


def _sizes(op: str, arrays: list[Array], labels: list[Labels]) -> dict[Hashable, int]:
    """Return the length of every label; an axis of length 1 fits any."""
    sizes: dict[Hashable, int] = {}
    for array, own in zip(arrays, labels, strict=True):
        for label, length in zip(own, array.shape, strict=True):
            known = sizes.setdefault(label, length)
            if known == 1 and own.count(label) == 1:
                sizes[label] = length
            elif length != known and (length != 1 or own.count(label) > 1):
                what = f"label {label!r}" if isinstance(label, str) else "an axis under ..."
                raise ShapeError(f"{op}: {what} has lengths {known} and {length}, expected one")
    return sizes


def _evaluate(
    factors: list[tuple[Array, Labels]],
    out: Labels,
    sizes: dict[Hashable, int],
    dtype: Dtype,
    kernel: str | None,
) -> Array:
    """Return the product of one or two arrays, summed to the labels `out`, in `dtype`."""
    parts = [_plain(array.astype(dtype, copy=False), own, sizes) for array, own in factors]
    if len(parts) == 1:
        return _sum_to(*parts[0], out)
    return _contract(*parts[0], *parts[1], out, kernel)


def _contract(
    a: Array, labels_a: Labels, b: Array, labels_b: Labels, out: Labels, kernel: str | None
) -> Array:
    """Multiply and sum to `out`, as one batched matrix product where a shared label is summed."""
    batch = [n for n in labels_a if n in labels_b and n in out]
    summed = [n for n in labels_a if n in labels_b and n not in out]
    rows = [n for n in labels_a if n not in labels_b and n in out]
    columns = [n for n in labels_b if n not in labels_a and n in out]
    a = _sum_to(a, labels_a, [*batch, *rows, *summed])
    b = _sum_to(b, labels_b, [*batch, *summed, *columns])
    if not summed:
        return _aligned(a, [*batch, *rows], out) * _aligned(b, [*batch, *columns], out)
    at, split, middle = len(batch), len(batch) + len(rows), len(batch) + len(summed)
    shape = (*a.shape[:split], *b.shape[middle:])
    width = prod(a.shape[split:])
    left = a.reshape(*a.shape[:at], prod(a.shape[at:split]), width)
    right = b.reshape(*b.shape[:at], width, prod(b.shape[middle:]))
    y = product(left, right, a.dtype, kernel).reshape(shape)
    return _sum_to(y, [*batch, *rows, *columns], out)


def _sum_to(array: Array, labels: Labels, out: Labels) -> Array:
    """Sum over the labels that `out` lacks and bring the others into its order."""
    axes = tuple([i for i, label in enumerate(labels) if label not in out])
    if axes:
        array = array.sum(axes, dtype=array.dtype)
        labels = [label for label in labels if label in out]
    return array if labels == out else array.transpose([labels.index(label) for label in out])


def _aligned(array: Array, labels: Labels, out: Labels) -> Array:
    """Return a view with the axes of `out`, of length 1 where the array has none."""
    array = _sum_to(array, labels, [label for label in out if label in labels])
    return array[tuple([slice(None) if label in labels else None for label in out])]


def _diagonal(array: Array, labels: Labels) -> tuple[Array, Labels]:
    """Return a view in which a repeated label is one axis, the diagonal."""
    own = list(dict.fromkeys(labels))
    if len(own) == len(labels):
        return array, labels
    lengths = [array.shape[labels.index(label)] for label in own]
    strides = [
        sum(stride for stride, other in zip(array.strides, labels, strict=True) if other == label)
        for label in own
    ]
    return namespace(array).lib.stride_tricks.as_strided(array, lengths, strides), own


def _plain(array: Array, labels: Labels, sizes: dict[Hashable, int]) -> tuple[Array, Labels]:
    """Return a view with each label once, and no axis of length 1 that stands for a longer one."""
    array, labels = _diagonal(array, labels)
    own = [n for n, length in zip(labels, array.shape, strict=True) if length == sizes[n]]
    if len(own) == len(labels):
        return array, labels
    return array[tuple([slice(None) if label in own else 0 for label in labels])], own


def _spread(dx: Array, known: Labels, array: Array, labels: Labels) -> Array:
    """Return a gradient that has only the `known` labels in the shape of the operand."""
    view, own = _diagonal(array, labels)
    dx = dx[tuple([slice(None) if label in known else None for label in own])]
    xp = namespace(array)
    dx = xp.broadcast_to(dx, view.shape)
    if len(own) == len(labels):
        return dx
    full = xp.zeros(array.shape, dx.dtype)
    _diagonal(full, labels)[0][...] = dx
    return full
