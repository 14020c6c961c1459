"""Multi-head attention, rotary position embeddings and the key-value cache."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np

from tensorgrad.core import backend
from tensorgrad.core.backend import Array
from tensorgrad.core.checks import check_integer, check_range
from tensorgrad.core.dtypes import DtypeLike
from tensorgrad.core.errors import ArgumentError, GradError, ShapeError
from tensorgrad.core.modes import mode
from tensorgrad.core.tensor import Tensor
from tensorgrad.nn.linear import Linear
from tensorgrad.nn.module import Module, can_fuse
from tensorgrad.nn.rows import Rows
from tensorgrad.nn.shard import Shard
from tensorgrad.ops.attention import attention, attention_packed
from tensorgrad.ops.attention_unfused import attention_unfused
from tensorgrad.ops.creation import empty, zeros
from tensorgrad.ops.decode import attend
from tensorgrad.ops.rotary import rotary as rotary_op
from tensorgrad.ops.shape import concatenate, split


@dataclass(frozen=True)
class RopeScaling:
    """Slower rotations, for contexts longer than a model was first trained on.

    "linear": all frequencies divided by the factor
    "llama3": those of wavelengths above original_context / low_freq_factor are divided, those below
        original_context / high_freq_factor are kept, and those between are interpolated

    Args:
        kind: "linear" or "llama3".
        factor: at least 1.
        low_freq_factor, high_freq_factor: for "llama3", the first below the second.
        original_context: for "llama3", the context before, in tokens.

    Raises:
        ArgumentError: a value is outside its range.

    Source: Chen et al. 2023, arXiv:2306.15595, eq. 4 (linear); Grattafiori et al. 2024,
        arXiv:2407.21783, and the code that Meta published with Llama 3.1 (llama3).

    Example:
        >>> scaling = tg.nn.RopeScaling("llama3", 8.0, original_context=8192)
        >>> scaling.scaled(np.array([1.0, 1e-4]))  # fast rotations stay, slow ones are divided by 8
        array([1.00e+00, 1.25e-05])
    """

    kind: str
    factor: float
    _: KW_ONLY
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192

    def __post_init__(self) -> None:
        if self.kind not in ("linear", "llama3"):
            raise ArgumentError(
                f"RopeScaling: kind is {self.kind!r:.80}, expected 'linear' or 'llama3'"
            )
        for name in ("factor", "low_freq_factor", "high_freq_factor"):
            check_range("RopeScaling", name, getattr(self, name))
        check_integer("RopeScaling", "original_context", self.original_context, 1)
        if self.factor < 1:
            raise ArgumentError(f"RopeScaling: factor is {self.factor}, expected 1 or more")
        if not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ArgumentError(
                f"RopeScaling: low_freq_factor is {self.low_freq_factor}, expected above 0 and "
                f"below high_freq_factor, {self.high_freq_factor}"
            )

    def scaled(self, frequencies: Array) -> Array:
        """Return the frequencies in radians a token, (D / 2,), of the longer context."""
        if self.kind == "linear":
            return frequencies / self.factor
        turns = self.original_context * frequencies / (2 * np.pi)  # in the original context
        span = self.high_freq_factor - self.low_freq_factor
        kept = np.clip((turns - self.low_freq_factor) / span, 0, 1)
        return frequencies * (kept + (1 - kept) / self.factor)


class RotaryEmbedding(Module):
    """Rotate pairs of elements of queries and keys by angles proportional to the position.

    angle of pair i = position * base^(-2 i / D)

    Attention scores then depend only on the distance between two positions. Angles are computed
    in float64 and rounded to float32 cosines in every dtype of the model; a sequence may have any
    length.

    Args:
        width: D of a head, even.
        base: larger for longer sequences: the lowest frequency is about 1 / base.
        interleaved: rotate pairs (2 i, 2 i + 1), as in the paper; otherwise (i, i + D / 2), as in
            Hugging Face's LLaMA.
        scaling: lower frequencies for a longer context; default: none.

    Raises:
        ArgumentError: width is not even, or base is not a finite number above 0.

    Source: Su et al. 2021, arXiv:2104.09864, eq. 34.

    Example:
        >>> rotary = tg.nn.RotaryEmbedding(2)
        >>> x = tg.ones((1, 3, 1, 2))  # three steps of one head
        >>> rotary(x)[0, :, 0].round(3)  # by 0, 1 and 2 radians
        tensor([[ 1.   ,  1.   ],
                [-0.301,  1.382],
                [-1.325,  0.493]], dtype=float32)
    """

    def __init__(
        self,
        width: int,
        *,
        base: float = 10000.0,
        interleaved: bool = False,
        scaling: RopeScaling | None = None,
    ) -> None:
        check_integer("RotaryEmbedding", "width", width)
        check_range("RotaryEmbedding", "base", base)
        if base == 0:
            raise ArgumentError(f"RotaryEmbedding: base is {base}, expected a number above 0")
        if width < 2 or width % 2:
            raise ArgumentError(f"RotaryEmbedding: width is {width}, expected an even number")
        self.width, self.base, self.interleaved, self.scaling = width, base, interleaved, scaling
        self._table: tuple[tuple[Any, ...], Array, Array] | None = None

    def forward(self, x: Any, positions: Any = 0, heads: int | None = None) -> Tensor:
        """Return x with its pairs rotated, (B, T, H, D).

        Args:
            x: (B, T, H, D), floats.
            positions: integers: that of the first step, or all of them, (T,) or (B, T).
            heads: rotate the first `heads` of the H heads only; default: all.
        """
        cos, sin = self._angles(x, positions)
        return rotary_op(x, cos, sin, heads=heads, interleaved=self.interleaved)

    def table(self, steps: int, like: Array) -> tuple[Array, Array]:
        """Return cosines and sines of positions 0 to steps - 1, float32 (steps, D / 2)."""
        key = self.base, self.scaling, backend.device_of(like)
        if self._table is None or self._table[0] != key or len(self._table[1]) < steps:
            found = self._cos_sin(np.arange(1 << max(0, steps - 1).bit_length()), np)
            cos, sin = (backend.asarray_like(table[:, 0], like) for table in found)
            self._table = key, cos, sin
        _, cos, sin = self._table
        return cos[:steps], sin[:steps]

    def _angles(self, x: Any, positions: Any) -> tuple[Array, Array]:
        """Return cosines and sines, float32 (..., T, 1, D / 2), on the device of x."""
        positions = positions.data if isinstance(positions, Tensor) else positions
        if np.ndim(positions):
            return self._cos_sin(positions, backend.namespace(x.data))
        start, stop = int(positions), int(positions) + x.shape[1]
        if start < 0:
            return self._cos_sin(np.arange(start, stop), backend.namespace(x.data))
        cos, sin = self.table(stop, x.data)
        return cos[start:, None], sin[start:, None]

    def _cos_sin(self, positions: Any, xp: Any) -> tuple[Array, Array]:
        """Return cosines and sines, (*positions.shape, 1, D / 2), by NumPy or CuPy."""
        frequencies = self.base ** (-2 * np.arange(self.width // 2) / self.width)
        if self.scaling is not None:
            frequencies = self.scaling.scaled(frequencies)
        angles = xp.asarray(positions, np.float64)[..., None, None] * xp.asarray(frequencies)
        return xp.cos(angles).astype(np.float32), xp.sin(angles).astype(np.float32)

    def extra_repr(self) -> str:
        """Return the settings."""
        scaling = "" if self.scaling is None else f", scaling={self.scaling}"
        return f"{self.width}, base={self.base}" + ", interleaved=True" * self.interleaved + scaling


class KeyValueCache:
    """Keys and values of all previous steps, for generation (KV cache).

    Args:
        batch: B, the number of sequences.
        heads: the number of key and value heads.
        steps: the capacity: the largest number of steps.
        width: D of a head.
        dtype: of the keys and values.
        device: "cpu", "cuda" or "cuda:N".

    Attributes:
        length: the number of steps stored; decrease it to drop the latest ones.
        lengths: None, or the number of steps stored for each sequence, int32 (B,), on the device
            of the cache. With it a call stores one step of each sequence, and the caller
            increments it.
        counters: None, or those that `attend` takes.

    Example:
        >>> cache = tg.nn.KeyValueCache(batch=1, heads=2, steps=16, width=4)
        >>> step = tg.ones((1, 2, 1, 4))
        >>> _ = cache.append(step, step)
        >>> keys, values = cache.append(step, step)
        >>> keys.shape
        (1, 2, 2, 4)
    """

    def __init__(
        self,
        batch: int,
        heads: int,
        steps: int,
        width: int,
        dtype: DtypeLike = "float32",
        device: str = "cpu",
    ) -> None:
        shape = (batch, heads, steps, width)
        self._keys, self._values = (empty(shape, dtype, device=device).data for _ in range(2))
        self.length = 0
        self.lengths: Array | None = None
        self.counters: Array | None = None

    @property
    def arrays(self) -> tuple[Array, Array]:
        """The buffers of keys and values, each (B, heads, steps, D)."""
        return self._keys, self._values

    @property
    def steps(self) -> int:
        """The capacity in steps."""
        return self._keys.shape[2]  # type: ignore[no-any-return]  # an int

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append T steps, (B, heads, T, D); return views of all keys and values so far.

        Raises:
            ShapeError: k or v has another shape, or the capacity is exceeded.
            GradError: gradients are enabled and k or v requires one; use `no_grad()`.
        """
        if mode.grad_enabled and (k.requires_grad or v.requires_grad):
            raise GradError("cache: the keys require a gradient; generate under no_grad()")
        first, last = self.length, self.length + k.shape[2]
        expected = (*self._keys.shape[:2], k.shape[2], self._keys.shape[3])
        if k.shape != expected or v.shape != expected:
            raise ShapeError(f"cache: k has shape {k.shape}, v {v.shape}, expected {expected}")
        if last > self.steps:
            raise ShapeError(
                f"cache: {first} steps are held and {k.shape[2]} come, expected at most "
                f"{self.steps}"
            )
        self._keys[:, :, first:last] = k.data
        self._values[:, :, first:last] = v.data
        self.length = last
        return Tensor(self._keys[:, :, :last]), Tensor(self._values[:, :, :last])

    def part(self, rows: slice) -> KeyValueCache:
        """Return an empty cache over the buffers of some sequences."""
        part = object.__new__(KeyValueCache)
        part._keys, part._values = self._keys[rows], self._values[rows]
        part.length, part.lengths, part.counters = 0, None, None
        return part

    def select(self, rows: Array) -> None:
        """Replace the sequences by a selection of them, as beam search does.

        Args:
            rows: integers from 0 to B - 1, in any order and with repeats, on the cache's device.
        """
        for name in ("_keys", "_values"):
            old = getattr(self, name)
            new = backend.empty((len(rows), *old.shape[1:]), old.dtype, old)
            new[:, :, : self.length] = old[rows, :, : self.length]
            setattr(self, name, new)


