"""GPT-2, TransformerLM, translation, classifiers, generation. Import as `tensorgrad.models`.

A name is loaded at its first use, with the module that defines it. The modules have more names.
"""

if __name__ != "tensorgrad.models":
    raise ImportError("`models` is the package tensorgrad.models: `from tensorgrad import models`")

from importlib import import_module as _import_module
from typing import TYPE_CHECKING, Any

# In the order in which a name is looked for: the first are loaded by most of the others.
_MODULES = (
    "language_model", "flops", "generation", "gpt2", "transformer_lm", "restore", "pretrained",
    "sentiment", "translation",
)  # fmt: skip

__all__ = [
    "GPT2",
    "PRESETS",
    "Classifier",
    "ClassifierConfig",
    "GPT2Config",
    "LanguageModel",
    "MeanClassifier",
    "MeanConfig",
    "TransformerClassifier",
    "TransformerConfig",
    "TransformerLM",
    "TransformerLMConfig",
    "TranslationConfig",
    "TranslationModel",
    "beam_search",
    "class_probabilities",
    "config_of",
    "from_pretrained",
    "generate",
    "generate_batch",
    "greedy_search",
    "is_pretrained",
    "pretrained_folder",
    "save_pretrained",
    "stream",
    "training_flops",
]

if TYPE_CHECKING:
    from tensorgrad.models.flops import training_flops
    from tensorgrad.models.generation import (
        beam_search,
        generate,
        generate_batch,
        greedy_search,
        stream,
    )
    from tensorgrad.models.gpt2 import GPT2, PRESETS, GPT2Config
    from tensorgrad.models.language_model import LanguageModel
    from tensorgrad.models.pretrained import (
        from_pretrained,
        is_pretrained,
        pretrained_folder,
        save_pretrained,
    )
    from tensorgrad.models.restore import config_of
    from tensorgrad.models.sentiment import (
        Classifier,
        ClassifierConfig,
        MeanClassifier,
        MeanConfig,
        TransformerClassifier,
        TransformerConfig,
        class_probabilities,
    )
    from tensorgrad.models.transformer_lm import TransformerLM, TransformerLMConfig
    from tensorgrad.models.translation import TranslationConfig, TranslationModel
else:  # to a type checker every name would exist

    def __getattr__(name: str) -> Any:
        if name in _MODULES:
            return _import_module(f"{__name__}.{name}")
        if name in __all__:
            for module in map(__getattr__, _MODULES):
                if name in module.__all__:
                    return getattr(module, name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)

    def __dir__() -> list[str]:
        return sorted([*__all__, *_MODULES])
