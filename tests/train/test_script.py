from __future__ import annotations

import json
import logging
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tensorgrad import random
from tensorgrad.data import Corpus, prepare
from tensorgrad.data.published_tokenizer import load_tokenizer
from tensorgrad.errors import ArgumentError, CheckpointError, TrainingError
from tensorgrad.models.gpt2 import GPT2, GPT2Config
from tensorgrad.optim import SGD, Optimizer
from tensorgrad.train import ScriptRun, ScriptSettings, Strategy
from tensorgrad.train.checkpoint import best_checkpoint, list_checkpoints, step_of
from tensorgrad.train.log import read_metrics, read_samples
from tensorgrad.train.strategy import OneProcess

SIZES = GPT2Config(vocab_size=257, context=8, layers=1, heads=1, width=8)
SETTINGS = ScriptSettings(steps=10, warmup=2, batch=2)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "text.txt").write_text("some words " * 200)
    return prepare(folder / "text.txt", folder / "cache", 257)


@pytest.fixture
def model() -> GPT2:
    random.seed(0)
    return GPT2(SIZES)


def sgd(model: GPT2) -> Optimizer:
    return SGD(model.named_parameters(), lr=0.1)


def train(run: ScriptRun, model: GPT2, corpus: Corpus, *, until: int = 10) -> int:
    """Go through the steps of a run, without any training; return how many were done before."""
    first = step = run.resume(model, sgd(model), SIZES, corpus)
    while step < until and not run.stopping():
        step += 1
        run.log_step(step, 1.0 / step, 0.1, 2.0)
        if step % 2 == 0:
            run.log_evaluation(step, {"validation_loss": abs(step - 4.0)})
            run.save(step)
    run.save(step)
    return first


def interrupted(folder: Path, model: GPT2, corpus: Corpus, values: tuple[float, float]) -> None:
    """Log a step beyond the newest checkpoint, and fail."""
    with ScriptRun(SETTINGS, folder) as run:
        train(run, model, corpus, until=3)
        run.log_step(4, values[0], 0.1, values[1])
        raise KeyError


def resume(settings: ScriptSettings, folder: Path, model: GPT2, corpus: Corpus) -> None:
    with ScriptRun(settings, folder, resuming=True) as run:
        run.resume(model, sgd(model), model.config, corpus)