class MultiHeadAttention(Module):
    """Compute proj(attention(q, k, v)), with q, k, v from one linear layer of x.

    Args:
        width: C, of x and of the result.
        heads: the number of query heads, H.
        kv_heads: the number of key and value heads; default H. It divides H (grouped-query
            attention).
        bias: whether the linear layers have one.
        dropout: probability of dropping an attention weight in training.
        causal: whether a step attends only to itself and previous steps.
        rotary: rotates queries and keys by their positions; default: no position embedding.
        window: number of steps that a step attends to: up to and including itself if causal,
            otherwise on each side. Default: all.
        head_width: D of a head; default C / H, which then is a whole number.
        proj_bias: whether `proj` has a bias; default: as `bias`.
        qk_norm: makes a norm from D, for the queries and keys of each head before their rotation;
            default: none.

    Attributes:
        qkv: Linear(C, (H + 2 * kv_heads) * D): the queries of all heads, then keys, then values.
        proj: Linear(H * D, C).
        q_norm, k_norm: the norms of a head's queries and keys; or None.
        kernel: how attention without a cache is computed, see `use_attention`.

    Raises:
        ArgumentError: a size is below 1 or does not divide as above, or dropout is outside [0, 1).

    Source: Vaswani et al. 2017, arXiv:1706.03762, section 3.2.2; norms of queries and keys:
        Dehghani et al. 2023, arXiv:2302.05442, section 2.

    Example:
        >>> layer = tg.nn.MultiHeadAttention(32, 4, kv_heads=2, causal=True)
        >>> layer(tg.ones((2, 5, 32))).shape
        (2, 5, 32)
    """

    q_norm: Module | None = None
    k_norm: Module | None = None

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        bias: bool = True,
        dropout: float = 0.0,
        causal: bool = False,
        rotary: RotaryEmbedding | None = None,
        window: int | None = None,
        head_width: int | None = None,
        proj_bias: bool | None = None,
        qk_norm: Callable[[int], Module] | None = None,
    ) -> None:
        kv_heads = heads if kv_heads is None else kv_heads
        for name, value in (("width", width), ("heads", heads), ("kv_heads", kv_heads)):
            check_integer("MultiHeadAttention", name, value, 1)
        if head_width is not None:
            check_integer("MultiHeadAttention", "head_width", head_width, 1)
        elif width % heads:
            raise ArgumentError(
                f"MultiHeadAttention: width is {width}, expected a multiple of {heads} heads"
            )
        if heads % kv_heads:
            raise ArgumentError(
                f"MultiHeadAttention: kv_heads is {kv_heads}, expected a divisor of {heads} heads"
            )
        if window is not None:
            check_integer("MultiHeadAttention", "window", window, 1)
        self.heads = heads
        self.kv_heads = kv_heads
        check_range("MultiHeadAttention", "dropout", dropout, 1)
        self.dropout = float(dropout)
        self.causal = causal
        head_width = width // heads if head_width is None else head_width
        self.qkv = Linear(width, (heads + 2 * kv_heads) * head_width, bias)
        self.proj = Linear(heads * head_width, width, bias if proj_bias is None else proj_bias)
        if qk_norm is not None:
            self.q_norm, self.k_norm = qk_norm(head_width), qk_norm(head_width)
        self.rotary = rotary
        self.window = window
        self.kernel = "flash"

    def forward(self, x: Any, mask: Any = None, cache: KeyValueCache | None = None) -> Tensor:
        """Return the attention of x, (B, T, C).

        Args:
            x: (B, T, C).
            mask: which steps each step attends to, or a bias of the scores, which may be a
                `Parameter`; see `tensorgrad.attention`. With a cache its last axis covers the
                cached steps, then those of x.
            cache: from `new_cache`; x continues its steps and is appended to it.
        """
        region = getattr(self.qkv, "before", None)
        qkv: Tensor = self.qkv(x)
        with nullcontext() if region is None else region.inner_stream():
            y = self._mixed(qkv, mask, cache)
        result: Tensor = self.proj(y)
        return result

    def _mixed(self, qkv: Tensor, mask: Any, cache: KeyValueCache | None) -> Tensor:
        """Return (B, T, H D), what the heads mix of the values of all steps."""
        batch, length, width = qkv.shape  # (B, T, (H + 2 kv_heads) D): queries, keys, values
        parts = self.heads + 2 * self.kv_heads
        heads = batch, length, parts, width // parts
        if self.q_norm is not None and self.k_norm is not None:
            q, k, v = split(qkv.reshape(heads), [self.heads, self.heads + self.kv_heads], axis=2)
            qkv = concatenate([self.q_norm(q), self.k_norm(k), v], axis=2).reshape(qkv.shape)
        overwrite = can_fuse(self.qkv, "may_be_overwritten")
        fused, angles, interleaved = cache is None and self.kernel == "flash", None, False
        if fused and self.rotary is not None and can_fuse(self.rotary, "table"):
            cos, sin = self.rotary.table(length, qkv.data)
            angles, interleaved = (cos[:, None], sin[:, None]), self.rotary.interleaved
        elif self.rotary is not None and not self._attend_rotates(cache):
            start: Any = 0 if cache is None else cache.length
            if cache is not None and cache.lengths is not None:
                start = cache.lengths[:, None]
            rotated = self.rotary(qkv.reshape(heads), start, self.heads + self.kv_heads)
            qkv = rotated.reshape(qkv.shape)
        if cache is not None and cache.lengths is not None:
            return self._attend(qkv, cache)
        if not fused:
            by_head = qkv.reshape(heads).swapaxes(1, 2)
            q, k, v = split(by_head, [self.heads, self.heads + self.kv_heads], axis=1)
            if cache is not None:
                k, v = cache.append(k, v)  # (B, kv_heads, S, D), S the steps so far
        dropout = self.dropout if self.training else 0.0
        if fused or (cache is not None and cache.length == length):  # these steps alone: no copies
            return attention_packed(
                qkv, self.heads, kv_heads=self.kv_heads, mask=mask, causal=self.causal,
                dropout=dropout, window=self.window, angles=angles, interleaved=interleaved,
                overwrite=overwrite,
            )  # fmt: skip
        if cache is None:
            y = attention_unfused(
                q, k, v, mask, causal=self.causal, dropout=dropout, window=self.window,
                fused_softmax=self.kernel == "fused-softmax",
            )  # fmt: skip
        else:
            y = attention(q, k, v, mask, causal=self.causal, dropout=dropout, window=self.window)
        return y.swapaxes(1, 2).reshape(batch, length, self.heads * y.shape[3])

    def shards(self) -> list[Shard]:
        """Return which layers ranks can share: by heads of keys and values."""
        width = self.proj.weight.shape[1] // self.heads
        sections = [width * heads for heads in (self.heads, self.kv_heads, self.kv_heads)]
        counts = ("heads", "kv_heads")
        return [
            Shard("qkv", "column", sections, self.kv_heads, counts),
            *(Shard("q_norm", "inside"), Shard("k_norm", "inside")),
            Shard("proj", "row", None, self.kv_heads),
        ]

    def saved_bytes(self, rows: Rows) -> float:
        """Return the bytes that backward needs.

        These are the inputs of both linear layers, queries, keys, values, and a logarithm for each
        head; with norms of queries and keys also what these were before.
        """
        found = self.qkv.saved_bytes(rows) + self.proj.saved_bytes(rows)
        packed = rows.inside * rows.item * self.qkv.weight.shape[0]
        found += packed + 4 * rows.inside * self.heads
        if self.q_norm is not None and self.k_norm is not None:
            values = packed * self.kv_heads / (self.heads + 2 * self.kv_heads)
            found += self.q_norm.saved_bytes(rows.of_heads(self.heads)) + values
            found += self.k_norm.saved_bytes(rows.of_heads(self.kv_heads))
        return found

    def _attend_rotates(self, cache: KeyValueCache | None) -> bool:
        """Whether `attend` rotates the queries and keys of this call itself."""
        if cache is None or cache.lengths is None:
            return False
        return self.rotary is not None and can_fuse(self.rotary, "table")

    def _attend(self, qkv: Tensor, cache: KeyValueCache) -> Tensor:
        """Return (B, 1, H D) for the newest step of each sequence."""
        keys, values = cache.arrays
        # (B, (H + 2 kv_heads) D); under autocast its dtype may differ from the cache's
        newest = qkv.data[:, 0].astype(keys.dtype, copy=False)
        angles, interleaved = None, False
        if self.rotary is not None and self._attend_rotates(cache):
            angles, interleaved = self.rotary.table(cache.steps, keys), self.rotary.interleaved
        assert cache.lengths is not None  # otherwise a step is not one of each sequence
        y = attend(
            newest,
            keys,
            values,
            cache.lengths,
            window=self.window,
            angles=angles,
            interleaved=interleaved,
            counters=cache.counters,
        )
        return Tensor(y[:, None])

    def new_cache(self, batch: int, steps: int) -> KeyValueCache:
        """Return an empty cache for `batch` sequences of up to `steps` steps."""
        weight = self.qkv.weight
        width = weight.shape[0] // (self.heads + 2 * self.kv_heads)
        cache = KeyValueCache(batch, self.kv_heads, steps, width, weight.dtype, weight.device)
        cache.counters = zeros((batch * self.heads,), np.uint32, device=weight.device).data
        if self.rotary is not None and can_fuse(self.rotary, "table"):
            self.rotary.table(steps, weight.data)  # so that no step makes another one
        return cache

    def extra_repr(self) -> str:
        """Return the settings."""
        shared = f", kv_heads={self.kv_heads}" if self.kv_heads != self.heads else ""
        dropout = f", dropout={self.dropout}" if self.dropout else ""
        window = "" if self.window is None else f", window={self.window}"
        return f"heads={self.heads}{shared}, causal={self.causal}{dropout}{window}"


ATTENTION_KERNELS = ("unfused", "fused-softmax", "flash")


def use_attention(module: Module, kernel: str) -> None:
    """Choose how the attention layers of a module compute, but for steps with a cache.

    Args:
        module: the layers in it are changed.
        kernel: "flash": one kernel, which never holds all scores; "fused-softmax": scores by a
            matrix product, then one kernel for scaling, mask and softmax; "unfused": op by op.

    Raises:
        ArgumentError: there is no such kernel.

    Example:
        >>> layer = tg.nn.MultiHeadAttention(32, 4)
        >>> tg.nn.use_attention(layer, "unfused")
        >>> layer.kernel
        'unfused'
    """
    if kernel not in ATTENTION_KERNELS:
        expected = ", ".join(ATTENTION_KERNELS)
        raise ArgumentError(f"use_attention: kernel is {kernel!r}, expected one of {expected}")
    for layer in module.modules():
        if isinstance(layer, MultiHeadAttention):
            layer.kernel = kernel
