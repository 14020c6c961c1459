"""The mean of the last checkpoints of a run, often better than any of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tensorgrad.errors import ArgumentError, CheckpointError
from tensorgrad.train.checkpoint import list_checkpoints, load_checkpoint, step_of


def average_checkpoints(
    folder: Path, count: int, every: int = 1
) -> dict[str, np.ndarray[Any, Any]]:
    """Return the mean of the model's arrays over the newest checkpoints.

    Args:
        folder: where the checkpoints of a run are.
        count: how many, 1 or more; fewer where there are not so many.
        every: before the newest, take those alone whose step is a multiple of this: an interrupt
            leaves others too.
    Returns:
        Arrays by name, summed in float64, in the dtype that they have in the newest one.
    Raises:
        ArgumentError: count is below 1.
        CheckpointError: there is none, or one of them is damaged or of another model.
    Source: Vaswani et al. 2017, arXiv:1706.03762, section 6.1.
    """
    if count < 1:
        raise ArgumentError(f"average_checkpoints: count is {count}, expected 1 or more")
    paths = list_checkpoints(folder)
    if not paths:
        raise CheckpointError(f"average: {folder} has no checkpoint, expected one or more")
    paths = [paths[0], *(path for path in paths[1:] if step_of(path) % every == 0)][:count]
    newest = load_checkpoint(paths[0]).arrays("model")
    total = {name: array.astype(np.float64) for name, array in newest.items()}
    for path in paths[1:]:
        found = load_checkpoint(path).arrays("model")
        shapes = {name: array.shape for name, array in found.items()}
        if shapes != {name: array.shape for name, array in newest.items()}:
            raise CheckpointError(f"average: {path} is of another model than {paths[0]}")
        for name, array in found.items():
            total[name] += array
    return {name: (total[name] / len(paths)).astype(newest[name].dtype) for name in newest}
