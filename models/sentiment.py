"""Classifiers of short texts: the mean of word vectors, and a small transformer.

Texts are rows of tokens, padded on the right, with their lengths. Padding has no influence on the
result of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from tensorgrad import nn
from tensorgrad.core import backend
from tensorgrad.core.backend import Array
from tensorgrad.core.checks import check_integer, probability
from tensorgrad.core.errors import ArgumentError, ShapeError
from tensorgrad.core.nodes import assign
from tensorgrad.core.operands import integer_array
from tensorgrad.core.record import no_grad
from tensorgrad.core.tensor import Tensor
from tensorgrad.data.labelled_loader import pad
from tensorgrad.models.flops import training_flops
from tensorgrad.ops.cross_entropy import cross_entropy
from tensorgrad.ops.dropout import dropout as dropout_op
from tensorgrad.ops.elementwise.activation import relu
from tensorgrad.ops.matmul import matmul
from tensorgrad.ops.softmax import softmax

__all__ = [
    "Classifier",
    "ClassifierConfig",
    "MeanClassifier",
    "MeanConfig",
    "TransformerClassifier",
    "TransformerConfig",
    "class_probabilities",
]


@dataclass(frozen=True)
class ClassifierConfig:
    """The sizes of both classifiers.

    Args:
        vocab_size: V, the number of tokens.
        classes: the number of classes.
        width: C, of the word vectors.
        dropout: probability of dropping an activation in training, in [0, 1).
        word_dropout: probability of dropping a whole word in training, in [0, 1).
    Raises:
        ArgumentError: a size is out of its range.
    """

    vocab_size: int
    classes: int = 2
    width: int = 100
    dropout: float = 0.3
    word_dropout: float = 0.3

    def __post_init__(self) -> None:
        name = type(self).__name__
        for field, value in vars(self).items():
            if field.endswith("dropout"):
                probability(name, field, value)
            else:
                check_integer(name, field, value, 0 if field == "layers" else 1)

    def training_flops(self, length: float, keys: float) -> float:
        """Return the FLOPs of training on a text, see models/flops.py.

        Args:
            length: tokens of the text.
            keys: that a token attends to, on average over the tokens of all texts.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class MeanConfig(ClassifierConfig):
    """The sizes of a MeanClassifier.

    Args:
        layers: hidden layers between the mean and the classes, 0 or more.
        hidden: their width.
    """

    layers: int = 1
    hidden: int = 100

    @property
    def parameters(self) -> int:
        """The number of parameters."""
        words, width, hidden = self.vocab_size * self.width, self.width, self.hidden
        if not self.layers:
            return words + (width + 1) * self.classes
        between = (width + 1 + (self.layers - 1) * (hidden + 1)) * hidden
        return words + between + (hidden + 1) * self.classes

    def training_flops(self, length: float, keys: float) -> float:
        """Return the FLOPs of training on a text; its length has no influence here."""
        widths = [self.width] + [self.hidden] * self.layers + [self.classes]
        return training_flops(sum(a * b for a, b in pairwise(widths)), 0, 0, 0)


@dataclass(frozen=True)
class TransformerConfig(ClassifierConfig):
    """The sizes of a TransformerClassifier.

    Args:
        context: T, the context length in tokens.
        layers: blocks.
        heads: of the attention; they divide the width.
    Raises:
        ArgumentError: a size is out of its range, or heads do not divide the width.
    """

    width: int = 128
    context: int = 64
    layers: int = 2
    heads: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.width % self.heads:
            raise ArgumentError(
                f"TransformerConfig: width is {self.width}, expected a multiple of heads, "
                f"{self.heads}"
            )

    @property
    def parameters(self) -> int:
        """The number of parameters."""
        block = 12 * self.width**2 + 13 * self.width
        last = (self.width + 1) * self.classes
        return (self.vocab_size + self.context + 2) * self.width + self.layers * block + last

    def training_flops(self, length: float, keys: float) -> float:
        """Return the FLOPs of training on a text, see `ClassifierConfig.training_flops`."""
        blocks = training_flops(12 * self.layers * self.width**2, self.layers, self.width, keys)
        return length * blocks + training_flops(self.width * self.classes, 0, 0, 0)


