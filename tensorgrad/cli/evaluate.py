"""`tensorgrad evaluate`: validation loss, BLEU or accuracy of a trained model."""

from __future__ import annotations

import json as jsonlib
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from tensorgrad.core.errors import ArgumentError
from tensorgrad.io.files import finite
from tensorgrad.train import config
from tensorgrad.train.device import choose_device
from tensorgrad.train.language import LanguageModeling, LanguageSettings
from tensorgrad.train.load import run_of
from tensorgrad.train.tasks import task_of_run


def evaluate(
    model: Path,
    /,
    *,
    checkpoint: Literal["best", "last", "averaged"] = "best",
    data: str | None = None,
    text_column: str | None = None,
    batch: int | None = None,
    dtype: Literal["float32", "tf32", "bfloat16", "float16"] | None = None,
    device: str = "auto",
    json: bool = False,
    download: Annotated[bool, Parameter(negative=())] = False,
    revision: str | None = None,
    task: str | None = None,
    model_file: Annotated[str, Parameter(name="--model")] = "",
) -> int:
    """Measure a trained model on its validation data: loss, perplexity, BLEU, accuracy.

    Args:
        model: a run, or one of its checkpoints; or with --data a model in the layout of Hugging
            Face transformers, or a file of `python -m tensorgrad.parallel.merge`; with --download,
            the name of a GPT-2 on the Hub.
        checkpoint: checkpoint of a run: the best by validation loss, the last, or the average of
            the last ones (translation).
        data: other data than the run's; needed for other models.
        text_column: the column of the text in these data, if not the run's.
        batch: another batch size than the run's.
        dtype: another dtype of matrix products than the run's.
        device: cpu, cuda, cuda:N, or auto: a GPU if there is one.
        json: print JSON.
        download: download a model that is not a folder; needs huggingface_hub.
        revision: revision of the download: a branch, tag or commit.
        task: the Python file of the run's task, if it is your own; it is executed.
        model_file: the Python file of the run's model, if it is your own; it is executed.
    """
    folder, kind = run_of(model), LanguageModeling
    settings: Any
    if folder is not None and (folder / config.FILE).exists():
        kind, settings = task_of_run(folder, task, model_file)
        if kind is not LanguageModeling and folder != model:
            raise ArgumentError(
                f"evaluate: {model} is a checkpoint of a {settings.task} run, expected the run: "
                f"{folder}"
            )
    elif not (download or model.exists()):
        raise ArgumentError(
            f"evaluate: {model} does not exist, expected a run or a model; with --download a model "
            "of the Hugging Face Hub"
        )
    elif data is None:
        raise ArgumentError(
            f"--data: got none, expected the text to evaluate on: {model} is not a run, or it has "
            "no checkpoints"
        )
    else:
        settings = LanguageSettings(download=download, revision=revision or "", model=model_file)
    given = {"data": data, "text_column": text_column, "batch": batch, "dtype": dtype}
    changed: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if text_column is not None and not hasattr(settings, "text_column"):
        raise ArgumentError(f"--text-column: got {text_column} for {settings.task}, which has none")
    settings, place = choose_device(replace(settings, device=device, **changed))
    found = kind.measure(settings, model, place, checkpoint)
    if not found:
        raise ArgumentError(
            f"evaluate: the task of {model} measures nothing, expected one whose `evaluate` "
            "returns numbers by name"
        )
    if json:
        print(jsonlib.dumps(finite(found), indent=1))
    else:
        for name, value in found.items():
            shown = f"{value:,.4f}" if isinstance(value, float) else f"{value}"
            print(f"{name.replace('_', ' '):16} {shown}")
    return 0
