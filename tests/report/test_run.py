from __future__ import annotations

import json
import logging
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tensorgrad.cli import main
from tensorgrad.errors import DataError
from tensorgrad.report import compare, write_report
from tensorgrad.report import run as run_module
from tensorgrad.report.result import result_of
from tensorgrad.report.run import Log, read_run, to_log
from tensorgrad.train.folder import hold
from tests.report.made_run import DIFF, ENVIRONMENT, make_run, write_lines


def same(log: Log, key: str, steps: list[int], values: list[float]) -> None:
    assert log[key].steps.tolist() == steps
    np.testing.assert_array_equal(log[key].values, values)


def test_a_whole_run_is_read(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "gpt2-1", steps=60, every=20))
    assert run.name == "gpt2-1"
    assert run.config["steps"] == 60
    assert run.metrics["loss"].steps.tolist() == list(range(1, 61))
    assert run.metrics["validation_loss"].steps.tolist() == [0, 20, 40, 60]
    assert run.times["tokens"].values[-1] == 60 * 524_288
    assert [sample["step"] for sample in run.samples] == [30, 60]
    assert run.environment == ENVIRONMENT
    assert run.diff == DIFF
    assert run.measures == []
    assert (run.metrics.last_step, run.metrics.damaged, run.metrics.omitted) == (60, 0, 0)
    assert run.resolved["preset"] == "small"
    assert (run.is_training, run.notes) == (False, ())


def test_what_a_run_lacks_is_empty(tmp_path: Path) -> None:
    write_lines(tmp_path / "metrics.jsonl", [{"step": 0, "validation_loss": 2.0}])
    run = read_run(tmp_path)
    assert (run.config, run.samples, run.environment, run.diff) == ({}, [], {}, "")
    assert (run.times.columns, run.times.last_step) == ({}, 0)
    assert run.notes == ()
    assert replace(run, folder=Path("/")).name == "/"


def test_facts_take_the_place_of_settings_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"layers": null, "width": null, "heads": 4}')
    (tmp_path / "facts.json").write_text('{"layers": 2, "heads": 8}')
    assert read_run(tmp_path).resolved == {"layers": 2, "width": None, "heads": 4}


def test_reads_a_folder_given_as_text(tmp_path: Path) -> None:
    folders = [make_run(tmp_path / name) for name in ("a", "b")]
    assert read_run(str(folders[0])).folder == folders[0]
    assert compare(list(map(str, folders))).names == ("a", "b")
    out = tmp_path / "page.html"
    assert write_report(str(folders[0]), str(out)) == out
    assert out.is_file()


def test_a_folder_that_is_not_of_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has no config\.json and no metrics\.jsonl, expected"):
        read_run(tmp_path)
    make_run(tmp_path / "one")
    with pytest.raises(DataError, match=r"; it has the runs one$"):
        read_run(tmp_path)
    for number in range(6):
        make_run(tmp_path / f"a{number}")
    with pytest.raises(DataError, match=r"; it has the runs a0, a1, a2, a3, a4$"):
        read_run(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(DataError, match="has a published model, expected the folder of a run"):
        read_run(tmp_path)
    with pytest.raises(DataError, match="nowhere does not exist"):
        read_run(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"config\.json is a file, expected the folder of a run"):
        read_run(tmp_path / "one" / "config.json")


def test_damaged_files_are_noted_and_the_rest_is_read(tmp_path: Path) -> None:
    lines = ['{"step": 1, "loss": 3}', "\x00\x00", '{"step": "2"}', "[1]", '{"step": 3, "loss": 2}']
    cut = '{"step": 4, "lo'
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, cut]))
    (tmp_path / "config.json").write_text('{"steps": 1')
    (tmp_path / "environment.json").mkdir()
    os.mkfifo(tmp_path / "times.jsonl")
    (tmp_path / "uncommitted.diff").write_bytes(b"+\xff\n")
    run = read_run(tmp_path)
    same(run.metrics, "loss", [1, 3], [3, 2])
    assert run.diff == "+\ufffd\n"
    found = {note.partition(".")[0]: note for note in run.notes}
    assert sorted(found) == ["config", "environment", "metrics", "times"]
    assert found["metrics"] == "metrics.jsonl: skipped 3 damaged lines"
    assert run.metrics.damaged == 3
    assert found["environment"] == "environment.json cannot be read: Is a directory"
    assert "FIFO" in found["times"]


