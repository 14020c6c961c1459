"""Early stopping, where the validation loss falls no more. Tests: tests/train/test_patience.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tensorgrad.core.errors import CheckpointError


@dataclass
class Patience:
    """The lowest validation loss of a run, and how many evaluations came after it.

    Attributes:
        lowest: None before the first finite loss.
        waited: evaluations since the lowest loss, or since the start.
    """

    lowest: float | None = None
    waited: int = 0

    def see(self, loss: float) -> None:
        """Count an evaluation; NaN and infinity are not the lowest."""
        if loss < float("inf" if self.lowest is None else self.lowest):
            self.lowest, self.waited = loss, 0
        else:
            self.waited += 1

    def is_over(self, patience: int) -> bool:
        """Whether `patience` evaluations came after the lowest; never with 0."""
        return 0 < patience <= self.waited

    @staticmethod
    def load(state: Any) -> Patience:
        """Return the patience that a checkpoint has as a mapping; a new one of None.

        Raises:
            CheckpointError: it is something else.
        """
        if state is None:
            return Patience()
        found = state if isinstance(state, Mapping) else {}
        lowest, waited = found.get("lowest"), found.get("waited")
        if type(waited) is not int or waited < 0 or not isinstance(lowest, float | int | None):
            raise CheckpointError(
                f"load: patience is {state!r:.80}, expected the lowest loss and a number from 0"
            )
        return Patience(lowest, waited)
