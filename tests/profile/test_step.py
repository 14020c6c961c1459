from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from tensorgrad.data import Tokenizer
from tensorgrad.errors import ArgumentError, CheckpointError
from tensorgrad.parallel import Comm
from tensorgrad.profile import step
from tensorgrad.profile.ceilings import Ceilings
from tensorgrad.profile.memory import KINDS, Allocation, MemoryRecording, Sample
from tensorgrad.profile.overlap import overlap, timeline
from tensorgrad.profile.recording import Range, Recording, Transfer
from tensorgrad.profile.step import (
    StepProfile,
    memory_facts,
    profile_step,
    settings_of_run,
    summary,
    write_step_profile,
)
from tensorgrad.profile.tables import attention_split, op_table
from tensorgrad.train import config
from tensorgrad.train.language import LanguageSettings
from tests.file_formats import compare, fields_of
from tests.parallel.threads import on_ranks

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
    compare(facts, fields_of("summary.json"))
    assert facts["busy"] + facts["gaps"] == pytest.approx(facts["seconds_with_profiler"])
    assert facts["memory"]["peak"] > facts["memory_forward"]["peak"]
    assert facts["tokens_per_second"] == pytest.approx(4 * 8 / found.seconds)
    memory = json.loads((tmp_path / "memory.json").read_text())
    compare(memory, fields_of("memory.json"))
    for each in memory["timeline"]:
        assert sum(each["bytes"]) == each["peak"]
    assert memory["peak"]["peak"] == max(each["peak"] for each in memory["timeline"])
    assert memory["peak_by_line"][0]["bytes"] > 0
    assert len(memory["largest"]) == 20
    assert (memory["timeline"][0]["ms"], memory["device"]) == (0, "cpu")
    assert facts["parameters"] == settings.config(None).parameters
    recording = found.recording
    assert recording is not None
    assert facts["attention"] == pytest.approx(attention_split(recording))
    forwards = [r for r in recording.ranges if r.kind == "phase" and r.name == "forward"]
    assert len(forwards) == 2 * 2  # a forward pass for each micro-batch


def test_the_default_steps() -> None:
    stages: list[tuple[str, int, int]] = []
    settings = LanguageSettings(**{**SIZES, "layers": 1})
    found = profile_step(settings, what=["time"], progress=lambda *stage: stages.append(stage))
    runs = {"warm-up": 2, "without profiler": 3, "warm-up of the profiler": 1, "time": 3}
    expected = [(stage, done, total) for stage, total in runs.items() for done in range(total)]
    assert stages == [*expected, ("ceilings", 0, 1)]
    assert found.recording is not None
    assert (found.recording.steps, found.device, found.memories) == (3, "cpu", {})
    assert summary(replace(found, recording=None)).keys() == {
        *("device", "parameters", "seconds", "tokens_per_second")
    }


def test_memory_for_json() -> None:
    facts = memory_facts(MemoryRecording([], [], "a GPU"))
    assert (facts["device"], facts["kinds"], facts["timeline"]) == ("a GPU", KINDS, [])
    assert (facts["peak"], facts["peak_by_line"], facts["at_peak"]) == (None, [], [])
    kinds = (0, 0, 0, 30, 0, 0, 10)
    first = Sample(5_000_000, "exp", "forward", "a", "f.py:1", 30, 40, kinds)
    second = replace(first, time=7_500_000, peak=30, kinds=(*kinds[:6], 0))
    array = Allocation(30, "activations", "exp", "forward", "a", "f.py:1", (30,), "int8", 0)
    facts = memory_facts(MemoryRecording([first, second], [array] * 21))
    assert facts["timeline"][1] == {
        "ms": 2.5, "op": "exp", "phase": "forward", "layer": "a", "used": 30, "peak": 30,
        "bytes": second.kinds,
    }  # fmt: skip
    assert facts["peak"] == asdict(first)
    assert facts["peak_by_line"] == [{"line": "f.py:1", "bytes": 21 * 30 + 10}]
    assert facts["at_peak"] == facts["largest"] == [asdict(array)] * 20


def test_files_of_several_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    titles: dict[str, str] = {}

    def plot(found: Any, *rest: Any) -> None:
        *_, path, title = rest
        path.touch()
        titles[path.name] = title

    for name in ("plot_roofline", "plot_timeline"):
        monkeypatch.setattr(step, name, lambda *given: plot(*given))
    monkeypatch.setattr(step, "find_spec", lambda name: name == "matplotlib")
    settings = LanguageSettings(**SIZES, parallel="zero1")
    work = Range(1, 0, "op", "exp", 100, 500, dtype="float32")

    def program(comm: Comm) -> list[str]:
        transfers = (Transfer("all_reduce", 400, 900, 8),)
        ranges = [Range(0, -1, "phase", "step", 0, 1000), work]
        recording = Recording(ranges, (0, 1000), (), transfers, rank=comm.rank)
        overlaps = step._gathered(overlap, recording, comm)
        assert [each.rank for each in overlaps] == [0, 1]
        assert overlaps[comm.rank] == overlap(recording)
        assert step._gathered(overlap, replace(recording, source="events"), comm) == []
        found = StepProfile(
            settings, "cpu", 1_200_000, 8, 0.5, recording, overlaps,
            step._gathered(timeline, recording, comm), Ceilings(1e10, {}),
        )  # fmt: skip
        return [path.name for path in write_step_profile(found, tmp_path, comm)]

    first, second = on_ranks(2, program)
    assert second == ["trace-rank1.json"]
    assert first == [
        *("trace.json", "trace-rank0.json", "trace-rank1.json", "summary.json"),
        *("ops.csv", "ops.md", "layers.csv", "layers.md", "roofline.png", "timeline.png"),
    ]
    assert {path.name for path in tmp_path.iterdir()} == {*first}
    about = "GPT2, 1.2M parameters, batch 4, float32, cpu"
    assert titles == {"roofline.png": about, "timeline.png": f"{about}, zero1"}
    facts = json.loads((tmp_path / "summary.json").read_text())
    assert [each["calls"] for each in facts["communication"]] == [1, 1]


def test_pictures_that_cannot_be_drawn_are_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found = StepProfile(LanguageSettings(**SIZES), "cpu", 1, 8, 0.5)
    errors: list[Exception] = [ValueError("backend"), OSError("disk is full")]
    monkeypatch.setattr(step, "_pictures", lambda *_: (_ for _ in ()).throw(errors.pop(0)))
    monkeypatch.setattr(step, "find_spec", lambda name: object())
    assert step._draw(found, tmp_path) == []
    assert caplog.messages == ["no pictures: ValueError: backend"]
    with pytest.raises(OSError, match="disk is full"):
        step._draw(found, tmp_path)
    monkeypatch.setattr(step, "find_spec", lambda name: None)
    assert step._draw(found, tmp_path) == []
    assert write_step_profile(found, tmp_path) == [tmp_path / "summary.json"]


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
    Tokenizer.train(["a text"], 258).save(tmp_path / "tokenizer.json")
    assert settings_of_run(tmp_path) == replace(settings, vocab=257)
    with pytest.raises(CheckpointError, match=r"nothing has no config\.json"):
        settings_of_run(tmp_path / "nothing")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot be used"):
        settings_of_run(tmp_path)
