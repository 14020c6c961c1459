from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tensorgrad.cli import COMMANDS, main
from tensorgrad.core import backend
from tensorgrad.data import PublishedTokenizer
from tensorgrad.io.weights import load_arrays
from tensorgrad.models.pretrained import save_pretrained
from tensorgrad.models.transformer_lm import TransformerLM, TransformerLMConfig
from tensorgrad.parallel import Mesh, program
from tensorgrad.parallel.merge import merge
from tensorgrad.train.checkpoint import list_checkpoints, load_checkpoint
from tensorgrad.train.log import read_metrics
from tests.data.test_published_tokenizer import sentence_piece, write
from tests.parallel.test_checkpoint import save_on
from tests.ranks import run_each, run_ranks

TINY = "--layers 1 --heads 2 --width 16 --context 16 --vocab 300 --batch 4 --no-plot --device cpu"
SHORT = "--steps 4 --warmup 1 --evaluate-every 4 --evaluation-batches 1 --sample 8"
PROGRAM = "tensorgrad"


@pytest.fixture
def options(tmp_path: Path) -> list[str]:
    path = tmp_path / "text.txt"
    lines = [f"def add_{i}(a, b):\n    return a + b + {i}\n\n" for i in range(400)]
    path.write_text("<|endoftext|>".join(lines))
    places = ["--data", str(path), "--cache", str(tmp_path / "cache")]
    return [*places, "--out", str(tmp_path / "run"), *TINY.split(), *SHORT.split()]


def metrics(folder: Path) -> list[dict[str, float]]:
    return read_metrics(folder / "metrics.jsonl")


def test_a_file_of_settings_gives_the_run_of_its_options(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *options]) == 0
    assert capsys.readouterr().out.startswith("def ")
    saved = tmp_path / "run" / "config.json"
    again = ["--out", str(tmp_path / "again")]
    assert main(["train", "gpt2", "--config", str(saved), *again]) == 0
    assert metrics(tmp_path / "again") == metrics(tmp_path / "run")
    both = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("run", "again")]
    assert both[0] == both[1] | {"out": str(tmp_path / "run"), "model": ""}


