from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from examples import train_sentiment
from tensorgrad.cli import main
from tensorgrad.data.labelled import read_labelled
from tensorgrad.report import read_run
from tensorgrad.report.result import result_of
from tensorgrad.train import command_line, loop, sentiment
from tensorgrad.train.checkpoint import list_checkpoints, load_checkpoint
from tensorgrad.train.load import load_classifier
from tensorgrad.train.log import read_metrics
from tensorgrad.train.task import make_trainer
from tests.processes import closed_streams

TINY = "--device cpu --width 16 --batch 32 --epochs 3 --warmup 5 --lr 0.02 --no-plot"
KINDS = {
    "mean": ["--hidden", "8"],
    "transformer": [
        *("--model", "transformer", "--layers", "1", "--heads", "2", "--tokens", "bpe"),
        *("--vocab", "400", "--dropout", "0.1", "--word-dropout", "0"),
    ],
}


def read_settings(arguments: Sequence[str]) -> sentiment.SentimentSettings:
    return command_line.read_command_line(sentiment.SentimentSettings, None, arguments)[0]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    for part, name, count in (("train", "train", 320), ("validation", "dev", 100)):
        found = read_labelled("reviews", part)
        lines = [f"{label}\t{text}" for text, label in zip(found.texts, found.labels, strict=True)]
        (folder / f"{name}.tsv").write_text("\n".join(["label\tsentence", *lines[:count], ""]))
    return folder


@pytest.fixture(params=KINDS)
def options(request: pytest.FixtureRequest, data: Path, tmp_path: Path) -> list[str]:
    places = ["--data", str(data), "--out", str(tmp_path / "run")]
    return [*places, *TINY.split(), *KINDS[request.param]]


@pytest.fixture
def mean(data: Path, tmp_path: Path) -> list[str]:
    return ["--data", str(data), "--out", str(tmp_path / "run"), *TINY.split()]


def end_of(folder: Path) -> dict[str, Any]:
    """Return what the last checkpoint holds, and the metrics."""
    newest = load_checkpoint(list_checkpoints(folder / "checkpoints")[0])
    assert newest.step == 30
    arrays = {**newest.arrays("model"), **newest.arrays("optimizer")}
    return {
        **{name: array.tobytes() for name, array in arrays.items()},
        "generator": newest.state["generator"],
        "metrics": (folder / "metrics.jsonl").read_bytes(),
    }


def measured(folder: Path) -> list[tuple[int, float, float]]:
    return [
        (record["step"], record["validation_loss"], record["accuracy"])
        for record in read_metrics(folder / "metrics.jsonl")
        if "accuracy" in record
    ]


@pytest.mark.gpu
def test_captured_steps_are_those_of_an_eager_run(options: list[str], tmp_path: Path) -> None:
    found = []
    for name, more in (("captured", []), ("eager", ["--no-capture"])):
        given = [*options, "--out", str(tmp_path / name), "--device", "cuda", *more]
        settings, folder, _ = command_line.read_command_line(
            sentiment.SentimentSettings, None, given
        )
        run = sentiment.Sentiment(settings, folder)
        run.prepare("cuda")
        trainer = make_trainer(run)
        trainer.run()
        found.append(end_of(folder))
        captured = trainer._captured
        assert (captured is not None) == (name == "captured")
        assert captured is None or captured.graphs >= 6  # shapes of batches
    assert found[0] == found[1]


