"""Entries of the index for the search of the site: what it finds beside the words of a page.

A page has what readers search for (docs/searches.json) and the terms of the glossary that it
explains; pages of the reference have the names of PyTorch that the library serves under another
name. The words of entries are keywords of their page too. docs/_ext/search.js ranks the results.
"""

from __future__ import annotations

import importlib
import re
from functools import cache
from typing import Any

import glossary
import pages
import tables
from docutils import nodes
from pages import ROOT
from sphinx import addnodes
from sphinx.application import Sphinx


def entries(name: str) -> list[str]:
    """Return the main entries of the index for a page."""
    terms = [*pages.searches(ROOT).get(name, ()), *_terms().get(name, ())]
    return [f"! {term}" for term in {term.lower(): term for term in terms[::-1]}.values()]


@cache
def _terms() -> dict[str, list[str]]:
    """Return the terms of the glossary by the page that explains them."""
    terms = glossary.Terms((ROOT / f"{glossary.PAGE}.md").read_text(encoding="utf-8"))
    by_page: dict[str, list[str]] = {}
    for form, title in terms.titles.items():
        by_page.setdefault(terms.pages[title], []).append(form)
    return by_page


@cache
def names_of_torch() -> dict[str, list[str]]:
    """Return names of PyTorch by the public path of what the library has in their place."""
    paths = {id(value): path for path, value in pages.entries().items()}
    by_path: dict[str, list[str]] = {}
    for name, instead in tables.torch_answers():
        first, *parts = instead.split(".")  # `x.gather` is a method
        value: Any = importlib.import_module(pages.LIBRARY)
        for part in parts if first != "x" else ["Tensor"]:
            value = getattr(value, part)
        if id(value) in paths:
            by_path.setdefault(paths[id(value)], []).append(name)
    return by_path


def add_keywords(app: Sphinx, document: nodes.document) -> None:
    """Make the words of main entries of the index keywords of their page, single and joined."""
    index_entries = [
        entry for node in document.findall(addnodes.index) for entry in node["entries"]
    ]
    words = [re.findall(r"[^\W_]+", text) for _, text, _, main, _ in index_entries if main]
    joined = {mark.join(parts) for parts in words for mark in ("", "_")}
    if keywords := sorted({*joined, *(part for parts in words for part in parts)}):
        document.insert(0, nodes.meta("", name="keywords", content=", ".join(keywords)))


def setup(app: Sphinx) -> dict[str, Any]:
    """Connect the functions above."""
    app.connect("doctree-read", add_keywords)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