class Classifier(nn.Module):
    """Base of models that classify a text; a subclass computes its features.

    Attributes:
        config: the sizes.
        words: Embedding(V, C), the word vectors.
        output: Linear(width of the features, classes).
    """

    config: ClassifierConfig
    words: nn.Embedding
    output: nn.Linear

    def features(self, tokens: Array, weights: Array) -> Tensor:
        """Return (B, any width).

        Args:
            tokens: (B, T).
            weights: (B, T), of each word in the mean of its text; 0 for padding and dropped words.
        """
        raise NotImplementedError

    def forward(self, tokens: Any, lengths: Any, labels: Any = None) -> Tensor:
        """Return the logits of the classes, or the mean loss when labels are given.

        Args:
            tokens: (B, T) integers in [0, V).
            lengths: (B,) integers from 0 to T: the rest of a row is padding. The features of an
                empty text are 0.
            labels: (B,) integers from 0 to classes - 1.
        Returns:
            (B, classes); or the mean negative log-likelihood of the labels, a scalar.
        Raises:
            ShapeError: the shapes do not fit.
            ArgumentError, DtypeError, DeviceError: see `tensorgrad.embedding` and
                `tensorgrad.cross_entropy`.
        """
        name = type(self).__name__
        ids = integer_array(name, "tokens", tokens)
        counts = integer_array(name, "lengths", lengths)
        if ids.ndim != 2 or counts.shape != ids.shape[:1]:
            raise ShapeError(
                f"{name}: tokens have shape {ids.shape} and lengths {counts.shape}, expected "
                "(B, T) and (B,)"
            )
        backend.same_device(name, ("tokens", "lengths"), (ids, counts))
        logits: Tensor = self.output(self.features(ids, self._weights(ids, counts)))
        return logits if labels is None else cross_entropy(logits, labels)

    def use_vectors(self, rows: Sequence[int], vectors: np.ndarray[Any, Any]) -> None:
        """Set rows of the word vectors to vectors (rows, C) before training."""
        weight = self.words.weight
        with no_grad():
            assign(weight, np.asarray(rows), backend.asarray_like(vectors, weight.data))

    @property
    def device(self) -> str:
        """The device of the parameters."""
        return self.output.weight.device

    def _weights(self, tokens: Array, lengths: Array) -> Array:
        """Return (B, T): 1 / their number for the words of a text that are kept, 0 elsewhere."""
        xp = backend.namespace(tokens)
        inside = (xp.arange(tokens.shape[1]) < lengths[:, None]).astype(np.float32)  # (B, T)
        kept = dropout_op(inside, self.config.word_dropout, self.training).data
        return kept / xp.maximum(kept.sum(1, keepdims=True), np.float32(1e-6))


class MeanClassifier(Classifier):
    """The mean of the word vectors of a text, then a feed-forward network.

    logits = W_n relu(... relu(W_1 mean + b_1) ...) + b_n

    Attributes:
        hidden: the layers before the last.
    Source: Iyyer et al. 2015, "Deep unordered composition rivals syntactic methods for text
        classification", sections 3 (deep averaging) and 3.1 (word dropout).
    """

    config: MeanConfig

    def __init__(self, config: MeanConfig) -> None:
        self.config = config
        self.words = _word_vectors(config)
        widths = [config.width] + [config.hidden] * config.layers
        self.hidden = nn.ModuleList(nn.Linear(*pair) for pair in pairwise(widths))
        self.output = nn.Linear(widths[-1], config.classes)
        self.dropout = nn.Dropout(config.dropout)

    def features(self, tokens: Array, weights: Array) -> Tensor:
        """Return (B, hidden); see `Classifier.features`."""
        x: Tensor = self.dropout(_mean(self.words(tokens), weights))
        for layer in self.hidden:
            x = self.dropout(relu(layer(x)))
        return x


class TransformerClassifier(Classifier):
    """Pre-norm transformer blocks without a causal mask, then the mean over the words.

    Attributes:
        positions: (T, C), the position embedding.
        blocks: the transformer blocks.
        norm: LayerNorm after the last of them.
    """

    config: TransformerConfig

    def __init__(self, config: TransformerConfig) -> None:
        self.config = config
        self.words = _word_vectors(config)
        self.positions = nn.Parameter(np.empty((config.context, config.width), np.float32))
        nn.init.normal_(self.positions, 0.0, 0.02)
        self.blocks = nn.ModuleList(
            nn.TransformerBlock(config.width, config.heads, dropout=config.dropout, causal=False)
            for _ in range(config.layers)
        )
        self.norm = nn.LayerNorm(config.width)
        self.output = nn.Linear(config.width, config.classes)
        self.dropout = nn.Dropout(config.dropout)

    def features(self, tokens: Array, weights: Array) -> Tensor:
        """Return (B, C); see `Classifier.features`."""
        if tokens.shape[1] > self.config.context:
            raise ShapeError(
                f"TransformerClassifier: tokens have {tokens.shape[1]} columns, expected at most "
                f"{self.config.context} (the context)"
            )
        x: Tensor = self.dropout(self.words(tokens, self.positions))
        mask = (weights > 0)[:, None, None]  # (B, 1, 1, T)
        for block in self.blocks:
            x = block(x, mask)
        x = self.dropout(_mean(self.norm(x), weights))
        return x


def class_probabilities(
    model: Classifier, rows: Sequence[Sequence[int]], longest: int | None = None, batch: int = 64
) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return (texts, classes): the probability of each class for the token ids of texts.

    Args:
        model: its mode (train or eval) is the same afterwards.
        rows: the token ids of each text.
        longest: cut texts to this number of tokens.
        batch: texts at a time.
    Raises:
        ArgumentError: longest or batch is below 1.
        DtypeError: ids are not integers.
    """
    check_integer("class_probabilities", "batch", batch, 1)
    parts = [np.empty((0, model.config.classes), np.float32)]
    with nn.evaluating(model):
        for first in range(0, len(rows), batch):
            arrays = pad(rows[first : first + batch], longest)
            logits = model(*(backend.to_device(array, model.device) for array in arrays))
            parts.append(softmax(logits.astype("float32")).numpy())
    return np.concatenate(parts)


def _word_vectors(config: ClassifierConfig) -> nn.Embedding:
    words = nn.Embedding(config.vocab_size, config.width)
    nn.init.normal_(words.weight, 0.0, 0.1)
    return words


def _mean(x: Tensor, weights: Array) -> Tensor:
    """Return (B, C), the mean of x (B, T, C) over T with weights (B, T)."""
    row = Tensor(weights.astype(x.dtype, copy=False))[:, None]  # (B, 1, T)
    return matmul(row, x)[:, 0]
