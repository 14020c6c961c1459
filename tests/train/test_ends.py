"""However a run ends, nothing is lost, its status says why, and it resumes to the same bits."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tensorgrad import random
from tensorgrad.core import backend
from tensorgrad.train.log import read_metrics
from tensorgrad.train.loop import Trainer
from tests.train.tiny_run import make_trainer

OPTIONS: dict[str, Any] = {"steps": 12, "checkpoint_every": 4, "log_every": 3}


def state_of(trainer: Trainer) -> list[Any]:
    """Return all that a step advances."""
    optimizer = trainer.optimizer
    arrays = [optimizer.flat.data, *optimizer.state.values()]
    scale = None if trainer.scaler is None else trainer.scaler.state_dict()
    numbers = trainer.step, optimizer.numbers(), random.get_state(), scale
    return [*(array.tobytes() for array in arrays), numbers]


def test_a_run_needs_no_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "BLOCK", 500)  # so that work is shared
    whole = make_trainer(tmp_path / "whole", **OPTIONS)
    whole.run()
    expected = state_of(whole)

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    backend._pool.cache_clear()
    trainer = make_trainer(tmp_path / "run", **OPTIONS)
    try:
        trainer.run()
    finally:
        backend._pool.cache_clear()
    assert state_of(trainer) == expected


def stop_at_once() -> None:
    for _ in range(2):
        signal.raise_signal(signal.SIGINT)


def fail() -> None:
    raise MemoryError


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(
    ("place", "act", "error"),
    [
        ("_loss", stop_at_once, KeyboardInterrupt),
        ("_loss", fail, MemoryError),
        ("_schedule", stop_at_once, KeyboardInterrupt),
        ("check", stop_at_once, KeyboardInterrupt),
        ("_workspaces", fail, MemoryError),
        ("_update_numpy", stop_at_once, KeyboardInterrupt),
    ],
)
def test_a_step_that_was_interrupted_is_whole_or_not_done(
    place: str, act: Callable[[], None], error: type[BaseException], dtype: str,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """In the same process, which runs on."""
    whole = make_trainer(tmp_path / "whole", dtype=dtype, **OPTIONS)
    whole.run()
    expected = state_of(whole)
    trainer = make_trainer(tmp_path / "run", dtype=dtype, **OPTIONS)
    owner = {"_loss": trainer, "_schedule": trainer, "check": trainer.optimizer.flat}
    place_of: Any = owner.get(place, trainer.optimizer)
    function, calls = getattr(place_of, place), []

    def interrupted(*arguments: Any, **options: Any) -> Any:
        calls.append(trainer.step)
        found = function(*arguments, **options)
        if len(calls) == 6:
            act()
        return found

    monkeypatch.setattr(place_of, place, interrupted)
    with pytest.raises(error):
        trainer.run()
    assert 0 < trainer.step < 12
    trainer.run()
    assert state_of(trainer) == expected
    logs = [read_metrics(tmp_path / name / "metrics.jsonl") for name in ("run", "whole")]
    run, alone = ([record for record in log if "loss" in record] for log in logs)
    assert run == alone
