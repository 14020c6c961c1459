"""Attention on NumPy: the (Tq, Tk) weights exist for one block of queries at a time, in cache.

A block reads only the keys that at least one of its queries attends to. Scores, weights and sums
are float32 for 16-bit inputs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, Literal

import numpy as np

from tensorgrad.core import backend
from tensorgrad.core.backend import Array, Shape, upcast
from tensorgrad.core.dtypes import Dtype
from tensorgrad.kernels.attention.options import (
    ALL,
    Arrays,
    AttentionOptions,
    ForwardPass,
    empty_result,
)

_FEW = 16  # queries; for fewer, copying the keys into C order costs more than it saves
_SHORT = 1 << 14  # attention weights of a sequence
_CAUSAL_ROWS = 64  # queries a block: fewer skip more masked keys, more multiply faster


def forward(arrays: Arrays, options: AttentionOptions) -> tuple[Array, Array]:
    """Return the result and the logarithm of each row's sum of exponentials."""
    q, k, v = arrays
    if _is_short(q, k, options):
        heads = _as_heads(q), _as_heads(k), _as_heads(v)
        merged, logsumexp = forward(heads, _options_of_heads(options))
        y = empty_result(q, q.dtype)
        y[...] = merged.reshape(q.shape)
        return y, logsumexp.reshape(q.shape[:3])
    y, logsumexp = empty_result(q, q.dtype), np.empty(q.shape[:3], upcast(q[:0]).dtype)
    for rows, keys, own in _sequences(options):
        part = q[:, :, rows], k[:, :, keys], v[:, :, keys]
        _forward(part, own, y[:, :, rows], logsumexp[:, :, rows])
    return y, logsumexp


def backward(dy: Array, done: ForwardPass, gradients: Sequence[Array]) -> None:
    """Write the gradients of q, k and v."""
    q, k, v, y, logsumexp, options = done
    if _is_short(q, k, options):
        merged = ForwardPass._make([*map(_as_heads, done[:5]), _options_of_heads(options)])
        parts = [np.empty(a.shape, gradients[0].dtype) for a in merged[:3]]
        backward(_as_heads(dy), merged, parts)
        for gradient, part in zip(gradients, parts, strict=True):
            gradient[...] = part.reshape(gradient.shape)
        return
    dq, dk, dv = gradients
    for rows, keys, own in _sequences(options):
        arrays = q[:, :, rows], k[:, :, keys], v[:, :, keys], y[:, :, rows], logsumexp[:, :, rows]
        results = dq[:, :, rows], dk[:, :, keys], dv[:, :, keys]
        _backward(dy[:, :, rows], ForwardPass(*arrays, own), results)


def _is_short(q: Array, k: Array, options: AttentionOptions) -> bool:
    """Whether sequences are so short that taking them one by one costs more than their work."""
    return (
        options.sequences is None and len(q) > 1 and q.shape[1] * q.shape[2] * k.shape[2] <= _SHORT
    )


def _as_heads(array: Array) -> Array:
    """Return (B, H, ...) as (1, B * H, ...): one sequence with the heads of all, copied."""
    return array.reshape(1, math.prod(array.shape[:2]), *array.shape[2:])


def _options_of_heads(options: AttentionOptions) -> AttentionOptions:
    bias, keep = (None if a is None else _as_heads(a) for a in (options.bias, options.keep))
    return replace(options, bias=bias, keep=keep)


def _sequences(options: AttentionOptions) -> Iterator[tuple[slice, slice, AttentionOptions]]:
    """Yield the slices of queries and keys of each sequence, and its options."""
    if options.sequences is None:
        yield slice(None), slice(None), options
        return
    q_starts, k_starts = options.sequences.q_starts.tolist(), options.sequences.k_starts.tolist()
    for s in range(len(q_starts) - 1):
        rows, keys = slice(*q_starts[s : s + 2]), slice(*k_starts[s : s + 2])
        keep = None
        if options.keep is not None:
            keep = options.keep[s : s + 1, :, : rows.stop - rows.start, : keys.stop - keys.start]
        yield rows, keys, replace(options, keep=keep, sequences=None)


