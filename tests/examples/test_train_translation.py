from __future__ import annotations

import io
import json
import logging
import math
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sacrebleu

from examples import train_translation
from tensorgrad.cli import main, translate
from tensorgrad.data import Tokenizer, phrases
from tensorgrad.report import read_run
from tensorgrad.report.result import result_of
from tensorgrad.train import checkpoint, command_line, loop, mean_loss, translation
from tensorgrad.train.log import read_metrics
from tensorgrad.train.task import make_trainer
from tensorgrad.train.translation import Bleu, TranslationSettings
from tests.processes import closed_streams, unread_output
from tests.source_tree import ROOT

TINY = (
    "--layers 1 --heads 2 --width 16 --context 48 --vocab 300 --batch 512 --warmup 2 --no-plot "
    "--no-lowercase --epochs 2 --average 2 --rows 16 --dropout 0.1 --device cpu"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder of short pairs."""
    (tmp_path / "text").mkdir()
    short = [pair for pair in phrases(400) if len(pair[0]) + len(pair[1]) < 60]
    parts = {"train": short[20:110], "valid": short[10:20], "test": short[:10]}
    for name, pairs in parts.items():
        for side, language in enumerate(("de", "en")):
            lines = "".join(f"{pair[side]}\n" for pair in pairs)
            (tmp_path / "text" / f"{name}.{language}").write_text(lines, encoding="utf-8")
    return tmp_path / "text"


@pytest.fixture
def options(folder: Path, tmp_path: Path) -> list[str]:
    return ["--data", str(folder), "--out", str(tmp_path / "run"), *TINY.split()]


def read_command_line(arguments: Sequence[str]) -> tuple[TranslationSettings, Path, bool]:
    return command_line.read_command_line(TranslationSettings, None, arguments)


def results(folder: Path, name: str) -> Any:
    return json.loads((folder / f"eval_results_{name}.json").read_text(encoding="utf-8"))


def test_a_run_leaves_what_it_promises(
    options: list[str], folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        assert train_translation.main([*options, "--average", "4"]) == 0
    assert "mean of the last 2 checkpoints: " in caplog.text
    run = tmp_path / "run"
    references = (folder / "test.en").read_text().splitlines()
    records = [r for r in read_metrics(run / "metrics.jsonl") if "validation_loss" in r]
    assert len(records) == 3  # before the first step and after either epoch
    expected = f"finished: 2 epochs, {records[-1]['step']} steps"
    assert result_of(read_run(run)).status == expected
    assert records[-1]["validation_loss"] < records[0]["validation_loss"]
    for epoch in (1, 2):
        found = results(run, f"epoch{epoch}")
        assert (found["epoch"], found["step"]) == (epoch, records[epoch]["step"])
        assert found["validation_loss"] == records[epoch]["validation_loss"]
        assert [entry["reference"] for entry in found["translations"]] == references
        texts = [entry["translation"] for entry in found["translations"]]
        assert found["bleu"] == sacrebleu.corpus_bleu(texts, [references]).score
        assert "version:" in found["signature"]
        assert "case:mixed" in found["signature"]
    averaged = results(run, "averaged")
    assert averaged["validation_loss"] not in [r["validation_loss"] for r in records]
    assert len(averaged["translations"]) == 10
    assert len(list((run / "checkpoints").iterdir())) == 2


@pytest.mark.parametrize("prefix", [[], ["--prefix"]])
def test_the_utilization_is_logged_where_the_peak_is_known(
    options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prefix: list[str]
) -> None:
    monkeypatch.setattr(loop, "peak_of", lambda *_: 1e6)
    options += ["--test-limit", "1", *prefix]
    settings, folder, _ = read_command_line(options)
    assert train_translation.main([*options, "--stop-after", "3"]) == 0
    last = read_metrics(folder / "times.jsonl")[-1]
    run = translation.Translation(settings, folder, resuming=True)
    run.prepare("cpu")
    batches = run.training
    flops = run.model.config.training_flops(
        batches.mean_keys(bool(prefix)), batches.targets / batches.tokens
    )
    assert last["mfu"] == pytest.approx(last["tokens_per_second"] * flops / 1e6, rel=1e-3)


def test_losses_that_are_not_finite_are_null(
    options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = {"validation_loss": math.nan, "validation_tokens": 1}
    monkeypatch.setattr(translation.Translation, "measure_loss", lambda _: dict(measured))
    assert train_translation.main(options) == 0
    assert results(tmp_path / "run", "epoch1")["validation_loss"] is None
    assert results(tmp_path / "run", "averaged")["validation_loss"] is None


def test_a_run_of_few_steps_is_warm_before_its_end() -> None:
    settings = read_command_line(["--epochs", "2", "--data", "hf:any"])[0]
    assert settings.warmup == 400
    assert settings.with_steps(50).warmup == 99
    assert settings.with_steps(500).warmup == 400
    settings = read_command_line(["--steps", "100", "--data", "phrases"])[0]
    assert settings.with_steps(50).warmup_steps == 5


def parameters(folder: Path) -> dict[str, bytes]:
    newest = checkpoint.load_latest(folder / "checkpoints")
    assert newest is not None
    return {name: array.tobytes() for name, array in newest.arrays("model").items()}


def test_a_run_resumes_to_the_same_bits(
    options: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run, whole = tmp_path / "run", tmp_path / "whole"
    with caplog.at_level(logging.INFO):
        train_translation.main(options)
        run.rename(whole)
        train_translation.main([*options, "--stop-after", "5"])
        assert f"--resume {run}" in caplog.text
        assert not (run / "eval_results_averaged.json").exists()
        assert train_translation.main(["--resume", str(run), "--stop-after", "3"]) == 0
        assert train_translation.main(["--resume", str(run)]) == 0
    assert parameters(run) == parameters(whole)
    for name in ("metrics.jsonl", "eval_results_epoch1.json", "eval_results_epoch2.json"):
        assert (run / name).read_bytes() == (whole / name).read_bytes()
    greedy, trained = results(run, "averaged"), parameters(run)
    assert train_translation.main(["--resume", str(run), "--beams", "3"]) == 0
    again = results(run, "averaged")
    assert (greedy["beams"], again["beams"]) == (1, 3)
    assert "length_penalty" not in greedy
    assert again["length_penalty"] == 0.6
    assert again["validation_loss"] == greedy["validation_loss"]
    assert parameters(run) == trained


def test_interrupts_do_not_change_what_is_averaged(options: list[str], tmp_path: Path) -> None:
    more = [*options, "--epochs", "4", "--average", "3", "--keep", "3", "--bleu-every", "9"]
    run, whole = tmp_path / "run", tmp_path / "whole"
    assert train_translation.main([*more, "--out", str(whole)]) == 0
    train_translation.main([*more, "--stop-after", "1"])
    epoch = results(whole, "epoch4")["step"] // 4
    for steps in (2 * epoch, 1, epoch - 1, epoch - 1, 1000):
        assert train_translation.main(["--resume", str(run), "--stop-after", str(steps)]) == 0
    left = [int(path.name[-8:]) for path in (run / "checkpoints").iterdir()]
    assert any(step % epoch for step in left)
    found = [(folder / "averaged.safetensors").read_bytes() for folder in (run, whole)]
    assert found[0] == found[1]


def test_a_run_may_save_less_often_and_drop_more(options: list[str], tmp_path: Path) -> None:
    more = ["--epochs", "3", "--save-every", "2", "--bleu-every", "9", "--keep", "9"]
    rates = ["--activation-dropout", "0.3", "--attention-dropout", "0.2"]
    assert train_translation.main([*options, *more, *rates]) == 0
    run = tmp_path / "run"
    records = [r for r in read_metrics(run / "metrics.jsonl") if "validation_loss" in r]
    steps = [record["step"] for record in records]
    left = sorted(int(path.name[-8:]) for path in (run / "checkpoints").iterdir())
    assert (len(steps), left) == (4, steps[2:])
    newest = checkpoint.load_latest(run / "checkpoints")
    assert newest is not None
    config = newest.entry("model")
    names = ("dropout", "activation_dropout", "attention_dropout")
    assert [config[name] for name in names] == [0.1, 0.3, 0.2]


def test_a_run_that_is_over_translates_again_without_an_average(
    options: list[str], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    train_translation.main([*options, "--average", "0"])
    greedy, kept = results(run, "epoch2"), (run / "metrics.jsonl").read_bytes()
    assert train_translation.main(["--resume", str(run), "--beams", "3"]) == 0
    again = results(run, "epoch2")
    assert (greedy["beams"], again["beams"]) == (1, 3)
    assert again["validation_loss"] == greedy["validation_loss"]
    assert (run / "metrics.jsonl").read_bytes() == kept
    assert not (run / "averaged.safetensors").exists()


def test_what_was_trained_translates(
    options: list[str],
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    train_translation.main(options)
    run = str(tmp_path / "run")
    sources = (folder / "test.de").read_text(encoding="utf-8")
    capsys.readouterr()
    monkeypatch.setattr(sys, "stdin", io.StringIO(sources + "\n"))
    assert main(["translate", run, "--checkpoint", "last", "--beams", "1", "--device", "cpu"]) == 0
    lines = capsys.readouterr().out.split("\n")
    texts = [entry["translation"] for entry in results(tmp_path / "run", "epoch2")["translations"]]
    assert lines == [*texts, "", ""]  # an empty line stays one
    monkeypatch.setattr(sys, "stdin", io.StringIO("\ufeff" + sources))
    assert main(["translate", run, "--checkpoint", "last", "--beams", "1", "--device", "cpu"]) == 0
    assert capsys.readouterr().out.split("\n") == [*texts, ""]
    stdin = io.TextIOWrapper(io.BytesIO(b"acht\rUhr\r\nneun\r\n"), encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", stdin)
    assert main(["translate", run, "--device", "cpu"]) == 0
    assert capsys.readouterr().out.count("\n") == 2
    stdin = io.TextIOWrapper(io.BytesIO(b"acht\n\xff\n"), encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", stdin)
    assert main(["translate", run, "--device", "cpu"]) == 1
    assert "can't decode byte 0xff" in caplog.records[-1].getMessage()
    for which in ("best", "averaged"):
        assert main(["translate", run, "--checkpoint", which, "--device", "cpu", "acht Uhr"]) == 0
        assert capsys.readouterr().out.count("\n") == 1
    assert main(["translate", run, "eins zwei " * 30, "--device", "cpu"]) == 0
    assert "tokens, expected at most 23; the rest is omitted" in caplog.text


class Fixed:
    """A translator of which each translation is known."""

    def __call__(self, lines: list[str], *_: object) -> list[str]:
        return ["drei\nZeilen\x85für"] * len(lines)


def test_a_line_gives_a_line_and_what_cannot_be_written_is_an_error(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(translate, "load_translator", lambda *_: Fixed())
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\ntwo\n"))
    assert main(["translate", "run"]) == 0
    assert capsys.readouterr().out == "drei Zeilen für\n" * 2
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    assert main(["translate", "run", "one"]) == 1
    assert "'ascii' codec can't encode" in caplog.records[-1].getMessage()


def test_nobody_need_read_translations(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(translate, "load_translator", lambda *_: Fixed())
    with unread_output(monkeypatch):
        assert main(["translate", "run", "one"]) == 141
    with closed_streams(monkeypatch):
        assert main(["translate", "run"]) == 0
    assert caplog.records == []


def test_it_trains_without_standard_streams(
    options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closed_streams(monkeypatch):
        assert train_translation.main(options) == 0
    assert results(tmp_path / "run", "averaged")["bleu"] >= 0


def test_a_translator_says_what_is_missing(
    options: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def message(*arguments: str) -> str:
        caplog.clear()
        assert main(["translate", *arguments]) == 1
        return caplog.records[-1].getMessage()

    run = str(tmp_path / "run")
    assert "no such file or folder" in message(run, "ja")
    train_translation.main([*options, "--stop-after", "2"])
    assert "averaged.safetensors is missing" in message(run, "ja", "--checkpoint", "averaged")
    assert "TEXT: it is empty" in message(run, " ")
    assert "--beams: got 0" in message(run, "ja", "--beams", "0")
    assert "device: got 'tpu'" in message(run, "ja", "--device", "tpu")
    tokenizer = tmp_path / "run" / "tokenizer.json"
    right = tokenizer.read_bytes()
    Tokenizer.train(["other words"], 260).save(tokenizer)
    assert "does not match the tokenizer of this run: sha256 is" in message(run, "ja")
    tokenizer.write_bytes(right)
    (path,) = checkpoint.list_checkpoints(tmp_path / "run" / "checkpoints")
    whole = (path / "state.json").read_bytes()
    for name, change, error in (
        ("model", {"layers": 10**9}, "has arrays of"),
        ("model", {"vocab_size": 10**12}, "has arrays of"),
        ("model", {"prefix": 1}, "prefix is 1, expected bool"),
        ("data", {"lowercase": "no"}, "is a different kind of run, expected translation"),
        ("data", {"target": 3}, "is a different kind of run, expected translation"),
    ):
        state = json.loads(whole)
        state[name] |= change
        del state["crc32"]
        (path / "state.json").write_text(json.dumps(state))
        assert error in message(run, "ja")
    (path / "state.json").write_bytes(whole)
    tokenizer.unlink()
    assert "tokenizer.json" in message(run, "ja")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--epochs", "0"], "--epochs: got 0, expected 1 or more"),
        (["--heads", "3"], "expected a multiple of"),
        (["--data", "missing"], "missing: no such file or folder"),
        (["--batch", "40"], "--batch: got 40 tokens, expected --context, 48, or more"),
        (["--average", "9"], "--average: got 9, expected at most --keep, 5"),
        (["--length-penalty", "11"], "--length-penalty: got 11.0, expected 10 or less"),
        (["--steps", "2"], "--warmup: got 2, expected less than --steps, 2"),
        (["--target", "fr"], "train.fr is missing"),
        (["--also", "missing"], "missing: no such file or folder"),
        (["--device", "tpu"], "device: got 'tpu'"),
        (["--evaluate-every", "5"], "each epoch is evaluated; see --bleu-every"),
    ],
)
def test_bad_options_are_named(
    options: list[str], more: list[str], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert train_translation.main([*options, *more]) == 1
    assert message in caplog.records[-1].getMessage()


def test_other_data_is_refused(
    options: list[str], folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train_translation.main([*options, "--stop-after", "1"])
    lines = (folder / "train.en").read_text().splitlines()
    (folder / "train.en").write_text("\n".join(["Something else.", *lines[1:]]))
    resume = ["--resume", str(tmp_path / "run")]
    assert train_translation.main([*resume, "--checkpoint-every", "5"]) == 1
    assert "--checkpoint-every: got 5, expected none" in caplog.records[-1].getMessage()
    assert train_translation.main(resume) == 1
    assert "does not match the data of this run: corpus is" in caplog.records[-1].getMessage()
    (folder / "train.en").write_text("\n".join([*lines, ""]))
    config = tmp_path / "run" / "config.json"
    saved = config.read_text()
    config.write_text(saved.replace('"average": 2', '"average": 1'))
    assert train_translation.main(resume) == 1
    assert "--average is 2 there, got 1" in caplog.records[-1].getMessage()
    config.write_text(saved)
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    assert train_translation.main(options) == 1
    assert "to start it at step 0, as it has no checkpoint" in caplog.records[-1].getMessage()
    first = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    assert train_translation.main([*resume, "--stop-after", "1"]) == 0
    assert f"{tmp_path / 'run'} has no checkpoint: starting at step 0" in caplog.text
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == first


def test_a_run_resumes_with_its_pairs_elsewhere(
    options: list[str], folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train_translation.main([*options, "--stop-after", "1"])
    folder.rename(tmp_path / "moved")
    resume = ["--resume", str(tmp_path / "run"), "--stop-after", "1"]
    assert train_translation.main(resume) == 1
    assert f"--data: {folder} does not exist" in caplog.records[-1].getMessage()
    assert train_translation.main([*resume, "--data", str(tmp_path / "moved")]) == 0


def test_sizes_are_checked_before_pairs_are_read(
    options: list[str], folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.rmtree(folder)
    for wrong, message in (
        (["--heads", "3"], "width"),
        (["--batch", "40"], "--batch: got 40 tokens, expected --context, 48, or more"),
    ):
        assert train_translation.main([*options, *wrong]) == 1
        assert message in caplog.records[-1].getMessage()


@pytest.mark.parametrize(
    ("language", "tokenization"),
    [("en", "13a"), ("zh", "zh"), ("zh_CN", "zh"), ("cmn", "zh"), ("ja", "ja-mecab"), ("ko", "ko")],
)
def test_bleu_splits_words_as_the_language_does(
    language: str, tokenization: str, caplog: pytest.LogCaptureFixture
) -> None:
    bleu = Bleu(False, language)
    reference, text = "今天天气很好我们去公园。", "今天天气不好我们去公园。"
    found = bleu([text], [reference])
    if "compares characters" in caplog.text:  # MeCab is not installed
        assert f"sacrebleu[{language[:2]}]" in caplog.text
        assert tokenization in ("ja-mecab", "ko")
        tokenization = "char"
    assert f"tok:{tokenization}" in found["signature"]
    assert language == "en" or found["bleu"] > 50


def test_a_run_with_other_batches_is_refused(
    options: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train_translation.main([*options, "--stop-after", "1"])
    (path,) = checkpoint.list_checkpoints(tmp_path / "run" / "checkpoints")
    state = json.loads((path / "state.json").read_text())
    assert len(state["data"]["shapes"]) > 1
    del state["data"]["shapes"], state["crc32"]  # runs with batches of any shape were saved so
    (path / "state.json").write_text(json.dumps(state))
    assert train_translation.main(["--resume", str(tmp_path / "run")]) == 1
    assert (
        "does not match the data of this run: shapes is None there"
        in caplog.records[-1].getMessage()
    )


@pytest.mark.gpu
def test_each_shape_is_captured_once(options: list[str], tmp_path: Path) -> None:
    found = []
    for name in ("captured", "eager"):
        given = [*options, "--out", str(tmp_path / name), "--device", "cuda", "--epochs", "3"]
        given += ["--no-capture"] * (name == "eager")
        settings, folder, _ = read_command_line([*given, "--prefix"])
        run = translation.Translation(settings, folder)
        run.prepare("cuda")
        trainer = make_trainer(run)
        trainer.run()
        found.append(parameters(folder))
        if name == "captured":
            assert trainer._captured is not None
            assert trainer._captured.graphs == len(run.training.shapes) > 1
    assert found[0] == found[1]


def test_without_sacrebleu_nothing_begins(
    options: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setitem(sys.modules, "sacrebleu.metrics", None)
    assert train_translation.main(options) == 1
    assert 'pip install -e ".[text]"' in caplog.records[-1].getMessage()
    assert not (tmp_path / "run").exists()


def test_presets_and_folders() -> None:
    settings, folder, _ = read_command_line(["--lr", "0.02"])
    assert str(folder) == "workdir_vocab10000_lr0.02_embd256"
    assert (settings.layers, settings.heads, settings.preset) == (4, 8, "small")
    assert settings.data.startswith("hf:")
    settings, folder, _ = read_command_line(["--data", "phrases", "--width", "64"])
    assert settings.preset == "phrases"
    assert (settings.width, settings.lowercase) == (64, False)
    assert f"embd{settings.width}" in str(folder)
    for preset in translation.PRESETS:
        settings, _, _ = read_command_line(["--preset", preset])
        assert settings.config(300).width == settings.width


@pytest.mark.parametrize("dtype", ["bfloat16", "bfloat16-parameters", "float16"])
def test_16_bits_learn_as_well(options: list[str], tmp_path: Path, dtype: str) -> None:
    more = ["--dtype", dtype, "--beams", "2", "--bleu-every", "9", "--test-limit", "3"]
    assert train_translation.main([*options, *more]) == 0
    run = tmp_path / "run"
    records = [r for r in read_metrics(run / "metrics.jsonl") if "validation_loss" in r]
    assert records[-1]["validation_loss"] < records[0]["validation_loss"]
    assert not (run / "eval_results_epoch1.json").exists()
    last = results(run, "epoch2")
    assert (len(last["translations"]), last["beams"]) == (3, 2)


def test_more_pairs_and_lower_case(options: list[str], folder: Path) -> None:
    more = ["--also", str(folder), "--lowercase"]
    settings, _, _ = read_command_line([*options, *more])
    corpus = translation.read_corpus(settings)
    assert len(corpus.train) == 180
    assert corpus.train == [(a.lower(), b.lower()) for a, b in corpus.train]
    plain, _, _ = read_command_line(options)
    assert len(translation.read_corpus(plain).train) == 90


def test_the_validation_loss_weighs_tokens(options: list[str], tmp_path: Path) -> None:
    settings, folder, _ = read_command_line(options)
    run = translation.Translation(settings, folder)
    run.prepare("cpu")
    together = run.measure_loss()["validation_loss"]
    alone = []
    for tokens, targets in run.validation.evaluation_batches():
        for row in range(len(tokens)):
            part = tokens[row : row + 1], targets[row : row + 1]
            alone.append((mean_loss(run.model, run.loss, [part]), int((part[1] != -100).sum())))
    losses, counts = np.array(alone).T
    assert together == pytest.approx((losses * counts).sum() / counts.sum(), rel=1e-6)
    assert together != pytest.approx(losses.mean(), rel=1e-6)
    assert run.model.training


@pytest.mark.parametrize("script", ["train_translation.py", "translate.py"])
def test_they_run_as_programs(script: str) -> None:
    command = [sys.executable, f"examples/{script}", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "translat" in done.stdout
