"""Translation by a decoder-only model: source, a token for the target language, target.

Training data: data/pair_loader.py. Tests: tests/models/test_translation.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from tensorgrad.core.backend import Array, namespace
from tensorgrad.core.checks import check_between, check_integer
from tensorgrad.core.dtypes import DtypeLike, float32
from tensorgrad.core.errors import ArgumentError, ShapeError
from tensorgrad.core.operands import integer_array
from tensorgrad.core.tensor import Tensor
from tensorgrad.data.batches import IGNORED
from tensorgrad.data.pairs import language_token
from tensorgrad.data.tokenizer import Tokenizer
from tensorgrad.models.generation import beam_search, greedy_search
from tensorgrad.models.transformer_lm import TransformerLM, TransformerLMConfig

__all__ = ["TranslationConfig", "TranslationModel", "generate", "prefix_mask"]


@dataclass(frozen=True)
class TranslationConfig(TransformerLMConfig):
    """The sizes of a TranslationModel.

    Args:
        vocab_size, context, layers, heads, kv_heads, width: as for `TransformerLMConfig`.
        hidden, dropout, attention_dropout, activation_dropout: as for `TransformerLMConfig`.
        tied, rope_base, head_width, rope_scaling, window: as for `TransformerLMConfig`.
        window_from, norm_eps, qkv_bias, proj_bias: as for `TransformerLMConfig`.
        feed_forward_bias, qk_norm: as for `TransformerLMConfig`.
        label_smoothing: the fraction of a target's probability spread over all tokens, in [0, 1].
        prefix: whether the tokens of a source attend to each other in both directions (a prefix
            language model: Raffel et al. 2020, arXiv:1910.10683, section 3.2.1).

    Raises:
        ArgumentError: a size is out of its range.

    Example:
        >>> from tensorgrad.models import TranslationConfig
        >>> TranslationConfig(8000, context=256, layers=6, label_smoothing=0.1, prefix=True).prefix
        True
    """

    label_smoothing: float = 0.0
    prefix: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_between("TranslationConfig", "label_smoothing", self.label_smoothing, 0, 1)


class TranslationModel(TransformerLM):
    """A TransformerLM whose loss covers the last columns, with label smoothing in training.

    With `config.prefix`, all tokens of a row up to the one that predicts the first target attend to
    each other; without targets, all tokens of a call do.

    Args:
        config: the sizes.

    Example:
        >>> from tensorgrad.models import TranslationConfig, TranslationModel
        >>> config = TranslationConfig(10, context=8, layers=1, heads=2, kv_heads=1, width=8)
        >>> model = TranslationModel(config)
        >>> loss = model([[5, 6, 2, 7]], targets=[[7, 0]])  # the last two columns count
        >>> loss.shape, float(loss) > 0
        ((), True)
    """

    config: TranslationConfig
    loss_of_any_rows = False  # it is that of the last columns

    def __init__(self, config: TranslationConfig) -> None:
        super().__init__(config)
        for layer in self.attention_layers():
            layer.causal = not config.prefix

    def mask(self, tokens: Any, targets: Any) -> Any:
        """Return the mask of the prefixes, where the model has them."""
        if not self.config.prefix or targets is None:
            return None
        tokens, _ = self._checked(tokens, None)
        return prefix_mask(self._fitting(targets, tokens), tokens.shape[1])

    def finish(self, x: Tensor, targets: Any = None, dtype: DtypeLike | None = None) -> Tensor:
        """Return the logits, or the mean loss of the last positions.

        Args:
            x: (B, T, C), from the last block.
            targets: (B, n) for the last n <= T positions, -100 to ignore a position in the loss.
            dtype: the dtype of the logits; default: that of x.
        Raises:
            ShapeError: targets are not (B, n) with n from 1 to T.
        """
        if targets is None:
            return super().finish(x, dtype=dtype)
        targets = self._fitting(targets, x)
        x = self.norm(x[:, x.shape[1] - targets.shape[1] :])
        smoothing = self.config.label_smoothing if self.training else 0.0
        return self._cross_entropy(x, targets, label_smoothing=smoothing)

    @staticmethod
    def _fitting(targets: Any, x: Tensor) -> Array:
        """Return the targets of the last positions of x."""
        targets = integer_array("TranslationModel", "targets", targets)
        batch, steps = x.shape[:2]
        if targets.ndim != 2 or len(targets) != batch or not 1 <= targets.shape[1] <= steps:
            raise ShapeError(
                f"TranslationModel: targets have shape {targets.shape}, expected ({batch}, n) with "
                f"n from 1 to {steps} (rows and columns of tokens)"
            )
        return targets


def prefix_mask(targets: Array, width: int) -> Tensor:
    """Return the attention mask of a prefix language model.

    Args:
        targets: (B, n) for the last n of `width` positions, -100 for ignored ones. The first other
            one is the target of the last token of the prefix.
        width: T, the number of columns of the tokens.

    Returns:
        (B, 1, T, T) float32, to add to the attention scores: 0 where a token attends (to the
        prefix, itself and earlier tokens), -inf elsewhere.

    Example:
        >>> from tensorgrad.models.translation import prefix_mask
        >>> prefix_mask(np.array([[-100, 7, 0]]), 3)[0, 0]
        tensor([[  0.,   0., -inf],
                [  0.,   0., -inf],
                [  0.,   0.,   0.]], dtype=float32)
    """
    xp = namespace(targets)
    last = (targets != IGNORED).argmax(1) + (width - targets.shape[1])  # (B,), of the prefix
    columns = xp.arange(width, dtype=last.dtype)
    attends = columns <= xp.maximum(columns[:, None], last[:, None, None])  # (B, T, T)
    mask = xp.where(attends, float32.type(0), float32.type(-math.inf))
    return Tensor(mask.astype(float32, copy=False)[:, None])


def generate(
    model: TransformerLM,
    examples: Sequence[Mapping[str, str]],
    src_key: str,
    tgt_key: str,
    tokenizer: Tokenizer,
    model_max_length: int,
    backend: Any = None,
    desc: str = "translating",
    *,
    beams: int = 1,
    length_penalty: float = 0.6,
    rows: int = 128,
) -> list[str]:
    """Translate examples in batches of similar length, with a progress bar.

    Half of the positions are for the source, which is cut to fit, and half for the translation.

    Args:
        model: a model trained on pairs of these languages.
        examples: dictionaries with the text to translate under src_key.
        src_key: the language of the source, as in "de".
        tgt_key: the language to translate into; the tokenizer has a token for it.
        tokenizer: the model's.
        model_max_length: the number of positions to use, 4 to the model's context.
        backend: no effect: the model computes where its parameters are. Courses pass one.
        desc: the label of the progress bar.
        beams: 1: greedy search; more: see `beam_search`.
        length_penalty: as for `beam_search`.
        rows: the number of sequences to generate at a time; each beam counts.

    Returns:
        The translations as texts without special tokens, in the order of the examples.

    Raises:
        ArgumentError: an argument is out of its range, or an example has no text under src_key.
        DataError: the tokenizer has no token for the language.

    Example:
        >>> from tensorgrad.data import train_tokenizer
        >>> from tensorgrad.models import TranslationConfig, TranslationModel
        >>> from tensorgrad.models.translation import generate
        >>> tokenizer = train_tokenizer([("ja", "yes"), ("nein", "no")], 259, ["de", "en"])
        >>> config = TranslationConfig(259, context=8, layers=1, heads=2, kv_heads=1, width=8)
        >>> examples = [{"de": "ja"}, {"de": "nein"}]
        >>> texts = generate(TranslationModel(config), examples, "de", "en", tokenizer, 8)
        >>> len(texts)
        2
    """
    for name, value in (("model_max_length", model_max_length), ("beams", beams), ("rows", rows)):
        check_integer("generate", name, value)
    if not 4 <= model_max_length <= model.context:
        raise ArgumentError(
            f"generate: model_max_length is {model_max_length}, expected 4 to {model.context} "
            "(the model's context)"
        )
    if beams < 1 or rows < beams:
        raise ArgumentError(
            f"generate: beams is {beams} and rows {rows}, expected 1 or more and as many rows"
        )
    examples = list(examples)
    for number, example in enumerate(examples):
        if not isinstance(example, Mapping) or src_key not in example:
            got = sorted(example) if isinstance(example, Mapping) else repr(example)
            raise ArgumentError(f"generate: example {number} has {got}, expected {src_key!r}")
        if not isinstance(example[src_key], str):
            raise ArgumentError(
                f"generate: example {number} has a {type(example[src_key]).__name__} under "
                f"{src_key!r}, expected a text"
            )
    start_token, end = language_token(tokenizer, tgt_key), tokenizer.end_of_text
    longest = model_max_length // 2
    encoded = tokenizer.encode_batch([example[src_key] for example in examples])
    prompts = [[*ids[: longest - 1], start_token] for ids in encoded]
    by_length = sorted(range(len(prompts)), key=lambda number: len(prompts[number]), reverse=True)
    texts = [""] * len(prompts)
    each = rows // beams
    with tqdm(total=len(prompts), desc=desc, unit="line", leave=False, disable=None) as bar:
        for start in range(0, len(prompts), each):
            numbers = by_length[start : start + each]
            part = [prompts[number] for number in numbers]
            limit = model_max_length - longest
            if beams == 1:
                found = greedy_search(model, part, end, limit)
            else:
                found = beam_search(model, part, end, limit, beams, length_penalty)
            for number, ids in zip(numbers, found, strict=True):
                texts[number] = tokenizer.decode(ids, skip_special_tokens=True).strip()
            bar.update(len(numbers))
    return texts
