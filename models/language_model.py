"""The base of language models: logits, loss, and decoding with a key-value cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np

from tensorgrad import nn
from tensorgrad.autograd.recompute import checkpoint
from tensorgrad.core.arrays import array_of
from tensorgrad.core.dtypes import DtypeLike, compute_dtype
from tensorgrad.core.errors import ArgumentError, DtypeError, ShapeError
from tensorgrad.core.modes import mode, replaced
from tensorgrad.core.operands import tensor_of
from tensorgrad.core.tensor import Tensor
from tensorgrad.nn.shard import Region, Shard
from tensorgrad.ops.linear import linear
from tensorgrad.ops.linear_cross_entropy import linear_cross_entropy

__all__ = ["LanguageModel", "check_tokens", "checked_prompts", "initialize", "model_of"]

Cache = list[Any]  # a KeyValueCache for each block, None for those of other ranks


class ModelPart(NamedTuple):
    """The part of a model that a stage of a pipeline runs.

    Attributes:
        blocks: the numbers of its blocks.
        x: (B, T, C), the output of the block before; None: the part begins with the tokens.
        last: whether it ends with logits or the loss.
    """

    blocks: range
    x: Tensor | None
    last: bool


class Stages(Protocol):
    """The ranks that have the layers of a model, each some; see parallel/pipeline.py."""

    def next_logits(self, tokens: Any, cache: Any, mask: Any) -> Tensor:
        """Return what `LanguageModel.next_logits` does, on all ranks."""


class LanguageModel(nn.Module):
    """Base of models that predict the next token; a subclass defines `embed`.

    tokens (B, T) -> embed -> blocks -> finish -> logits (B, T, V), or the mean loss

    Between these there is one array (B, T, C), where a pipeline can cut the model.

    A subclass sets:
        Config: the class of `config`, the sizes: a dataclass with vocab_size, context, layers,
            heads and width, `parameters` (how many) and `training_flops()` (of a token). The model
            takes one.
        vocab_size: V; tokens are 0 to V - 1.
        context: the context length in tokens.
        tokens: Embedding(V or more, C).
        blocks: the transformer blocks.
        norm: the norm after the last block.
        output: Linear(C, V) without bias; None where the head is tied to the token embedding.
        loss_of_any_rows: whether the loss is the mean over all targets, whatever their rows, as
            sequence parallelism needs.

    A training loop sets:
        recompute: whether a block saves only its input, and runs again in backward.
        recompute_norms: whether linear layers of blocks save no output of a norm, which backward
            computes again from the input of the norm. Results have the same bits. Under autocast,
            and with tensor parallelism, they save a copy or parts of it all the same.
        region: the ranks that share the layers; or None.
        stages: the ranks that have the layers, each some; or None.
        part: the part of the model that this call runs; None: all.

    Example:
        >>> from tensorgrad.models import GPT2, GPT2Config, LanguageModel
        >>> config = GPT2Config(vocab_size=10, context=8, layers=1, heads=2, width=8)
        >>> model: LanguageModel = GPT2(config)
        >>> model.causal, model.next_logits([[1, 2, 3]]).shape
        (True, (1, 10))
    """

    Config: ClassVar[type[Any]]
    config: Any
    vocab_size: int
    context: int
    tokens: nn.Embedding
    blocks: nn.ModuleList
    norm: nn.Module
    output: nn.Linear | None = None
    recompute: bool = False
    recompute_norms: bool = False
    region: Region | None = None
    stages: Stages | None = None
    part: ModelPart | None = None
    loss_of_any_rows: bool = True

    def embed(self, tokens: Any, cache: Cache | None = None) -> Tensor:
        """Return (B, T, C), the input of the first block; arguments as for `forward`."""
        raise NotImplementedError

    def finish(self, x: Tensor, targets: Any = None, dtype: DtypeLike | None = None) -> Tensor:
        """Return the logits, or the mean loss if targets are given, of the last block's output.

        Args:
            x: (..., C).
            targets: as for `forward`.
            dtype: the dtype of the logits; default: that of x.
        """
        x = self.norm(x)
        if targets is None:
            logits = self._logits(x, dtype)
            # Padding rows of the embedding are not tokens.
            return logits if logits.shape[-1] == self.vocab_size else logits[..., : self.vocab_size]
        return self._cross_entropy(x, targets)

    def _logits(self, x: Tensor, dtype: DtypeLike | None) -> Tensor:
        """Return the products of features with all rows of the head."""
        if self.region is not None:
            return self.region.logits(self.region.enter(x), self.head(), dtype)
        return linear(x, self.head(), dtype=dtype)

    def _cross_entropy(self, x: Tensor, targets: Any, **options: Any) -> Tensor:
        """Return the loss of features; options as of `linear_cross_entropy`."""
        options["vocab_size"] = self.vocab_size
        if self.region is not None:
            return self.region.cross_entropy(self.region.enter(x), self.head(), targets, **options)
        return linear_cross_entropy(x, self.head(), targets, **options)

    def shards(self) -> list[Shard]:
        """Return which layers outside the blocks ranks can share; blocks have their own tables."""
        layers = ["tokens"] if self.output is None else ["tokens", "output"]
        return [Shard(layer, "vocabulary") for layer in layers]

    def stage_table(self) -> dict[str, str]:
        """Return which stage of a pipeline has a layer: "first", "last" or both "ends".

        Layers that it does not name are of the first stage; each block is of one stage.
        """
        tokens = "ends" if self.output is None else "first"
        return {"tokens": tokens, "norm": "last", "output": "last"}

    def head(self) -> Tensor:
        """Return the weight of the head, (V or more, C)."""
        return self.tokens.weight if self.output is None else self.output.weight

    def forward(self, tokens: Any, targets: Any = None, cache: Cache | None = None) -> Tensor:
        """Return the logits of the next tokens, or the mean loss when targets are given.

        Args:
            tokens: (B, T) integers in [0, V), 1 <= T <= context.
            targets: (B, T) integers in [0, V), or -100 to ignore a position in the loss.
            cache: from `new_cache`: the tokens continue its sequences, and are added to it.
        Returns:
            Logits (B, T, V); or the mean negative log-likelihood of the targets, a scalar.
        Raises:
            ShapeError: tokens are not (B, T), or more than fit in the context.
            ArgumentError, DtypeError, DeviceError: see `tensorgrad.embedding` and
                `tensorgrad.linear_cross_entropy`.
        """
        mask, part = self.mask(tokens, targets), self.part
        if part is None:
            if self.stages is not None:
                raise ArgumentError(
                    f"{type(self).__name__}: this rank has some of the layers, expected to be "
                    "called by the loss of a training loop whose ranks are the Pipeline"
                )
            return self.finish(self.run_blocks(self.embed(tokens, cache), cache, mask), targets)
        x = self.embed(tokens, cache) if part.x is None else part.x
        x = self.run_blocks(x, cache, mask, part.blocks)
        return self.finish(x, targets) if part.last else x

    def mask(self, tokens: Any, targets: Any) -> Any:
        """Return the mask of all attention layers for a call, or None; see `attention`."""

    def next_logits(self, tokens: Any, cache: Cache | None = None, mask: Any = None) -> Tensor:
        """Return the logits (B, V) of the one token after `tokens`, float32 for 16-bit models.

        Args:
            tokens, cache: as for `forward`.
            mask: broadcastable to (B, 1, T, all tokens so far), bool, False where a token must not
                attend, such as to padding; see `tensorgrad.attention`.
        """
        if self.stages is not None:
            return self.stages.next_logits(tokens, cache, mask)
        x = self.embed(tokens, cache)
        return self.last_logits(self.run_blocks(x, cache, mask))

    def last_logits(self, x: Tensor) -> Tensor:
        """Return the logits (B, V) after the last of the positions (B, T, C).

        Those of 16-bit models are float32: rounded to bfloat16, logits of 100 would be 0.5 apart.
        """
        return self.finish(x[:, -1], dtype=compute_dtype(x.dtype))

    def new_cache(self, batch: int, steps: int | None = None) -> Cache:
        """Return an empty cache for `batch` sequences of `steps` tokens (default: the context).

        A block that other ranks have gets None.
        """
        steps = self.context if steps is None else steps
        return [
            block.attention.new_cache(batch, steps) if hasattr(block, "attention") else None
            for block in self.blocks
        ]

    def step_bytes(self, batch: int, keys: float) -> float:
        """Return the bytes that a decoding step reads of weights and of the cache.

        The weights of the blocks, the last norm and the head are read once for all sequences. By
        the time of a step and the bandwidth of the GPU's memory that is the MBU, memory bandwidth
        utilization.

        Args:
            batch: the number of sequences.
            keys: the mean number of keys that the cache of a layer has of a sequence.

        Example:
            >>> from tensorgrad.models import GPT2, GPT2Config
            >>> model = GPT2(GPT2Config(vocab_size=10, context=8, layers=1, heads=2, width=8))
            >>> model.step_bytes(batch=1, keys=4)  # float32: 968 weights, 4 keys and 4 values of 8
            4128.0
        """
        parameters = [self.head(), *self.norm.parameters(), *self.blocks.parameters()]
        found = float(sum(parameter.data.nbytes for parameter in parameters))
        for layer in self.attention_layers():
            seen = keys if layer.window is None else min(keys, layer.window)
            weight = layer.qkv.weight.data
            head = weight.nbytes / weight.shape[1] / (layer.heads + 2 * layer.kv_heads)
            found += 2 * batch * seen * layer.kv_heads * head
        return found

    @property
    def is_shared(self) -> bool:
        """Whether ranks share its layers, or each has some."""
        return self.region is not None or self.stages is not None

    @property
    def causal(self) -> bool:
        """Whether no token attends to a later one."""
        return all(layer.causal for layer in self.attention_layers())

    def attention_layers(self) -> list[nn.MultiHeadAttention]:
        """Return the attention of each block that this process has."""
        return [block.attention for block in self.blocks if hasattr(block, "attention")]

    @property
    def device(self) -> str:
        """The device of the parameters."""
        return next(self.parameters()).device

    def run_block(
        self, number: int, x: Tensor, cache: Cache | None = None, mask: Any = None
    ) -> Tensor:
        """Return the output of a block, (B, T, C)."""
        block = self.blocks[number]
        if cache is not None:
            return block(x, mask, cache[number])  # type: ignore[no-any-return]
        run: Callable[..., Tensor] = checkpoint(block) if self.recompute else block
        if not self.recompute_norms:
            return run(x, mask)
        with replaced(mode, recompute_norms=True):
            return run(x, mask)

    def run_blocks(
        self,
        x: Tensor,
        cache: Cache | None = None,
        mask: Any = None,
        numbers: Iterable[int] | None = None,
    ) -> Tensor:
        """Return the output of all blocks, or of those with these numbers, (B, T, C)."""
        if not isinstance(x, Tensor) or x.ndim != 3:
            got = f"shape {x.shape}" if isinstance(x, Tensor) else type(x).__name__
            raise ShapeError(f"{type(self).__name__}: embed returned {got}, expected (B, T, C)")
        for number in range(len(self.blocks)) if numbers is None else numbers:
            x = self.run_block(number, x, cache, mask)
        return x

    def _checked(self, tokens: Any, cache: Cache | None) -> tuple[Tensor, Any]:
        """Return the tokens as a tensor, and the number of tokens before them, or before each."""
        name = type(self).__name__
        tokens = tensor_of(name, "tokens", tokens)
        lengths = cache[0].lengths if cache else None
        before = cache[0].length if cache and lengths is None else 0
        if tokens.ndim != 2 or tokens.shape[1] < 1:
            raise ShapeError(f"{name}: tokens have shape {tokens.shape}, expected (B, T)")
        if before + tokens.shape[1] > self.context:
            raise ShapeError(
                f"{name}: got {before + tokens.shape[1]} tokens, expected at most {self.context} "
                "(the context)"
            )
        return tokens, before if lengths is None else lengths


def checked_prompts(op: str, prompts: Any, model: LanguageModel) -> list[np.ndarray[Any, Any]]:
    """Return the tokens of each prompt, after checks of their type, number and range.

    Args:
        op: the name of the caller, for errors.
        prompts: lists or arrays of integers, or one array with two axes.
        model: the model, whose vocabulary and context are the limits.

    Returns:
        Arrays of int64 with one axis.

    Raises:
        ArgumentError: a prompt is empty or longer than the context, or has a token outside the
            vocabulary.
        ShapeError: a prompt has more than one axis.
        DtypeError: the prompts are not lists of integers.

    Example:
        >>> from tensorgrad.models import GPT2, GPT2Config
        >>> from tensorgrad.models.language_model import checked_prompts
        >>> model = GPT2(GPT2Config(vocab_size=10, context=8, layers=1, heads=2, width=8))
        >>> checked_prompts("search", [[1, 2], [3]], model)
        [array([1, 2]), array([3])]
    """
    if isinstance(prompts, str) or not hasattr(prompts, "__len__"):
        kind = type(prompts).__name__
        raise DtypeError(f"{op}: prompts has type {kind}, expected a list of prompts")
    found = []
    for number, prompt in enumerate(prompts):
        name = "the prompt" if len(prompts) == 1 else f"prompt {number}"
        if isinstance(prompt, str):
            raise DtypeError(f"{op}: {name} has type str, expected a tokenizer's tokens")
        tokens = np.asarray(array_of(op, name, prompt, "one axis"))
        if tokens.ndim != 1:
            raise ShapeError(f"{op}: {name} has {tokens.ndim} axes, expected one")
        if not 1 <= len(tokens) <= model.context:
            raise ArgumentError(
                f"{op}: {name} has {len(tokens)} tokens, expected 1 to {model.context} (the "
                "context)"
            )
        if tokens.dtype.kind not in "iu":
            raise DtypeError(f"{op}: {name} has dtype {tokens.dtype}, expected integers")
        check_tokens(op, name, tokens.tolist(), model.vocab_size)
        found.append(tokens.astype(np.int64))
    return found


def model_of(config: Any) -> type[LanguageModel] | None:
    """Return the language model whose sizes a config is: the first class with this `Config`.

    Args:
        config: the sizes of a model.

    Returns:
        A subclass of LanguageModel, or None where no imported one has this Config.

    Example:
        >>> from tensorgrad.models.language_model import model_of
        >>> model_of(tg.models.GPT2Config())
        <class 'tensorgrad.models.gpt2.GPT2'>
    """
    classes: list[type[LanguageModel]] = [LanguageModel]
    for kind in classes:  # which grows by their subclasses
        if vars(kind).get("Config") is type(config):
            return kind
        classes += kind.__subclasses__()
    return None


def check_tokens(op: str, name: str, tokens: Sequence[int], vocab_size: int) -> None:
    """Raise ArgumentError where one of the integers is outside the vocabulary.

    Args:
        op, name: the caller and its argument, for the message.
        tokens: the token ids.
        vocab_size: the number of tokens.

    Example:
        >>> from tensorgrad.models.language_model import check_tokens
        >>> check_tokens("search", "end", [50257], 50257)
        Traceback (most recent call last):
            ...
        tensorgrad.errors.ArgumentError: search: end has the token 50257, expected 0 to 50256 ...
    """
    wrong = [token for token in tokens if not 0 <= token < vocab_size]
    if wrong:
        raise ArgumentError(
            f"{op}: {name} has the token {wrong[0]}, expected 0 to {vocab_size - 1} (a vocabulary "
            f"of {vocab_size})"
        )


def initialize(model: LanguageModel, std: float = 0.02) -> None:
    """Draw matrices from N(0, std), those that end a residual branch narrower; biases are 0.

    The two branches of each of the L blocks add up in the residual stream; std / sqrt(2 L) keeps
    its variance from growing with L.

    Args:
        model: the model, whose parameters are overwritten.
        std: the standard deviation.

    Source: Radford et al. 2019, "Language models are unsupervised multitask learners", 2.3.

    Example:
        >>> from tensorgrad.models import GPT2, GPT2Config
        >>> from tensorgrad.models.language_model import initialize
        >>> model = GPT2(GPT2Config(vocab_size=500, context=8, layers=1, heads=2, width=8))
        >>> initialize(model, std=0.1)
        >>> round(float(model.tokens.weight.std()), 1)
        0.1
    """
    narrow = std / (2 * len(model.blocks)) ** 0.5
    for name, parameter in model.named_parameters():
        if name.endswith((".proj.weight", ".down.weight")):
            nn.init.normal_(parameter, 0.0, narrow)
        elif parameter.ndim == 2:
            nn.init.normal_(parameter, 0.0, std)
        elif name.endswith(".bias"):
            nn.init.zeros_(parameter)
