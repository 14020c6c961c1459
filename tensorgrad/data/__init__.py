"""Text to tokens to batches: sources, tokenizer, token files, and a loader that can resume."""

from __future__ import annotations

from tensorgrad.data.corpus import Corpus, prepare
from tensorgrad.data.loader import TokenLoader
from tensorgrad.data.split import Split, plan_split
from tensorgrad.data.text import END_OF_TEXT, documents, fingerprint
from tensorgrad.data.tokenizer import Tokenizer
from tensorgrad.data.tokens import TokenFile, token_dtype, write_tokens

__all__ = [
    "END_OF_TEXT",
    "Corpus",
    "Split",
    "TokenFile",
    "TokenLoader",
    "Tokenizer",
    "documents",
    "fingerprint",
    "plan_split",
    "prepare",
    "token_dtype",
    "write_tokens",
]
