"""The pages of the reference: one for each public module, with a table of its names.

Names are described from their docstrings: docs/_ext/docstrings.py.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pages
from docstrings import escaped
from search import entries, names_of_torch
from sphinx.application import Sphinx


def write_reference(app: Sphinx) -> None:
    """Write the pages of the reference to the source folder."""
    folder = Path(app.srcdir) / "reference"
    folder.mkdir(exist_ok=True)
    for name, text in reference_pages():
        (folder / f"{name}.rst").write_text(text, encoding="utf-8")


def reference_pages() -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each page of the reference."""
    modules = pages.pages()
    names = {page.module for page in modules}
    parents = {name: parent for name in names if (parent := name.rpartition(".")[0]) in names}
    parents = {name: parent for name, parent in parents.items() if parent != pages.LIBRARY}
    top = sorted(names - parents.keys())
    yield (
        "index",
        "\n".join([*_title("Reference"), *_contents(top, hidden=True), *_table(_links(modules))]),
    )
    for page in modules:
        below = sorted(name for name, parent in parents.items() if parent == page.module)
        yield page.module, "\n".join(_page(page, pages.entries(), below))


def _links(modules: list[pages.Page]) -> Iterator[tuple[str, str]]:
    for page in modules:
        module = importlib.import_module(page.module)
        yield f":doc:`{page.module}`", pages.first_sentence(module)


def _page(page: pages.Page, values: dict[str, Any], below: list[str]) -> Iterator[str]:
    yield from _title(page.module)
    yield from (f".. index:: {entry}" for entry in entries(f"reference/{page.module}"))
    yield f"\n.. automodule:: {page.module}\n   :no-members:\n"
    if below:
        yield from _contents(below)
    groups: dict[str, dict[str, str]] = {}
    for path, value in page.entries.items():
        groups.setdefault(_kind(value), {})[f":py:obj:`~{path}`"] = pages.first_sentence(value)
    module = importlib.import_module(page.module)
    for name, path in page.others.items():
        home = values[path].__module__
        group = home if page.module == pages.LIBRARY else "Described elsewhere"
        link = f":py:obj:`{name} <{path}>`"
        groups.setdefault(group, {})[link] = pages.first_sentence(values[path])
    for name, path in page.constants.items():
        link = f":py:obj:`{name} <{path}>`"
        groups.setdefault("Constants and types", {})[link] = f"``{_shown(getattr(module, name))}``"
    for group, rows in groups.items():
        yield f".. rubric:: {group}\n"
        yield from _table(rows.items())
    for path, value in page.entries.items():
        directive = "autoclass" if isinstance(value, type) else "autofunction"
        bases = [base.__name__ for base in getattr(value, "__bases__", ())]
        public = [name for name in bases if name != "object" and name[0] != "_"]
        options = "   :show-inheritance:\n" if public else ""
        yield from (f".. index:: ! {name}" for name in names_of_torch().get(path, ()))
        yield f"\n.. {directive}:: {path}\n{options}"
    for name, path in page.constants.items():
        if path == f"{page.module}.{name}":
            yield f".. py:data:: {path}\n   :value: {_shown(getattr(module, name))}\n"


def _kind(value: Any) -> str:
    if not isinstance(value, type):
        return "Functions"
    return "Exceptions" if issubclass(value, BaseException) else "Classes"


def _shown(value: Any) -> str:
    text = re.sub(r" at 0x\w+|\s+", " ", repr(value)).replace("`", "'")
    return text if len(text) <= 60 else text[:60].rstrip() + "..."


def _title(text: str) -> list[str]:
    return [text, "=" * len(text), ""]


def _contents(names: list[str], hidden: bool = False) -> list[str]:
    options = ["   :hidden:"] if hidden else ["   :maxdepth: 1"]
    return [".. toctree::", *options, "", *(f"   {name}" for name in names), ""]


def _table(rows: Any) -> Iterator[str]:
    yield ".. list-table::\n   :widths: auto\n   :class: summary\n"
    for name, summary in rows:
        yield f"   * - {name}\n     - {escaped(summary)}"
    yield ""


def setup(app: Sphinx) -> dict[str, Any]:
    """Connect the functions above."""
    app.connect("builder-inited", write_reference)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
