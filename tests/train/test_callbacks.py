"""Callbacks hear of everything, change nothing, and an error of theirs loses nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensorgrad import random
from tensorgrad.errors import TrainingError
from tensorgrad.train.callbacks import Callback
from tensorgrad.train.checkpoint import list_checkpoints, step_of
from tensorgrad.train.log import read_metrics, read_samples
from tensorgrad.train.loop import Trainer
from tensorgrad.train.run import Outcome
from tensorgrad.train.strategy import OneProcess, Strategy
from tests.train.tiny_run import make_trainer

METHODS = ("on_start", "on_step", "on_times", "on_evaluation", "on_sample", "on_checkpoint")


class Recorder(Callback):
    """Notes all calls, and raises an error in one of them."""

    def __init__(self, fails_in: str = "", at: int = 0) -> None:
        self.calls: list[tuple[str, Any, Any]] = []
        self.fails_in, self.at = fails_in, at

    def note(self, name: str, step: int, value: Any = None) -> None:
        self.calls.append((name, step, value))
        if name == self.fails_in and step >= self.at:
            raise ValueError(f"{name} at {step}")

    def on_start(self, trainer: Trainer) -> None:
        self.note("on_start", trainer.step)

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        self.note("on_step", step, dict(metrics))

    def on_times(self, step: int, times: Mapping[str, float]) -> None:
        self.note("on_times", step, dict(times))

    def on_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        self.note("on_evaluation", step, dict(metrics))

    def on_sample(self, step: int, prompt: str, text: str) -> None:
        self.note("on_sample", step, (prompt, text))

    def on_checkpoint(self, step: int, path: Path) -> None:
        self.note("on_checkpoint", step, path)

    def on_end(self, result: Outcome | BaseException) -> None:
        self.note("on_end", 0, result)

    def steps(self, name: str) -> list[int]:
        return [step for called, step, _ in self.calls if called == name]

    @property
    def end(self) -> Any:
        """The arguments that `on_end` was called with, once."""
        (result,) = (value for called, _, value in self.calls if called == "on_end")
        return result


def trainer_with(folder: Path, *callbacks: Callback, **options: Any) -> Trainer:
    """Return a trainer that samples every 7 steps, by drawing random numbers."""
    trainer = make_trainer(folder, options.pop("strategy", None), **options)
    trainer._callbacks = callbacks
    trainer._sample_every = 7

    def sample() -> tuple[str, str]:
        drawn = random.uniform(size=(3,)).numpy().tolist()
        return "a", f"a {trainer.step} {drawn} {np.abs(trainer.optimizer.flat.data).sum():.3f}"

    trainer._sampler = sample
    return trainer


def bits(trainer: Trainer) -> list[bytes]:
    optimizer = trainer.optimizer
    arrays = [optimizer.flat.data, *optimizer.state.values()]
    return [*(array.tobytes() for array in arrays), str(random.get_state()).encode()]


def files(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in ("metrics.jsonl", "samples.jsonl")}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[bytes], dict[str, bytes]]:
    """Return the bits and the files of a run with samples, without callbacks."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    trainer = trainer_with(folder)
    trainer.run()
    return bits(trainer), files(folder)


def test_samples_and_callbacks_do_not_change_a_run(tmp_path: Path, alone: Any) -> None:
    plain = make_trainer(tmp_path / "plain")
    plain.run()
    assert bits(plain) == alone[0]
    assert (tmp_path / "plain" / "metrics.jsonl").read_bytes() == alone[1]["metrics.jsonl"]
    assert not (tmp_path / "plain" / "samples.jsonl").exists()
    trainer = trainer_with(tmp_path / "run", Recorder())
    trainer.run()
    assert bits(trainer) == alone[0]
    assert files(tmp_path / "run") == alone[1]


