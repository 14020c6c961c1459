from __future__ import annotations

import json
import math
import re
import signal
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tensorgrad import random
from tensorgrad.errors import ArgumentError, CheckpointError, TrainingError
from tensorgrad.train import run
from tensorgrad.train.background import CPU_FRACTION, BackgroundSaving
from tensorgrad.train.checkpoint import load_latest
from tensorgrad.train.progress import ProgressBar
from tensorgrad.train.strategy import OneProcess
from tensorgrad.train.times import Clock
from tests.train.tiny_run import MODEL, make_trainer


def test_a_fingerprint_has_mappings_by_names_of_its_own(tmp_path: Path) -> None:
    assert make_trainer(tmp_path, fingerprint={"text": {"digest": "1"}}).step == 0
    wrong: Any
    wrong = [1]
    with pytest.raises(ArgumentError, match=r"fingerprint returned \[1\], expected mappings by"):
        make_trainer(tmp_path, fingerprint=wrong)
    for wrong in ({"step": {}}, {"text": "digest"}):
        with pytest.raises(ArgumentError, match=r"fingerprint has .*, expected mappings by other"):
            make_trainer(tmp_path, fingerprint=wrong)


def test_a_run_that_resumes_says_so_once_and_may_grow(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO", "tensorgrad.train.run")
    outcome = make_trainer(tmp_path, steps=6, warmup=5, stop_after=5).run()
    (path,) = (tmp_path / "checkpoints").iterdir()
    assert outcome == run.Outcome(5, False, 0, outcome.tokens_per_second, path)
    assert outcome.tokens_per_second > 0
    lines = (tmp_path / "times.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["step"] == 5
    longer = make_trainer(tmp_path, steps=9, warmup=6)
    assert longer.resume()  # its warmup is limited by the steps before
    assert (longer.step, longer.saved, longer.saved_step) == (5, path, 5)
    assert caplog.text.count("resuming from step 5 of 9: ") == 1
    monkeypatch.setattr(OneProcess, "is_main", False)
    assert make_trainer(tmp_path, steps=6, warmup=5).resume()
    assert caplog.text.count("resuming from") == 1


def test_a_run_without_a_checkpoint_starts_at_step_0(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(tmp_path)
    assert trainer.resume() is False
    run.resume_run(trainer)
    monkeypatch.setattr(OneProcess, "is_main", False)
    run.resume_run(trainer)
    warned = [record.getMessage() for record in caplog.records]
    assert warned == [f"{tmp_path} has no checkpoint: starting at step 0"]
    assert (trainer.step, trainer.skipped, trainer.saved, trainer.saved_step) == (0, 0, None, -1)


def test_what_a_checkpoint_has_is_what_a_run_resumes_with(tmp_path: Path) -> None:
    make_trainer(tmp_path, stop_after=6, warmup=2).run()
    found = load_latest(tmp_path / "checkpoints")
    assert found is not None
    trainer = make_trainer(tmp_path, warmup=2)
    trainer.load(found)
    assert trainer.measured == found.state["metrics"] != {}
    assert trainer.entries() == {
        name: found.state[name]
        for name in ("model", "settings", "ranks", "scaler", "generator", "metrics", "patience")
    } | {"settings": trainer.entries()["settings"]}
    assert (trainer.entries()["ranks"], trainer.entries()["scaler"]) == (1, None)
    for options, message in (
        ({"warmup": 3}, "--warmup is 2 there, got 3"),
        ({"warmup": 2, "lr": 0.5}, "--lr is 0.01 there, got 0.5"),
        ({"warmup": 2, "micro_batches": 2}, "expected 1 with the same number of ranks"),
    ):
        with pytest.raises(CheckpointError, match=f"was made with other settings: .*{message}"):
            make_trainer(tmp_path, **options).load(found)
    of_more_ranks = replace(found, state={**found.state, "ranks": 2})
    make_trainer(tmp_path, warmup=2, micro_batches=2).load(of_more_ranks)


def test_a_checkpoint_that_fails_midway_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_trainer(tmp_path, dtype="float16", stop_after=1).run()
    found = load_latest(tmp_path / "checkpoints")
    assert found is not None
    scaler = {"scale": 8.0, "streak": 3}
    other = replace(found, state={**found.state, "scaler": scaler})
    trainer = make_trainer(tmp_path, dtype="float16")
    assert trainer.scaler is not None
    before, generator = trainer.scaler.state_dict(), random.get_state()
    reasons: list[Exception] = []

    def fail(*_: object) -> None:
        raise reasons[-1]

    said = f"load: {found.path} cannot be used: no"
    load = OneProcess.load
    monkeypatch.setattr(OneProcess, "load", fail)
    for reason, kind, message in (
        (CheckpointError("no"), CheckpointError, said),
        (ArgumentError("no"), CheckpointError, said),
        (OSError("no"), OSError, "no"),
    ):
        reasons.append(reason)
        with pytest.raises(kind) as caught:
            trainer.load(other)
        assert str(caught.value) == message
        assert (trainer.scaler.state_dict(), random.get_state()) == (before, generator)
    monkeypatch.setattr(OneProcess, "load", load)
    trainer.load(other)
    assert trainer.scaler.state_dict() == scaler


def test_ranks_compare_all_settings_but_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(OneProcess, "begin", lambda self, *given: seen.append(given))
    monkeypatch.setattr(OneProcess, "rank", 3)
    trainer = make_trainer(tmp_path)
    trainer._synchronize()
    ((step, arrays, facts),) = seen
    assert step == 0
    assert "device" not in facts
    assert (facts["lr"], facts["model width"]) == (0.01, 16)
    parameters = len(list(trainer.model.state_dict()))
    assert len(arrays) == parameters + len(trainer.optimizer.state)
    assert random.get_state()["stream"] == 3


def test_an_evaluation_is_shown(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "tensorgrad.train.run")
    trainer, logged = make_trainer(tmp_path), []
    trainer.step = 5
    trainer.log_evaluation({"a": 1.0})
    assert (trainer.measured, caplog.records) == ({"a": 1.0}, [])
    log: Any = SimpleNamespace(evaluation=lambda *given: logged.append(given))
    trainer.log = log
    measured = {"loss": 1.23456, "tokens": 12345}
    trainer.log_evaluation(measured)
    trainer.log_evaluation({"bleu": math.nan, **measured})
    assert logged[0] == (5, measured)
    assert [record.getMessage() for record in caplog.records] == [
        "step 5/24  loss 1.2346  tokens 12,345",
        "step 5/24  bleu nan  loss 1.2346  tokens 12,345",
        "step 5: not finite: bleu",
    ]


def test_what_is_not_finite_names_the_checkpoint_to_go_back_to(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    for saved, words in ((None, "none was saved yet"), (tmp_path, f"the last .* is {tmp_path}")):
        trainer.saved = saved
        message = f"^train: bad, expected finite numbers; {words}. Try a lower learning rate, or$"
        with pytest.raises(TrainingError, match=message):
            trainer.end_not_finite("bad", ", or")


@pytest.mark.parametrize(
    ("error", "calls"),
    [
        (None, ["abandon"]),
        (ValueError(), ["finish"]),
        (CheckpointError("full"), ["finish"]),
        (KeyboardInterrupt(), ["abandon"]),
    ],
)
def test_a_checkpoint_that_is_being_written_is_finished_after_an_error(
    tmp_path: Path, error: BaseException | None, calls: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    done = []

    def finish() -> Path:
        done.append("finish")
        if isinstance(error, CheckpointError):
            raise error
        return tmp_path

    saving: Any = SimpleNamespace(finish=finish, abandon=lambda: done.append("abandon"))
    trainer = make_trainer(tmp_path)
    trainer.clock, trainer._saving = Clock(), (5, saving)
    trainer._end_saving(None, error, None)
    assert done == calls
    assert trainer._saving is None
    assert trainer.saved == (tmp_path if isinstance(error, ValueError) else None)
    assert caplog.messages == (["full"] if isinstance(error, CheckpointError) else [])


def test_checkpoints_are_written_at_once_or_in_the_background(tmp_path: Path) -> None:
    told: list[Any] = []
    log: Any = SimpleNamespace(
        times=lambda step, at_once: told.append((step, at_once)),
        sync=lambda: told.append("synced"),
        checkpoint=lambda step, path: told.append((step, path.name)),
        end=lambda outcome: told.append(outcome),
    )
    trainer = make_trainer(tmp_path)
    trainer.clock, trainer.log = Clock(), log
    trainer.save()
    assert trainer._saving is None
    trainer.step = 1
    trainer.save(in_background=True)
    assert trainer._saving is not None
    assert isinstance(trainer._saving[1], BackgroundSaving)
    assert trainer._saving[1]._fraction == CPU_FRACTION  # beside steps on the same cores
    assert trainer.saved_step == 1
    trainer.finish_saving()
    assert trainer.saved == tmp_path / "checkpoints" / "step-00000001"
    assert told == [
        *((0, True), "synced", (0, "step-00000000")),
        *((1, True), "synced", (1, "step-00000001")),
    ]
    trainer.progress = ProgressBar(24, 0, 1, trainer.clock, shown=False)
    trainer.signals.agreed = signal.SIGTERM
    outcome = trainer.end()
    assert told[-1] is outcome
    assert (outcome.finished, outcome.stopped_by) == (False, signal.SIGTERM)
    trainer.step = 24
    assert trainer.end().stopped_by is None  # all steps are done


@pytest.mark.parametrize(
    ("words", "processes", "file", "command"),
    [
        ("/bin/tensorgrad train gpt2 --steps 3 a", 1, "", "tensorgrad train gpt2 --resume RUN"),
        (
            "/x/tensorgrad/__main__.py train", 4, "own.py",
            "mpirun -n 4 tensorgrad train --resume RUN --model own.py",
        ),
        ("own/train.py --steps 3", 1, "", "python own/train.py --resume RUN"),
    ],
)  # fmt: skip
def test_a_run_that_stops_says_how_to_resume(
    tmp_path: Path, words: str, processes: int, file: str, command: str,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    caplog.set_level("INFO", "tensorgrad.train.run")
    monkeypatch.setattr(sys, "argv", words.split())
    trainer = make_trainer(tmp_path)
    assert trainer.processes == 1
    trainer.processes = processes
    outcome = run.Outcome(5, False, 0, 1.0, None)
    run.report_stop(outcome, trainer, file)
    expected = f"stopped after step 5 of 24; to resume: {command}"
    assert caplog.messages == [expected.replace("RUN", str(tmp_path))]


def test_the_exit_status_is_that_of_the_signal(tmp_path: Path) -> None:
    outcome = run.Outcome(5, False, 0, 1.0, None)
    assert outcome.status == 0
    assert replace(outcome, stopped_by=signal.SIGTERM).status == 143
    run.save_facts(tmp_path, {"layers": 2})
    assert json.loads((tmp_path / run.FACTS).read_text()) == {"layers": 2}


def test_a_best_step_without_a_checkpoint_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [tmp_path / "checkpoints" / f"step-{step:08}" for step in (20, 10)]
    monkeypatch.setattr(run, "list_checkpoints", lambda folder: paths)
    for best, step, words in (
        (None, 10, ""), (paths[1], 10, ""), (paths[1], 15, "which has no checkpoint: .* step 10"),
    ):  # fmt: skip
        monkeypatch.setattr(run, "best_checkpoint", lambda folder, best=best: best)
        found = run.without_checkpoint(tmp_path, step)
        assert re.search(words, found) if words else found == ""


def test_a_checkpoint_that_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    make_trainer(tmp_path, stop_after=5).run()
    found = load_latest(tmp_path / "checkpoints")
    assert found is not None
    damaged = replace(found, state={**found.state, "generator": {"seed": "x"}})
    for config, checkpoint, message in (
        (
            replace(MODEL, width=32),
            found,
            "step-00000005 does not match the model of this run: width is 16",
        ),
        (MODEL, damaged, "step-00000005 cannot be used: "),
    ):
        trainer = make_trainer(tmp_path, model_config=config)
        before, weights = random.get_state(), trainer.optimizer.flat.data.copy()
        with pytest.raises(CheckpointError, match=rf"load: .*{message}"):
            trainer.load(checkpoint)
        assert (random.get_state(), trainer.step, trainer.measured) == (before, 0, {})
        np.testing.assert_array_equal(trainer.optimizer.flat.data, weights)
