"""Translation by the course's model, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

import minitorch


def generate(
    model: Any,
    examples: Sequence[dict[str, str]],
    src_key: str,
    tgt_key: str,
    tokenizer: Any,
    model_max_length: int,
    backend: minitorch.TensorBackend,
    desc: str = "",
) -> list[str]:
    """Return a translation of each example, of the most likely token at each step.

    The model continues "source <eos_source>" until it gives "<eos_target>".

    Args:
        model: gives logits (1, T, V) of ids (1, T), such as `minitorch.DecoderLM`.
        examples: texts by language.
        src_key: the language to translate.
        tgt_key: the language to translate to.
        tokenizer: has `vocab`, from token to id, `__call__` and `decode`, as Hugging Face's.
        model_max_length: the longest sequence, of both texts together.
        backend: where the ids live.
        desc: of the progress; accepted, nothing is shown.
    """
    model.eval()
    end = tokenizer.vocab[f"<eos_{tgt_key}>"]
    translations = []
    for example in examples:
        ids = list(tokenizer(f"{example[src_key]}<eos_{src_key}>")["input_ids"])
        start = len(ids)
        while len(ids) < model_max_length:
            logits = model(minitorch.tensor_from_numpy(np.array([ids]), backend))
            token = int(logits.to_numpy()[0, -1].argmax())
            if token == end:
                break
            ids.append(token)
        translations.append(tokenizer.decode(ids[start:]))
    return translations


def collate_batch(
    examples: Sequence[dict[str, str]],
    src_key: str,
    tgt_key: str,
    tokenizer: Any,
    model_max_length: int,
    backend: minitorch.TensorBackend,
) -> dict[str, Any]:
    """Return "input_ids", "labels" and "label_token_weights", each (B, model_max_length).

    The ids are "source <eos_source> target <eos_target> <pad> ..."; labels are the ids that follow,
    with weight 1 where they belong to the target.

    Args:
        examples: B texts by language.
        src_key: the language to translate.
        tgt_key: the language to translate to.
        tokenizer: as of `generate`, with "<pad>".
        model_max_length: the longest sequence, of both texts together.
        backend: where the tensors live.
    """
    length = model_max_length + 1
    ids = np.full((len(examples), length), tokenizer.vocab["<pad>"])
    weights = np.zeros((len(examples), length))
    for row, example in enumerate(examples):
        source, target = (
            list(tokenizer(f"{example[key]}<eos_{key}>")["input_ids"]) for key in (src_key, tgt_key)
        )
        both = (source + target)[:length]
        ids[row, : len(both)] = both
        weights[row, len(source) : len(both)] = 1
    parts = {"input_ids": ids[:, :-1], "labels": ids[:, 1:], "label_token_weights": weights[:, 1:]}
    return {name: minitorch.tensor_from_numpy(part, backend) for name, part in parts.items()}


def loss_fn(batch: dict[str, Any], model: Any) -> Any:
    """Return the cross-entropy of the target's tokens, their mean, (1,)."""
    logits = model(batch["input_ids"])
    rows = logits.shape[0] * logits.shape[1]
    weights = batch["label_token_weights"].view(rows)
    losses = minitorch.softmax_loss(logits.view(rows, logits.shape[2]), batch["labels"].view(rows))
    return (losses * weights).sum() / weights.sum()
