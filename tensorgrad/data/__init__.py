"""Text to tokens to batches: sources, tokenizer, token files, and loaders that can resume."""

from __future__ import annotations

from tensorgrad.data.corpus import Corpus, is_prepared, open_prepared, prepare
from tensorgrad.data.data_loader import DataLoader, Dataset, TensorDataset, collate
from tensorgrad.data.labelled import LabelledTexts, hold_out, read_labelled
from tensorgrad.data.labelled_loader import LabelledLoader
from tensorgrad.data.pair_loader import PairLoader
from tensorgrad.data.pairs import (
    PairCorpus,
    encode_pairs,
    language_token,
    read_pairs,
    train_tokenizer,
)
from tensorgrad.data.phrases import phrases
from tensorgrad.data.published_tokenizer import PublishedTokenizer
from tensorgrad.data.reviews import reviews
from tensorgrad.data.split import Split, plan_split
from tensorgrad.data.text import END_OF_TEXT, documents, fingerprint, folder_files
from tensorgrad.data.text_stream import TextStream
from tensorgrad.data.token_file import TokenFile, token_dtype, write_tokens
from tensorgrad.data.token_loader import TokenLoader
from tensorgrad.data.tokenizer import Tokenizer
from tensorgrad.data.words import WordVocabulary, read_vectors, split_words

__all__ = [
    "END_OF_TEXT", "Corpus", "DataLoader", "Dataset", "LabelledLoader", "LabelledTexts",
    "PairCorpus", "PairLoader", "PublishedTokenizer", "Split", "TensorDataset", "TextStream",
    "TokenFile", "TokenLoader", "Tokenizer", "WordVocabulary", "collate", "documents",
    "encode_pairs", "fingerprint", "folder_files", "hold_out", "is_prepared", "language_token",
    "open_prepared", "phrases", "plan_split", "prepare", "read_labelled", "read_pairs",
    "read_vectors", "reviews", "split_words", "token_dtype", "train_tokenizer", "write_tokens",
]  # fmt: skip