def test_all_events_are_told(tmp_path: Path) -> None:
    recorder = Recorder()
    outcome = trainer_with(tmp_path, recorder).run()
    assert recorder.steps("on_start") == [0]
    assert recorder.steps("on_step") == list(range(1, 25))
    assert recorder.steps("on_evaluation") == [0, 6, 12, 18, 24]
    assert recorder.steps("on_sample") == [7, 14, 21, 24]
    assert recorder.steps("on_checkpoint") == [5, 10, 15, 20, 24]
    assert set(recorder.steps("on_times")) >= {5, 10, 15, 20, 24}
    assert recorder.end is outcome
    told = [{"step": s, **v} for n, s, v in recorder.calls if n in ("on_step", "on_evaluation")]
    assert told == read_metrics(tmp_path / "metrics.jsonl")
    samples = [(s, *v) for n, s, v in recorder.calls if n == "on_sample"]
    read = read_samples(tmp_path / "samples.jsonl")
    assert samples == [(r["step"], r["prompt"], r["text"]) for r in read]
    paths = [value for name, _, value in recorder.calls if name == "on_checkpoint"]
    assert paths[-1] == outcome.checkpoint


def test_samples_continue_where_a_run_resumes(tmp_path: Path, alone: Any) -> None:
    for stop_after in (7, 9, None):
        trainer = trainer_with(tmp_path, stop_after=stop_after)
        trainer.resume()
        trainer.run()
    assert bits(trainer) == alone[0]
    assert files(tmp_path) == alone[1]
    finished = trainer_with(tmp_path)
    finished.resume()
    finished.run()
    assert [r["step"] for r in read_samples(tmp_path / "samples.jsonl")] == [7, 14, 21, 24, 24]
    assert finished.sampled == trainer.sampled


@pytest.mark.parametrize("name", METHODS[1:])
@pytest.mark.parametrize("log_every", [1, 10])
def test_an_error_ends_the_run_after_a_checkpoint(
    name: str, log_every: int, tmp_path: Path, alone: Any
) -> None:
    broken, other = Recorder(name, at=1), Recorder()
    options: dict[str, Any] = {"checkpoint_every": 8, "log_every": log_every}
    trainer = trainer_with(tmp_path, broken, other, **options)
    with pytest.raises(ValueError, match=f"{name} at") as caught:
        trainer.run()
    assert "Recorder, a callback of the training loop, failed" in caught.value.__notes__
    assert 0 < trainer.step < 24
    assert step_of(list_checkpoints(tmp_path / "checkpoints")[0]) == trainer.step
    assert broken.end is other.end is caught.value
    assert broken.calls[-2][0] == name  # and was not called again but for the end
    assert other.steps("on_checkpoint")[-1] == trainer.step
    resumed = trainer_with(tmp_path, **options)
    assert resumed.resume()
    resumed.run()
    assert bits(resumed) == alone[0]
    assert files(tmp_path) == alone[1]


def test_an_error_at_the_start_ends_the_run_before_any_work(tmp_path: Path) -> None:
    first, broken, last = Recorder(), Recorder("on_start"), Recorder()
    trainer = trainer_with(tmp_path, first, broken, last)
    with pytest.raises(ValueError, match="on_start at 0"):
        trainer.run()
    assert isinstance(first.end, ValueError)
    assert [name for name, _, _ in broken.calls] == ["on_start"]
    assert last.calls == []
    assert trainer.step == 0
    assert not (tmp_path / "metrics.jsonl").exists()


def test_an_error_at_the_end_is_raised_when_all_is_saved(tmp_path: Path) -> None:
    broken, other = Recorder("on_end"), Recorder()
    trainer = trainer_with(tmp_path, broken, other)
    with pytest.raises(ValueError, match="on_end"):
        trainer.run()
    assert other.end.finished
    assert len(broken.steps("on_end")) == 1
    assert step_of(list_checkpoints(tmp_path / "checkpoints")[0]) == 24


def test_callbacks_are_ended_with_the_error_of_a_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recorder, broken = Recorder(), Recorder("on_end")
    trainer = trainer_with(tmp_path, broken, recorder)
    loss = trainer._loss
    trainer._loss = lambda *batch: loss(*batch) * math.nan
    with pytest.raises(TrainingError, match="the loss is nan") as caught:
        trainer.run()
    assert recorder.end is caught.value
    assert np.isnan(recorder.calls[-2][2]["loss"])
    assert "Recorder failed too: on_end at 0" in caplog.text