def _forward(arrays: Arrays, options: AttentionOptions, y: Array, logsumexp: Array) -> None:
    q, k, v = arrays
    dtype = logsumexp.dtype
    blocks = _Blocks(q.shape, k.shape, options)
    ones = np.ones(k.shape[2], dtype)
    kept = 1 - options.dropout
    order: Literal["C", "K"] = "C" if q.shape[2] > _FEW else "K"

    def run(pieces: slice) -> None:
        for b, heads, groups in blocks.units[pieces]:
            keys = np.asarray(k[b, groups].swapaxes(-1, -2), dtype, order=order)
            values = np.asarray(v[b, groups], dtype, order=order)
            for rows, seen in blocks.queries:
                queries = np.multiply(q[b, heads, rows], options.scale, dtype=dtype, order="C")
                weights = _product(queries, keys[:, :, seen])
                small = not options.adds and weights.max(initial=0) < 40 > -weights.min(initial=0)
                blocks.mask(weights, options.bias, (b, heads, rows, seen))
                largest = np.zeros(weights.shape[:2], dtype)
                if not small:  # exp may overflow, or come to 0 for a whole row
                    np.max(weights, -1, out=largest, initial=-np.inf)
                    largest[largest == -np.inf] = 0
                    weights -= largest[..., None]
                np.exp(weights, out=weights)
                total = np.vecdot(weights, ones[seen])
                empty = total == 0  # no key to attend to
                total[empty] = 1
                largest[empty] = np.finfo(dtype).max / 4  # makes the weights 0 in backward
                logsumexp[b, heads, rows] = np.log(total) + largest
                if options.keep is not None:
                    weights *= options.keep[b, heads, rows, seen]
                mixed = _product(weights, values[:, seen])
                np.multiply(mixed, (1 / (total * kept))[..., None], out=y[b, heads, rows])

    backend.parallel_blocks(run, len(blocks.units), 1, multiplies=True)


def _backward(dy: Array, done: ForwardPass, gradients: Sequence[Array]) -> None:
    q, k, v, y, logsumexp, options = done
    dq, dk, dv = gradients
    dtype = logsumexp.dtype
    blocks = _Blocks(q.shape, k.shape, options)

    def run(pieces: slice) -> None:
        for b, heads, groups in blocks.units[pieces]:
            keys = np.ascontiguousarray(k[b, groups], dtype)
            keys_one = _beside(k[b, groups], 1, 1, dtype).swapaxes(-1, -2).copy()
            values_one = _beside(v[b, groups], 1, 1, dtype).swapaxes(-1, -2).copy()
            dkeys, dvalues = np.zeros_like(keys), np.zeros_like(keys)
            for rows, seen in blocks.queries:
                place = b, heads, rows
                # The product also subtracts a number from each row: an extra column times ones.
                # weights = exp(q k - logsumexp), dscores = weights (dy v - c)
                queries = _beside(q[place], options.scale, -logsumexp[place], dtype)
                weights = _product(queries, keys_one[:, :, seen])
                blocks.mask(weights, options.bias, (*place, seen))
                np.exp(weights, out=weights)
                constant = np.vecdot(dy[place], y[place], dtype=dtype)
                dmixed = _beside(dy[place], 1, -constant, dtype)
                if options.keep is None:
                    dscores = _product(dmixed, values_one[:, :, seen])
                    dvalues[:, seen] += _product_over_rows(weights, dmixed[..., :-1], keys)
                else:
                    keep = options.keep[(*place, seen)] * dtype.type(1 / (1 - options.dropout))
                    dscores = _product(dmixed[..., :-1], values_one[:, :-1, seen])
                    dscores *= keep
                    dscores -= constant[..., None]
                    keep *= weights
                    dvalues[:, seen] += _product_over_rows(keep, dmixed[..., :-1], keys)
                dscores *= weights
                np.multiply(_product(dscores, keys[:, seen]), options.scale, out=dq[place])
                dkeys[:, seen] += _product_over_rows(dscores, queries[..., :-1], keys)
            dk[b, groups], dv[b, groups] = dkeys, dvalues

    backend.parallel_blocks(run, len(blocks.units), 1, multiplies=True)


