"""`tensorgrad export`: write a trained model in the layout of Hugging Face transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from tensorgrad.core.errors import CheckpointError
from tensorgrad.data import PublishedTokenizer, Tokenizer
from tensorgrad.models.pretrained import save_pretrained
from tensorgrad.train.folder import check_new_folder
from tensorgrad.train.load import load_trained


def export(
    model: Path,
    folder: Path,
    /,
    *,
    checkpoint: Literal["best", "last"] = "best",
    tokenizer: Path | None = None,
    dtype: Literal["float32", "bfloat16", "float16"] = "float32",
    max_file_bytes: int = 5 * 10**9,
    download: Annotated[bool, Parameter(negative=())] = False,
    revision: str | None = None,
) -> int:
    """Write a trained language model as a folder that Hugging Face transformers loads.

    The folder gets config.json, model.safetensors, tokenizer.json and the settings of tokenizer
    and generation. `tensorgrad generate` and `from_pretrained` load it too.

    Args:
        model: a run, one of its checkpoints, a model in the layout of Hugging Face transformers, or
            a file of `python -m tensorgrad.parallel.merge`; with --download, the name of a model on
            the Hub.
        folder: new folder to write.
        checkpoint: checkpoint of a run: the best by validation loss, or the last.
        tokenizer: a tokenizer.json, or a folder with one, if not the model's.
        dtype: dtype of the weights.
        max_file_bytes: largest file; larger weights are several files, with an index.
        download: download a model that is not a folder; needs huggingface_hub.
        revision: revision of the download: a branch, tag or commit.
    """
    check_new_folder(folder, "FOLDER")
    found, own = load_trained(
        model, checkpoint, tokenizer, file=None, download=download, revision=revision
    )
    if own.vocab_size > found.vocab_size:
        raise CheckpointError(
            f"export: the tokenizer has {own.vocab_size} tokens, expected at most "
            f"{found.vocab_size} (the vocabulary of {model})"
        )
    save_pretrained(found.to("cpu", dtype), folder, max_file_bytes=max_file_bytes)
    (PublishedTokenizer.of(own) if isinstance(own, Tokenizer) else own).save(folder)
    print(f"wrote {folder}")
    return 0
