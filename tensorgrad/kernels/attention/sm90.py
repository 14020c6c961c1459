"""Attention on Hopper with wgmma and TMA.

Launches attention/forward_sm90.cu, and for backward either attention/backward_ordered_sm90.cu, one
kernel, or attention/backward_sm90.cu, which takes everything. Arrays are (B, H, T, D) views of
any layout that TMA reads in place; others are copied. Kernels are compiled for a few head widths; a
head of another width takes the next larger one, and TMA pads it with zeros. The tiles of each width
fit the registers; the fastest ones were measured on an H200. Extras (a mask, dropout, sequences of
unequal length, a scale that is not positive) have kernels of their own, so that the others stay
fast.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np

from tensorgrad.core import backend
from tensorgrad.core.backend import Array, Shape
from tensorgrad.core.dtypes import Dtype, c_name, float32, int32, uint8
from tensorgrad.kernels import overlap
from tensorgrad.kernels.attention.options import (
    ALL,
    Arrays,
    AttentionOptions,
    ForwardPass,
    empty_result,
)
from tensorgrad.kernels.capturing import is_capturing
from tensorgrad.kernels.counter import counter
from tensorgrad.kernels.device import capability, sm_count
from tensorgrad.kernels.loader import Kernel, load
from tensorgrad.kernels.structs import (
    AttentionSm90Arguments,
    AttentionSm90Extras,
    BackwardTeams,
    ColumnSums,
    Strides,
    address,
    by_value,
    number,
)
from tensorgrad.kernels.tensor_map import TensorMap, fits, tensor_map

_FORWARD, _BACKWARD = "attention/forward_sm90.cu", "attention/backward_sm90.cu"
_ORDERED = "attention/backward_ordered_sm90.cu"
_SHARED = 226 * 1024  # bytes a block: all that there is but for the barriers
_WARPGROUP = 128
_CACHED = 24 * 2**20  # bytes of keys and values, or of queries, that stay in the L2 cache
# By head width, without and with extras: warpgroups of 64 rows in a block, and columns of a tile.
_Tiles = dict[int, tuple[int, int]]
_FORWARD_TILES: tuple[_Tiles, _Tiles] = (
    {32: (3, 128), 64: (3, 128), 96: (3, 96), 128: (2, 128), 256: (2, 80)},
    {64: (3, 64), 128: (2, 64), 256: (2, 32)},
)
_LONG_TILES: _Tiles = {128: (2, 176)}
_CLUSTERS = (128, 256)  # widths for which pairs of blocks share keys and values, in full attention
# Forward with a mask of keys, with dropout.
_MASKED_TILES = _FORWARD_TILES[0] | {256: (2, 64)}
_DROPOUT_TILES = {32: (3, 128), 64: (2, 128), 96: (2, 128), 128: (2, 128), 256: (2, 64)}
_KEYS_TILES: tuple[_Tiles, _Tiles] = (
    {32: (2, 96), 64: (2, 96), 96: (2, 64), 128: (2, 64), 256: (2, 64)},
    {64: (2, 64), 128: (2, 64), 256: (2, 32)},
)
_QUERIES_TILES: tuple[_Tiles, _Tiles] = (
    {32: (3, 64), 64: (3, 64), 96: (3, 64), 128: (2, 80), 256: (2, 64)},
    {64: (2, 64), 128: (2, 64), 256: (2, 32)},
)
# The kernel with ordered sums: queries of a tile by head width; a block has 128 keys.
_ORDERED_TILES = {64: 128, 128: 64}
_ORDERED_KEYS, _PARTS, _PART = 128, 2, 4096
_HEADS = 4  # heads of a block of attention_backward_rows
_SUMMED_WIDTH = 64  # the width of heads for which backward sums up rows of the gradients
_STREAMED = 32 * 2**20  # bytes that stay in the L2 cache
_BOTH_GRADIENTS = (128, 64)  # the widest heads of which registers hold both dk and dv


def supports(arrays: Arrays, options: AttentionOptions) -> bool:
    """Whether the kernels are for this GPU, for these arrays and this options."""
    q = arrays[0]
    fit = q.itemsize == 2 and q.shape[3] % 8 == 0 and q.shape[3] <= 256
    return fit and capability(q.device.id) == 90


def forward(arrays: Arrays, options: AttentionOptions) -> tuple[Array, Array]:
    """Return the result, in the memory order of (B, T, H, D), and the logsumexp."""
    y = empty_result(arrays[0], arrays[0].dtype)
    q, k, v = [readable(array) for array in arrays]
    logsumexp = backend.empty(q.shape[:3], float32, like=q)
    geometry = _geometry(q, k, options)
    kernel, grid, block, columns, struct = geometry.forward
    maps = boxes(q), boxes(k, columns), boxes(v, columns)
    key_mask = _key_mask(options, columns) if "KEY_MASK" in geometry.options else None
    extras = _extras(options, q.shape[2], 0, key_mask)
    overlap.launch_in_graph(
        kernel, grid, block,
        (y, logsumexp, counter(q), *maps, struct, extras, number("?", is_capturing())), _SHARED,
        writes=(y, logsumexp),
    )  # fmt: skip
    return y, logsumexp


def backward(
    dy: Array, done: ForwardPass, gradients: Sequence[Array], column_sums: Array | None = None
) -> None:
    """Write the gradients, of the dtype of q; dk and dv have equal strides.

    Args:
        column_sums: from `column_sums_for`; written, too.
    """
    q, k, v = [readable(array) for array in done[:3]]
    y, logsumexp, options = done[3:]
    dy = readable(dy.astype(q.dtype, copy=False))
    dq, dk, dv = gradients
    geometry = _geometry(q, k, options)
    if geometry.ordered is not None:
        _backward_ordered(geometry, dy, done._replace(q=q, k=k, v=v), gradients)
        return
    sums = backend.empty((*q.shape[:2], 2, geometry.pitch), float32, like=q)
    kernel, grid, block, columns, struct = geometry.backward_rows
    extras, numbers = _extras(options, q.shape[2], columns), geometry.numbers
    kernel(grid, block, (sums, y, dy, logsumexp, struct, extras, *numbers, strides_argument(dy)))
    dq_sums, *others_sums = _column_sums(column_sums, q.shape[1], k.shape[1])
    for results, rows, others, launches, sums_of_rows in (
        ((dk, dv), (boxes(k), boxes(v)), (q, dy), geometry.backward_keys, others_sums),
        ((dq, dq), (boxes(q), boxes(dy)), (k, v), geometry.backward_queries, (dq_sums, dq_sums)),
    ):
        for kernel, grid, block, columns, struct in launches:
            maps = (*rows, *(boxes(other, columns) for other in others))
            last = (struct, extras, numbers[2], strides_argument(results[0]), *sums_of_rows)
            kernel(grid, block, (*results, sums, counter(q), *maps, *last), _SHARED)


def column_sums_for(done: ForwardPass) -> Array | None:
    """Return an array (N, (H + 2 Hkv) D), float32, for the sums over rows of dq, dk and dv.

    Its rows add up to them. None where the kernels do not sum up.
    """
    q, k = done.q, done.k
    batch, heads, length, width = q.shape
    geometry = _geometry(q, k, done.options)
    if width != _SUMMED_WIDTH or k.shape[2] != length or geometry.extras or geometry.ordered:
        return None
    columns = (heads + 2 * k.shape[1]) * width
    return backend.empty((batch * -(-length // 16), columns), float32, like=q)


def _column_sums(array: Array | None, heads: int, kv_heads: int) -> list[Any]:
    """Return the structs ColumnSums of dq, dk and dv."""
    if array is None:
        return 3 * [by_value(ColumnSums(0, 0))]
    starts = (0, heads * _SUMMED_WIDTH, (heads + kv_heads) * _SUMMED_WIDTH)
    return [by_value(ColumnSums(array.data.ptr + 4 * start, array.shape[1])) for start in starts]


def _backward_ordered(
    geometry: _Geometry, dy: Array, done: ForwardPass, gradients: Sequence[Array]
) -> None:
    """Write the gradients with one kernel, which adds the parts of dq in a fixed order."""
    plan = geometry.ordered
    assert plan is not None
    (q, k, v, y, logsumexp, _), (dq, dk, dv) = done, gradients
    sums = backend.empty((*q.shape[:2], 2, plan.pitch), float32, like=q)
    parts = (*q.shape[:2], plan.pitch // plan.rows, _PARTS)
    dq_sums = backend.empty((*parts, _PART), float32, like=q)
    turns = backend.cupy.zeros(parts, np.int32)
    rows, pitch = number("i4", plan.rows), number("i4", plan.pitch)

    rest = (number("i4", len(q)), rows, pitch, number("f4", 1 / math.log(2)), strides_argument(dy))
    load(_BACKWARD, f"attention_backward_rows<{c_name(q.dtype)}>")(
        (len(q) * -(-q.shape[1] // _HEADS) * plan.pitch // 32,),
        (256,),
        (sums, y, dy, logsumexp, plan.struct, _no_extras(q.shape[2], plan.rows), *rest),
    )
    maps = (boxes(k), boxes(v), boxes(q, plan.rows), boxes(dy, plan.rows))
    results, strides = (dq, dk, dv, dq_sums, turns), (strides_argument(dq), strides_argument(dk))
    plan.kernel(
        (plan.grid,),
        (3 * _WARPGROUP,),
        (*results, sums, *maps, plan.struct, plan.teams, pitch, *strides),
        _SHARED,
    )
    blind = q.shape[2] - k.shape[2]  # causal: how many first queries see no key
    if blind > 0 and not geometry.even:
        dq[:, :, :blind] = 0


class _Ordered(NamedTuple):
    """The kernel with ordered sums, and how its blocks share the work."""

    kernel: Kernel
    grid: int
    rows: int  # queries of a tile
    pitch: int  # queries, padded to whole tiles
    struct: Any  # AttentionSm90Arguments
    teams: Any  # BackwardTeams


class _TileLaunch(NamedTuple):
    """A kernel and its arguments that are not arrays."""

    kernel: Kernel
    grid: tuple[int]
    block: tuple[int]
    columns: int  # columns of a tile
    struct: Any  # AttentionSm90Arguments


def _geometry(q: Array, k: Array, options: AttentionOptions) -> _Geometry:
    """Return the launches of these sizes, cached from step to step."""
    starts = options.sequences
    extras = (
        options.bias is not None or options.dropout > 0 or starts is not None or options.scale <= 0
    )
    lengths = None if starts is None else (len(starts.q_starts) - 1, *starts.longest)
    return _geometry_of(
        q.dtype, q.shape, k.shape, lengths, options.before, options.after, options.scale, extras,
        _forward_options(options), q.device.id,
    )  # fmt: skip


def _forward_options(options: AttentionOptions) -> str:
    """Return what forward is compiled for: PLAIN, EXTRAS, or parts of extras that cost little."""
    bias, found = options.bias, []
    if options.sequences is not None or options.scale <= 0:
        return "EXTRAS"
    if options.dropout > 0:
        found.append("DROPOUT")
    if bias is not None:
        if options.adds or any(bias.strides[axis] for axis in (1, 2) if bias.shape[axis] > 1):
            return "EXTRAS"
        found.append("KEY_MASK")
    return " + ".join(found) or "PLAIN"


def _key_mask(options: AttentionOptions, columns: int) -> tuple[Array, Array]:
    """Return which tiles and which keys are seen; see key_mask.cu."""
    mask = options.bias
    assert mask is not None
    batch, keys = mask.shape[0], mask.shape[3]
    count = -(-keys // columns)
    tiles = backend.empty((batch, count), int32, like=mask)
    bits = backend.empty((batch, count, columns // 8), uint8, like=mask)
    strides = (np.int64(mask.strides[axis] // mask.itemsize) for axis in (0, 3))
    load("attention/key_mask.cu", "attention_key_mask")(
        (batch,), (256,), (tiles, bits, mask, *strides, *map(np.int32, (keys, columns, count)))
    )
    return tiles, bits


class _Geometry:
    """The launches of one attention, which its sizes decide.

    Args:
        dtype, q_shape, k_shape: of the arrays.
        lengths: the number of sequences and the longest of q and of k; None: those of the arrays.
        before, after, scale: as in `AttentionOptions`.
        extras: whether backward needs the kernels with extras.
        options: which forward kernels, from `_forward_options`.
        device: the GPU, which is the current one.
    """

    def __init__(
        self, dtype: Dtype, q_shape: Shape, k_shape: Shape, lengths: tuple[int, int, int] | None,
        before: int, after: int, scale: float, extras: bool, options: str, device: int,
    ) -> None:  # fmt: skip
        self.dtype, self.extras, self.options, self.scale = dtype, extras, options, scale
        self.batch, self.heads, self.queries, self.width = q_shape
        self.kv_heads, self.keys = k_shape[1:3]
        if lengths is not None:
            self.batch, self.queries, self.keys = lengths
        self.before, self.after = before, after
        self.even = before == after == ALL and lengths is None
        self.processors = sm_count(device)
        columns = self._tiles(_KEYS_TILES[self.extras])[2]
        self.padded = self.pitch = -(-self.queries // columns) * columns
        if lengths is not None:  # each sequence starts at a multiple of `columns`
            self.pitch = (q_shape[2] // columns + self.batch + 1) * columns
        self.numbers = (
            *(number("i4", n) for n in (self.batch, columns, self.pitch)),
            number("f4", 1 if extras else 1 / np.log(2)),
        )

    @cached_property
    def forward(self) -> _TileLaunch:
        """The kernel of the forward pass."""
        table = _FORWARD_TILES[self.options == "EXTRAS"]
        if "DROPOUT" in self.options:
            table = _DROPOUT_TILES
        elif self.options == "KEY_MASK":
            table = _MASKED_TILES
        elif self.options == "PLAIN" and (self.keys >= 8192 or (self.keys >= 2048 and self.even)):
            table = table | _LONG_TILES
        tiles = self._tiles(table)
        if self.options == "PLAIN" and self.even and self.keys >= 2048 and tiles[0] in _CLUSTERS:
            return self._launch(_FORWARD, "attention_forward", *tiles, "PLAIN, 2", cluster=2)
        return self._launch(_FORWARD, "attention_forward", *tiles, self.options)

    @cached_property
    def backward_rows(self) -> _TileLaunch:
        """The kernel for the statistics of each query, padded to tiles of `backward_keys`."""
        kernel = load(_BACKWARD, f"attention_backward_rows<{c_name(self.dtype)}>")
        blocks = self.batch * -(-self.heads // _HEADS) * -(-self.padded // 32)
        return _TileLaunch(
            kernel, (blocks,), (256,), self._tiles(_KEYS_TILES[self.extras])[2], self._struct()
        )

    @cached_property
    def backward_keys(self) -> list[_TileLaunch]:
        """The kernels for dk and dv: one where registers hold both."""
        tiles = self._tiles(_KEYS_TILES[self.extras])
        both = tiles[0] <= _BOTH_GRADIENTS[self.extras]
        return [
            self._launch(_BACKWARD, "attention_backward", *tiles, self._part(part), of_keys=True)
            for part in (("BOTH",) if both else ("KEYS", "VALUES"))
        ]

    @cached_property
    def backward_queries(self) -> list[_TileLaunch]:
        """The kernel for dq."""
        tiles = self._tiles(_QUERIES_TILES[self.extras])
        return [self._launch(_BACKWARD, "attention_backward", *tiles, self._part("QUERIES"))]

    def _part(self, gradients: str) -> str:
        return f"{gradients}, {'true' if self.extras else 'false'}"

    @cached_property
    def ordered(self) -> _Ordered | None:
        """The kernel with ordered sums, where there is one and it is the faster way."""
        causal = self.before == ALL and self.after == 0
        width = min((w for w in _ORDERED_TILES if w >= self.width), default=0)
        if self.extras or not (causal or self.even) or not width or self.width <= width // 2:
            return None
        rows = _ORDERED_TILES[width]
        tiles, blocks = -(-self.queries // rows), -(-self.keys // _ORDERED_KEYS)
        if not tiles or not blocks:
            return None
        shift = self.keys - self.queries
        lengths = [
            max(0, tiles - (max(0, n * _ORDERED_KEYS - shift) // rows if causal else 0))
            for n in range(blocks)
        ]
        heads = self.batch * self.kv_heads
        streamed = 8 * width * self.queries * self.heads // self.kv_heads  # q, dy and sums of dq
        team, longest = _best_team(heads, lengths, tiles, causal, self.processors, streamed)
        even = max(max(lengths), sum(lengths) * heads / self.processors)
        if 5.3 * longest > 7 * even:  # five products and the sums of dq, or seven products
            return None
        kernel = load(
            _ORDERED, f"attention_backward_ordered<{c_name(self.dtype)}, {width}, {rows}>"
        )
        grid = min(self.processors // team, heads) * team
        teams = by_value(BackwardTeams(team, not causal))
        return _Ordered(kernel, grid, rows, tiles * rows, self._struct(of_keys=True), teams)

    def _tiles(self, table: _Tiles) -> tuple[int, int, int]:
        """Return the least width of a table that holds the heads, and its tiles."""
        width = min(w for w in table if w >= self.width)
        return (width, *table[width])

    def _launch(
        self, file: str, name: str, width: int, groups: int, columns: int, last: str,
        of_keys: bool = False, cluster: int = 1,
    ) -> _TileLaunch:  # fmt: skip
        """Return a kernel with a persistent grid: a block for each SM or tile."""
        rows, heads = (self.keys, self.kv_heads) if of_keys else (self.queries, self.heads)
        count = -(-rows // (64 * groups * cluster)) * heads * self.batch
        sizes = ", ".join([c_name(self.dtype), *map(str, (width, groups, columns))])
        kernel = load(file, f"{name}<{sizes}, {last}>")
        block = _WARPGROUP * (groups + 1)
        grid = min(self.processors // cluster, count) * cluster
        return _TileLaunch(kernel, (grid,), (block,), columns, self._struct(of_keys))

    def _struct(self, of_keys: bool = False) -> Any:
        """Return the sizes for tiles of rows of q or of k."""
        heads = self.batch * (self.kv_heads if of_keys else self.heads)
        together = 1
        if not self.even:  # heads whose other side stays in the cache, in groups of equal size
            streamed = self.queries * self.heads if of_keys else self.keys * self.kv_heads
            streamed *= 4 * self.width * self.batch
            together = -(-heads // max(1, min(heads, -(-streamed // _CACHED))))
        return by_value(
            AttentionSm90Arguments(
                self.heads, self.kv_heads, self.queries, self.keys, self.width, self.before,
                self.after, together, heads, self.scale,
            )
        )  # fmt: skip


_geometry_of = lru_cache(maxsize=1024)(_Geometry)


def _best_team(
    heads: int, lengths: list[int], tiles: int, causal: bool, processors: int, streamed: int
) -> tuple[int, float]:
    """Return how many blocks share a head, and the most tiles that one of them computes.

    Args:
        heads: of all sequences.
        lengths: the tiles of each block of keys, the first has the most.
        tiles: of the queries.
        causal: see backward_ordered_sm90.cu for the order in which keys are dealt.
        processors: of the GPU.
        streamed: bytes of a head.

    Measured on an H200: a team of one takes half as long again when what all teams stream does not
    stay in the L2 cache; larger teams read it once for all their blocks, but wait for each other,
    about as many tiles for each head as they have members.
    """
    best = (0, math.inf)
    for team in range(1, min(len(lengths), tiles, processors) + 1):
        rounds = -(-heads // (processors // team))
        shares = [0] * team
        groups = -(-len(lengths) // team)
        for group in range(groups):
            low = (groups - 1 - group) * team if causal else group * team
            reverse = causal and not (group >= 2 and group % 2 == 0)
            for member in range(team):
                block = low + (team - 1 - member if reverse else member)
                shares[member] += lengths[block] if block < len(lengths) else 0
        missed = max(0, 1 - _STREAMED / (processors // team * streamed))
        longest = rounds * (max(shares) * (1 + missed / (2 * team)) + team)
        if longest < best[1]:
            best = team, longest
    return best


def _extras(
    options: AttentionOptions, length: int, columns: int,
    key_mask: tuple[Array, Array] | None = None,
) -> Any:  # fmt: skip
    """Return the struct AttentionSm90Extras."""
    starts, bias, key = options.sequences, options.bias, options.key
    if starts is None and bias is None and key is None:
        return _no_extras(length, columns)
    keep = 1 - options.dropout
    extras = AttentionSm90Extras(
        length=length, columns=columns, threshold=round(keep * 2**16), inverse_keep=1 / keep
    )
    if key_mask is not None:
        extras.key_tiles, extras.key_bits = map(address, key_mask)
    elif bias is not None:
        extras.bias = address(bias)
        steps = [step // 4 for step in bias.strides]
        extras.bias_batch, extras.bias_head, extras.bias_query, extras.bias_key = steps
    if starts is not None:
        extras.query_starts, extras.key_starts = address(starts.q_starts), address(starts.k_starts)
    if key is not None:
        extras.seed, extras.draw, extras.stream = key[:3]
        extras.offset = address(key.offset)
    return by_value(extras)


@lru_cache(maxsize=1024)
def _no_extras(length: int, columns: int) -> Any:
    return by_value(
        AttentionSm90Extras(length=length, columns=columns, threshold=2**16, inverse_keep=1)
    )


def readable(array: Array) -> Array:
    """Return the array, copied unless TMA can read it."""
    return array if fits(array) else array.copy()


def boxes(array: Array, rows: int = 64) -> TensorMap:
    """Return the tensor map for boxes of rows and 64 columns."""
    return tensor_map(array, (1, 1, rows, 64))


def strides_argument(array: Array) -> Any:
    """Return the struct Strides, in elements."""
    return _strides_of(array.strides, array.itemsize)


@lru_cache(maxsize=1024)
def _strides_of(strides: Shape, item: int) -> Any:
    return by_value(Strides(*(stride // item for stride in strides[:3])))
