"""The notebook runs from its first cell to its last, at small sizes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.source_tree import ROOT

pytestmark = pytest.mark.slow

NOTEBOOK = ROOT / "examples" / "walkthrough.ipynb"


def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbclient: Any = pytest.importorskip("nbclient", reason="nbclient is not installed")
    nbformat: Any = pytest.importorskip("nbformat", reason="nbformat is not installed")
    pytest.importorskip("ipykernel", reason="ipykernel is not installed")
    for name in ("HOME", "IPYTHONDIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "home"))  # nobody has no home
    monkeypatch.setenv("STEPS", "4")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("DATA", str(ROOT / "docs" / "performance.md"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    assert all(not cell.get("outputs") for cell in notebook.cells)  # results are not committed
    nbclient.NotebookClient(
        notebook, timeout=120, resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    shown = "".join(
        output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", ())
    )
    assert "Traceback" not in shown
    for words in ("tensorgrad", "validation loss", "def main(", "nats a token", "report.html"):
        assert words in shown
    made = tmp_path / "runs"
    assert (made / "walkthrough" / "report.html").exists()
    assert (made / "walkthrough-profile" / "trace.json").exists()
