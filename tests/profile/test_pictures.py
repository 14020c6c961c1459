from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tensorgrad.errors import ArgumentError
from tensorgrad.profile import pictures
from tensorgrad.profile.ceilings import Ceilings
from tensorgrad.profile.memory import KINDS, MemoryRecording, Sample
from tensorgrad.profile.overlap import Timeline
from tensorgrad.profile.pictures import plot_memory, plot_roofline, plot_timeline
from tensorgrad.profile.tables import Table, TableRow, op_table
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


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures that would be saved."""
    pytest.importorskip("matplotlib")
    figures: list[Any] = []
    monkeypatch.setattr(pictures, "save", lambda figure, path: figures.append(figure))
    return figures


def test_products_are_points_under_the_roof_and_other_ops_are_bars(drawn: list[Any]) -> None:
    rows = [
        TableRow("matmul", "forward", 1, 4e-6, 0.4, 4e6, 2e4, "float32"),
        TableRow("linear", "backward", 1, 2e-6, 0.2, 1e4, 1e4, "float32"),
        TableRow("gelu", "backward", 1, 2e-6, 0.2, 0, 3e4, "float32"),
        TableRow("exp", "forward", 1, 1e-6, 0.1, 0, 2e4, "float32"),
        TableRow("getitem", "forward", 1, 1e-6, 0.1, 0, 0, "float32"),
    ]
    plot_roofline(Table("op", rows, 1, 1e-5, 0, 0), CEILINGS, "a.png", "title")
    roof, bars = drawn[0].axes
    flat, slope = roof.lines
    assert list(flat.get_xdata()) == [0.05, 5, 2000]
    assert list(flat.get_ydata()) == [0.001, 0.1, 0.1]
    assert (list(slope.get_xdata()), list(slope.get_ydata())) == ([0.05, 5], [0.001, 0.1])
    assert [line.get_label() for line in roof.lines] == [
        "float32: 0.1 TFLOP/s", "copy: 20 GB/s"
    ]  # fmt: skip
    points = [(*each.get_offsets()[0], *each.get_sizes()) for each in roof.collections]
    assert points == [(200, 1, 320), (1, 0.005, 170)]
    assert [text.get_text() for text in roof.texts] == ["matmul", "linear backward"]
    assert [bar.get_width() for bar in bars.patches] == pytest.approx([20, 15])
    assert [label.get_text() for label in bars.get_yticklabels()] == ["exp", "gelu backward"]
    assert bars.lines[0].get_xdata()[0] == 20
    assert drawn[0].get_suptitle() == "title"
    many = [replace(row, name=f"{row.name} {n}") for n in range(20) for row in (rows[0], rows[3])]
    plot_roofline(Table("op", many, 1, 1e-5, 0, 0), CEILINGS, "a.png")
    roof, bars = drawn[1].axes
    assert (len(roof.collections), len(roof.texts), len(bars.patches)) == (20, 12, 15)


@pytest.mark.parametrize(("unit", "name"), [(1_000_000, "MB"), (1_000_000_000, "GB")])
def test_memory_is_drawn_by_kind_with_its_peak_and_phases(
    unit: int, name: str, drawn: list[Any]
) -> None:
    phases = [*["forward"] * 6, "x", *["backward"] * 6]
    samples = [
        Sample(
            n, "exp", phase, "net" if n < 6 else "", "", 0, 2 * unit, (unit, 0, 0, unit, 0, 0, 0)
        )
        for n, phase in enumerate(phases)
    ]
    samples[8] = replace(samples[8], peak=4 * unit, kinds=(unit, 0, 0, 0, 0, 0, 3 * unit))
    plot_memory(MemoryRecording(samples, []), "b.png", "title")
    [axes] = drawn[0].axes
    assert axes.get_ylabel() == f"memory ({name})"
    assert axes.get_ylim() == (0, 1.12 * 4)
    peak, *borders = axes.lines
    assert (list(peak.get_xdata()), list(peak.get_ydata())) == ([8], [4])
    assert [line.get_xdata()[0] for line in borders] == [5.5, 6.5]
    texts = [(text.get_text(), text.get_position()[0]) for text in axes.texts]
    assert texts == [
        (f"peak 4 {name}: exp, backward", 0), ("forward", 2.5), ("backward", 9.5)
    ]  # fmt: skip
    assert [stack.get_label() for stack in axes.collections] == list(KINDS)
    parameters, workspace = axes.collections[0], axes.collections[-1]
    assert parameters.get_paths()[0].get_extents().ymax == 1
    assert workspace.get_paths()[0].get_extents().ymax == 4
    assert axes.get_title() == "title"
    [legend] = drawn[0].legends
    assert legend.get_texts()[0].get_text() == "workspace"


def test_ranks_are_drawn_by_one_clock(drawn: list[Any]) -> None:
    computed = {"backward": [(3_000_000, 8_000_000)], "forward": [(0, 3_000_000)], "x": []}
    sent = [(5_000_000, 9_000_000)]
    plot_timeline(
        [
            Timeline(rank, 10**9 + rank * 10**6, 9_000_000, computed, sent)
            for rank in range(2)
        ],
        "a.png", "title",
    )  # fmt: skip
    [axes] = drawn[0].axes
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        "rank 0: computation", "communication", "rank 1: computation", "communication"
    ]  # fmt: skip
    boxes = [
        (bars.get_label(), *path.get_extents().extents.round(6))
        for bars in axes.collections
        for path in bars.get_paths()
    ]
    assert boxes == [
        (label, start + rank, 2 * rank + row - 0.4, end + rank, 2 * rank + row + 0.4)
        for rank in range(2)
        for label, row, start, end in (
            ("backward", 0, 3, 8),
            ("forward", 0, 0, 3),
            ("communication alone", 1, 5, 9),
            ("communication beside computation", 1, 5, 8),
        )
    ]
    [legend] = drawn[0].legends
    assert [text.get_text() for text in legend.get_texts()] == [
        *("backward", "forward", "other"),
        *("communication alone", "communication beside computation"),
    ]
    assert drawn[0].get_size_inches().tolist() == pytest.approx([13, 1.2 + 2 * 1.1])


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
