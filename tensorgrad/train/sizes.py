"""The sizes of a model before it is built: those of its run's checkpoints, and of the machine.

config.json that is untrusted may ask for a model that no memory holds. Tests:
tests/train/test_sizes.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from tensorgrad.core.errors import ArgumentError, CheckpointError, DamagedError
from tensorgrad.models.restore import Config, check_building
from tensorgrad.train.checkpoint import Checkpoint, list_checkpoints, open_state

__all__ = ["check_sizes", "newest_entry"]


def check_sizes(config: Config, folder: Path) -> None:
    """Compare the sizes of a model with the newest readable checkpoint of its run, if there is one.

    Only headers are read.

    Args:
        config: the sizes.
        folder: of the run; it may be missing.

    Raises:
        CheckpointError: the checkpoint has arrays of other sizes.
        ArgumentError: the model is too large for this machine.

    Example:
        >>> from pathlib import Path
        >>> from tensorgrad.train.sizes import check_sizes
        >>> try:
        ...     check_sizes(tg.models.GPT2Config(layers=10**6), Path("runs/new"))
        ... except tg.errors.ArgumentError as error:
        ...     print("too large")
        too large
    """
    try:
        check_building(config)
    except ArgumentError as error:
        raise ArgumentError(f"train: {error}") from error
    for checkpoint in _readable(folder):
        try:
            with ExitStack() as stack:
                stored = checkpoint.pieces(stack)
                pieces = [parts for name, parts in stored.items() if name.startswith("model/")]
                held = sum(part.piece.size for parts in pieces for part in parts)
                whole = sum(math.prod(parts[0].piece.placement.shape) for parts in pieces)
        except DamagedError:
            continue
        if whole != config.parameters or held < whole:
            raise CheckpointError(
                f"resume: {checkpoint.path} was saved from a different model: its arrays have "
                f"{min(whole, held):,} elements in all, expected {config.parameters:,}, as "
                "config.json and the tokenizer say"
            )
        return


def newest_entry(folder: Path, name: str) -> Any:
    """Return an entry of the newest readable checkpoint of a run, such as "model", the sizes.

    Args:
        folder: of the run.
        name: of the entry.

    Returns:
        The entry, as JSON has it; None where the run has no readable checkpoint with it.

    Example:
        >>> from pathlib import Path
        >>> from tensorgrad.train import Trainer, TrainSettings
        >>> from tensorgrad.train.sizes import newest_entry
        >>> model, settings = tg.nn.Linear(3, 1), TrainSettings(steps=2, device="cpu", plot=False)
        >>> optimizer = settings.optimizer(model.named_parameters())
        >>> loss, rate = lambda x: model(x).mean(), settings.learning_rate
        >>> batches = lambda step: iter([(np.ones((8, 3), "float32"),)] * 2)
        >>> outcome = Trainer(model, optimizer, loss, batches, rate, settings, "runs/9").run()
        >>> newest_entry(Path("runs/9"), "settings")["steps"]
        2
    """
    return next((checkpoint.state.get(name) for checkpoint in _readable(folder)), None)


def _readable(folder: Path) -> Iterator[Checkpoint]:
    """Yield the checkpoints of a run whose state is whole, the newest first."""
    for path in list_checkpoints(folder / "checkpoints"):
        with suppress(DamagedError):  # resuming warns of it, and goes back
            yield open_state(path)
