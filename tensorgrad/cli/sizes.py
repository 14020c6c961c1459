"""The sizes of a GPT-2 as options of several commands, each of which has its own defaults.

None is the default of a command with presets.
"""

from __future__ import annotations

from typing import Annotated, Any

from cyclopts import Parameter


def _option(words: str) -> Parameter:
    return Parameter(help=words, show_default=_shown)


def _shown(default: Any) -> str:
    return "the preset's" if default is None else str(default)


Layers = Annotated[int, _option("transformer blocks.")]
Heads = Annotated[int, _option("attention heads.")]
Width = Annotated[int, _option("width of the model.")]
Hidden = Annotated[
    int, Parameter(help="hidden width of the blocks (default: 4 x --width).", show_default=False)
]
Context = Annotated[int, _option("context length in tokens.")]
Vocab = Annotated[int, _option("size of the vocabulary.")]
