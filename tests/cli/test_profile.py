from __future__ import annotations

import json
from pathlib import Path

import pytest

from tensorgrad.cli import main
from tensorgrad.profile import step
from tensorgrad.profile.ceilings import Ceilings
from tensorgrad.train import config
from tensorgrad.train.language import LanguageSettings
from tests.ranks import run_ranks

SIZES = [
    *("--layers", "1", "--heads", "2", "--width", "16", "--context", "8", "--vocab", "300"),
    *("--batch", "4", "--device", "cpu"),
]
QUICK = ["--steps", "1", "--warmup", "0"]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made = Ceilings(1e10, {"float32": 1e11})
    monkeypatch.setattr(step, "measure_ceilings", lambda device, dtypes: made)
    monkeypatch.setattr(step, "_draw", lambda found, folder: [])  # tests/profile/test_step.py


def test_it_prints_a_table_and_names_its_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["profile", *SIZES, *QUICK, "--rows", "3"]) == 0
    out = capsys.readouterr().out
    for words in ("tokens/s", "| op   ", "| *step* ", "in gaps",
                  "inside attention: flash", "copy 10 GB/s", "peak memory of forward alone",
                  "peak memory of a step",
                  "in runs/profile-1: ", "trace.json"):  # fmt: skip
        assert words in out
    assert (tmp_path / "runs/profile-1/trace.json").is_file()
    assert main(["profile", *SIZES, *QUICK, "--what", "memory", "--attention", "unfused"]) == 0
    out = capsys.readouterr().out
    assert "| op |" not in out
    assert "in runs/profile-2: memory.json" in out


def test_the_step_of_a_run_with_other_options(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run").mkdir()
    settings = LanguageSettings(
        layers=1, heads=2, width=16, context=8, vocab=300, batch=2, device="cpu", out="run"
    )
    config.save(settings, tmp_path / "run")
    more = ["--batch", "6", "--what", "time", "--out", "found"]
    assert main(["profile", "run", *QUICK, *more]) == 0
    assert "batch 6, float32" in capsys.readouterr().out
    facts = json.loads((tmp_path / "found/summary.json").read_text())
    assert "memory" not in facts
    assert facts["attention"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], "RUN nothing: no such file or folder"),
        (["--out", "used"], "--out: used holds files (file), expected a new folder"),
        (["--steps", "0"], "--steps: got 0, expected 1 or more"),
        (["--heads", "3"], "--width: got 16, expected a multiple of --heads, 3"),
        (["--source", "cupti"], "--source: got 'cupti'"),
        (["--device", "cuda:77"], "device: got 'cuda:77'"),
        (["--what", "space"], "space"),
        (["--layer", "3"], "did you mean --layers?"),
    ],
)
def test_errors_are_one_line_and_leave_no_files(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, arguments: list[str], message: str
) -> None:
    (tmp_path / "used").mkdir()
    (tmp_path / "used/file").touch()
    given = zip(SIZES[::2], SIZES[1::2], strict=True)
    sizes = [word for pair in given if pair[0] not in arguments for word in pair]
    assert main(["profile", *sizes, *arguments]) == 1
    assert message in caplog.text
    assert {path.name for path in tmp_path.rglob("*")} <= {"used", "file", "runs"}


@pytest.mark.mpi
def test_two_ranks_write_traces_that_are_merged(tmp_path: Path) -> None:
    code = tmp_path / "ranks.py"
    code.write_text(
        "import sys\n"
        "from tensorgrad.cli import main\n"
        "from tensorgrad.profile import step\n"
        "from tensorgrad.profile.ceilings import Ceilings\n"
        "step.measure_ceilings = lambda device, dtypes: Ceilings(1e10, {'float32': 1e11})\n"
        "step._draw = lambda found, folder: []\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    out = tmp_path / "found"
    run_ranks(code, 2, ["profile", *SIZES, *QUICK, "--what", "time", "--out", out])
    ranks = json.loads((out / "summary.json").read_text())["communication"]
    assert [each["rank"] for each in ranks] == [0, 1]
    for each in ranks:
        assert each["calls"] >= 1
        assert each["nbytes"] > 0
        assert 0 <= each["overlapped"] <= each["communication"] <= each["step"]
    trace = json.loads((out / "trace.json").read_text())
    assert trace["otherData"]["ranks"] == [0, 1]
    assert {event["pid"] for event in trace["traceEvents"]} == {0, 1}
    assert (out / "trace-rank1.json").is_file()
