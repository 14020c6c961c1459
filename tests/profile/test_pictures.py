from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tensorgrad.errors import ArgumentError
from tensorgrad.profile.ceilings import Ceilings
from tensorgrad.profile.memory import MemoryRecording
from tensorgrad.profile.overlap import Timeline
from tensorgrad.profile.pictures import plot_memory, plot_roofline, plot_timeline
from tensorgrad.profile.tables import Table, op_table
from tests.profile.steps import Step

CEILINGS = Ceilings(2e10, {"float32": 1e11})


def is_png(path: Path) -> bool:
    return path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5000


def test_pictures_of_a_step(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot_roofline(op_table(Step().recorded().recording), CEILINGS, tmp_path / "a.png", "title")
    memory = Step().recorded(memory=True).memory
    assert memory is not None
    plot_memory(memory, tmp_path / "b.png", "title")
    assert is_png(tmp_path / "a.png")
    assert is_png(tmp_path / "b.png")


def test_the_timeline_of_two_ranks(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    lines = [
        Timeline(
            rank, 10**9 + rank * 10**6, 9_000_000,
            {"forward": [(0, 3_000_000)], "backward": [(3_000_000, 8_000_000)]},
            [(5_000_000, 6_000_000), (7_500_000, 9_000_000)],
        )
        for rank in range(2)
    ]  # fmt: skip
    plot_timeline(lines, tmp_path / "a.png", "title")
    assert is_png(tmp_path / "a.png")


def test_pictures_of_nothing(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot_roofline(Table("op", [], 1, 0, 0, 0), Ceilings(1e9, {}), tmp_path / "a.png")
    plot_memory(MemoryRecording([], []), tmp_path / "b.png")
    assert is_png(tmp_path / "a.png")
    assert is_png(tmp_path / "b.png")


def test_without_matplotlib_an_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ArgumentError, match=r"pip install -e \"\.\[plot\]\""):
        plot_memory(MemoryRecording([], []), tmp_path / "b.png")
    assert list(tmp_path.iterdir()) == []