def test_a_run_keeps_its_newest_checkpoints_and_the_best(
    model: GPT2, corpus: Corpus, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "run"
    with caplog.at_level(logging.INFO), ScriptRun(SETTINGS, folder, keep=1) as run:
        assert train(run, model, corpus) == 0
    assert run.status == 0
    facts = json.loads((folder / "facts.json").read_text())
    assert facts == {
        "warmup": 2,
        "parameters": SIZES.parameters,
        "training_tokens": len(corpus.train),
        "validation_tokens": len(corpus.validation),
    }
    about = f"{SIZES.parameters:,} parameters, vocabulary {corpus.tokenizer.vocab_size:,}"
    assert caplog.messages[0] == f"{folder}: {about}, {len(corpus.train):,} tokens of text, on cpu"
    assert json.loads((folder / "config.json").read_text())["steps"] == 10
    assert load_tokenizer(folder / "tokenizer.json").digest == corpus.tokenizer.digest
    checkpoints = list_checkpoints(folder / "checkpoints")
    assert [step_of(path) for path in checkpoints] == [10, 4]
    assert best_checkpoint(folder / "checkpoints") == checkpoints[1]
    assert "10 steps, " in caplog.text
    assert f"; all in {folder}" in caplog.text
    records = read_metrics(folder / "metrics.jsonl")
    assert [record["step"] for record in records if "loss" in record] == list(range(1, 11))


def test_lines_after_the_checkpoint_are_written_again(
    model: GPT2, corpus: Corpus, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "run"
    with pytest.raises(KeyError):
        interrupted(folder, model, corpus, (7.0, 2.0))
    assert "stopped" not in caplog.text
    with caplog.at_level(logging.INFO), ScriptRun(SETTINGS, folder, resuming=True) as run:
        assert train(run, model, corpus, until=5) == 3
    assert "stopped after step 5 of 10; to resume: " in caplog.text
    records = read_metrics(folder / "metrics.jsonl")
    losses = [record["loss"] for record in records if "loss" in record]
    assert losses == [1 / step for step in range(1, 6)]
    assert run.status == 0


def test_what_a_checkpoint_does_not_fit_is_named(
    model: GPT2, corpus: Corpus, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    with ScriptRun(SETTINGS, folder) as run:
        train(run, model, corpus)
    for settings, width, message in (
        (SETTINGS, 4, "the model of this run: width is 8"),
        (replace(SETTINGS, batch=4), 8, "the data of this run: batch is 2 there, expected 4"),
        (replace(SETTINGS, warmup=1), 8, "--warmup is 2 there, got 1"),
    ):
        with pytest.raises(CheckpointError, match=message):
            resume(settings, folder, GPT2(replace(SIZES, width=width)), corpus)


def test_samples_are_logged_and_a_step_is_saved_once(
    model: GPT2, corpus: Corpus, tmp_path: Path
) -> None:
    run = ScriptRun(SETTINGS, tmp_path / "run")
    with pytest.raises(ArgumentError, match=r"^ScriptRun: resume\(\) was not called, expected it"):
        run.stopping()
    with run:
        run.resume(model, sgd(model), SIZES, corpus)
        run.log_step(1, 1.0, 0.1, 2.0)
        run.log_sample(1, "a", "b")
        run.save(1)
        (path,) = list_checkpoints(tmp_path / "run" / "checkpoints")
        before = path.stat().st_ino
        run.save(1)
        assert path.stat().st_ino == before
    samples = read_samples(tmp_path / "run" / "samples.jsonl")
    assert samples == [{"step": 1, "prompt": "a", "text": "b"}]


def test_another_rank_than_the_main_one_writes_nothing(
    model: GPT2, corpus: Corpus, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    strategy = OneProcess()
    strategy.is_main = False
    with (
        caplog.at_level(logging.INFO),
        ScriptRun(SETTINGS, tmp_path / "r", strategy=strategy) as run,
    ):
        run.resume(model, sgd(model), SIZES, corpus)
        run.log_step(1, 1.0, 0.1, 2.0)
        run.log_sample(1, "a", "b")
    assert caplog.messages == []
    assert not (tmp_path / "r").exists()


def test_a_signal_stops_a_run_whose_status_says_so(
    model: GPT2, corpus: Corpus, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    with ScriptRun(SETTINGS, folder) as run:
        run.resume(model, sgd(model), SIZES, corpus)
        assert not run.stopping()
        run.log_step(1, 1.0, 0.1, 2.0)
        signal.raise_signal(signal.SIGTERM)
        assert run.stopping()
        run.save(1)
    assert run.status == 128 + signal.SIGTERM
    with ScriptRun(SETTINGS, folder, resuming=True) as run:
        assert train(run, model, corpus) == 1
        signal.raise_signal(signal.SIGTERM)
        assert run.stopping()
    assert run.status == 0  # all steps are done


@pytest.mark.parametrize("values", [(float("nan"), 1.0), (1.0, float("inf"))])
def test_a_step_that_is_not_finite_ends_the_run(
    values: tuple[float, float], model: GPT2, corpus: Corpus, tmp_path: Path
) -> None:
    with pytest.raises(TrainingError, match=r"step 4: the loss is (nan|1) and the gradient norm"):
        interrupted(tmp_path / "run", model, corpus, values)
    record = read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]
    assert None in record.values()


def test_only_the_steps_count_as_training(
    model: GPT2, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    with ScriptRun(SETTINGS, tmp_path / "run") as run:
        run.resume(model, sgd(model), SIZES, corpus)
        for step, (outside, inside) in enumerate([(100.0, 2.0), (50.0, 3.0)]):
            now[0] += outside
            run.stopping()
            now[0] += inside
            run.log_step(step + 1, 1.0, 0.1, 2.0)
        now[0] += 70
        run.save(2)
    times = read_metrics(tmp_path / "run" / "times.jsonl")
    assert [(line["step"], line["seconds"]) for line in times] == [(1, 2.0), (2, 5.0)]


def test_a_run_that_fails_before_its_data_was_read_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="--data: got x"), ScriptRun(SETTINGS, tmp_path / "run"):
        raise ArgumentError("--data: got x")
    assert list(tmp_path.iterdir()) == []


def test_a_batch_that_ranks_cannot_share_is_refused(tmp_path: Path) -> None:
    strategy = Strategy()
    strategy.ranks = 3
    message = "--batch: got 2, expected a multiple of the 3 data parallel ranks"
    with (
        pytest.raises(ArgumentError, match=message),
        ScriptRun(SETTINGS, tmp_path / "r", strategy=strategy),
    ):
        pass
    assert not (tmp_path / "r").exists()


def test_a_run_without_a_checkpoint_starts_at_step_0(
    model: GPT2, corpus: Corpus, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with ScriptRun(SETTINGS, tmp_path / "run", resuming=True) as run:
        assert train(run, model, corpus) == 0
    assert "has no checkpoint: starting at step 0" in caplog.text


def test_settings_of_scripts_are_checked() -> None:
    assert ScriptSettings(steps=40).warmup_steps == 2
    assert ScriptSettings(steps=5, warmup=4).warmup_steps == 4
    assert ScriptSettings(out="a").folder == Path("a")
    wrong: tuple[tuple[dict[str, Any], str], ...] = (
        ({"steps": 0}, "--steps: got 0, expected 1 or more"),
        ({"steps": 5, "warmup": 5}, "--warmup: got 5, expected less than --steps, 5"),
    )
    for given, message in wrong:
        with pytest.raises(ArgumentError, match=message):
            ScriptSettings(**given)
