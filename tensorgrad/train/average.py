"""Checkpoint averaging: the mean of the last checkpoints is often better than each of them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from tensorgrad.core.errors import ArgumentError, CheckpointError
from tensorgrad.train.checkpoint import load_checkpoint


def average_checkpoints(paths: Sequence[str | os.PathLike[str]]) -> dict[str, np.ndarray[Any, Any]]:
    """Return the mean of the model's arrays over checkpoints.

    Args:
        paths: folders of checkpoints, one or more; see `checkpoint.list_checkpoints`.

    Returns:
        Arrays by name, summed in float64, in the dtype of the first checkpoint.

    Raises:
        ArgumentError: paths is empty.
        CheckpointError: a checkpoint is missing, damaged or of another model than the first.

    Source: Vaswani et al. 2017, arXiv:1706.03762, section 6.1.

    Example:
        >>> from tensorgrad.train import Trainer, TrainSettings, average_checkpoints
        >>> settings = TrainSettings(steps=4, checkpoint_every=2, device="cpu", plot=False)
        >>> model, rate = tg.nn.Linear(3, 1), settings.learning_rate
        >>> optimizer, loss = settings.optimizer(model.parameters()), lambda x: model(x).mean()
        >>> batches = lambda step: iter([(np.ones((8, 3), "float32"),)] * 4)
        >>> outcome = Trainer(model, optimizer, loss, batches, rate, settings, "runs/5").run()
        >>> folder = "runs/5/checkpoints"
        >>> mean = average_checkpoints([f"{folder}/step-00000002", f"{folder}/step-00000004"])
        >>> mean["weight"].shape, mean["weight"].dtype
        ((1, 3), dtype('float32'))
    """
    if not paths:
        raise ArgumentError("average_checkpoints: paths is empty, expected one or more")
    first = load_checkpoint(paths[0]).arrays("model")
    if not first:
        raise CheckpointError(f"average: {paths[0]} has no array, expected those of a model")
    total = {name: array.astype(np.float64) for name, array in first.items()}
    for path in paths[1:]:
        found = load_checkpoint(path).arrays("model")
        shapes = {name: array.shape for name, array in found.items()}
        if shapes != {name: array.shape for name, array in first.items()}:
            raise CheckpointError(
                f"average: {path} was saved from a different model than {paths[0]}"
            )
        for name, array in found.items():
            total[name] += array
    return {name: (total[name] / len(paths)).astype(first[name].dtype) for name in first}
