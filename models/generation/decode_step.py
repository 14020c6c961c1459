"""A decode step on the GPU as a list of kernel launches that is prepared once.

With one sequence a step is short: 0.05 ms for the weights of 124M parameters. Python takes longer
to prepare the arguments of some ninety kernels, so it does that once, when generation begins. A
block is seven launches: norm, qkv, attention, proj, norm, up, down (eight with SwiGLU's gate).
Bias, GELU and residual are fused into the matrix products.
"""

from __future__ import annotations

from typing import Any

from tensorgrad import backend, nn
from tensorgrad.backend import Array
from tensorgrad.dtypes import Dtype, float32
from tensorgrad.engine import mode
from tensorgrad.kernels import decode as decode_cuda
from tensorgrad.kernels.prepared import Launches
from tensorgrad.models.gpt2 import GPT2
from tensorgrad.models.language_model import Cache, LanguageModel
from tensorgrad.models.transformer_lm import TransformerLM
from tensorgrad.ops.sampling import Sampling, State, extend

__all__ = ["DecodeStep"]

# The layers that the launches reproduce. A model with a user's own layer, a layer shared among
# ranks, or a replaced method is not supported.
_LAYERS = (
    nn.Dropout, nn.Embedding, nn.FeedForward, nn.LayerNorm, nn.Linear, nn.ModuleList,
    nn.MultiHeadAttention, nn.RMSNorm, nn.RotaryEmbedding, nn.SwiGLU, nn.TransformerBlock,
)  # fmt: skip
_METHODS = {"forward", "next_logits", "new_cache", "linear"}


class DecodeStep:
    """All launches of a decode step: from the latest token of each sequence to the next one.

    Args:
        model: one that `supports` accepts.
        cache: of the model, with `lengths`.
        state: the sequences.
        how: the sampling options.
    """

    def __init__(self, model: LanguageModel, cache: Cache, state: State, how: Sampling) -> None:
        self._launches = Launches()
        self._add = self._launches.add
        self._state = state
        self._embedding = model.tokens.weight.data
        self._buffers: dict[tuple[str, int], Array] = {}
        self._workspaces: dict[tuple[Any, ...], decode_cuda.AttentionWorkspace] = {}
        with self._embedding.device:
            self._prepare(model, cache, how)

    @staticmethod
    def supports(model: LanguageModel) -> bool:
        """Whether this model is on a GPU and has only layers that the launches reproduce."""
        if model.device == "cpu" or type(model) not in (GPT2, TransformerLM):
            return False
        below = [module for module in model.modules() if module is not model]
        if any(type(module) not in _LAYERS for module in below) or mode.autocast is not None:
            return False
        if any(_METHODS & vars(module).keys() for module in (model, *below)):
            return False
        embedding = model.tokens.weight.data
        return all(
            isinstance(block, nn.TransformerBlock)
            and isinstance(block.feed_forward, (nn.FeedForward, nn.SwiGLU))
            and decode_cuda.supports(embedding, embedding.shape[1] // block.attention.heads)
            for block in model.blocks
        ) and all(
            p.dtype == embedding.dtype and p.data.flags.c_contiguous for p in model.parameters()
        )

    def __call__(self) -> None:
        """Append a token to each sequence."""
        with self._embedding.device:
            self._launches.run()

    def _prepare(self, model: LanguageModel, cache: Cache, how: Sampling) -> None:
        state, width = self._state, self._embedding.shape[1]
        x, normed = self._buffer("x", width), self._buffer("normed", width)
        positions = model.positions.weight.data if isinstance(model, GPT2) else None
        decode_cuda.embed(self._add, x, self._embedding, positions, state.latest, state.lengths)
        for block, own in zip(model.blocks, cache, strict=True):
            assert isinstance(block, nn.TransformerBlock)  # see `supports`
            self._norm(normed, x, block.norm1)
            self._attend(x, normed, block.attention, own)
            self._norm(normed, x, block.norm2)
            self._feed_forward(x, normed, block.feed_forward)
        self._norm(normed, x, model.norm)
        logits = self._buffer("logits", model.vocab_size, float32)
        decode_cuda.product(self._add, logits, normed, model.head().data)
        extend(state, logits, how, self._add)

    def _attend(
        self, x: Array, normed: Array, layer: nn.MultiHeadAttention, cache: nn.KeyValueCache
    ) -> None:
        """Add proj(attention(normed)) to x."""
        qkv = self._buffer("qkv", len(layer.qkv.weight.data))
        mixed = self._buffer("mixed", x.shape[1])
        keys, values = cache.arrays
        key = (qkv.shape, keys.shape, layer.window)
        if key not in self._workspaces:
            self._workspaces[key] = decode_cuda.AttentionWorkspace(qkv, keys, values, layer.window)
        rotary = layer.rotary
        self._linear(qkv, normed, layer.qkv)
        decode_cuda.attention(
            self._add, mixed, qkv, keys, values, self._state.lengths, self._workspaces[key],
            layer.window, None if rotary is None else rotary.table(keys.shape[2], keys),
            rotary is not None and rotary.interleaved,
        )  # fmt: skip
        self._linear(x, mixed, layer.proj, residual=x)

    def _feed_forward(self, x: Array, normed: Array, layer: Any) -> None:
        """Add feed_forward(normed) to x."""
        hidden = len(layer.up.weight.data)
        up = self._buffer("up", hidden)
        if isinstance(layer, nn.SwiGLU):
            gate = self._buffer("gate", hidden)
            self._linear(gate, normed, layer.gate)
            self._linear(up, normed, layer.up, gate=gate)
        else:
            self._linear(up, normed, layer.up, gelu=layer.approximate)
        self._linear(x, up, layer.down, residual=x)

    def _norm(self, y: Array, x: Array, layer: Any) -> None:
        centre = isinstance(layer, nn.LayerNorm)
        bias = layer.bias.data if centre and layer.bias is not None else None
        decode_cuda.norm(self._add, y, x, layer.weight.data, bias, layer.eps, centre)

    def _linear(self, y: Array, x: Array, layer: nn.Linear, **options: Any) -> None:
        bias = None if layer.bias is None else layer.bias.data
        decode_cuda.product(self._add, y, x, layer.weight.data, bias, **options)

    def _buffer(self, name: str, columns: int, dtype: Dtype | None = None) -> Array:
        """Return a buffer with a row for each sequence; blocks share it."""
        key = name, columns
        if key not in self._buffers:
            shape = (len(self._state.latest), columns)
            dtype = self._embedding.dtype if dtype is None else dtype
            self._buffers[key] = backend.empty(shape, dtype, like=self._embedding)
        return self._buffers[key]