def test_it_learns_and_answers(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    assert train_sentiment.main([*options, "--epochs", "8"]) == 0
    found = measured(folder)
    assert [step for step, _, _ in found] == [10 * epoch for epoch in range(9)]
    assert found[-1][2] > 0.8 > found[0][2]
    assert len(list_checkpoints(folder / "checkpoints")) in (2, 3)
    assert json.loads((folder / "config.json").read_text())["steps"] == 0
    assert result_of(read_run(folder)).status == "finished: 8 epochs, 80 steps"
    for text, answer in (
        ("The film is Funny, warm and tender!", "positive ("),
        ("the plot is shallow , silly and bland", "negative ("),
    ):
        assert main(["classify", str(folder), text]) == 0
        said = capsys.readouterr().out
        assert said.startswith(answer)
        assert said.endswith(f"%): {text}\n")


def test_the_utilization_is_logged_where_the_peak_is_known(
    options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "peak_of", lambda *_: 1e5)
    settings = read_settings(options)
    assert train_sentiment.main([*options, "--stop-after", "3"]) == 0
    last = read_metrics(tmp_path / "run" / "times.jsonl")[-1]
    run = sentiment.Sentiment(settings, tmp_path / "run")
    run.prepare("cpu")
    texts, tokens = 32, run.training.tokens
    assert last["tokens"] == 3 * round(tokens)
    assert last["epoch"] == 0.3
    flops = texts / tokens * run.model.config.training_flops(tokens / texts, run.training.keys)
    assert last["mfu"] == pytest.approx(last["tokens_per_second"] * flops / 1e5, rel=1e-3)
    monkeypatch.undo()  # the peak of a CPU is not known
    assert train_sentiment.main(["--resume", str(tmp_path / "run"), "--stop-after", "3"]) == 0
    assert "mfu" not in read_metrics(tmp_path / "run" / "times.jsonl")[-1]


def test_a_run_resumes_to_the_same_bits(
    options: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "run"
    with caplog.at_level(logging.INFO):
        assert train_sentiment.main(options) == 0
        folder.rename(tmp_path / "whole")
        assert train_sentiment.main([*options, "--stop-after", "13"]) == 0
        assert f"--resume {folder}" in caplog.text
        assert train_sentiment.main(["--resume", str(folder), "--stop-after", "9"]) == 0
        assert train_sentiment.main(["--resume", str(folder), "--stop-after", "99"]) == 0
        assert "% at the end" in caplog.records[-1].getMessage()
        said = caplog.records[-1].getMessage().partition(" at the end")[0]
        assert end_of(folder) == end_of(tmp_path / "whole")
        (folder / "metrics.jsonl").unlink()
        assert train_sentiment.main(["--resume", str(folder)]) == 0
        assert caplog.records[-1].getMessage().startswith(said)


def test_it_trains_and_answers_without_standard_streams(
    mean: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closed_streams(monkeypatch):
        assert train_sentiment.main(mean) == 0
        assert main(["classify", str(tmp_path / "run"), "a good film"]) == 0


def test_few_sentences_are_passed_more_often(tmp_path: Path) -> None:
    def chosen(*more: str) -> tuple[int, int]:
        told = ["--out", str(tmp_path / "new"), *more]
        settings = read_settings(told)
        return settings.epochs, settings.batch

    assert chosen() == (3, 256)
    assert chosen("--data", "reviews") == (20, 64)
    assert chosen("--data", "reviews", "--epochs", "2") == (2, 64)
    assert chosen("--data", "reviews", "--model", "transformer") == (3, 128)


def test_the_accuracy_is_that_of_the_answers(mean: list[str], tmp_path: Path, data: Path) -> None:
    assert train_sentiment.main([*mean, "--keep", "9"]) == 0
    folder = tmp_path / "run"
    dev = read_labelled(str(data), "validation")
    _, loss, accuracy = min(measured(folder), key=lambda found: found[1])
    right = [
        found == sentiment.CLASSES[label]
        for (found, _), label in zip(load_classifier(folder)(dev.texts), dev.labels, strict=True)
    ]
    assert sum(right) / len(right) == accuracy
    assert loss > 0


def test_held_out_sentences_take_the_place_of_the_dev_set(
    mean: list[str], tmp_path: Path, data: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (data / "dev.tsv").unlink()
    with caplog.at_level(logging.INFO):
        assert train_sentiment.main([*mean, "--held-out", "0.1", "--stop-after", "1"]) == 0
    assert "286 sentences to train on, 32 to measure with" in caplog.text


def test_vectors_begin_the_training(mean: list[str], tmp_path: Path, data: Path) -> None:
    vectors = tmp_path / "vectors.txt"
    words = ("funny", "dull", "unheard-of")
    vectors.write_text("".join(f"{word} {' '.join(['3'] * 16)}\n" for word in words))
    for more in ([], ["--vectors", str(vectors)]):
        assert train_sentiment.main([*mean, *more, "--lr", "0", "--stop-after", "1"]) == 0
        newest = list_checkpoints(tmp_path / "run" / "checkpoints")[0]
        table = load_checkpoint(newest).arrays("model")["words.weight"]
        assert (table == 3).all(1).sum() == (2 if more else 0)
        (tmp_path / "run").rename(tmp_path / f"run-{len(more)}")


def fails(arguments: list[str], caplog: pytest.LogCaptureFixture) -> str:
    caplog.clear()
    assert train_sentiment.main(arguments) == 1
    return caplog.records[-1].getMessage()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--data", "nowhere"], "--data nowhere: no such file or folder"),
        (["--label-column", "stars"], "expected 'stars' and"),
        (["--text-column", "review"], "expected 'label' and 'review'"),
        (["--epochs", "0"], "--epochs: got 0, expected 1 or more"),
        (["--steps", "4"], "--warmup: got 5, expected less than --steps, 4"),
        (["--dropout", "1"], "--dropout: got 1.0, expected 0 <= dropout < 1"),
        (["--model", "transformer", "--heads", "3"], "expected a multiple of --heads, 3"),
        (["--vectors", "none.txt"], "--vectors none.txt: no such file or folder"),
        (["--vectors", "a.txt", "--tokens", "bpe"], "--vectors: got --tokens bpe, expected words"),
        (
            ["--at-least", "2", "--tokens", "bpe"],
            "--at-least: got 2 with --tokens bpe, expected none",
        ),
        (["--heads", "4"], "--heads: got 4 with --model mean, expected none"),
        (["--model", "transformer", "--hidden", "8"], "--hidden: got 8 with --model transformer"),
    ],
)
def test_bad_options_are_named(
    mean: list[str], more: list[str], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert message in fails([*mean, *more], caplog)


def test_a_run_of_few_steps_is_warm_before_its_end() -> None:
    for given, warmup in (([], 100), (["--steps", "40"], 2), (["--epochs", "1"], 49)):
        settings = command_line.read_command_line(
            sentiment.SentimentSettings, None, ["--data", "any", *given]
        )[0]
        assert settings.with_steps(50).warmup_steps == warmup


def unable_to_classify(folder: str, caplog: pytest.LogCaptureFixture) -> str:
    assert main(["classify", folder, "fine"]) == 1
    return caplog.records[-1].getMessage()


def test_bad_labels_and_vectors_are_named(
    mean: list[str], data: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (data / "vectors.txt").write_text("film 1 2 3\n")
    message = fails([*mean, "--vectors", str(data / "vectors.txt")], caplog)
    assert "line 1 has 3 numbers, expected 16, the width of the model" in message
    with (data / "dev.tsv").open("a") as file:
        file.write("5\tfine\n")
    assert "dev.tsv: line 102 has label '5', expected 0 or 1" in fails(mean, caplog)
    (data / "dev.tsv").write_text("")
    assert "dev.tsv is empty" in fails(mean, caplog)


def test_what_contradicts_the_run_is_refused(
    mean: list[str], tmp_path: Path, data: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    assert "is a file, expected" in fails([*mean, "--out", str(tmp_path / "file")], caplog)
    folder = str(tmp_path / "run")
    assert main(["classify", folder, "fine"]) == 1
    assert "no such file or folder" in caplog.records[-1].getMessage()
    assert train_sentiment.main([*mean, "--stop-after", "2"]) == 0
    assert f"{folder} holds a run" in fails(mean, caplog)
    assert "--model is 'mean' there" in fails(
        ["--resume", folder, "--model", "transformer"], caplog
    )
    assert main(["classify", folder, " "]) == 1
    assert "got ' ', expected a sentence" in caplog.records[-1].getMessage()
    for part in ("train", "dev"):
        before = (data / f"{part}.tsv").read_bytes()
        (data / f"{part}.tsv").write_bytes(before + b"1\tfine\n")
        assert "does not match the data of this run" in fails(["--resume", folder], caplog)
        (data / f"{part}.tsv").write_bytes(before)
    data.rename(tmp_path / "moved")
    assert f"--data: {data} does not exist" in fails(["--resume", folder], caplog)
    moved = ["--data", str(tmp_path / "moved"), "--stop-after", "1"]
    assert train_sentiment.main(["--resume", folder, *moved]) == 0
    (tmp_path / "moved").rename(data)
    config = tmp_path / "run" / "config.json"
    saved = config.read_text().replace(str(tmp_path / "moved"), str(data))
    config.write_text(saved.replace('"clip": 1.0', '"clip": 2.0'))
    assert "--clip is 1.0 there, got 2.0" in fails(["--resume", folder], caplog)
    config.write_text(saved)
    for size, message in (
        ({"layers": 10**9}, "has arrays of"),
        ({"width": 10**12}, "has arrays of"),
        ({"layers": "1"}, "layers is '1', expected int"),
        ({"kind": "other"}, "is a different kind of model"),
    ):
        checkpoints = list_checkpoints(tmp_path / "run" / "checkpoints")
        states = {path / "state.json": (path / "state.json").read_bytes() for path in checkpoints}
        for path, before in states.items():
            state = json.loads(before)
            state["model"] |= size
            del state["crc32"]
            path.write_text(json.dumps(state))
        assert message in unable_to_classify(folder, caplog)
        for path, before in states.items():
            path.write_bytes(before)
    words = tmp_path / "run" / "words.json"
    words.write_text(words.read_text().replace('"film"', '"flim"'))
    message = unable_to_classify(folder, caplog)
    assert "does not match the vocabulary of this run: sha256" in message
    words.unlink()
    message = unable_to_classify(folder, caplog)
    assert f"cannot read {words}: No such file" in message
