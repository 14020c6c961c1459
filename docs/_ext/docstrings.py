"""Docstrings and signatures: reStructuredText of plain docstrings, annotations as written."""

from __future__ import annotations

import inspect
import re
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx


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
        line if line.lstrip().startswith((">>>", "...")) else escaped(line)
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


def escaped(text: str) -> str:
    """Escape what plain text means literally; mark as code what is in backquotes and no name."""
    parts = _CODE.split(text)
    parts[::2] = [re.sub(r"([*|])|(?<=\w)(_)(?!\w)", r"\\\1\2", part) for part in parts[::2]]
    parts[1::2] = [
        part if _NAME.fullmatch(part) else f"``{part.strip('`')}``" for part in parts[1::2]
    ]
    return "".join(parts)


def keep_quotes(app: Sphinx, document: nodes.document) -> None:
    """Show the strings of signatures with the quotes of the source."""
    for text in document.findall(addnodes.desc_sig_literal_string):
        if "'" in text.astext() and '"' not in text.astext():
            text[:] = [nodes.Text(text.astext().replace("'", '"'))]


def setup(app: Sphinx) -> dict[str, Any]:
    """Connect the functions above."""
    app.connect("autodoc-process-signature", write_signature)
    app.connect("autodoc-process-docstring", write_docstring, priority=400)
    app.connect("doctree-read", keep_quotes)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
