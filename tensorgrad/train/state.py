"""The state of a run in its checkpoints: what it is beside the arrays, and how it is loaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from tensorgrad import random
from tensorgrad.errors import ArgumentError, CheckpointError
from tensorgrad.files import finite
from tensorgrad.nn import Module
from tensorgrad.optim import LossScaler, Optimizer
from tensorgrad.train.checkpoint import Checkpoint, check_same
from tensorgrad.train.config import Dataclass, contradictions, renamed
from tensorgrad.train.strategy import Strategy

BelongsTo = Mapping[str, Mapping[str, Any]]


def state_of(
    settings: Dataclass,
    strategy: Strategy,
    belongs_to: BelongsTo,
    metrics: Mapping[str, float],
    scaler: LossScaler | None = None,
) -> dict[str, Any]:
    """Return what a checkpoint has beside the arrays, for `Strategy.save`.

    Args:
        settings: of the run.
        strategy: the processes that train together.
        belongs_to: what a checkpoint must have been made with to fit this run, by group.
        metrics: of the evaluation at this step; its "validation_loss" chooses the best checkpoint.
        scaler: for float16.
    """
    return {
        **belongs_to,
        "settings": asdict(settings),
        "ranks": strategy.ranks,
        "scaler": None if scaler is None else scaler.state_dict(),
        "generator": random.get_state(),
        "metrics": finite(metrics),
    }


def load_state(
    checkpoint: Checkpoint,
    model: Module,
    optimizer: Optimizer,
    settings: Dataclass,
    strategy: Strategy,
    belongs_to: BelongsTo,
    scaler: LossScaler | None = None,
) -> None:
    """Load a checkpoint into a run; nothing changes if it does not fit.

    Args:
        checkpoint: that `Strategy.save` has written with the state of `state_of`.
        model, optimizer: whose arrays are replaced.
        settings, ranks, belongs_to, scaler: as for `state_of`.
    Raises:
        CheckpointError: it belongs to another model, vocabulary or data, or was made with
            settings that a resumed run must keep.
    """
    for name, expected in belongs_to.items():
        check_same(checkpoint, name, expected)
    _check_settings(checkpoint, settings, strategy)
    generator = checkpoint.mapping("generator")
    try:
        with _unchanged_by_errors(scaler):
            random.set_state(generator)
            if scaler is not None:
                scaler.load_state_dict(checkpoint.entry("scaler") or {})
            strategy.load(checkpoint, model, optimizer)
    except (ArgumentError, CheckpointError) as error:
        raise CheckpointError(f"load: {checkpoint.path} cannot be used: {error}") from error


def _check_settings(checkpoint: Checkpoint, settings: Dataclass, strategy: Strategy) -> None:
    """Raise CheckpointError where a setting differs that a resumed run must keep."""
    before = renamed(checkpoint.settings("settings"))
    same_ranks = checkpoint.state.get("ranks") == strategy.ranks
    now, warmup = asdict(settings), before.get("warmup")
    if isinstance(warmup, int) and warmup + 1 == before.get("steps"):
        now.pop("warmup", None)  # limited by the steps, with which it may grow
    wrong = contradictions(settings, before, now, same_ranks)
    if wrong:
        raise CheckpointError(
            f"load: {checkpoint.path} was made with other settings: {'; '.join(wrong)}"
        )


@contextmanager
def _unchanged_by_errors(scaler: LossScaler | None) -> Iterator[None]:
    """Restore the generator and the scaler if the block fails."""
    generator = random.get_state()
    scale = None if scaler is None else scaler.state_dict()
    try:
        yield
    except BaseException:
        random.set_state(generator)
        if scaler is not None and scale is not None:
            scaler.load_state_dict(scale)
        raise