def test_a_step_is_a_whole_number_that_a_page_can_show(tmp_path: Path) -> None:
    steps = ["0", "true", "-1", "2.0", f"{2**53 - 1}", f"{2**53}"]
    lines = "".join(f'{{"step": {step}, "text": "a", "more": 1}}\n' for step in steps)
    for name in ("metrics", "samples"):
        (tmp_path / f"{name}.jsonl").write_text(lines)
    run = read_run(tmp_path)
    assert run.metrics["more"].steps.tolist() == [0, 2**53 - 1]
    assert run.samples == [{"step": step, "text": "a"} for step in (0, 2**53 - 1)]
    assert run.notes == tuple(
        f"{name}.jsonl: skipped 4 damaged lines" for name in ("metrics", "samples")
    )


def test_of_equal_steps_the_last_line_counts() -> None:
    records = [{"step": 1, "x": 1.0}, {"step": 3, "x": 3.0}, {"step": 2, "x": 2.0}]
    log = to_log([*records, {"step": 3, "x": 4.0}, {"step": 5}])
    same(log, "x", [1, 2, 3], [1, 2, 4])
    same(log, "y", [], [])
    same(to_log([{"step": 1, "x": 1.0}, None, {"step": 1, "x": 2.0}]), "x", [1], [2])
    assert log.last_step == 5


def test_what_is_not_a_finite_number_is_nan(tmp_path: Path) -> None:
    values = ["1", "null", "NaN", "1e999", "true", '"2"', "1" + "0" * 400, "[3]", "2.5"]
    text = "".join(f'{{"step": {step}, "x": {value}}}\n' for step, value in enumerate(values))
    (tmp_path / "metrics.jsonl").write_text(text)
    expected = [1, *[np.nan] * 7, 2.5]
    same(read_run(tmp_path).metrics, "x", list(range(9)), expected)


