"""The tuning command: its arithmetic and files anywhere, a tiny run on a GPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tensorgrad.core import backend
from tensorgrad.dtypes import bfloat16, float32
from tensorgrad.errors import KernelError
from tensorgrad.kernels import matmul as matmul_cuda
from tensorgrad.kernels import tune, tuned
from tensorgrad.kernels.matmul import tune as matmul_tune
from tensorgrad.kernels.tuned import TuningCase
from tests.disk import full_disk


def case(name: str, **times: float) -> TuningCase:
    """A case whose candidates 'take' so long with `timer`."""
    return TuningCase(
        "matmul", name, "cublas", {key: partial(float, t) for key, t in times.items()}
    )


def timer(run: Callable[[], Any]) -> float:
    return float(run())


CASES = [
    case("clear", cublas=1.0, tiled=0.5, wgmma=0.7),
    case("close", cublas=1.0, tiled=0.98),
    case("default", cublas=1.0, tiled=1.5),
]


def test_the_fastest_wins_where_it_is_clearly_faster() -> None:
    answers = list(tune.answer_all(iter(CASES), timer))
    assert [a.best for a in answers] == ["tiled", "cublas", "cublas"]
    assert answers[0].times == {"cublas": 1.0, "tiled": 0.5, "wgmma": 0.7}
    lines = tune.table(answers).splitlines()
    name = f"matmul {'clear':24} "
    assert lines[0] == f"{name}cublas 1000.0 us   tiled 500.0 us*  wgmma 700.0 us "
    assert "cublas 1000.0 us*" in lines[1]
    assert len(lines) == 3
    slow = [case("slow", cublas=10.0, tiled=9.6), case("close", cublas=10.0, tiled=9.8)]
    assert [a.best for a in tune.answer_all(iter(slow), timer)] == ["tiled", "cublas"]


def test_answers_replace_rows_of_the_same_gpu_alone() -> None:
    old = {
        "sm_80": {"matmul": {"clear": "old"}},
        "sm_90": {"matmul": {"close": "old", "kept": "old"}, "other": {"clear": "old"}},
    }
    before = json.dumps(old)
    new = tune.merge(old, "sm_90", list(tune.answer_all(iter(CASES), timer)))
    assert json.dumps(old) == before
    assert new["sm_80"] == old["sm_80"]
    assert new["sm_90"] == {"matmul": {"kept": "old", "clear": "tiled"}, "other": {"clear": "old"}}
    assert tune.changes(old, new) == [
        "sm_90 matmul clear: default -> tiled",
        "sm_90 matmul close: old -> default",
    ]
    assert tune.merge({}, "sm_90", list(tune.answer_all(iter(CASES[1:]), timer))) == {}


def test_files_are_read_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "tuned.json"
    rows = {"sm_90": {"matmul": {"b": "tiled", "a": "wgmma"}}}
    tuned.write(path, rows)
    assert tuned.read(path) == rows
    assert path.read_text().index('"a"') < path.read_text().index('"b"')
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    "text",
    ["", "[]", '{"sm_90": 3}', '{"sm_90": {"matmul": {"a": 1}}}', "[" * 100_000, '{"a": ' * 5000],
)
def test_a_damaged_file_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "tuned.json"
    path.write_text(text)
    with pytest.raises(KernelError, match=r"tuned: .*tuned\.json (got|has)"):
        tuned.read(path)


def test_a_full_disk_leaves_the_file_that_was_there_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "tuned.json"
    tuned.write(path, {"sm_90": {"matmul": {"a": "b"}}})
    with full_disk(1 << 10), pytest.raises(KernelError, match="expected a file to write"):
        tuned.write(path, {"sm_90": {"matmul": {str(i): "wgmma" for i in range(999)}}})
    assert tuned.read(path) == {"sm_90": {"matmul": {"a": "b"}}}
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(KernelError, match=r"tuned: .*tuned\.json got"):
        tuned.write(tmp_path / "missing" / "tuned.json", {})


def test_what_is_listed_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tuned.json"
    tuned.write(path, {"sm_90": {"matmul": {"here": "tiled"}}})
    monkeypatch.setattr(tuned, "PATH", path)
    monkeypatch.setattr(tuned, "architecture", lambda: "sm_90")
    assert tuned.tuned("matmul", "here", "cublas") == "tiled"
    assert tuned.tuned("matmul", "elsewhere", "cublas") == "cublas"
    assert tuned.tuned("attention", "here", "cublas") == "cublas"
    monkeypatch.setattr(tuned, "architecture", lambda: "sm_80")
    assert tuned.tuned("matmul", "here", "cublas") == "cublas"


def test_the_file_that_comes_along_names_kernels_that_exist() -> None:
    for choices in tuned.read(tuned.PATH).values():
        assert set(choices.get("matmul", {}).values()) <= set(matmul_cuda.KERNELS)


def test_cases_are_chosen_by_the_beginnings_of_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [SimpleNamespace(name=name) for name in ("matmul a", "matmul b", "softmax")]
    monkeypatch.setattr(tune, "cases", lambda: found)
    assert [*tune._cases([])] == found
    assert [*tune._cases(["matmul"])] == found[:2]
    assert [*tune._cases(["soft", "matmul b"])] == found[1:]


def test_names_of_matrix_products() -> None:
    assert matmul_cuda.case(float32, "nt", 256, 257, 2049, False) == "float32 nt sml"
    assert matmul_cuda.case(bfloat16, "tn", 1, 2048, 9000, True) == "bfloat16 tn sml gelu"


def test_the_command_needs_a_gpu(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(backend, "gpu_count", lambda: 0)
    assert tune.main(["--file", str(tmp_path / "tuned.json"), "--write"]) == 1
    assert "tune: no GPU was found" in caplog.text
    assert list(tmp_path.iterdir()) == []


def test_the_command_writes_only_when_told(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    path = tmp_path / "tuned.json"
    monkeypatch.setattr(backend, "gpu_count", lambda: 1)
    monkeypatch.setattr(tune, "_cases", lambda only: (c for c in CASES if c.name not in only))
    monkeypatch.setattr(tune, "measure", timer)
    monkeypatch.setattr(tune, "architecture", lambda: "sm_90")
    assert tune.main(["--file", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "sm_90 matmul clear: default -> tiled" in printed
    assert not path.exists()
    assert tune.main(["--file", str(path), "--write"]) == 0
    assert tuned.read(path) == {"sm_90": {"matmul": {"clear": "tiled"}}}
    capsys.readouterr()
    assert tune.main(["clear", "--file", str(path), "--write"]) == 0  # leaves the others alone
    assert "nothing changes" in capsys.readouterr().out
    assert tuned.read(path) == {"sm_90": {"matmul": {"clear": "tiled"}}}
    path.write_text("{")
    assert tune.main(["--file", str(path), "--write"]) == 1
    assert "expected choices as JSON" in caplog.text
    assert path.read_text() == "{"


@pytest.mark.gpu
def test_a_tiny_tuning(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "tuned.json"
    monkeypatch.setattr(matmul_tune, "_LENGTHS", {"s": 64})
    monkeypatch.setattr(tune, "_CLEARLY", 1000)  # whatever is the fastest
    assert tune.main(["bfloat16 n", "--file", str(path)]) == 0
    assert not path.exists()
    assert tune.main(["bfloat16 n", "--file", str(path), "--write"]) == 0
    printed = capsys.readouterr().out
    for name in ("bfloat16 nn sss", "bfloat16 nt sss gelu"):
        assert f"matmul {name} " in printed
    assert set(tuned.read(path).get(tuned.architecture(), {"matmul": {}})) == {"matmul"}
