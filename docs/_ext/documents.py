"""Additions to Sphinx: the sources of the site, links into the repository, plain docstrings."""

from __future__ import annotations

import ast
import builtins
import importlib
import inspect
import json
import keyword
import os
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import cache, reduce
from pathlib import Path
from typing import Any

import glossary
import pages
import tables
from docutils import nodes
from docutils.utils.math import latex2mathml
from packaging.version import Version
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.ext.intersphinx import InventoryAdapter
from sphinx.pycode import ModuleAnalyzer
from sphinx.util import logging

ROOT = Path(__file__).parents[2]
logger = logging.getLogger(__name__)


# Sources: the documents where they lie in the repository, and the reference from the code.


def write_sources(app: Sphinx) -> None:
    """Copy the documents to the source folder and write the pages of the reference."""
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
    first["source"] = _with_terms(pages.NOTEBOOK, "".join(first["source"]))
    notebook.write_text(json.dumps(cells), encoding="utf-8")
    reference = source / "reference"
    reference.mkdir(exist_ok=True)
    for name, text in reference_pages():
        (reference / f"{name}.rst").write_text(text, encoding="utf-8")


def reference_pages() -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each page of the reference."""
    found = pages.pages()
    names = {page.module for page in found}
    parents = {name: parent for name in names if (parent := name.rpartition(".")[0]) in names}
    parents = {name: parent for name, parent in parents.items() if parent != pages.LIBRARY}
    top = sorted(names - parents.keys())
    yield (
        "index",
        "\n".join([*_title("Reference"), *_contents(top, hidden=True), *_table(_links(found))]),
    )
    for page in found:
        below = sorted(name for name, parent in parents.items() if parent == page.module)
        yield page.module, "\n".join(_page(page, _entries(), below))


def _links(found: list[pages.Page]) -> Iterator[tuple[str, str]]:
    for page in found:
        module = importlib.import_module(page.module)
        yield f":doc:`{page.module}`", pages.first_sentence(module)


def _page(page: pages.Page, values: dict[str, Any], below: list[str]) -> Iterator[str]:
    yield from _title(page.module)
    yield f".. automodule:: {page.module}\n   :no-members:\n"
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
        yield f".. {directive}:: {path}\n{options}"
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
        yield f"   * - {name}\n     - {_escaped(summary)}"
    yield ""


# Markdown.


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
    if name != pages.NOTEBOOK:
        text[0] = _with_terms(name, text[0])


def _with_terms(name: str, text: str) -> str:
    """Return a page with what readers search for as entries of the index, below its title."""
    terms = pages.searches(ROOT).get(name)
    if not terms:
        return text
    title, _, rest = text.partition("\n")
    main = ", ".join(f"! {term}" for term in terms)
    return f"{title}\n\n```{{index}} {main}\n```\n\n{rest}"


def adapt(app: Sphinx, document: nodes.document) -> None:
    """Lead links to files that are no pages to the repository; show strings as written."""
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
    for text in document.findall(addnodes.desc_sig_literal_string):
        if "'" in text.astext() and '"' not in text.astext():  # the quotes of the source
            text[:] = [nodes.Text(text.astext().replace("'", '"'))]


# The glossary.

_UNLINKED = (
    *(nodes.title, nodes.literal, nodes.math, nodes.reference, addnodes.pending_xref),
    *(nodes.entry, nodes.caption),
)


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


# The reference.


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
    found = {*dir(builtins), *keyword.kwlist}
    for folder in (pages.LIBRARY, "models", "parallel"):
        for path in (ROOT / folder).rglob("*.py"):
            found |= {path.parent.name, path.stem}
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                names = (getattr(node, part, None) for part in ("id", "attr", "arg", "name"))
                found |= {name for name in names if isinstance(name, str)}
    return found


@cache
def _by_name() -> dict[str, list[str]]:
    """Return the public paths of entries by what stands behind their last dot."""
    found: dict[str, list[str]] = {}
    for name in _entries():
        found.setdefault(name.rpartition(".")[2], []).append(name)
    return found


class _Text(str):
    """An annotation or default as the source has it."""

    __slots__ = ()
    __repr__ = str.__str__


def write_signature(
    app: Sphinx, what: str, name: str, value: Any, options: Any, args: Any, result: Any
) -> Any:
    """Return the signature with annotations as written, without evaluating them."""
    if what not in ("function", "method", "class", "exception") or args is None:
        return None
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return None
    parameters = list(signature.parameters.values())
    if what == "method" and parameters and parameters[0].name in ("self", "cls"):
        parameters = parameters[1:]
    shown = signature.replace(
        parameters=[_as_written(p) for p in parameters], return_annotation=inspect.Signature.empty
    )
    if what in ("class", "exception"):
        return str(shown), None
    return str(shown), _annotation(signature.return_annotation)


def _as_written(parameter: inspect.Parameter) -> inspect.Parameter:
    annotation, default = parameter.annotation, parameter.default
    if annotation is not parameter.empty:
        annotation = _Text(_annotation(annotation))
    if default is not parameter.empty and "<" in repr(default):
        default = _Text(getattr(default, "__name__", "..."))
    return parameter.replace(annotation=annotation, default=default)


def _annotation(annotation: Any) -> str | None:
    if annotation is inspect.Signature.empty:
        return None
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


_SECTION = re.compile(r"^(Args|Attributes|Returns|Yields|Raises|Example|Source):$", re.MULTILINE)
_ONE_LINE = re.compile(r"^(Source|Formula|Gradients?): +(.+(?:\n    .+)*)$", re.MULTILINE)
_HEADING = re.compile(r"[A-Z][\w ]*:$")
_CODE = re.compile(r"(`+[^`]*`+)")
_CODE_OF_TWO_LINES = re.compile(r"(?<=[\s(])`([^`\n]+\n[^`\n]+)`(?=[\s.,;:)])")
_NAME = re.compile(r"`[A-Za-z_][\w.]*(\(\))?`")


def write_docstring(
    app: Sphinx, what: str, name: str, value: Any, options: Any, lines: list[str]
) -> None:
    """Make reStructuredText of plain text: before napoleon reads its sections."""
    text = _ONE_LINE.sub(_section, "\n".join(lines))
    for argument in _arguments(value):  # no links to functions of the same name
        text = text.replace(f"`{argument}`", f"``{argument}``")
    start = _SECTION.search(text)
    end = start.start() if start else len(text)
    text = _literal_blocks(text[:end]) + text[end:]
    text = _CODE_OF_TWO_LINES.sub(r"``\1``", text)
    if what in ("property", "attribute"):
        text = f"\\ \n{text}"  # napoleon takes the first line up to a colon for its type
    lines[:] = [
        line if line.lstrip().startswith((">>>", "...")) else _escaped(line)
        for line in text.split("\n")
    ]


def _arguments(value: Any) -> list[str]:
    try:
        return list(inspect.signature(value).parameters)
    except (TypeError, ValueError):
        return []


def _section(match: re.Match[str]) -> str:
    title, text = match[1], re.sub(r"\s*\n\s*", " ", match[2])
    return f"{title}:\n    {text if title == 'Source' else f'``{text}``'}\n"


def _literal_blocks(text: str) -> str:
    """Mark indented blocks, and paragraphs with indented lines, as code."""
    paragraphs = text.split("\n\n")
    for i, paragraph in enumerate(paragraphs):
        lines = paragraph.split("\n")
        if lines[0].startswith("    "):
            paragraphs[i] = f"::\n\n{paragraph}"
        elif any(line.startswith("    ") for line in lines) and not _HEADING.match(lines[0]):
            paragraphs[i] = "::\n\n" + "\n".join(f"    {line}" for line in lines)
    return "\n\n".join(paragraphs)


def _escaped(text: str) -> str:
    """Escape what plain text means literally; mark as code what is in backquotes and no name."""
    parts = _CODE.split(text)
    parts[::2] = [re.sub(r"([*|])|(?<=\w)(_)(?!\w)", r"\\\1\2", part) for part in parts[::2]]
    parts[1::2] = [
        part if _NAME.fullmatch(part) else f"``{part.strip('`')}``" for part in parts[1::2]
    ]
    return "".join(parts)


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
    public = {f"{v.__module__}.{v.__name__}": path for path, v in _entries().items()}
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


@cache
def _entries() -> dict[str, Any]:
    return {path: value for page in pages.pages() for path, value in page.entries.items()}


# Formulas: MathML, which browsers draw without a script and with their own fonts.


def visit_math(self: Any, node: nodes.math) -> None:
    """Write a formula in a line."""
    self.body.append(latex2mathml.tex2mathml(node.astext()))
    raise nodes.SkipNode


def visit_math_block(self: Any, node: nodes.math_block) -> None:
    """Write a formula of its own."""
    self.body.append(latex2mathml.tex2mathml(node.astext(), as_block=True))
    raise nodes.SkipNode


# Versions: a folder each, and beside them a list and a page that leads to the newest.


def list_versions(app: Sphinx, error: Exception | None) -> None:
    """Write what the menu of versions lists, newest first, and the page above all versions."""
    if error is None:
        site = Path(app.outdir).parent
        shutil.rmtree(site / "jupyter_execute", ignore_errors=True)  # copies of notebooks
        names = (path.parent.name for path in site.glob("*/objects.inv"))
        versions = sorted(names, key=Version, reverse=True)
        (site / "versions.js").write_text(f"const VERSIONS = {json.dumps(versions)};\n")
        newest = f"{versions[0]}/index.html"
        (site / "index.html").write_text(
            f'<!DOCTYPE html>\n<html lang="en"><head><title>{app.config.project}</title>\n'
            f'<meta http-equiv="refresh" content="0; url={newest}"></head>\n'
            f'<body><a href="{newest}">{app.config.project} {versions[0]}</a></body></html>\n'
        )


def setup(app: Sphinx) -> dict[str, Any]:
    """Connect the functions above."""
    app.add_config_value("repository", "", "html")
    app.add_html_math_renderer("mathml", (visit_math, None), (visit_math_block, None))
    app.connect("builder-inited", write_sources)
    app.connect("source-read", add_contents)
    app.connect("doctree-read", adapt)
    app.connect("doctree-read", link_terms)
    app.connect("missing-reference", resolve)
    app.connect("autodoc-process-signature", write_signature)
    app.connect("autodoc-process-docstring", write_docstring, priority=400)
    app.connect("viewcode-find-source", find_source)
    app.connect("html-page-context", link_back)
    app.connect("build-finished", list_versions)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