class _Blocks:
    """The partition of the work among threads.

    Attributes:
        units: one thread's work: a sequence, some of its query heads, and their key heads.
        queries: blocks of queries, each with the keys that at least one of them attends to.
    """

    def __init__(self, q_shape: Shape, k_shape: Shape, options: AttentionOptions) -> None:
        batch, heads, tq, _ = q_shape
        _, groups, tk, _ = k_shape
        each = heads // groups
        most = _CAUSAL_ROWS if min(options.before, options.after) < ALL else tq
        width = min(tk, options.before + options.after + most)
        count = min(most, tq, max(16, backend.BLOCK // max(1, each * width)))
        together = max(1, backend.BLOCK // max(1, each * width * count))
        self.units = [
            (b, slice(first * each, last * each), slice(first, last))
            for b in range(batch)
            for first in range(0, groups, together)
            if (last := min(first + together, groups))
        ]
        # Query i attends to the keys from i + low up to, but not including, i + high.
        self.low, self.high = tk - tq - options.before, tk - tq + options.after + 1
        self.queries = []
        for first in range(0, tq, max(1, count)):
            last = min(first + count, tq)
            start = min(max(first + self.low, 0), tk)
            stop = max(min(last - 1 + self.high, tk), start)
            self.queries.append((slice(first, last), slice(start, stop)))

    def mask(
        self, scores: Array, bias: Array | None, place: tuple[int, slice, slice, slice]
    ) -> None:
        """Add the mask to scores (heads, rows, keys) in place; -inf where forbidden."""
        _, _, rows, seen = place
        if bias is not None:
            scores += bias[place]
        count, dtype = scores.shape[1], scores.dtype
        first = max(rows.start + self.high, seen.start)  # all queries attend to earlier keys
        if first < seen.stop:
            diagonal = rows.start + self.high - first
            later = scores[..., first - seen.start :]
            later += _forbidden(count, seen.stop - first, diagonal, dtype, True)
        last = min(rows.stop - 1 + self.low, seen.stop)  # all queries attend to later keys
        if last > seen.start:
            diagonal = rows.start + self.low - 1 - seen.start
            earlier = scores[..., : last - seen.start]
            earlier += _forbidden(count, last - seen.start, diagonal, dtype, False)


@lru_cache(maxsize=64)
def _forbidden(rows: int, keys: int, diagonal: int, dtype: Dtype, above: bool) -> Array:
    """Return -inf from a diagonal on, above or below it, and 0 elsewhere."""
    return (np.triu if above else np.tril)(np.full((rows, keys), -np.inf, dtype), diagonal)


def _beside(array: Array, scale: float, column: Any, dtype: Dtype) -> Array:
    """Return the scaled array (heads, rows, D) with one more column, in C order."""
    joined = np.empty((*array.shape[:2], array.shape[2] + 1), dtype)
    np.multiply(array, scale, out=joined[..., :-1], dtype=dtype)  # otherwise 16 bits round first
    joined[..., -1] = column
    return joined


def _stacked(array: Array, groups: int) -> Array:
    """Return (heads, rows, n) as (groups, heads / groups * rows, n), one group a key head."""
    heads, rows, width = array.shape
    return array.reshape(groups, heads // groups * rows, width)


def _product(array: Array, grouped: Array) -> Array:
    """Return (heads, rows, n) times (groups, n, m) as (heads, rows, m)."""
    product = _stacked(array, len(grouped)) @ grouped
    return product.reshape(*array.shape[:2], grouped.shape[2])


def _product_over_rows(array: Array, other: Array, grouped: Array) -> Array:
    """Return the transpose of (heads, rows, n) times (heads, rows, m) as (groups, n, m)."""
    groups = len(grouped)
    return _stacked(array, groups).swapaxes(-1, -2) @ _stacked(other, groups)