def test_callbacks_are_ended_when_a_run_is_interrupted(tmp_path: Path) -> None:
    recorder = Recorder()
    trainer = trainer_with(tmp_path, recorder)

    def interrupt(step: int) -> float:
        raise KeyboardInterrupt

    trainer._schedule = interrupt
    with pytest.raises(KeyboardInterrupt):
        trainer.run()
    assert isinstance(recorder.end, KeyboardInterrupt)
    stopped = Recorder()
    trainer_with(tmp_path / "other", stopped, stop_after=3).run()
    assert (stopped.end.step, stopped.end.finished) == (3, False)


class TwoRanks(Strategy):
    """The main one of two ranks, the second of which has the same values."""

    ranks = processes = 2

    def sum(self, values: Sequence[float]) -> list[float]:
        return [2 * value for value in values]


def test_several_ranks_stop_where_all_know_of_the_error(tmp_path: Path) -> None:
    options: dict[str, Any] = {"log_every": 4, "evaluate_every": 24, "checkpoint_every": 24}
    broken = Recorder("on_step", at=3)
    trainer = trainer_with(tmp_path, broken, strategy=TwoRanks(), **options)
    trainer._sampler = None
    with pytest.raises(ValueError, match="on_step at 3"):
        trainer.run()
    assert trainer.step == 8  # the losses of step 4 told of it, those of step 8 told all ranks
    assert step_of(list_checkpoints(tmp_path / "checkpoints")[0]) == 8


class Stopper(Recorder):
    """Stops a run at a step."""

    def __init__(self, stops_in: str, at: int) -> None:
        super().__init__(at=at)
        self.stops_in = stops_in

    def on_start(self, trainer: Trainer) -> None:
        self.trainer = trainer
        super().on_start(trainer)

    def note(self, name: str, step: int, value: Any = None) -> None:
        super().note(name, step, value)
        if name == self.stops_in and step >= self.at:
            self.trainer.stop()


def stopped(folder: Path, stops_in: str, **options: Any) -> int:
    """Return the step at which a callback has stopped a run."""
    stopper = Stopper(stops_in, 4)
    trainer = trainer_with(folder, stopper, checkpoint_every=24, **options)
    trainer._sampler = None
    outcome = trainer.run()
    assert (outcome.finished, outcome.stopped_by, outcome.status) == (False, None, 0)
    assert stopper.end is outcome
    assert step_of(list_checkpoints(folder / "checkpoints")[0]) == outcome.step
    step: int = outcome.step
    return step


def test_a_callback_stops_a_run_which_then_resumes(tmp_path: Path, alone: Any) -> None:
    assert stopped(tmp_path / "run", "on_evaluation", log_every=5) == 6
    resumed = trainer_with(tmp_path / "run")
    resumed.resume()
    resumed.run()
    assert bits(resumed) == alone[0]
    assert files(tmp_path / "run")["metrics.jsonl"] == alone[1]["metrics.jsonl"]
    # Step 4 asks, step 8 tells all ranks.
    several: dict[str, Any] = {"log_every": 4, "evaluate_every": 24, "strategy": TwoRanks()}
    assert stopped(tmp_path / "ranks", "on_step", **several) == 8


class Second(OneProcess):
    is_main = False


def test_other_ranks_sample_but_call_nothing(tmp_path: Path) -> None:
    recorder = Recorder()
    trainer = trainer_with(tmp_path / "run", recorder, strategy=Second())
    trainer.run()
    assert recorder.calls == []
    assert trainer.sampled is not None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("step", [7, 24])
def test_a_sample_that_fails_loses_no_step(tmp_path: Path, alone: Any, step: int) -> None:
    trainer = trainer_with(tmp_path)
    sample = trainer._sampler
    assert sample is not None

    def fail() -> tuple[str, str]:
        if trainer.step == step:
            raise MemoryError
        return sample()

    trainer._sampler = fail
    with pytest.raises(MemoryError):
        trainer.run()
    assert step_of(list_checkpoints(tmp_path / "checkpoints")[0]) == trainer.step == step
    resumed = trainer_with(tmp_path)
    assert resumed.resume()
    resumed.run()
    assert bits(resumed) == alone[0]
    assert files(tmp_path)["metrics.jsonl"] == alone[1]["metrics.jsonl"]
