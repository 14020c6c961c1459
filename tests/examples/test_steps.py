"""The examples whose training step is written out: they take the steps of `tensorgrad train`."""

from __future__ import annotations

import ast
import json
import logging
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples import train_gpt2, train_transformer_lm
from tensorgrad.cli import main
from tensorgrad.models.gpt2 import GPT2
from tensorgrad.train import Run, load_latest
from tensorgrad.train.log import read_metrics, read_samples
from tests.ranks import run_ranks
from tests.source_tree import ROOT

SIZES = "--layers 2 --heads 2 --width 16 --context 16 --vocab 300 --batch 4 --device cpu"
SHORT = "--steps 12 --warmup 2"
SCRIPTS = ("train_gpt2", "train_gpt2_dp", "train_gpt2_pp", "train_transformer_lm")
# Runs of a script on the same ranks: a whole one, and one that a signal to rank 1 stops at step 5.
ON_RANKS = """
import signal, sys
from examples.{0} import main
from tensorgrad.cli import main as program
from tensorgrad.parallel import world
from tensorgrad.train import Run

options, folder = sys.argv[1:-1], sys.argv[-1]
log_step = Run.log_step

def stop(run, step, *values):
    log_step(run, step, *values)
    if step == 5 and world().rank == 1:
        signal.raise_signal(signal.SIGTERM)

def run(*options):
    sys.argv[1:] = options
    return main()

assert run(*options, "--out", folder + "/whole") == 0
Run.log_step = stop
assert run(*options, "--out", folder + "/run") == 128 + signal.SIGTERM
assert run("--resume", folder + "/run") == 0
more = ["--no-plot", "--evaluate-every", "200", {1}]
assert program(["train", *options, *more, "--out", folder + "/program"]) == 0
"""


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    lines = [f"def add_{i}(a, b):\n    return a + b + {i}\n\n" for i in range(400)]
    path.write_text("<|endoftext|>".join(lines))
    return path


@pytest.fixture
def options(text: Path) -> list[str]:
    places = ["--data", str(text), "--cache", str(text.parent / "cache")]
    return [*places, *SIZES.split(), *SHORT.split()]


def same_runs(one: Path, other: Path) -> None:
    """Compare the losses and the parameters of two runs to the bit."""
    logs = [(folder / "metrics.jsonl").read_bytes() for folder in (one, other)]
    assert logs[0] == logs[1]
    found = [load_latest(folder / "checkpoints") for folder in (one, other)]
    first, second = (each.arrays("model") for each in found if each is not None)
    assert first.keys() == second.keys()
    assert all(np.array_equal(first[name], second[name]) for name in first)


def stop_at(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a run be interrupted in a step."""
    log_step = Run.log_step

    def interrupt(run: Run, done: int, *values: Any) -> None:
        if done == step:
            signal.raise_signal(signal.SIGINT)
        log_step(run, done, *values)

    monkeypatch.setattr(Run, "log_step", interrupt)


@pytest.mark.parametrize("script", [train_gpt2, train_transformer_lm], ids=["gpt2", "lm"])
def test_a_run_is_resumed_to_the_same_bits(
    script: Any,
    options: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    whole, run = tmp_path / "whole", tmp_path / "run"
    assert script.main([*options, "--out", str(whole)]) == 0
    assert capsys.readouterr().out == f"{read_samples(whole / 'samples.jsonl')[0]['text']}\n"
    losses = [r["validation_loss"] for r in read_metrics(whole / "metrics.jsonl")[::13]]
    assert losses[1] < losses[0]
    stop_at(5, monkeypatch)
    with caplog.at_level(logging.INFO):
        assert script.main([*options, "--out", str(run)]) == 128 + signal.SIGINT
    assert f"stopped after step 5 of 12; to resume: python {sys.argv[0]} --resume" in caplog.text
    assert capsys.readouterr().out == ""
    assert script.main(["--resume", str(run)]) == 0
    same_runs(run, whole)


def test_the_steps_are_those_of_the_program(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And the commands that read a run read this one."""
    run, other = tmp_path / "run", tmp_path / "other"
    assert train_gpt2.main([*options, "--out", str(run)]) == 0
    assert (
        main(["train", *options, "--evaluate-every", "200", "--no-plot", "--out", str(other)]) == 0
    )
    same_runs(run, other)
    files = [json.loads((folder / "facts.json").read_text()) for folder in (run, other)]
    assert files[0].items() <= files[1].items()
    capsys.readouterr()
    assert main(["generate", str(run), "def ", "--max-new-tokens", "4", "--device", "cpu"]) == 0
    assert capsys.readouterr().out.startswith("def ")
    assert main(["evaluate", str(run), "--checkpoint", "last", "--json"]) == 0
    loss = json.loads(capsys.readouterr().out)["validation_loss"]
    assert loss == read_metrics(run / "metrics.jsonl")[-1]["final_validation_loss"]
    assert main(["report", str(run)]) == 0
    assert main(["compare", str(run), str(other)]) == 0
    assert main(["train", "--resume", str(run), "--steps", "13", "--no-plot"]) == 0


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("script", "more"), [("train_gpt2_dp", ""), ("train_gpt2_pp", '"--pp", "2"')]
)
def test_ranks_resume_to_the_same_bits_and_take_the_steps_of_the_program(
    script: str, more: str, options: list[str], tmp_path: Path
) -> None:
    program = tmp_path / "runs.py"
    program.write_text(ON_RANKS.format(script, more))
    if more:
        options += ["--micro-batches", "2"]
    result = run_ranks(program, 2, [*options, tmp_path])
    assert result.stdout.count("def ") == 3  # a sample of each run that was finished
    assert f"to resume: mpirun -n 2 python {program} --resume {tmp_path / 'run'}" in result.stderr
    same_runs(tmp_path / "run", tmp_path / "whole")
    same_runs(tmp_path / "run", tmp_path / "program")


