"""The notebook runs from its first cell to its last, at small sizes, and has stored outputs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.notebook import NOTEBOOK, executed, merged, on_screen, shape
from tests.source_tree import ROOT

pytestmark = pytest.mark.slow


def test_the_notebook_runs(tmp_path: Path) -> None:
    nbformat: Any = pytest.importorskip("nbformat", reason="nbformat is not installed")
    for name in ("nbclient", "ipykernel"):
        pytest.importorskip(name, reason=f"{name} is not installed")
    environment = {
        "STEPS": "4",
        "OMP_NUM_THREADS": "1",
        "DATA": str(ROOT / "docs" / "performance.md"),
    }
    notebook = executed(tmp_path, environment)
    shown = "".join(
        output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", ())
    )
    assert "Traceback" not in shown
    for words in ("tensorgrad", "validation loss", "def main(", "nats a token", "report.html"):
        assert words in shown
    made = tmp_path / "runs"
    assert (made / "walkthrough" / "report.html").exists()
    assert (made / "walkthrough-profile" / "trace.json").exists()
    stored = nbformat.read(NOTEBOOK, as_version=4)
    for cell, new in zip(stored.cells, notebook.cells, strict=True):
        kinds, found = ([re.sub(r"data/\S+", "data/", k) for k in shape(c)] for c in (cell, new))
        assert kinds == found, cell.id


def test_stored_outputs_are_small_and_of_no_machine() -> None:
    text = NOTEBOOK.read_text(encoding="utf-8")
    assert 0 < text.count('"output_type"') < 20
    assert len(text) < 100_000
    for word in ("/tmp", "/home", "/root", "Traceback", "it/s", "\\r", "\\u001b"):
        assert word not in text, word


def test_a_progress_bar_leaves_the_lines_of_a_screen() -> None:
    bar = "  0%| | 0/2 [00:00<?]\r 50%|5| 1/2 [00:01<00:01]\r" + 30 * " " + "\rstep 1  loss 2.0\n"
    assert on_screen(bar + "100%|#| 2/2 [00:02<00:00]\r\ndone\r\n") == "step 1  loss 2.0\ndone\n"
    parts = [{"name": "stdout", "text": "a "}, {"name": "stdout", "text": "b\n"}, {"name": "stderr",
             "text": "\n"}]  # fmt: skip
    assert merged(parts) == [{"name": "stdout", "text": "a b\n"}]
