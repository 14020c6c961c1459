from __future__ import annotations

import io
import json
import logging
import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from tensorgrad.cli import main
from tensorgrad.core import backend
from tensorgrad.data import Tokenizer
from tensorgrad.io.files import locked
from tensorgrad.models.generation import generate
from tensorgrad.models.gpt2 import GPT2, GPT2Config
from tensorgrad.report.page import page
from tensorgrad.report.result import result_of
from tensorgrad.report.run import read_run
from tensorgrad.train import checkpoint, command_line, language
from tensorgrad.train.device import choose_device
from tensorgrad.train.log import read_metrics, read_samples
from tensorgrad.train.stop_signals import STOPS
from tests.processes import started
from tests.source_tree import ROOT

TINY = "--layers 1 --heads 2 --width 16 --context 16 --vocab 300 --batch 4 --warmup 2 --no-plot"
SHORT = "--steps 12 --evaluate-every 6 --checkpoint-every 4 --evaluation-batches 2 --sample 8"


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    lines = [f"def add_{i}(a, b):\n    return a + b + {i}\n\n" for i in range(400)]
    path.write_text("<|endoftext|>".join(lines))
    return path


@pytest.fixture
def options(text: Path, tmp_path: Path) -> list[str]:
    places = ["--data", str(text), "--cache", str(tmp_path / "cache"), "--device", "cpu"]
    return [*places, "--out", str(tmp_path / "run"), *TINY.split(), *SHORT.split()]


def train(arguments: list[str]) -> int:
    return main(["train", *arguments])


def parameters(folder: Path) -> dict[str, bytes]:
    newest = checkpoint.load_latest(folder / "checkpoints")
    assert newest is not None
    assert newest.step == 12
    return {name: array.tobytes() for name, array in newest.arrays("model").items()}


