"""A published architecture: how it names its settings and stores its weights.

gpt2_weights.py and llama_weights.py describe the architectures, pretrained.py reads and writes
their folders.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from tensorgrad.core.backend import Shape
from tensorgrad.core.errors import CheckpointError

__all__ = ["Architecture", "PublishedSettings", "StoredArray"]

_REQUIRED = object()
# Entries of a config.json that change no logit: about training, generation, tokens, heads for
# classification, precision, the files and the programs that wrote them.
_WITHOUT_EFFECT = {
    *("_name_or_path", "name_or_path", "_commit_hash", "transformers_version", "model_type"),
    *("torch_dtype", "dtype", "use_bfloat16", "torchscript", "tf_legacy_loss", "use_cache"),
    *("return_dict", "use_return_dict", "output_attentions", "output_hidden_states"),
    *("output_scores", "output_past", "return_dict_in_generate", "chunk_size_feed_forward"),
    *("attn_implementation", "_attn_implementation", "_attn_implementation_autoset"),
    *("experts_implementation", "reorder_and_upcast_attn", "pretraining_tp"),
    *("initializer_range", "gradient_checkpointing", "attn_pdrop", "embd_pdrop", "resid_pdrop"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "unk_token_id"),
    *("decoder_start_token_id", "forced_bos_token_id", "forced_eos_token_id", "tokenizer_class"),
    *("id2label", "label2id", "num_labels", "_num_labels", "problem_type", "finetuning_task"),
    *("classifier_dropout", "task_specific_params", "prefix", "predict_special_tokens"),
    *("summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels"),
    *("summary_first_dropout", "max_length", "min_length", "max_new_tokens", "do_sample"),
    *("early_stopping", "num_beams", "num_beam_groups", "diversity_penalty", "temperature"),
    *("top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty"),
    *("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids"),
    *("num_return_sequences", "remove_invalid_values", "exponential_decay_length_penalty"),
    *("suppress_tokens", "begin_suppress_tokens", "is_decoder", "tie_encoder_decoder"),
    *("tie_last_hidden_states", "n_ctx", "max_sequence_length", "is_llama_config"),
    *("transformers.js_config", "unsloth_version", "unsloth_fixed"),
}
# The values, the default first, that all models must have for entries which change the mathematics.
_FIXED: dict[str, tuple[Any, ...]] = {
    "is_causal": (True,),
    "is_encoder_decoder": (False, None),
    "add_cross_attention": (False, None),
    "cross_attention_hidden_size": (None,),
    "pruned_heads": ({}, None),
    "per_layer_config": (None, {}),
    "quantization_config": (None,),
}


class StoredArray(NamedTuple):
    """An array of a published model, and the rows of our parameter that it is.

    Attributes:
        theirs: its name in the file, without the prefix.
        ours: the name of the parameter.
        shape: the shape in the file.
        start: the first of the rows.
        transposed: whether the array in the file is (in, out).

    Example:
        >>> from tensorgrad.models.architecture import StoredArray
        >>> StoredArray("k_proj.weight", "qkv.weight", shape=(16, 64), start=64).rows
        slice(64, 80, None)
    """

    theirs: str
    ours: str
    shape: Shape
    start: int = 0
    transposed: bool = False

    @property
    def rows(self) -> slice:
        """The rows of the parameter."""
        return slice(self.start, self.start + self.shape[-1 if self.transposed else 0])


@dataclass(frozen=True)
class Architecture:
    """A published architecture.

    Attributes:
        name: as in "architectures" of config.json.
        model_type: as in config.json.
        model: our class.
        config: the class of its sizes.
        prefix: before the names of all arrays but the head's; some files lack it.
        tokens: the name of the token embedding, without the prefix.
        ignored: names, without the prefix, of arrays that files may have and we do not need.
        read: the function from the published settings to our sizes.
        write: the function from our sizes to the entries of a config.json.
        stored: the function from our sizes to the arrays of a file.

    Example:
        >>> from tensorgrad.models.architecture import Architecture
        >>> from tensorgrad.models.gpt2_weights import GPT2_ARCHITECTURE
        >>> gpt2: Architecture = GPT2_ARCHITECTURE
        >>> gpt2.name, gpt2.write(tg.models.PRESETS["gpt2-124M"])["n_embd"]
        ('GPT2LMHeadModel', 768)
    """

    name: str
    model_type: str
    model: Any
    config: Any
    prefix: str
    tokens: str
    ignored: re.Pattern[str]
    read: Callable[[PublishedSettings], Any]
    write: Callable[[Any], dict[str, Any]]
    stored: Callable[[Any], Iterator[StoredArray]]


class PublishedSettings:
    """The entries of a config.json; those of another type or value raise an error that names them.

    The methods note which entries they have read; `check_known` fails at any other that may change
    the mathematics.

    Args:
        values: the entries.
        name: the path of the file, for errors.

    Example:
        >>> from tensorgrad.models.architecture import PublishedSettings
        >>> settings = PublishedSettings({"n_layer": 12}, "config.json")
        >>> settings.integer("n_layer"), settings.integer("n_inner", default=None)
        (12, None)
    """

    def __init__(self, values: Mapping[str, Any], name: str) -> None:
        self.values, self.name = values, name
        self._read: set[str] = set()

    def integer(self, key: str, default: Any = _REQUIRED) -> Any:
        """Return an integer, or the default where the entry is missing or null."""
        return self._typed(key, (int,), "an integer", default)

    def number(self, key: str, default: Any = _REQUIRED) -> Any:
        """Return a number, or the default where the entry is missing or null."""
        return self._typed(key, (int, float), "a number", default)

    def boolean(self, key: str, default: bool) -> bool:
        """Return a boolean, or the default where the entry is missing or null."""
        found: bool = self._typed(key, (bool,), "true or false", default)
        return found

    def part(self, key: str) -> PublishedSettings | None:
        """Return the entries of a mapping; None where it is missing or null."""
        values = self._typed(key, (dict,), "a mapping", None)
        return None if values is None else PublishedSettings(values, f"{self.name}: {key}")

    def names(self, key: str) -> list[str] | None:
        """Return a list of texts; None where the entry is missing or null."""
        found = self._typed(key, (list,), "a list of names", None)
        if found is not None and not all(type(name) is str for name in found):
            self.refuse(key, "a list of names")
        names: list[str] | None = found
        return names

    def only(self, expected: Mapping[str, tuple[Any, ...]]) -> None:
        """Fail where an entry is there and has none of the values that are supported."""
        for key, values in expected.items():
            self._read.add(key)
            if key in self.values and self.values[key] not in values:
                self.refuse(key, " or ".join(map(repr, values)))

    def ignore(self, *keys: str) -> None:
        """Note that entries have no effect."""
        self._read.update(keys)

    def check_known(self) -> None:
        """Fail at an entry that may change the mathematics and that no method has read."""
        for key, value in self.values.items():
            if key not in self._read and value is not None:
                self.refuse(
                    key,
                    "no such entry: tensorgrad does not know whether it changes the logits; delete "
                    "it if it does not",
                )

    def check_all_known(
        self, architecture: str, unread: Mapping[str, tuple[Any, ...]] | None = None
    ) -> None:
        """Check the entries that all architectures share, and that no other one is unknown.

        Args:
            architecture: its name, as in "architectures".
            unread: the values that are supported for entries which no method has read.
        """
        self.only(_FIXED)
        self.only({key: values for key, values in (unread or {}).items() if key not in self._read})
        base = architecture.replace("ForCausalLM", "Model").replace("LMHeadModel", "Model")
        names = self.names("architectures")
        if names and not {architecture.lower(), base.lower()} & {name.lower() for name in names}:
            self.refuse("architectures", f"{architecture!r} or {base!r} among them")
        self.ignore(*_WITHOUT_EFFECT)
        self.check_known()

    def refuse(self, key: str, expected: str) -> None:
        """Fail for an entry."""
        raise CheckpointError(
            f"from_pretrained: {self.name}: {key} is {self.values.get(key)!r:.80}, expected "
            f"{expected}"
        )

    def _typed(self, key: str, types: tuple[type, ...], expected: str, default: Any) -> Any:
        self._read.add(key)
        found = self.values.get(key)
        if found is None and default is not _REQUIRED:
            return default
        if type(found) not in types:
            self.refuse(key, expected)
        return found
