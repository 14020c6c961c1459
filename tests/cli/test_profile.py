from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tensorgrad.cli import main, profile
from tensorgrad.profile import step
from tensorgrad.profile.ceilings import Ceilings
from tensorgrad.profile.memory import MemoryRecording, Sample
from tensorgrad.profile.recording import Kernel, Range, Recording
from tensorgrad.profile.step import StepProfile
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
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    assert main(["profile", *SIZES, *QUICK, "--rows", "3"]) == 0
    out = capsys.readouterr().out
    for words in ("tokens/s", "| op   ", "| *step* ", "in gaps",
                  "inside attention: flash", "copy 10 GB/s", "peak memory of forward alone",
                  "peak memory of a step",
                  "in runs/profile-1: ", "trace.json"):  # fmt: skip
        assert words in out
    assert (tmp_path / "runs/profile-1/trace.json").is_file()
    assert "products float32 0.1 TFLOP/s" in out
    monkeypatch.setattr(profile, "find_spec", lambda name: None)
    assert main(["profile", *SIZES, *QUICK, "--what", "memory", "--attention", "unfused"]) == 0
    assert "no pictures: run pip install -e" in caplog.text
    out = capsys.readouterr().out
    assert "| op |" not in out
    assert "in runs/profile-2: memory.json" in out


def test_the_report_has_units() -> None:
    ranges = (
        Range(0, -1, "phase", "step", 0, 4_000_000),
        Range(1, 0, "op", "attention", 0, 3_000_000, phase="forward", layer="blocks.0.attention"),
    )
    kernel = Kernel("flash_kernel", 1_000_000, 3_000_000, range=1)
    recording = Recording(ranges, (0, 4_000_000), (kernel,), source="cupti")
    kinds = (0, 0, 0, 0, 0, 500_000, 2_500_000)
    samples = [
        Sample(1, "add", "forward", layer, "", 9, 3_000_000, kinds) for layer in ("", "head")
    ]
    memory = [MemoryRecording(samples[:1], ()), MemoryRecording(samples[1:], ())]
    found = StepProfile(
        LanguageSettings(batch=4), "cpu", 1234, 8, 0.002, recording,
        ceilings=Ceilings(2e9, {"float32": 3e12}), memory=memory[0], memory_forward=memory[1],
    )  # fmt: skip
    lines = profile._report(found, 9).splitlines()
    assert lines[0] == (
        "GPT2, 1,234 parameters, batch 4, float32, on cpu: 2.00 ms a step, 16,000 tokens/s"
    )
    assert [line.split()[1] for line in lines if "---" not in line and line[:2] == "| "] == [
        *("op", "attention", "*gaps*", "*step*", "kernel", "flash_kernel", "*gaps*", "*step*")
    ]
    memory_lines = [
        *("", "peak memory of forward alone: 3.0 MB, in add (head)"),
        *("         2.5 MB  workspace", "         0.5 MB  other"),
        *("", "peak memory of a step: 3.0 MB, in add (forward)"),
        *("         2.5 MB  workspace", "         0.5 MB  other"),
    ]
    assert lines[-11:] == [
        "with the profiler (cupti) 4.00 ms a step: 2.00 ms busy, 2.00 ms in gaps",
        "inside attention: flash attention 2.00 ms",
        "measured ceilings: copy 2 GB/s, products float32 3 TFLOP/s",
        *memory_lines,
    ]
    alone = replace(found, recording=None, memory_forward=MemoryRecording((), ()))
    assert profile._report(alone, 9).splitlines()[1:] == memory_lines[4:]


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
        (["--rows", "-1"], "--rows: got -1, expected 0 or more"),
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
