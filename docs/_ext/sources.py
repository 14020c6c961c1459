"""The sources of the site: copies of the documents, and what the site alone adds to them.

The site adds contents, titles of results, what readers search for, and tables.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pages
import tables
from pages import ROOT
from search import entries
from sphinx.application import Sphinx


def write_sources(app: Sphinx) -> None:
    """Copy the documents to the source folder."""
    source = Path(app.srcdir)
    wanted = [*ROOT.glob("docs/**/*.md"), *ROOT.glob("docs/**/*.png"), *ROOT.glob("docs/**/*.svg")]
    wanted += [ROOT / f"{name}.md" for name in pages.PROJECT] + [ROOT / f"{pages.NOTEBOOK}.ipynb"]
    for path in wanted:
        copy = source / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, copy)
    shutil.copy2(ROOT / "README.md", source / f"{app.config.root_doc}.md")
    notebook = source / f"{pages.NOTEBOOK}.ipynb"
    cells = json.loads(notebook.read_text(encoding="utf-8"))
    cells["metadata"]["language_info"]["pygments_lexer"] = "ipython3"  # it has lines of a shell
    first = cells["cells"][0]
    first["source"] = _with_entries(pages.NOTEBOOK, "".join(first["source"]))
    notebook.write_text(json.dumps(cells), encoding="utf-8")


def add_contents(app: Sphinx, name: str, text: list[str]) -> None:
    """Add what the site alone has: contents, titles of results, terms of the index, tables."""
    parts = pages.contents(ROOT)
    text[0] = tables.rendered(text[0])
    if name == app.config.root_doc:
        for caption, documents in parts.items():
            lines = ["", "```{toctree}", ":hidden:", f":caption: {caption}", "", *documents, "```"]
            text[0] += "\n".join([*lines, ""])
    elif name in parts["Results"] and not text[0].startswith("# "):
        title = parts["Results"][name]
        text[0] = f"# {title[0].upper()}{title[1:]}\n\n{text[0]}"
    if name != pages.NOTEBOOK and not name.startswith("reference/"):  # their writers add the terms
        text[0] = _with_entries(name, text[0])


def _with_entries(name: str, text: str) -> str:
    """Return a document with its entries of the index below its title."""
    if not (terms := entries(name)):
        return text
    title, _, rest = text.partition("\n")
    return f"{title}\n\n```{{index}} {', '.join(terms)}\n```\n\n{rest}"


def setup(app: Sphinx) -> dict[str, Any]:
    """Connect the functions above."""
    app.connect("builder-inited", write_sources)
    app.connect("source-read", add_contents)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
