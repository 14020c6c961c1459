"""The names of PyTorch that tests/parity/names.json lists, for the coverage page of the site.

The file also has the names of the array API standard of 2024.12, which do not change. With another
PyTorch write it anew by

    PYTHONPATH=.:FOLDER_OF_PYTORCH python -m tests.parity.test_names
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tensorgrad.io.files import write_json

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

FILE = Path(__file__).with_name("names.json")
SPACES = (
    *("torch", "torch.linalg", "torch.nn", "torch.nn.functional", "torch.optim"),
    "torch.optim.lr_scheduler",
)


def documented(space: str) -> list[str]:
    """Return the functions and classes of a namespace that have a docstring, and the dtypes.

    Types of PyTorch's compiler are none of them, nor are names that it imports from elsewhere.
    """
    module = importlib.import_module(space)
    return [name for name in dir(module) if name[0] != "_" and _counts(getattr(module, name))]


def _counts(value: Any) -> bool:
    if isinstance(value, torch.dtype):
        return True
    home = getattr(value, "__module__", None) or "torch"
    is_internal = isinstance(value, type) and home == "torch._C"
    plain = callable(value) and not isinstance(value, ModuleType) and not is_internal
    return plain and home.startswith("torch") and bool(value.__doc__)


def version() -> str:
    """Return the version without its patch and its build."""
    return ".".join(torch.__version__.split(".")[:2])


def test_the_list_has_the_names_of_this_version() -> None:
    listed = json.loads(FILE.read_text(encoding="utf-8"))["torch"]
    if listed["version"] != version():
        pytest.skip(f"the list is of PyTorch {listed['version']}")
    assert listed["names"] == {space: documented(space) for space in SPACES}


if __name__ == "__main__":
    names = json.loads(FILE.read_text(encoding="utf-8"))
    names["torch"] = {"version": version(), "names": {space: documented(space) for space in SPACES}}
    write_json(FILE, names, 1)