def test_characters_are_tokens_of_their_own(
    options: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    at = options.index("--vocab")
    given = [*options[:at], *options[at + 2 :], "--preset", "char", "--sample", "0"]
    assert train(given) == 0
    tokenizer = Tokenizer.load(tmp_path / "run" / "tokenizer.json")
    assert tokenizer.vocab_size == 257
    assert [tokenizer.decode([each]) for each in tokenizer.encode("def a")] == [*"def a"]
    measured = [
        each
        for each in read_metrics(tmp_path / "run" / "metrics.jsonl")
        if "validation_loss" in each
    ]
    lowest = min(measured, key=lambda each: each["validation_loss"])
    words = f"the lowest was {lowest['validation_loss']:.4f}, at step {lowest['step']})"
    assert words in caplog.text


def test_a_run_leaves_what_it_promises(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(options) == 0
    assert capsys.readouterr().out.startswith("def ")
    folder = tmp_path / "run"
    saved = json.loads((folder / "config.json").read_text())
    assert (saved["steps"], saved["width"], saved["dtype"]) == (12, 16, "float32")
    losses = [
        record["validation_loss"]
        for record in read_metrics(folder / "metrics.jsonl")
        if "validation_loss" in record
    ]
    assert len(losses) == 3
    assert losses[-1] < losses[0]
    assert len(list((folder / "checkpoints").iterdir())) == 2
    assert read_metrics(folder / "times.jsonl")[-1]["tokens"] == 12 * 4 * 16
    assert json.loads((folder / "environment.json").read_text())["device"] == "cpu"


def test_a_last_validation_that_is_not_finite_is_said(
    options: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken = [*options, "--steps", "1", "--warmup", "0", "--lr", "1e20"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of overflow
        message = fails(broken, caplog)
    assert "the validation loss after the last step, 1, is not finite; the lowest was " in message
    run = read_run(tmp_path / "run")
    result = result_of(run)
    assert (result.is_broken, result.best_step, result.status) == (True, 0, "finished: 1 steps")
    assert "final_validation_loss" not in result.values
    assert "the last validation loss is not finite" in page(run)


def test_samples_are_kept_and_change_nothing(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train([*options, "--sample", "0"]) == 0
    assert capsys.readouterr().out == ""
    (tmp_path / "run").rename(tmp_path / "silent")
    assert not (tmp_path / "silent" / "samples.jsonl").exists()
    assert train([*options, "--sample-every", "5"]) == 0
    samples = read_samples(tmp_path / "run" / "samples.jsonl")
    assert [sample["step"] for sample in samples] == [5, 10, 12]
    assert all(s["prompt"] == "def " and s["text"].startswith("def ") for s in samples)
    assert capsys.readouterr().out == f"{samples[-1]['text']}\n"
    assert parameters(tmp_path / "run") == parameters(tmp_path / "silent")
    logs = [(tmp_path / name / "metrics.jsonl").read_bytes() for name in ("run", "silent")]
    assert logs[0] == logs[1]


def test_a_checkpoint_is_enough_to_generate(options: list[str], tmp_path: Path) -> None:
    train(options)
    found = checkpoint.load_best(tmp_path / "run" / "checkpoints")
    model = GPT2(GPT2Config(**found.state["model"]))
    model.load_state_dict(found.arrays("model"))
    tokenizer = Tokenizer.load(tmp_path / "run" / "tokenizer.json")
    tokens = generate(model, tokenizer.encode("def "), 5, temperature=0)
    assert len(tokenizer.decode(tokens)) > 0


def test_a_run_resumes_to_the_same_bits(
    options: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        train(options)
        whole = tmp_path / "run"
        whole.rename(tmp_path / "whole")
        train([*options, "--stop-after", "5"])
        assert f"--resume {whole}" in caplog.text
        assert train(["--resume", str(whole), "--stop-after", "3"]) == 0
        assert train(["--resume", str(whole), "--stop-after", "100"]) == 0
    assert parameters(whole) == parameters(tmp_path / "whole")
    curves = [(tmp_path / name / "metrics.jsonl").read_bytes() for name in ("run", "whole")]
    assert curves[0] == curves[1]


def fails(arguments: list[str], caplog: pytest.LogCaptureFixture) -> str:
    caplog.clear()
    assert train(arguments) == 1
    return caplog.records[-1].getMessage()


def test_what_contradicts_the_run_is_refused(
    options: list[str], tmp_path: Path, text: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = str(tmp_path / "run")
    assert "no such file or folder" in fails(["--resume", folder], caplog)
    train([*options, "--stop-after", "4"])
    before = parameters_at(folder, 4)
    assert f"{folder} holds a run" in fails(options, caplog)
    message = fails(["--resume", folder, "--lr", "1", "--width", "32"], caplog)
    assert "--lr is 0.003 there, got 1.0; --width is 16 there, got 32" in message
    text.write_text(text.read_text() * 2)
    assert "of this run: " in fails(["--resume", folder], caplog)
    assert parameters_at(folder, 4) == before


def test_a_run_resumes_with_its_text_elsewhere_and_from_another_folder(
    options: list[str],
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "run"
    assert main(["prepare", "text.txt", "tok", "--vocab", "300", "--cache", "cache"]) == 0
    given = [*options[options.index("--cache") :], "--tokenizer", "tok/tokenizer.json"]
    given.remove("--vocab")
    given.remove("300")
    assert train([*given, "--data", "text.txt", "--stop-after", "2"]) == 0
    assert json.loads((folder / "config.json").read_text())["data"] == str(text)
    (tmp_path / "new").mkdir()
    monkeypatch.chdir(tmp_path / "new")
    resume = ["--resume", str(folder), "--stop-after", "1"]
    assert train(resume) == 0
    text.rename("moved.txt")
    (tmp_path / "tok").rename("tok")
    message = fails(resume, caplog)
    assert f"--data: {text} does not exist" in message
    assert "name its new place with --data" in message
    assert train([*resume, "--data", "moved.txt"]) == 0
    assert train([*resume, "--data", "tok", "--tokenizer", "tok/tokenizer.json"]) == 0
    (tmp_path / "new" / "other.txt").write_text("Another text.\n" * 900)
    before = (folder / "config.json").read_bytes()
    assert "does not match the data of this run: corpus is" in fails(
        [*resume, "--data", "other.txt"], caplog
    )
    assert main(["prepare", "other.txt", "other", "--vocab", "290"]) == 0
    other = ["--data", "other.txt", "--tokenizer", "other/tokenizer.json"]
    assert "was saved from a different model: " in fails([*resume, *other], caplog)
    assert (folder / "config.json").read_bytes() == before


def test_sizes_are_checked_before_a_text_is_read(
    options: list[str], text: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text.write_bytes(b"\xff")
    for wrong, message in (
        (["--heads", "3"], "--width: got 16, expected a multiple of --heads, 3"),
        (["--micro-batches", "3"], "--micro-batches: got 3"),
    ):
        assert message in fails([*options, *wrong], caplog)


def test_what_changed_between_stop_and_resume_is_noticed(
    options: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "run"
    train([*options, "--stop-after", "4"])
    path = folder / "config.json"
    saved = json.loads(path.read_text())
    for change, message in (
        ({"lr": 0.1}, "--lr is 0.003 there, got 0.1"),
        ({"seed": 3}, "does not match the data of this run: seed is 0 there, expected 3"),
        ({"beta2": 0.5}, "--beta2 is 0.95 there, got 0.5"),
        ({"evaluate_every": 3}, "--evaluate-every is 6 there, got 3"),
        ({"steps": 11}, "--steps is 12 there, got 11, expected 12 or more"),
        ({"micro_batches": 2}, "--micro-batches is 1 there, got 2, expected 1 with the same"),
    ):
        path.write_text(json.dumps(saved | change))
        assert message in fails(["--resume", str(folder)], caplog)
        assert json.loads(path.read_text()) == saved | change  # to look at, and to put right
    path.write_text(json.dumps(saved | {"log_every": 3, "keep": 7, "out": "moved"}))
    with caplog.at_level(logging.INFO):
        assert train(["--resume", str(folder), "--stop-after", "1"]) == 0
    assert f"resuming from step 4 of 12: {folder}/checkpoints/step-00000004" in caplog.text


def test_a_run_may_get_more_steps(
    options: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options += ["--schedule", "constant"]
    assert train([*options, "--steps", "7"]) == 0
    resume = ["--resume", str(tmp_path / "run"), "--steps"]
    assert "--steps is 7 there, got 6, expected 7 or more" in fails([*resume, "6"], caplog)
    assert train([*resume, "12"]) == 0
    found = parameters(tmp_path / "run")
    (tmp_path / "run").rename(tmp_path / "more")
    assert train(options) == 0
    assert parameters(tmp_path / "run") == found


@pytest.mark.parametrize(
    "place", ["language.prepare_corpus", "task.save_facts", "loop.Trainer.save"]
)
def test_a_run_without_a_checkpoint_starts_at_step_0(
    place: str, options: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Killed as it reads its data, before its first step and after it; fine-tuned from another."""
    train([*options, "--out", str(tmp_path / "first"), "--stop-after", "2"])
    sizes = len(options) - options.index("--layers")
    start = [*options[:-sizes], "--init-from", str(tmp_path / "first"), *SHORT.split()]
    start += ["--batch", "4", "--warmup", "2", "--no-plot"]
    assert train([*start, "--out", str(tmp_path / "whole")]) == 0
    folder = tmp_path / "run"
    program = (
        "import os, sys; from tensorgrad.cli import main\n"
        "from tensorgrad.train import language, loop, task\n"
        f"{place} = lambda *_, **__: os.kill(os.getpid(), 9)\n"
        "main(['train', *sys.argv[1:]])"
    )
    done = subprocess.run([sys.executable, "-c", program, *start], cwd=ROOT, timeout=120)
    assert done.returncode == -signal.SIGKILL
    assert (folder / "metrics.jsonl").exists() == (place == "loop.Trainer.save")
    message = "holds a run, expected a new folder; to start it at step 0, as it has no checkpoint"
    assert f"{message}: --resume {folder}" in fails(start, caplog)
    assert train(["--resume", str(folder)]) == 0
    assert f"{folder} has no checkpoint: starting at step 0" in caplog.text
    for name in ("metrics.jsonl", "config.json", "facts.json", "tokenizer.json"):
        files = [(tmp_path / run / name).read_text() for run in ("run", "whole")]
        assert files[0].replace(str(folder), str(tmp_path / "whole")) == files[1]
    assert parameters(folder) == parameters(tmp_path / "whole")


def test_a_run_that_failed_before_its_data_was_read_leaves_no_folder(
    options: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert "no such file" in fails([*options, "--data", str(tmp_path / "lost")], caplog)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("place", "message"),
    [("file", "{} is a file, expected a new"), ("file/run", "cannot write to {}: ")],
)
def test_a_folder_that_cannot_be_written_is_named_before_any_work(
    options: list[str], tmp_path: Path, place: str, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    options += ["--out", str(tmp_path / place), "--data", "missing.txt"]
    assert message.format(tmp_path / place) in fails(options, caplog)
    assert not (tmp_path / "cache").exists()


def test_a_run_that_another_process_trains_is_left_alone(
    options: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "run"
    train([*options, "--stop-after", "4"])
    before = {path: path.read_bytes() for path in folder.rglob("*.json*")}
    with locked(folder / ".lock", wait=False):
        message = fails(["--resume", str(folder), "--keep", "9"], caplog)
    assert f"another process trains in {folder}: process {os.getpid()} on" in message
    assert before == {path: path.read_bytes() for path in folder.rglob("*.json*")}


def parameters_at(folder: str, step: int) -> dict[str, bytes]:
    path = Path(folder) / "checkpoints" / f"step-{step:08d}"
    found = checkpoint.load_checkpoint(path)
    return {name: array.tobytes() for name, array in found.arrays("model").items()}


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--loggers", "comet"], "--loggers: got 'comet', expected one of tensorboard"),
        (["--steps", "0"], "--steps: got 0, expected 1 or more"),
        (["--heads", "3"], "expected a multiple of --heads"),
        (["--tokenizer", "one.json"], "--vocab: got 300 with --tokenizer, expected none"),
        (["--data", "missing.txt"], "missing.txt"),
        (["--context", "5000"], "expected 5,001 or more"),
        (["--device", "tpu"], "device: got 'tpu'"),
        (
            ["--micro-batches", "3"],
            "--micro-batches: got 3, expected a divisor of the 4 sequences of a batch",
        ),
    ],
)
def test_bad_options_are_named(
    options: list[str],
    tmp_path: Path,
    more: list[str],
    message: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert message in fails([*options, *more], caplog)
    assert not (tmp_path / "run").exists()  # or else the right options are refused there


def read_settings(*options: str) -> language.LanguageSettings:
    return command_line.read_command_line(language.LanguageSettings, None, options)[0]


def test_the_warm_up_follows_the_steps() -> None:
    for steps, warmup in ((1, 0), (10, 0), (800, 40), (20_000, 1000)):
        settings = read_settings("--steps", str(steps))
        assert settings.warmup_steps == warmup
        assert settings.learning_rate(warmup) == settings.lr


def test_an_unknown_option_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    assert train(["--stepz", "3"]) == 1
    assert "--stepz: unknown option; did you mean --steps?" in caplog.text


def test_runs_without_a_name_are_numbered(
    options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    at = options.index("--out")
    unnamed = [*options[:at], *options[at + 2 :], "--stop-after", "1"]
    for name in ("gpt2-1", "gpt2-2"):
        assert train(unnamed) == 0
        assert (tmp_path / "runs" / name / "config.json").exists()


@pytest.mark.parametrize("dtype", ["bfloat16", "bfloat16-parameters", "float16"])
def test_16_bits_learn_as_well(options: list[str], tmp_path: Path, dtype: str) -> None:
    assert train([*options, "--dtype", dtype]) == 0
    losses = [
        record["validation_loss"]
        for record in read_metrics(tmp_path / "run" / "metrics.jsonl")
        if "validation_loss" in record
    ]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("number", STOPS)
def test_it_runs_as_a_program_and_stops_when_asked(
    options: list[str], tmp_path: Path, number: signal.Signals
) -> None:
    command = [sys.executable, "-m", "tensorgrad", "train", *options, "--steps", "100000"]
    metrics = tmp_path / "run" / "metrics.jsonl"
    with started(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        while not (metrics.exists() and metrics.stat().st_size):
            assert process.poll() is None, process.communicate()[1]
        process.send_signal(number)
        output, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert output == ""
    assert f"to resume: tensorgrad train --resume {tmp_path / 'run'}" in errors
    assert "Traceback" not in errors
    assert checkpoint.load_latest(tmp_path / "run" / "checkpoints") is not None


def test_a_program_that_is_interrupted_twice_ends_quietly(
    options: list[str], tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "tensorgrad", "train", *options, "--steps", "100000"]
    with started(command, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        checkpoints = tmp_path / "run" / "checkpoints"
        while not (checkpoint.list_checkpoints(checkpoints)):
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        while "SIGINT: finishing the step" not in process.stderr.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        errors = process.stderr.read()
        process.wait()
    assert process.returncode in (130, -signal.SIGINT), errors  # 130 for a shell
    assert "Traceback" not in errors
    assert checkpoint.load_latest(checkpoints) is not None


def test_a_program_whose_streams_are_closed_writes_into_no_file_of_its_own(
    options: list[str], tmp_path: Path
) -> None:
    """Files get the numbers of closed streams, and messages are written by number."""
    program = [sys.executable, "-m", "tensorgrad", "train", *options]
    shell = ["sh", "-c", 'exec "$0" "$@" <&- >&- 2>&-', *program]
    assert subprocess.run(shell, cwd=ROOT, timeout=120).returncode == 0
    train([*options, "--out", str(tmp_path / "other")])
    logs = [(tmp_path / name / "metrics.jsonl").read_bytes() for name in ("run", "other")]
    assert logs[0] == logs[1]
    assert parameters(tmp_path / "run") == parameters(tmp_path / "other")


def test_a_sample_is_shown_where_the_output_cannot_take_it(
    options: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    output = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", output)
    assert train([*options, "--prompt", "für"]) == 0
    output.seek(0)
    assert output.read().startswith("f\\xfcr")


def test_the_sample_may_begin_with_nothing(options: list[str]) -> None:
    settings = read_settings(*options, "--prompt", "")
    task = language.LanguageModeling(settings, Path(settings.out))
    task.prepare("cpu")
    prompt, text = task.sample()
    assert prompt == ""
    assert isinstance(text, str)


def test_an_old_gpu_gets_another_type(
    options: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Device:
        compute_capability = "75"

    cupy: Any = type("cupy", (), {"cuda": type("cuda", (), {"Device": lambda index: Device})})
    monkeypatch.setattr(backend, "gpu_count", lambda: 1)
    monkeypatch.setattr(backend, "gpu_index", lambda device: 0)
    monkeypatch.setattr(backend, "cupy", cupy)
    for given, got in (
        ("bfloat16", "float16"), ("bfloat16-parameters", "float32"), ("tf32", "float32")
    ):  # fmt: skip
        settings = read_settings(*options, "--dtype", given)
        chosen, _ = choose_device(settings)
        assert chosen.dtype == got
        missing = given.removesuffix("-parameters")
        assert f"has no {missing} (compute capability 75)" in caplog.text
