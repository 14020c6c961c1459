"""The library's source as data: which modules there are and what each imports."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = {
    "tensorgrad": "tensorgrad",
    "tensorgrad.models": "models",
    "tensorgrad.parallel": "parallel",
}


@dataclass(frozen=True)
class Import:
    """An imported module, where, whether importing the file runs it, or only type checkers do."""

    name: str
    line: int
    at_top: bool
    for_types: bool = False


@dataclass(frozen=True)
class Source:
    """A Python file of the library or of the examples."""

    module: str
    path: Path

    @cached_property
    def tree(self) -> ast.Module:
        """The file as Python reads it, when it is first asked for."""
        return ast.parse(self.path.read_text(encoding="utf-8"))

    def __str__(self) -> str:
        return str(self.path.relative_to(ROOT))


@cache
def library() -> tuple[Source, ...]:
    """Return every module of the package, through the folders and not through the links."""
    return tuple(
        source for package, folder in FOLDERS.items() for source in _read(ROOT / folder, package)
    )


@cache
def examples() -> tuple[Source, ...]:
    """Return every script of examples/."""
    return tuple(_read(ROOT / "examples", "examples"))


@cache
def module_names() -> frozenset[str]:
    """Return the name of every module and package of the library."""
    return frozenset(source.module for source in library())


@cache
def imports(source: Source) -> tuple[Import, ...]:
    """Return what a file imports, as a dotted name; of the library, the module and no further."""
    return tuple(_imports(source))


def _imports(source: Source) -> Iterator[Import]:
    typed = {
        child
        for node in ast.walk(source.tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for child in ast.walk(node)
    }
    for node, at_top in _walk(source.tree, True):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno, at_top, node in typed)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                yield Import("." * node.level + base, node.lineno, at_top, node in typed)
                continue
            for alias in node.names:
                whole = f"{base}.{alias.name}"
                inside = base in module_names() and whole not in module_names()
                yield Import(base if inside else whole, node.lineno, at_top, node in typed)


def _read(folder: Path, package: str) -> Iterator[Source]:
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder).with_suffix("").parts
        if any((folder / Path(*parts[:depth])).is_symlink() for depth in range(1, len(parts))):
            continue
        name = ".".join((package, *parts)).removesuffix(".__init__")
        yield Source(name, path)


def _walk(node: ast.AST, at_top: bool) -> Iterator[tuple[ast.AST, bool]]:
    yield node, at_top
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        at_top = False
    for child in ast.iter_child_nodes(node):
        yield from _walk(child, at_top)
