"""`tensorgrad prepare`: text to tokens."""

from __future__ import annotations

from pathlib import Path

from tensorgrad.data import Tokenizer
from tensorgrad.data import prepare as prepare_corpus
from tensorgrad.train.folder import check_new_folder
from tensorgrad.train.progress import StageProgress


def prepare(
    data: str,
    out: Path | None = None,
    /,
    *,
    vocab: int = 4096,
    tokenizer: Path | None = None,
    pattern: str | None = None,
    text_column: str | None = None,
    validation: float = 0.05,
    cache: Path = Path("runs/data"),
) -> int:
    """Train a tokenizer (byte-level BPE, on all cores) and write the tokens of a text.

    `tensorgrad train` does the same before its first step. The folder has tokenizer.json, train.npy
    and validation.npy; `tensorgrad train --data FOLDER` takes it as it is, also if the files come
    from elsewhere.

    Args:
        data: a file or a folder of text, JSON lines or Parquet, hf:NAME[:CONFIG][:SPLIT], or
            stdlib, Python's source.
        out: a new folder for the files; without it they stay in the cache.
        vocab: size of the vocabulary.
        tokenizer: a tokenizer.json to use; without it one is trained.
        pattern: regular expression of the words that a trained tokenizer does not merge across;
            without it GPT-2's.
        text_column: column of the text in JSON lines, Parquet and hf: data, if not "text".
        validation: fraction of the text for validation.
        cache: folder for prepared texts; a second call with the same options finds them there.
    """
    if out is not None:
        check_new_folder(out, "OUT")
    given = None if tokenizer is None else Tokenizer.load(tokenizer)
    with StageProgress(f"preparing {data}") as progress:
        corpus = prepare_corpus(
            data,
            cache,
            vocab,
            validation=validation,
            tokenizer=given,
            pattern=pattern,
            column=text_column,
            progress=progress,
        )
    if corpus.source_files:
        print(f"{data}: {corpus.source_files}")
    if out is not None:
        corpus.save(out)
    print(
        f"{out or corpus.folder}: {len(corpus.train):,} tokens to train on, "
        f"{len(corpus.validation):,} for validation, vocabulary {corpus.tokenizer.vocab_size:,}"
    )
    return 0
