"""Links from the first use of a term on a page to its entry in the glossary.

Headings, captions, tables, code, formulas and the texts of other links have none.
docs/_ext/glossary.py finds the terms. Tests: tests/test_reference.py.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import glossary
from docutils import nodes
from pages import ROOT
from sphinx import addnodes
from sphinx.application import Sphinx

_UNLINKED = (nodes.entry, nodes.literal, nodes.math, nodes.reference, addnodes.pending_xref)


def link_terms(app: Sphinx, document: nodes.document) -> None:
    """Lead from the first use of a term in a paragraph of a page to the glossary."""
    page = app.env.docname
    if not page.startswith(glossary.FOLDERS):
        return
    address, used = app.builder.get_relative_uri(page, glossary.PAGE), set[str]()
    for paragraph in document.findall(nodes.paragraph):
        for text in list(paragraph.findall(nodes.Text)):
            if not _is_below(text, _UNLINKED):
                parts = _with_links(text, address, used)
                text.parent.replace(text, parts)


def _is_below(node: nodes.Node, kinds: tuple[type[nodes.Node], ...]) -> bool:
    parent = node.parent
    return parent is not None and (isinstance(parent, kinds) or _is_below(parent, kinds))


def _with_links(text: nodes.Text, address: str, used: set[str]) -> list[nodes.Node]:
    words, end = text.astext(), 0
    parts: list[nodes.Node] = []
    for start, stop, title in _terms().uses(words, used):
        link = f"{address}#{nodes.make_id(title)}"
        term = nodes.Text(words[start:stop])
        parts += [nodes.Text(words[end:start]), nodes.reference("", "", term, refuri=link)]
        parts[-1]["classes"].append("term")
        parts[-1]["internal"], end = True, stop
    return [*parts, nodes.Text(words[end:])]


@cache
def _terms() -> glossary.Terms:
    return glossary.Terms((ROOT / f"{glossary.PAGE}.md").read_text(encoding="utf-8"))


def setup(app: Sphinx) -> dict[str, Any]:
    """Connect the functions above."""
    app.connect("doctree-read", link_terms)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
