"""The errors that signatures declare; `python -m tests.signatures` writes them to docstrings.

The `Raises` of a function that calls its check, `takes.NAME(...)`, begins with the errors that its
annotations declare. What the function itself raises follows.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tensorgrad.core.signature import Argument, Interval, Operand, Signatures, declared, limits
from tests.source_tree import ROOT

_HOLDS = {
    "Float": "does not hold floats", "Int": "does not hold integers", "Bool": "does not hold bools",
    "Real": "holds complex numbers", "Inexact": "holds neither floats nor complex numbers",
}  # fmt: skip
_WRITTEN = [  # entries as `raises` writes them
    re.compile(rf"DtypeError: [\w, ]+ (?:{'|'.join(_HOLDS.values())})[^.;]*\."),
    re.compile(r"ShapeError: \w+ is not \([^)]*\)(?:, \w+ (?:is )?not \([^)]*\))*\."),
    re.compile(r"ArgumentError: \w+ is not (?:\S+ or more|a finite number from .+|\S+ <= [^,]*)\."),
    re.compile(r"DeviceError: the operands are on different devices\."),
]


def checked() -> Iterator[tuple[Any, str]]:
    """Yield each module that declares signatures, with the name of each function that has one."""
    for path in sorted((ROOT / "tensorgrad").rglob("*.py")):
        if "= Signatures(globals()" in path.read_text():
            parts = path.relative_to(ROOT).with_suffix("").parts
            module = importlib.import_module(".".join(parts).removesuffix(".__init__"))
            for call in calls(module):
                yield module, call.func.attr  # type: ignore[attr-defined]


def calls(module: Any) -> list[ast.Call]:
    """Return the calls of checks, `takes.NAME(...)`, in a module."""
    tree = ast.parse(inspect.getsource(module))
    return [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and isinstance(getattr(module, node.func.value.id, None), Signatures)
    ]


def raises(function: Callable[..., Any]) -> list[str]:
    """Return the entries of `Raises` that a function's annotations declare."""
    arguments = declared(function)
    operands = [a for a in arguments if isinstance(a.takes, Operand)]
    entries = []
    dtypes = []
    for kind in dict.fromkeys(a.takes.kind for a in operands if a.takes.kind):
        names = [a.name for a in operands if a.takes.kind == kind]
        dtypes.append(f"{_either(names)} {_HOLDS[kind]}")
    if dtypes:
        entries.append(f"DtypeError: {', or '.join(dtypes)}.")
    shaped = [a for a in operands if a.takes.axes != "..."]
    if shaped:
        shapes = ", ".join(_shape(a) for a in shaped)
        entries.append(f"ShapeError: {shapes.replace(' not ', ' is not ', 1)}.")
    entries += [
        f"ArgumentError: {a.name} is not {limits(a.name, a.takes)}."
        for a in arguments
        if isinstance(a.takes, Interval)
    ]
    if len(operands) > 1:
        entries.append("DeviceError: the operands are on different devices.")
    return entries


def _either(names: list[str]) -> str:
    return " or ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else names[0]


def _shape(argument: Argument) -> str:
    axes = argument.takes.axes.split()
    return f"{argument.name} not ({', '.join(axes)}{',' if len(axes) == 1 else ''})"


def written(function: Callable[..., Any]) -> list[str]:
    """Return the entries of `Raises` in a docstring, each on one line."""
    doc = inspect.getdoc(function) or ""
    found = re.search(r"^Raises:\n((?:    .*\n?|\n)+)", doc, re.MULTILINE)
    if not found:
        return []
    entries = re.split(r"\n    (?=\w+(?:, \w+)*:)", "\n" + found[1].rstrip())
    return [" ".join(entry.split()) for entry in entries if entry.strip()]


def main() -> None:
    """Write the declared entries into the docstrings."""
    for module, name in checked():
        function = getattr(module, name)
        expected = raises(function)
        own = [e for e in written(function) if not any(p.fullmatch(e) for p in _WRITTEN)]
        if written(function) != [*expected, *own]:
            _write(module, function, [*expected, *own])
            print(f"{module.__name__}.{name}")


def _write(module: Any, function: Callable[..., Any], entries: list[str]) -> None:
    """Replace the entries of `Raises` in the docstring of a function."""
    path = Path(inspect.getsourcefile(module) or "")
    text = path.read_text()
    nodes = [n for n in ast.parse(text).body if isinstance(n, ast.FunctionDef)]
    node = next(n for n in nodes if n.name == function.__name__ and ast.get_docstring(n))
    doc = (ast.get_source_segment(text, node) or "").split('"""')[1]
    body = re.sub(r"\n\n?    Raises:\n(?:        .*\n)+", "\n", doc)
    place = re.search(r"^    (Source|Example):", body, re.MULTILINE)
    at = place.start() if place else body.rindex("\n") + 1
    wrapped = (
        textwrap.fill(
            entry, 100, initial_indent=" " * 8, subsequent_indent=" " * 12,
            break_long_words=False, break_on_hyphens=False,
        )
        for entry in entries
    )  # fmt: skip
    block = "".join(f"{entry}\n" for entry in ("    Raises:", *wrapped)) if entries else ""
    new = f"{body[:at].rstrip()}\n\n{block}"
    gap = "\n" if entries and place and place[1] == "Example" else ""
    path.write_text(text.replace(doc, f"{new}{gap}{body[at:]}", 1))


if __name__ == "__main__":
    main()
