"""Pages of source code: every name leads there, and back to its entry in the reference."""

from __future__ import annotations

import ast
import re
from typing import Any

import pages
from sphinx.application import Sphinx
from sphinx.pycode import ModuleAnalyzer


def find_source(app: Sphinx, module: str) -> Any:
    """Return a module's code and where its names are, also those that assignments define."""
    analyzer = ModuleAnalyzer.for_module(module)
    analyzer.find_tags()
    tags = dict(analyzer.tags)
    for statement in ast.parse(analyzer.code).body:
        if isinstance(statement, ast.Assign):
            place = ("def", statement.lineno, statement.end_lineno)
            for target in ast.walk(statement.targets[0]):
                if isinstance(target, ast.Name):
                    methods = [tag for tag in tags if tag.endswith(f".{target.id}")]
                    tags.setdefault(target.id, tags[methods[0]] if methods else place)
    return analyzer.code, tags


def link_back(app: Sphinx, page: str, template: str, context: dict[str, Any], tree: Any) -> None:
    """Lead from the source of an entry to the page of its public name."""
    if not page.startswith("_modules/"):
        return
    module = page.removeprefix("_modules/").replace("/", ".")
    public = {f"{v.__module__}.{v.__name__}": path for path, v in pages.entries().items()}
    objects = app.env.domains.python_domain.objects

    def link(match: re.Match[str]) -> str:
        name, _, member = match[1].partition(".")
        path = ".".join(filter(None, [public.get(f"{module}.{name}"), member]))
        if path not in objects:
            return ""
        address = app.builder.get_relative_uri(page, objects[path].docname)
        return f'<a class="viewcode-back" href="{address}#{path}">[docs]</a>'

    context["body"] = re.sub(
        r'(?<=<div class="viewcode-block" id=")([^"]+)(">\s*)<a class="viewcode-back"[^>]*>.*?</a>',
        lambda match: f"{match[1]}{match[2]}{link(match)}",
        context["body"],
        flags=re.DOTALL,
    )


def setup(app: Sphinx) -> dict[str, Any]:
    """Connect the functions above."""
    app.connect("viewcode-find-source", find_source)
    app.connect("html-page-context", link_back)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
