from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tensorgrad.errors import CheckpointError
from tensorgrad.train.log import read_metrics
from tensorgrad.train.loop import Trainer
from tensorgrad.train.patience import Patience
from tensorgrad.train.strategy import Strategy
from tests.train.tiny_run import make_trainer

# evaluations at steps 0, 2, 4, ...; the third of three in a row that are not lower is at 14
LOSSES = [5.0, 4.0, 4.5, 4.0, 3.0, 3.0, math.nan, 3.5, 2.0, 1.0]
OPTIONS: dict[str, Any] = {
    "steps": 18, "evaluate_every": 2, "checkpoint_every": 6, "patience": 3, "log_every": 5,
}  # fmt: skip


def trainer_in(folder: Path, strategy: Strategy | None = None, **options: Any) -> Trainer:
    """Return a trainer with these losses, of which the last evaluation has one more value."""
    trainer = make_trainer(folder, strategy, **{**OPTIONS, **options})
    calls: list[int] = []

    def evaluate() -> dict[str, float]:
        calls.append(trainer.step)
        found = {"validation_loss": LOSSES[trainer.step // 2]}
        return found | {"final": float(len(calls))} if trainer.finished else found

    trainer._evaluate = evaluate
    trainer._sampler = lambda: ("a", "ab")
    return trainer


def test_a_run_ends_after_evaluations_without_a_lower_loss(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    trainer = trainer_in(tmp_path)
    outcome = trainer.run()
    assert (outcome.step, outcome.finished, outcome.status) == (14, True, 0)
    assert outcome.checkpoint is not None
    assert outcome.checkpoint.name == "step-00000014"
    message = "step 14: the run ends early: evaluations without a validation loss below 3.0: 3; see"
    assert message in caplog.text
    assert trainer.sampled == "ab"
    records = [r for r in read_metrics(tmp_path / "metrics.jsonl") if "validation_loss" in r]
    assert [r["step"] for r in records] == list(range(0, 15, 2))
    assert "final" in records[-1]
    assert "final" not in records[-2]
    assert json.loads((outcome.checkpoint / "state.json").read_text())["patience"] == {
        "lowest": 3.0, "waited": 3,
    }  # fmt: skip
    again = trainer_in(tmp_path)
    assert again.resume()
    assert (again.run().step, again.sampled) == (14, "ab")
    longer = trainer_in(tmp_path, patience=4)
    assert longer.resume()
    assert longer.run().step == 18


@pytest.mark.parametrize("stop_after", [1, 7, 13])
def test_a_resumed_run_ends_at_the_same_step(tmp_path: Path, stop_after: int) -> None:
    first = trainer_in(tmp_path, stop_after=stop_after).run()
    assert (first.step, first.finished) == (stop_after, False)
    trainer = trainer_in(tmp_path)
    assert trainer.resume()
    outcome = trainer.run()
    assert (outcome.step, outcome.finished) == (14, True)


def test_without_patience_all_steps_are_done(tmp_path: Path) -> None:
    assert trainer_in(tmp_path, patience=0).run().step == 18
    assert not Patience(1.0, 100).is_over(0)


def test_ranks_decide_by_the_mean(tmp_path: Path) -> None:
    class Others(Strategy):
        """Another rank has measured 100 each time, so that no mean is lower after the first."""

        ranks = processes = 2

        def sum(self, values: Sequence[float]) -> list[float]:
            if len(values) == 2 and values[1] == 1.0:
                return [100.0, 2.0]
            return [2 * value for value in values]

    assert trainer_in(tmp_path, Others()).run().step == 6


def test_checkpoints_of_earlier_versions_begin_to_count() -> None:
    assert Patience.load(None) == Patience()
    for wrong in (3, {"lowest": "x", "waited": 0}, {"lowest": 1.0, "waited": -1}, {"waited": True}):
        with pytest.raises(
            CheckpointError, match=r"load: patience is .*, expected the lowest loss"
        ):
            Patience.load(wrong)