@pytest.mark.mpi
def test_what_ranks_cannot_share_is_one_line(options: list[str], tmp_path: Path) -> None:
    for script, given, message in (
        ("train_gpt2_dp", ["--batch", 7], "--batch: got 7, expected a multiple of the 2 data"),
        ("train_gpt2_pp", ["--stepz", 7], "--stepz: unknown option; did you mean --steps?"),
    ):
        more = [*options, *given, "--out", tmp_path / "run"]
        result = run_ranks(ROOT / "examples" / f"{script}.py", 2, more, check=False)
        assert result.returncode == 1
        assert result.stderr.count(message) == 1, result.stderr
        assert "Traceback" not in result.stderr
    assert not (tmp_path / "run").exists()


def test_parts_of_a_batch_give_its_step(options: list[str], tmp_path: Path) -> None:
    runs = tmp_path / "whole", tmp_path / "parts"
    for folder, parts in zip(runs, ("1", "2"), strict=True):
        more = ["--steps", "3", "--micro-batches", parts, "--out", str(folder)]
        assert train_transformer_lm.main([*options, *more]) == 0
    whole, found = (read_metrics(folder / "metrics.jsonl") for folder in runs)
    for record, wanted in zip(found, whole, strict=True):
        assert record == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize(
    ("script", "more", "message"),
    [
        (train_gpt2, ["--data", "missing.txt"], "--data missing.txt: no such file or folder"),
        (train_gpt2, ["--heads", "3"], "--width: got 16, expected a multiple of --heads, 3"),
        (train_gpt2, ["--warmup", "12"], "--warmup: got 12, expected less than --steps, 12"),
        (train_gpt2, ["--context", "9999"], "expected 10,000 or more"),
        (train_gpt2, ["--device", "tpu"], "--device: got 'tpu'"),
        (train_transformer_lm, ["--micro-batches", "3"], "--micro-batches: got 3 and a batch has"),
        (train_transformer_lm, ["--kv-heads", "3"], "--heads: got 2, expected a multiple of"),
    ],
)
def test_bad_options_are_one_line(
    script: Any,
    more: list[str],
    message: str,
    options: list[str],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert script.main([*options, "--out", str(tmp_path / "run"), *more]) == 1
    assert message in caplog.records[-1].getMessage()
    assert not (tmp_path / "run").exists()


def test_memory_that_is_used_up_is_one_line(
    options: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(*_: object) -> None:
        np.empty(2**60, np.int8)

    monkeypatch.setattr(GPT2, "forward", refuse)
    assert train_gpt2.main([*options, "--out", str(tmp_path / "run")]) == 1
    message = caplog.records[-1].getMessage()
    assert message.startswith("out of memory: Unable to allocate 1.00 EiB for an array with shape")
    assert "a smaller model, --batch" in message


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_step_fits_on_a_screen(name: str) -> None:
    tree = ast.parse((ROOT / "examples" / f"{name}.py").read_text())
    functions = {each.name: each for each in ast.walk(tree) if isinstance(each, ast.FunctionDef)}
    step = functions["train_step"]
    assert step.end_lineno is not None
    assert step.end_lineno - step.lineno < 30
