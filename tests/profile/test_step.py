from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tensorgrad.errors import ArgumentError, CheckpointError
from tensorgrad.profile import step
from tensorgrad.profile.ceilings import Ceilings
from tensorgrad.profile.step import profile_step, settings_of_run, summary, write_step_profile
from tensorgrad.profile.tables import attention_split, op_table
from tensorgrad.train import config
from tensorgrad.train.language import LanguageSettings

SIZES: dict[str, Any] = {
    "layers": 2, "heads": 2, "width": 16, "context": 8, "vocab": 300, "batch": 4,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measuring them takes seconds, and has a test of its own."""
    made = Ceilings(1e10, {"float32": 1e11})
    monkeypatch.setattr(step, "measure_ceilings", lambda device, dtypes: made)


def test_a_profile_and_its_files(tmp_path: Path) -> None:
    stages = []
    settings = LanguageSettings(**SIZES, micro_batches=2)
    found = profile_step(
        settings, steps=2, warmup=1, progress=lambda stage, done, total: stages.append(stage)
    )
    assert stages == [
        *("warm-up", "without profiler", "without profiler", "warm-up of the profiler"),
        *("time", "time", "ceilings"),
        *("memory", "memory"),
    ]
    written = write_step_profile(found, tmp_path)
    names = {path.name for path in written}
    assert names == {path.name for path in tmp_path.iterdir()}
    assert {"trace.json", "ops.csv", "ops.md", "layers.csv", "memory.json", "summary.json"} <= names
    facts = json.loads((tmp_path / "summary.json").read_text())
    assert facts == json.loads(json.dumps(summary(found)))
    assert facts["busy"] + facts["gaps"] == pytest.approx(facts["seconds_with_profiler"])
    assert facts["memory"]["peak"] > facts["memory_forward"]["peak"]
    assert facts["tokens_per_second"] == pytest.approx(4 * 8 / found.seconds)
    memory = json.loads((tmp_path / "memory.json").read_text())
    for each in memory["timeline"]:
        assert sum(each["bytes"]) == each["peak"]
    assert memory["peak"]["peak"] == max(each["peak"] for each in memory["timeline"])
    assert memory["peak_by_line"][0]["bytes"] > 0
    assert len(memory["largest"]) == 20
    recording = found.recording
    assert recording is not None
    forwards = [r for r in recording.ranges if r.kind == "phase" and r.name == "forward"]
    assert len(forwards) == 2 * 2  # one for each micro-batch


def test_what_attention_in_parts_spends(tmp_path: Path) -> None:
    def split(kind: str) -> set[str]:
        found = profile_step(
            LanguageSettings(**SIZES, attention=kind), steps=1, warmup=0, what=["time"]
        )
        assert found.memory is None
        assert found.recording is not None
        table = op_table(found.recording)
        assert sum(row.seconds for row in table.rows) + table.gaps == pytest.approx(table.step)
        return set(attention_split(found.recording))

    assert split("flash") == {"flash attention"}
    assert split("fused-softmax") == {"softmax", "matrix products", "layout"}
    assert split("unfused") == {"softmax", "matrix products", "layout"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "--steps: got 0, expected 1 or more"),
        ({"warmup": -1}, "--warmup: got -1, expected 0 or more"),
        ({"what": []}, "--what: got '', expected time, memory or both"),
        ({"what": ["space"]}, "--what: got 'space'"),
    ],
)
def test_options_out_of_their_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        profile_step(LanguageSettings(**SIZES), **options)


def test_a_batch_that_does_not_divide() -> None:
    with pytest.raises(ArgumentError, match="--micro-batches: got 3, expected a divisor of the 4"):
        profile_step(LanguageSettings(**SIZES, micro_batches=3))


def test_the_step_of_a_run(tmp_path: Path) -> None:
    settings = LanguageSettings(**SIZES, dtype="bfloat16", lr=0.5)
    config.save(settings, tmp_path)
    for path in (tmp_path, tmp_path / "config.json"):
        found = settings_of_run(path)
        assert (found.batch, found.dtype, found.width, found.vocab) == (4, "bfloat16", 16, 300)
    with pytest.raises(CheckpointError, match=r"nothing has no config\.json"):
        settings_of_run(tmp_path / "nothing")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot be used"):
        settings_of_run(tmp_path)
