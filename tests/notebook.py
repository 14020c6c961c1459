"""Running examples/walkthrough.ipynb; `python -m tests.notebook` stores its outputs.

What is stored is what a reader's screen shows in the end, without what belongs to one machine.
"""

from __future__ import annotations

import base64
import io
import os
import re
import tempfile
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.source_tree import ROOT

NOTEBOOK = ROOT / "examples" / "walkthrough.ipynb"
_COLOURS = 32  # pictures of lines and text need few
_WIDTH = 900  # pixels of a picture


def executed(folder: Path, environment: Mapping[str, str]) -> Any:
    """Return the notebook after a run of all its cells.

    Args:
        folder: where it runs.
        environment: variables beside those of this process.
    """
    nbclient: Any = import_module("nbclient")
    nbformat: Any = import_module("nbformat")
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    home = {
        name: str(folder / "home")
        for name in ("HOME", "IPYTHONDIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR")
    }
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    notebook.metadata["language_info"] = {"name": "python"}
    client = nbclient.NotebookClient(
        notebook, timeout=600, resources={"metadata": {"path": str(folder)}}
    )
    client.execute(env={**os.environ, **home, "PYTHONPATH": path, **environment})
    notebook.metadata["language_info"] = {"name": "python"}
    for cell in notebook.cells:
        cell.metadata = {}
        if cell.cell_type == "code":
            cell.outputs = merged(cell.outputs)
    return notebook


def merged(outputs: list[Any]) -> list[Any]:
    """Return outputs with all text of a stream in one, as a screen shows it in the end."""
    found: list[Any] = []
    for output in outputs:
        before = found[-1] if found else None
        if before and before.get("name") and before.get("name") == output.get("name"):
            before["text"] += output["text"]
        else:
            found.append(output)
    for output in found:
        if "text" in output:
            output["text"] = on_screen(output["text"])
    return [output for output in found if output.get("text", "nothing").strip()]


def on_screen(text: str) -> str:
    """Return text after its carriage returns, without the last state of a progress bar."""
    lines = []
    for line in text.replace("\r\n", "\n").split("\n"):
        shown = ""
        for part in line.split("\r"):
            shown = part + shown[len(part) :]
        if not re.search(r"\d%\|.*\| *\d+/\d+ \[", shown):
            lines.append(shown.rstrip())
    return "\n".join(lines).strip("\n") + "\n"


def shape(cell: Any) -> list[str]:
    """Return what kinds of output a cell has: a stream and its first word, types of data."""
    return [
        f"{output['name']}: {output['text'].split()[0]}"
        if "text" in output
        else ", ".join(sorted(output["data"]))
        for output in cell.get("outputs", ())
    ]


def store(notebook: Any) -> None:
    """Write the notebook with small pictures, and without the name of this machine's kernel."""
    nbformat: Any = import_module("nbformat")
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            if "text" in output:
                output["text"] = re.sub(r"(Linux)-\S+?-(x86_64|aarch64)", r"\1-\2", output["text"])
            elif picture := output["data"].get("image/png"):
                output["data"]["image/png"] = _smaller(picture)
    nbformat.write(notebook, NOTEBOOK)


def _smaller(picture: str) -> str:
    from PIL import Image

    image = Image.open(io.BytesIO(base64.b64decode(picture))).convert("RGB")
    image.thumbnail((_WIDTH, _WIDTH))
    file = io.BytesIO()
    image.quantize(_COLOURS).save(file, "PNG", optimize=True)
    return base64.b64encode(file.getvalue()).decode()


if __name__ == "__main__":
    from matplotlib import font_manager, get_cachedir  # whose first import makes a cache

    assert font_manager.fontManager
    with tempfile.TemporaryDirectory() as name:
        store(executed(Path(name), {"OMP_NUM_THREADS": "1", "MPLCONFIGDIR": get_cachedir()}))