def test_one_file_prepares_trains_samples_and_reports(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = dict(zip(options[::2], options[1::2], strict=False))
    names = ("data", "cache", "out")
    lines = [f"{name}: {settings[f'--{name}']}" for name in names]
    file = tmp_path / "run.yaml"
    file.write_text(
        "\n".join(lines) + "\nlayers: 1\nheads: 2\nwidth: 16\ncontext: 16\nvocab: 300\nbatch: 4\n"
        "steps: 4\nwarmup: 1\nevaluate_every: 2\nevaluation_batches: 1\nsample: 8\nplot: false\n"
        "device: cpu\nreport: true\n"
    )
    assert main(["train", "--config", str(file), "--steps", "3"]) == 0
    folder = tmp_path / "run"
    assert metrics(folder)[-1]["step"] == 3
    page = (folder / "report.html").read_text()
    assert "<html" in page
    assert "<dt>Parameters</dt><dd>8,368</dd>" in page
    assert "<dt>Tokens of the text</dt>" in page
    assert re.search(r"<details><summary>\d+ packages</summary>", page)
    assert json.loads((folder / "config.json").read_text())["steps"] == 3
    assert (folder / "samples.jsonl").exists()


def test_an_attention_of_ops_and_recomputed_blocks_train_as_well(
    options: list[str], tmp_path: Path
) -> None:
    assert main(["train", *options]) == 0
    expected = metrics(tmp_path / "run")
    for name, more in (
        ("recomputed", ["--recompute"]),
        ("recomputed-norms", ["--recompute-norms"]),
        ("unfused", ["--attention", "unfused"]),
        ("fused-softmax", ["--attention", "fused-softmax"]),
    ):
        assert main(["train", *options, *more, "--out", str(tmp_path / name)]) == 0
        tolerance = 0 if name.startswith("recomputed") else 1e-5
        for record, wanted in zip(metrics(tmp_path / name), expected, strict=True):
            assert record == pytest.approx(wanted, rel=tolerance)


def test_a_prepared_text_is_taken_as_it_is(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ready = str(tmp_path / "ready")
    cache = ["--cache", str(tmp_path / "other")]
    assert main(["prepare", options[1], ready, "--vocab", "300", *cache]) == 0
    assert f"{ready}: " in capsys.readouterr().out
    assert main(["train", *options]) == 0
    assert main(["train", *options, "--data", ready, "--out", str(tmp_path / "from ready")]) == 0
    assert metrics(tmp_path / "from ready") == metrics(tmp_path / "run")


def test_a_run_may_start_from_the_weights_of_another(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *options, "--lr", "0.01"]) == 0
    run, tuned = tmp_path / "run", tmp_path / "tuned"
    rest = [*options[:4], *SHORT.split(), "--no-plot", "--device", "cpu", "--batch", "4"]
    fine = ["--init-from", str(run), "--out", str(tuned)]
    assert main(["train", *rest, *fine, "--stop-after", "2"]) == 0
    assert metrics(tuned)[0]["validation_loss"] == pytest.approx(
        min(r["validation_loss"] for r in metrics(run) if "validation_loss" in r), rel=1e-6
    )
    assert (tuned / "tokenizer.json").read_bytes() == (run / "tokenizer.json").read_bytes()
    run.rename(tmp_path / "moved")  # a checkpoint has the weights
    assert main(["train", "--resume", str(tuned)]) == 0
    capsys.readouterr()
    assert main(["evaluate", str(tuned), "--checkpoint", "last", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    last = metrics(tuned)[-1]
    assert found["tokens"] == last["final_validation_tokens"] > last["validation_tokens"] > 0
    assert found["validation_loss"] == last["final_validation_loss"] != last["validation_loss"]
    assert found["perplexity"] == pytest.approx(np.exp(found["validation_loss"]))


def outputs(model: Path, capsys: pytest.CaptureFixture[str], *data: str) -> Any:
    """Return the loss, a text and the exported weights of a model."""
    capsys.readouterr()
    assert main(["evaluate", str(model), "--device", "cpu", "--json", *data]) == 0
    loss = capsys.readouterr().out
    assert main(["generate", str(model), "", "--device", "cpu", "--max-new-tokens", "5"]) == 0
    text = capsys.readouterr().out
    exported = model.parent / f"exported {model.name} {len(list(model.parent.iterdir()))}"
    assert main(["export", str(model), str(exported)]) == 0
    arrays = load_arrays(exported / "model.safetensors")
    return loss, text, {name: array.tobytes() for name, array in arrays.items()}


def test_one_process_takes_the_checkpoints_of_ranks(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, parts = tmp_path / "run", tmp_path / "parts"
    assert main(["train", *options]) == 0
    shutil.copytree(run, parts, ignore=shutil.ignore_patterns("checkpoints"))
    (last,) = list_checkpoints(run / "checkpoints")
    found = load_checkpoint(last)
    full = {
        f"{group}/{name}": array
        for group in ("model", "optimizer")
        for name, array in found.arrays(group).items()
    }
    save_on(Mesh(2, 2, 2), True, full, parts / "checkpoints", found.step, found.state)
    assert len(list((parts / "checkpoints" / last.name).glob("rank-*"))) == 8
    assert outputs(parts, capsys) == outputs(run, capsys)
    assert outputs(parts / "checkpoints" / last.name, capsys) == outputs(run, capsys)
    merged, data = parts / "merged.safetensors", ["--data", options[1], "--batch", "4"]
    merge(load_checkpoint(parts / "checkpoints" / last.name), merged)
    assert outputs(merged, capsys, *data) == outputs(run, capsys, *data)
    fine = ["--steps", "2", "--no-plot", "--device", "cpu", "--sample", "0", *options[:4]]
    for folder in (run, parts):
        assert main(["train", "--resume", str(folder), "--steps", "6"]) == 0
        tuned = str(tmp_path / f"tuned {folder.name}")
        assert main(["train", "--init-from", str(folder), *fine, "--out", tuned]) == 0
    assert metrics(parts) == metrics(run)
    assert metrics(tmp_path / "tuned parts") == metrics(tmp_path / "tuned run")


def test_an_exported_folder_is_a_model_and_no_run(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    run, data = tmp_path / "run", ["--data", options[1], "--batch", "4"]
    assert main(["train", *options]) == 0
    expected = outputs(run, capsys, *data)
    (folder,) = tmp_path.glob("exported run *")
    assert outputs(folder, capsys, *data) == expected
    for arguments, message in (
        (["evaluate", str(folder)], "--data: got none, expected the text to evaluate on"),
        (["report", str(folder)], "has a published model, expected the folder of a run"),
        (["compare", str(folder), str(run)], "has a published model, expected the folder of a run"),
        (["profile", str(folder)], "it has the sizes of a published model, expected the settings"),
        (["train", "--resume", str(folder)], "--init-from trains such a model"),
        (["classify", str(folder), "a"], "it has the sizes of a published model"),
        (["translate", str(folder), "a"], "checkpoints has no checkpoint"),
        (["evaluate", "a/model", *data], "with --download a model of the Hugging Face Hub"),
        (
            ["train", "--init-from", "a/model", "--out", str(tmp_path / "x")],
            "is downloaded only with --download",
        ),
        (["export", "a/model", "out"], "is downloaded only with --download"),
    ):
        caplog.clear()
        assert main(arguments) == 1, arguments
        assert message in caplog.text

    def snapshot_download(name: str, **options: Any) -> str:
        asked.append((name, options["revision"]))
        return str(folder)

    asked: list[Any] = []
    hub = SimpleNamespace(snapshot_download=snapshot_download)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    capsys.readouterr()
    assert main(["evaluate", "a/model", *data, "--json", "--download"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(expected[0])
    fine = ["--init-from", "a/model", "--download", "--revision", "v1", "--steps", "1"]
    rest = ["--no-plot", "--device", "cpu", "--sample", "0", *options[:4]]
    assert main(["train", *fine, *rest, "--out", str(tmp_path / "tuned")]) == 0
    assert main(["export", "a/model", str(tmp_path / "again"), "--download"]) == 0
    assert asked == [("a/model", None), ("a/model", "v1"), ("a/model", None)]


def test_a_model_with_a_tokenizer_of_sentence_piece_is_trained_further_and_exported(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    folder, tuned, again = (tmp_path / name for name in ("published", "tuned", "again"))
    words = PublishedTokenizer.load(write(tmp_path, sentence_piece()))
    sizes = TransformerLMConfig(words.vocab_size, 32, 1, 2, 2, 8)
    save_pretrained(TransformerLM(sizes), folder)
    words.save(folder)
    data = ["--data", options[1], "--batch", "4"]
    fine = [*data, "--steps", "4", "--no-plot", "--device", "cpu", "--out", str(tuned)]
    short = ["train", "--init-from", str(folder), *fine, "--context"]
    assert main([*short, "33"]) == 1
    assert "--context: got 33 with --init-from, expected at most the model's, 32" in caplog.text
    assert main([*short, "8", "--stop-after", "2"]) == 0
    assert main(["train", "--resume", str(tuned)]) == 0
    assert metrics(tuned)[-1]["step"] == 4
    *_, last = read_metrics(tuned / "times.jsonl")
    assert last["tokens"] == last["step"] * 4 * 8
    assert main(["export", str(tuned), str(again)]) == 0
    assert json.loads((again / "config.json").read_text())["max_position_embeddings"] == 32
    assert PublishedTokenizer.load(again).digest == words.digest
    assert (again / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    capsys.readouterr()
    assert outputs(again, capsys, *data) == outputs(tuned, capsys, *data)


def test_weights_have_their_own_sizes(options: list[str], caplog: pytest.LogCaptureFixture) -> None:
    assert main(["train", *options, "--init-from", "run"]) == 1
    message = "got 1 with --init-from, expected none: the model has its own"
    assert message in caplog.records[-1].getMessage()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "--layer", "2"], "--layer: unknown option; did you mean --layers?"),
        (["train", "--attention", "fast"], "expected one of unfused, fused-softmax, flash"),
        (["trian"], "trian: unknown command; did you mean train?"),
        (["train", "--pp", "2"], "mpirun -n 2 tensorgrad train --pp 2"),
        (
            ["train", "gpt2", "--model", "transformer-lm"],
            "--model: got transformer-lm with tensorgrad train gpt2, expected none",
        ),
        (["train", "--grad-dtype", "bfloat16"], "got bfloat16 with --dtype float32, expected"),
        (["train", "--bucket-mb", "1", "--parallel", "flat"], "--bucket-mb: got 1.0 with"),
    ],
)
def test_what_is_wrong_is_one_line(
    arguments: list[str], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert main(arguments) == 1
    assert message in caplog.records[-1].getMessage()
    assert len(caplog.records) == 1


def test_a_run_resumes_with_the_command_of_its_task(
    options: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = str(tmp_path / "run")
    assert main(["train", *options, "--stop-after", "2"]) == 0
    assert main(["train", "translation", "--resume", run]) == 1
    assert "task is 'language-model', expected 'translation'" in caplog.records[-1].getMessage()
    assert main(["train", "translation", "--config", f"{run}/config.json"]) == 1
    assert main(["train", "--resume", run]) == 0
    assert metrics(tmp_path / "run")[-1]["step"] == 4


def test_a_run_with_bfloat16_gradients_resumes_to_the_same_bits(
    options: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options += ["--dtype", "bfloat16-parameters", "--micro-batches", "2", "--lr", "0.01"]
    narrow = [*options, "--grad-dtype", "bfloat16"]
    assert main(["train", *options]) == 0
    wide = metrics(tmp_path / "run")
    assert main(["train", *narrow, "--out", str(tmp_path / "whole")]) == 0
    expected = metrics(tmp_path / "whole")
    assert expected != wide
    for record, wanted in zip(expected, wide, strict=True):
        assert record == pytest.approx(wanted, rel=1e-2)
    run = str(tmp_path / "stopped")
    assert main(["train", *narrow, "--out", run, "--stop-after", "2"]) == 0
    assert main(["train", "--resume", run, "--grad-dtype", "float32"]) == 1
    assert "--grad-dtype is 'bfloat16' there, got" in caplog.records[-1].getMessage()
    assert main(["train", "--resume", run]) == 0
    assert metrics(tmp_path / "stopped") == expected


def test_a_run_that_needs_too_much_memory_names_what_fits(
    options: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object, **__: object) -> None:
        raise MemoryError("Out of memory allocating 5 bytes")

    monkeypatch.setattr(program, "train", full)
    monkeypatch.setattr(backend, "total_memory", lambda device: 2**31)
    sizes = ["--preset", "gpt2-124M", "--layers", "2", "--vocab", "1024", "--batch", "64"]
    sizes += ["--width", "768", "--context", "1024"]
    estimates = set()
    for dtype in ("float32", "bfloat16", "bfloat16-parameters"):
        assert main(["train", *options, *sizes, "--dtype", dtype]) == 1
        message = caplog.records[-1].getMessage()
        assert "allocating 5 bytes; the estimate is" in message
        assert "with --micro-batches" in message
        estimates.add(message.partition("the estimate is")[2].split()[0])
    assert len(estimates) == 3


def test_help_lists_all_commands(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["--help"]):
        assert main(arguments) == 0
        found = capsys.readouterr().out
        assert all(name in found for name in COMMANDS)
    assert main(["--version"]) == 0


@pytest.mark.parametrize(
    ("command", "defaults"),
    [
        ("plan", ["the preset's"] * 5),
        ("profile", ["the preset's"] * 5),
        ("bench model", [*["the preset's"] * 3, "512", "10000"]),
        ("bench matrix", ["24", "16", "512", "256", "10000"]),
        ("bench buckets", ["12", "12", "768", "1024", "50304"]),
    ],
)
def test_sizes_of_a_model_have_one_help(
    command: str, defaults: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = {
        "layers": "transformer blocks",
        "heads": "attention heads",
        "width": "width of the model",
        "context": "context length in tokens",
        "vocab": "size of the vocabulary",
    }
    assert main([*command.split(), "--help"]) == 0
    text = re.sub(r"[\s│]+", " ", capsys.readouterr().out)
    for (name, about), default in zip(words.items(), defaults, strict=True):
        assert f"--{name} INT {about}. [default: {default}]" in text


def test_the_task_of_a_file_has_help(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "own.py"
    file.write_text(
        'from tensorgrad.train import Task\n\nclass Own(Task):\n    """Do it.\n\n    More."""\n'
    )
    assert main(["train", str(file), "--help"]) == 0
    shown = "".join(capsys.readouterr().out.split())
    assert shown.startswith(f"Usage:tensorgradtrain{file}".replace(" ", ""))
    assert "Doit." in shown
    assert "More" not in shown
    assert "--version" not in shown


@pytest.mark.parametrize("command", list(COMMANDS))
def test_each_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert shown.startswith(f"Usage: tensorgrad {command} ")
    assert COMMANDS[command] in shown


@pytest.mark.mpi
def test_ranks_train_together(options: list[str], tmp_path: Path) -> None:
    assert main(["train", *options]) == 0
    folder = tmp_path / "ranks"
    more = ["--parallel", "zero1", "--out", folder]
    result = run_ranks(PROGRAM, 2, ["train", *options, *more])
    assert result.stdout.count("def ") == 1
    assert result.stderr.startswith("2 ranks, data parallel (zero1)\n")
    for record, wanted in zip(metrics(folder), metrics(tmp_path / "run"), strict=True):
        assert record == pytest.approx(wanted, rel=1e-5)


@pytest.mark.mpi
def test_what_is_wrong_on_ranks_is_reported_once(tmp_path: Path) -> None:
    wrong = (
        (["train", "--stps", 3], "--stps: unknown option; did you mean --steps?"),
        (["generate", "run"], "generate: got 2 ranks, expected one process"),
        (["train", "--pp", 3], "--pp 3: got 2 ranks, expected a multiple of 3 ranks"),
        (["train", "sentiment", "--data", "none"], "--data none: no such file or folder"),
    )
    runs: list[Sequence[object]] = [arguments for arguments, _ in wrong]
    *results, helps = run_each(PROGRAM, 2, [*runs[:-1], ["train", "--help"]], tmp_path)
    results.append(run_ranks(PROGRAM, 2, runs[-1], check=False))  # rank 0 ends the other
    for result, (_, message) in zip(results, wrong, strict=True):
        assert result.returncode == 1
        assert result.stderr.count(message) == 1, result.stderr
        assert "Traceback" not in result.stderr
    assert helps.returncode == 0
    assert helps.stdout.count("--pipeline-schedule") == 1


def test_a_file_of_an_earlier_version_or_of_another_optimizer_is_read(
    options: list[str], tmp_path: Path
) -> None:
    assert main(["train", *options, "--optimizer", "lion", "--lr", "0.001"]) == 0
    saved = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (saved["task"], saved["optimizer_name"]) == ("language-model", "lion")
    file = tmp_path / "old.json"
    file.write_text(json.dumps({**saved, "task": "gpt2"}))
    assert main(["train", "--config", str(file), "--out", str(tmp_path / "again")]) == 0
    assert metrics(tmp_path / "again") == metrics(tmp_path / "run")
    (tmp_path / "run" / "config.json").write_text(file.read_text())
    for path in list_checkpoints(tmp_path / "run" / "checkpoints"):
        state = json.loads((path / "state.json").read_text())
        del state["crc32"]
        state["settings"]["task"] = "gpt2"
        (path / "state.json").write_text(json.dumps(state))
    assert main(["train", "--resume", str(tmp_path / "run"), "--steps", "5"]) == 0
    assert metrics(tmp_path / "run")[-1]["step"] == 5
