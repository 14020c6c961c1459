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
from tensorgrad.core.checks import check_integer, check_range
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
        width: C, the length of the word vectors.
        dropout: the probability of dropping an activation in training, in [0, 1).
        word_dropout: the probability of dropping a whole word in training, in [0, 1).

    Raises:
        ArgumentError: a size is out of its range.

    Example:
        >>> from tensorgrad.models import ClassifierConfig
        >>> ClassifierConfig(vocab_size=1000, classes=5).width
        100
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
                check_range(name, field, value, 1)
            else:
                check_integer(name, field, value, 0 if field == "layers" else 1)

    def training_flops(self, length: float, keys: float) -> float:
        """Return the FLOPs of training on a text, see models/flops.py.

        Args:
            length: the number of tokens of the text.
            keys: the number of keys that a token attends to, on average over all texts.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class MeanConfig(ClassifierConfig):
    """The sizes of a MeanClassifier.

    Args:
        vocab_size, classes, width, dropout, word_dropout: as for `ClassifierConfig`.
        layers: the number of hidden layers between the mean and the classes, 0 or more.
        hidden: their width.

    Example:
        >>> from tensorgrad.models import MeanConfig
        >>> MeanConfig(vocab_size=1000, classes=2, width=8, layers=0).parameters
        8018
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
        vocab_size, classes, width, dropout, word_dropout: as for `ClassifierConfig`.
        context: T, the context length in tokens.
        layers: the number of blocks.
        heads: the number of attention heads; they divide the width.

    Raises:
        ArgumentError: a size is out of its range, or heads do not divide the width.

    Example:
        >>> from tensorgrad.models import TransformerConfig
        >>> TransformerConfig(vocab_size=1000, width=8, context=16, layers=0, heads=2).parameters
        8162
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
    """Base of models that classify a text; a subclass computes its `features`.

    A subclass sets:
        config: the sizes.
        words: Embedding(V, C), the word vectors.
        output: Linear(width of the features, classes).

    Example:
        >>> from tensorgrad.models import Classifier, MeanClassifier, MeanConfig
        >>> model: Classifier = MeanClassifier(MeanConfig(vocab_size=10, classes=3))
        >>> model(tokens=np.array([[1, 2, 3], [4, 0, 0]]), lengths=np.array([3, 1])).shape
        (2, 3)
    """

    config: ClassifierConfig
    words: nn.Embedding
    output: nn.Linear

    def features(self, tokens: Array, weights: Array) -> Tensor:
        """Return (B, any width).

        Args:
            tokens: (B, T).
            weights: (B, T), the weight of each word in the mean of its text; 0 for padding and
                dropped words.
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

    Args:
        config: the sizes.

    Attributes:
        hidden: the layers before the last.

    Source: Iyyer et al. 2015, "Deep unordered composition rivals syntactic methods for text
        classification", sections 3 (deep averaging) and 3.1 (word dropout).

    Example:
        >>> from tensorgrad.models import MeanClassifier, MeanConfig
        >>> model = MeanClassifier(MeanConfig(vocab_size=10))
        >>> tokens, lengths = np.array([[1, 2, 3], [4, 0, 0]]), np.array([3, 1])
        >>> model(tokens, lengths).shape
        (2, 2)
        >>> loss = model(tokens, lengths, labels=np.array([1, 0]))
        >>> loss.shape, float(loss) > 0
        ((), True)
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

    Args:
        config: the sizes.

    Attributes:
        positions: (T, C), the position embedding.
        blocks: the transformer blocks.
        norm: LayerNorm after the last of them.

    Example:
        >>> from tensorgrad.models import TransformerClassifier, TransformerConfig
        >>> model = TransformerClassifier(TransformerConfig(10, width=8, layers=1, heads=2))
        >>> model(tokens=np.array([[1, 2, 3], [4, 0, 0]]), lengths=np.array([3, 1])).shape
        (2, 2)
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
    """Return the probability of each class for the token ids of texts.

    Args:
        model: the classifier; its mode (train or eval) is the same afterwards.
        rows: the token ids of each text.
        longest: cut texts to this number of tokens; None: texts stay whole.
        batch: the number of texts at a time.

    Returns:
        (texts, classes) float32; the sum of each row is 1.

    Raises:
        ArgumentError: longest or batch is below 1.
        DtypeError: ids are not integers.

    Example:
        >>> from tensorgrad.models import MeanClassifier, MeanConfig, class_probabilities
        >>> model = MeanClassifier(MeanConfig(vocab_size=10, classes=3))
        >>> p = class_probabilities(model, [[1, 2, 3], [4]])
        >>> p.shape, p.sum(1).round(3).tolist()
        ((2, 3), [1.0, 1.0])
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