@pytest.mark.parametrize(
    ("config", "records", "expected"),
    [
        ({"steps": 3}, [{"step": 3, "loss": 1.0}], "finished: 3 steps"),
        ({"steps": 8000}, [{"step": 3000, "loss": 1.0}], "stopped at step 3,000 of 8,000"),
        ({"steps": 0}, [{"step": 3, "loss": 1.0}], "3 steps"),
        ({}, [{"step": 3, "loss": 1.0}], "3 steps"),
        ({"steps": "many"}, [{"step": 3, "loss": 1.0}], "3 steps"),
        ({"steps": 8}, [{"step": 0, "validation_loss": 1.0}], "evaluated, not trained"),
        ({"steps": 8}, [], "no step logged yet"),
    ],
)
def test_the_status(
    tmp_path: Path, config: object, records: list[dict[str, float]], expected: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    write_lines(tmp_path / "metrics.jsonl", records)
    assert result_of(read_run(tmp_path)).status == expected


@pytest.mark.parametrize(
    ("config", "epoch", "expected"),
    [
        ({"steps": 0, "epochs": 3}, 3.0, "finished: 3 epochs, 1,200 steps"),
        ({"steps": 0, "epochs": 1}, 1.0, "finished: 1 epoch, 1,200 steps"),
        ({"steps": 0, "epochs": 30}, 1.2533, "stopped at epoch 1.253 of 30, step 1,200"),
        ({"steps": 1200, "epochs": 3}, 1.5, "finished: 1,200 steps"),
        ({"steps": 0, "epochs": 3}, None, "1,200 steps"),
        ({"steps": 0}, 1.5, "1,200 steps"),
    ],
)
def test_the_status_of_a_run_of_epochs(
    tmp_path: Path, config: object, epoch: float | None, expected: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    write_lines(tmp_path / "metrics.jsonl", [{"step": 1200, "loss": 1.0}])
    write_lines(tmp_path / "times.jsonl", [{"step": 1200, "epoch": epoch}])
    assert result_of(read_run(tmp_path)).status == expected
    if expected.startswith("stopped"):
        with hold(tmp_path):
            status = result_of(read_run(tmp_path)).status
        assert status == expected.replace("stopped at", "training,")


def test_a_run_that_is_training_says_so(tmp_path: Path) -> None:
    make_run(tmp_path / "run", steps=60)
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    (tmp_path / "run" / "config.json").write_text(json.dumps({**config, "steps": 90}))
    with hold(tmp_path / "run"):
        before = (tmp_path / "run" / ".lock").read_text()
        assert result_of(read_run(tmp_path / "run")).status == "training, step 60 of 90"
        assert (tmp_path / "run" / ".lock").read_text() == before
    assert result_of(read_run(tmp_path / "run")).status == "stopped at step 60 of 90"


def test_the_result(tmp_path: Path) -> None:
    losses = [{"step": step, "loss": loss} for step, loss in ((1, 4.0), (2, 3.0), (3, None))]
    scores = [{"step": 2, "validation_loss": 1.5, "accuracy": 0.5}]
    scores.append({"step": 3, "validation_loss": 1.75, "accuracy": 0.25})
    clock = [{"step": 3, "seconds": 2.0, "elapsed": 3.0, "tokens": 300, "mfu": 0.5}]
    write_lines(tmp_path / "metrics.jsonl", [*losses, *scores])
    write_lines(tmp_path / "times.jsonl", [{"step": 1, "peak_memory_mb": 7}, *clock])
    result = result_of(read_run(tmp_path))
    assert result.values == {
        "validation_loss": 1.75,
        "best_validation_loss": 1.5,
        "training_loss": 3.5,
        "accuracy": 0.25,
        "step": 3,
        "tokens": 300,
        "seconds": 2,
        "elapsed": 3,
        "tokens_per_second": 150,
        "mfu": 0.5,
        "peak_memory_mb": 7,
    }
    assert (result.best_step, result.not_finite) == (2, 1)
    assert read_run(tmp_path).measures == ["accuracy"]


@pytest.mark.parametrize("command", ["report", "compare"])
def test_progress_is_shown_for_long_logs_alone(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folders = [str(make_run(tmp_path / name, steps=60)) for name in ("a", "b")]
    arguments = [command, *folders[: 2 if command == "compare" else 1]]
    caplog.set_level(logging.INFO)
    assert main(arguments) == 0
    assert "reading" not in caplog.text
    smaller = (tmp_path / "a" / "metrics.jsonl").stat().st_size
    monkeypatch.setattr(run_module, "_LONG", smaller + 1)  # times.jsonl is longer
    assert main(arguments) == 0
    said = [each.getMessage() for each in caplog.records if "reading" in each.getMessage()]
    assert said == [f"reading: {folder}/times.jsonl" for folder in arguments[1:]]
    monkeypatch.setattr(run_module, "_LONG", smaller)
    read: list[str] = []
    read_run(tmp_path / "a", lambda path, *_: read.append(Path(path).name))
    assert sorted(set(read)) == ["metrics.jsonl", "times.jsonl"]


def test_an_untrusted_run_may_have_any_number_of_keys(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    many = {f"k{n}": 1.5 for n in range(5000)}
    keys = {"x" * 200: 1, "x" * 201: 1, **many, "loss": 2.0}
    write_lines(folder / "metrics.jsonl", [{"step": 1, **keys}])
    config = json.loads((folder / "config.json").read_text()) | many
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "environment.json").write_text(json.dumps({"gpu": "none", "packages": many}))
    (folder / "uncommitted.diff").write_text("+" * ((1 << 20) + 9))
    run = read_run(folder)
    assert len(run.metrics.columns) == 200  # the step is one more, and the loss is always read
    assert "x" * 200 in run.metrics.columns
    assert len(run.diff) == 1 << 20
    assert run.metrics["loss"].values.tolist() == [2.0]
    assert len(run.config) == len(run.environment["packages"]) == 2000
    assert run.notes == (
        f"config.json: {len(config) - 2000:,} more entries are omitted",
        "metrics.jsonl: values under 4,803 more names are omitted",
        "environment.json: 3,000 more entries are omitted",
    )
