"""The pages of the site: the documents by part, and which public name is described where.

Needs no Sphinx: `tests/test_site.py` compares them with the files and with what is exported.
"""

from __future__ import annotations

import importlib
import inspect
import json
import pkgutil
import re
import sys
import typing
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import GenericAlias, ModuleType, UnionType
from typing import Any

ROOT = Path(__file__).parents[2]
LIBRARY = "tensorgrad"
INDEX = "docs/README"  # lists the guides, chapters and results
NOTEBOOK = "examples/walkthrough"
SIGNATURES = "docs/reference/signatures"  # explains the names of NOTATION
NOTATION = {
    *("ArrayLike", "Bool", "Float", "Inexact", "Int", "Real", "Shaped"),
    *("Count", "Interval", "NotNegative", "Probability", "Size"),
}
PROJECT = ("CONTRIBUTING", "CHANGELOG", "SECURITY")


def contents(root: Path) -> dict[str, dict[str, str]]:
    """Return the documents of each part, with the titles of links to them, in order.

    The parts are the sections of docs/README.md, their documents those that it links to.
    """
    index = (root / f"{INDEX}.md").read_text(encoding="utf-8")
    _, *sections = re.split(r"^## (.+)$", index, flags=re.MULTILINE)
    by_part: dict[str, dict[str, str]] = {}
    for caption, section in zip(sections[::2], sections[1::2], strict=True):
        links = re.findall(r"\[([^]]+)\]\(([^)#]+)\.md\)", section)
        by_part[caption] = {f"docs/{link}": re.sub(r"\s+", " ", title) for title, link in links}
    by_part["Start"] = {INDEX: "", NOTEBOOK: "", **by_part["Start"]}
    by_part["Reference"] = {"reference/index": "", **by_part["Reference"]}
    by_part["Project"] = {**by_part["Project"], **dict.fromkeys(PROJECT, "")}
    return by_part


def searches(root: Path) -> dict[str, list[str]]:
    """Return what readers search for by the page that answers it: entries of the index."""
    by_page: dict[str, list[str]] = json.loads((root / "docs" / "searches.json").read_text())
    return by_page


@dataclass
class Page:
    """A module, the entries described on its page, and other names that it exports.

    Attributes:
        module: full name.
        entries: public path (`tensorgrad.layer_norm`) to value, of what is described here.
        others: name to public path, of what is described elsewhere.
        constants: name to public path, of numbers, dtypes, types and tables.
    """

    module: str
    entries: dict[str, Any] = field(default_factory=dict)
    others: dict[str, str] = field(default_factory=dict)
    constants: dict[str, str] = field(default_factory=dict)


def pages() -> list[Page]:
    """Return the pages of the reference in the order of their modules.

    A value has the shortest path that a module with `__all__` gives it, under its own name where
    there are others. What `tensorgrad` itself
    exports, some 350 names, is described on pages of the modules that define it or of the package
    around them.
    """
    exported = {name: importlib.import_module(name) for name in _modules()}
    exported = {name: module for name, module in exported.items() if hasattr(module, "__all__")}
    shortest: dict[int, tuple[tuple[int, bool, str], Any]] = {}
    for module, exports in exported.items():
        for name in exports.__all__:
            value = getattr(exports, name)
            if _is_described(value):
                alias = name != getattr(value, "__name__", name)
                key = (module.count("."), alias, f"{module}.{name}")
                shortest[id(value)] = min(shortest.get(id(value), (key, value)), (key, value))
    paths = {identity: path for identity, ((_, _, path), _) in shortest.items()}
    values = {path: value for (_, _, path), value in shortest.values()}

    names = (f"{LIBRARY}.{name}" for name in exported[LIBRARY].__all__)
    named = [name for name in names if isinstance(sys.modules.get(name), ModuleType)]
    by_module = {name: Page(name) for name in (*exported, *named) if name.count(".") < 2}
    for path, value in sorted(values.items()):
        module = _page_of(path, value, exported)
        by_module.setdefault(module, Page(module)).entries[path] = value
    for name, page in by_module.items():
        for public in sorted(_exports(exported.get(name))):
            value = getattr(exported[name], public)
            if isinstance(value, ModuleType):
                continue
            if id(value) not in paths:
                homes = (home for home in by_module if public in _exports(exported.get(home)))
                same = [home for home in homes if getattr(exported[home], public) is value]
                page.constants[public] = f"{min(same, key=len)}.{public}"
            elif paths[id(value)] not in page.entries:
                page.others[public] = paths[id(value)]
    return [by_module[name] for name in sorted(by_module)]


@cache
def entries() -> dict[str, Any]:
    """Return every function and class that the reference describes, by its public path."""
    return {path: value for page in pages() for path, value in page.entries.items()}


def _exports(module: ModuleType | None) -> list[str]:
    return list(getattr(module, "__all__", ()))


def _modules() -> list[str]:
    package = importlib.import_module(LIBRARY)
    below = pkgutil.walk_packages(package.__path__, f"{LIBRARY}.")
    return [LIBRARY, *(module.name for module in below if "._" not in module.name)]


def _is_described(value: Any) -> bool:
    """Whether a value is a function or class of the library, and not only for type checkers."""
    if isinstance(value, (GenericAlias, UnionType)) or typing.get_origin(value) is not None:
        return False
    home = getattr(value, "__module__", None) or ""
    return callable(value) and not getattr(value, "_is_protocol", False) and _is_ours(home)


def _is_ours(home: str) -> bool:
    return f"{home}.".startswith(f"{LIBRARY}.")


def _page_of(path: str, value: Any, exported: dict[str, ModuleType]) -> str:
    module, _, name = path.rpartition(".")
    if module != LIBRARY:
        return module
    home = value.__module__
    parts = home.split(".")
    for end in range(2, len(parts)):
        around = ".".join(parts[:end])
        if name in getattr(exported.get(around), "__all__", ()):
            return around
    return home


def first_sentence(value: Any) -> str:
    """Return the first sentence of a docstring, in one line."""
    paragraph = (inspect.getdoc(value) or "").partition("\n\n")[0].replace("\n", " ")
    return re.split(r"(?<=[.:!?])(?<!e\.g\.)(?<!i\.e\.)\s+(?=[A-Z`])", paragraph)[0]
