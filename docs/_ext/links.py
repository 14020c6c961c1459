"""Links: to files of the repository that are no pages, and to names of the code."""

from __future__ import annotations

import ast
import builtins
import keyword
import os
import re
import sys
from contextlib import suppress
from functools import cache, reduce
from typing import Any

import pages
from docutils import nodes
from pages import ROOT
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.ext.intersphinx import InventoryAdapter
from sphinx.util import logging

logger = logging.getLogger(__name__)


def lead_to_repository(app: Sphinx, document: nodes.document) -> None:
    """Lead links to files that are no pages to the repository."""
    name = app.env.docname
    folder = os.path.dirname(name) if name != app.config.root_doc else ""
    for node in list(document.findall(addnodes.pending_xref)):
        path = os.path.normpath(os.path.join(folder, node["reftarget"]))
        if node["reftype"] == "myst" and not node["refdomain"] and (ROOT / path).exists():
            kind = "tree" if (ROOT / path).is_dir() else "blob"
            address = f"{app.config.repository}/{kind}/main/{path}"
            node.replace_self(nodes.reference("", "", *node.children, refuri=address))
        else:
            node.attributes.pop("refspecific", None)  # no guess: `resolve` knows which is meant


def resolve(app: Sphinx, env: Any, node: Any, content: Any) -> Any:
    """Link a name without its module (`ArrayLike`, `np.ndarray`), or leave it as text.

    A name that is nowhere in the code is a warning: it is misspelt, or was renamed.
    """
    if node.get("refdomain") != "py" or node["reftype"] not in ("obj", "class", "exc"):
        return None
    target, objects = node["reftarget"], env.domains.python_domain.objects
    written = [re.sub(r"^tg\.", "tensorgrad.", target), f"tensorgrad.{target}"]
    own = [name for name in written if name in objects] or _by_name().get(target, [])
    own = [n for n in own if n.rpartition(".")[0] == node.get("py:module")] or own
    if target in pages.NOTATION:
        address = app.builder.get_relative_uri(node["refdoc"], pages.SIGNATURES)
        return nodes.reference("", "", content, refuri=address, internal=True)
    if len(own) == 1:
        entry = objects[own[0]]
        address = app.builder.get_relative_uri(node["refdoc"], entry.docname)
        return nodes.reference("", "", content, refuri=f"{address}#{entry.node_id}", internal=True)
    outside = target.replace("np.", "numpy.", 1)
    for names in InventoryAdapter(env).main_inventory.values():
        for name in (outside, f"collections.abc.{target}", f"pathlib.{target}"):
            if name in names:
                return nodes.reference("", "", content, refuri=names[name].uri, internal=False)
    if not _is_known(target):
        logger.warning("%s is no name of the code", target, location=node)
    return content


def _is_known(name: str) -> bool:
    if name.endswith(".py"):
        return any(ROOT.glob(f"*/**/{name}"))
    first, *rest = re.sub(r"^(tg|tensorgrad)\.", "", name).removesuffix("()").split(".")
    module = sys.modules.get(f"{pages.LIBRARY}.{first}")
    if rest and module is not None:
        with suppress(AttributeError):
            reduce(getattr, rest, module)
            return True
        return False
    return {first, *rest} <= _identifiers() or first in _OUTSIDE


_OUTSIDE = {
    *("torch", "numpy", "np", "cupy", "dataclasses", "ForwardRef"),
    *("Compute", "INFINITY", "start_next_kernel"),  # in CUDA
}


@cache
def _identifiers() -> set[str]:
    """Return every name in the code of the library, without its docstrings."""
    identifiers = {*dir(builtins), *keyword.kwlist}
    for folder in (pages.LIBRARY, "models", "parallel"):
        for path in (ROOT / folder).rglob("*.py"):
            identifiers |= {path.parent.name, path.stem}
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                names = (getattr(node, part, None) for part in ("id", "attr", "arg", "name"))
                identifiers |= {name for name in names if isinstance(name, str)}
    return identifiers


@cache
def _by_name() -> dict[str, list[str]]:
    """Return the public paths of entries by what stands behind their last dot."""
    by_name: dict[str, list[str]] = {}
    for name in pages.entries():
        by_name.setdefault(name.rpartition(".")[2], []).append(name)
    return by_name


def setup(app: Sphinx) -> dict[str, Any]:
    """Connect the functions above."""
    app.add_config_value("repository", "", "html")
    app.connect("doctree-read", lead_to_repository)
    app.connect("missing-reference", resolve)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
