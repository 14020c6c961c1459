from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensorgrad import random
from tensorgrad.errors import ArgumentError, CheckpointError
from tensorgrad.train import run
from tensorgrad.train.checkpoint import load_latest
from tensorgrad.train.folder import free_folder
from tensorgrad.train.strategy import OneProcess
from tests.train.tiny_run import MODEL, make_trainer


def test_folders_are_numbered(tmp_path: Path) -> None:
    for number in (1, 2):
        folder = free_folder(f"{tmp_path}/run")
        assert folder == tmp_path / f"run-{number}"
        folder.mkdir()


def test_a_fingerprint_has_mappings_by_names_of_its_own(tmp_path: Path) -> None:
    assert make_trainer(tmp_path, fingerprint={"text": {"digest": "1"}}).step == 0
    wrong: Any
    for wrong in ({"step": {}}, {"text": "digest"}):
        with pytest.raises(ArgumentError, match=r"fingerprint has .*, expected mappings by other"):
            make_trainer(tmp_path, fingerprint=wrong)


def test_a_run_that_resumes_says_so_once_and_may_grow(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO", "tensorgrad.train.run")
    make_trainer(tmp_path, steps=6, warmup=5, stop_after=5).run()
    assert make_trainer(tmp_path, steps=9, warmup=6).resume()  # limited by the steps before
    assert caplog.text.count("resuming from step 5 of 9: ") == 1
    monkeypatch.setattr(OneProcess, "is_main", False)
    assert make_trainer(tmp_path, steps=6, warmup=5).resume()
    assert caplog.text.count("resuming from") == 1


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
        (replace(MODEL, width=32), found, "step-00000005 is of another model: width is 16"),
        (MODEL, damaged, "step-00000005 cannot be used: "),
    ):
        trainer = make_trainer(tmp_path, model_config=config)
        before, weights = random.get_state(), trainer.optimizer.flat.data.copy()
        with pytest.raises(CheckpointError, match=rf"load: .*{message}"):
            trainer.load(checkpoint)
        assert (random.get_state(), trainer.step, trainer.measured) == (before, 0, {})
        np.testing.assert_array_equal(trainer.optimizer.flat.data, weights)
