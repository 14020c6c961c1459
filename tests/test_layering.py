from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.layers import LAYERS, PICTURE, layer_of, picture
from tests.source_tree import ROOT, Source, examples, imports, library, module_names

RUN_TIME = {"numpy", "ml_dtypes", "tqdm", "safetensors", "tokenizers", "cyclopts"}
ONLY_IN = {
    "mpi4py": {"tensorgrad.parallel.comm.mpi_nccl"},
    "cupy.cuda.nccl": {"tensorgrad.parallel.comm.mpi_nccl"},
    "cupyx.distributed": set(),
    "torch": set(),
    "triton": set(),
    "transformers": set(),
    "pickle": set(),  # whoever loads a pickle runs its code
}
EMPTY_NAMES = {"utils", "util", "helpers", "helper", "common", "misc"}


@cache
def edges() -> tuple[tuple[str, str, str], ...]:
    """Return (importing module, imported module, place) of every import that may run.

    Imports inside functions count too.
    """
    return tuple(_edges())


def _edges() -> Iterator[tuple[str, str, str]]:
    for source in (*library(), *examples()):
        for found in imports(source):
            inside = found.name.split(".")[0] in {"tensorgrad", "examples"}
            if inside and not found.for_types:
                yield source.module, found.name, f"{source}:{found.line}"


def upward(given: Iterable[tuple[str, str, str]]) -> list[str]:
    """Return the imports of a higher layer."""
    return [
        f"{place}: {upper} imports {lower}"
        for upper, lower, place in given
        if layer_of(lower) > layer_of(upper)
    ]


def cycles(given: Iterable[tuple[str, str, str]]) -> list[str]:
    """Return the imports that lead back to the module that has them."""
    imported: dict[str, list[tuple[str, str]]] = {}
    for upper, lower, place in given:
        imported.setdefault(upper, []).append((lower, place))

    @cache
    def reached(start: str) -> frozenset[str]:
        seen, stack = {start}, [start]
        while stack:
            for lower, _ in imported.get(stack.pop(), []):
                if lower not in seen:
                    seen.add(lower)
                    stack.append(lower)
        return frozenset(seen)

    return [
        f"{place}: {upper} imports {lower}, which leads back to it"
        for upper, found in imported.items()
        for lower, place in found
        if upper in reached(lower)
    ]


def test_the_modules_are_found() -> None:
    assert {"tensorgrad.core.backend", "tensorgrad.models", "tensorgrad.parallel"} <= module_names()
    assert not any(name.startswith("tensorgrad.models.models") for name in module_names())
    assert len(edges()) > 500


def test_every_module_belongs_to_a_layer() -> None:
    for source in (*library(), *examples()):
        layer_of(source.module)
    with pytest.raises(LookupError, match=r"tensorgrad\.leftover belongs to no layer"):
        layer_of("tensorgrad.leftover")
    names = {source.module for source in library()}
    listed = {part for parts in LAYERS.values() for part in parts if part != "examples"}
    assert {f"tensorgrad.{part}".rstrip(".") for part in listed} <= names


def test_imports_go_down() -> None:
    assert upward(edges()) == []


def test_there_are_no_cycles() -> None:
    assert cycles(edges()) == []


def test_a_wrong_import_is_found() -> None:
    wrong = ("tensorgrad.core.backend", "tensorgrad.nn.linear", "backend.py:1")
    assert upward([*edges(), wrong]) == [
        "backend.py:1: tensorgrad.core.backend imports tensorgrad.nn.linear"
    ]
    back = ("tensorgrad.core.dtypes", "tensorgrad.core.backend", "dtypes.py:1")
    where = "dtypes.py:1: tensorgrad.core.dtypes imports tensorgrad.core.backend"
    assert f"{where}, which leads back to it" in cycles([*edges(), back])


def test_imports_inside_functions_count(tmp_path: Path) -> None:
    path = tmp_path / "later.py"
    path.write_text("def f():\n    from tensorgrad.ops import reduce\n    import cupy\n")
    found = imports(Source("tensorgrad.later", path))
    assert [(one.name, one.at_top) for one in found] == [
        ("tensorgrad.ops.reduce", False),
        ("cupy", False),
    ]
    assert any(name == "tensorgrad.ops.methods" for name, *_ in edges())
    inside = {i.name for s in library() for i in imports(s) if not i.at_top}
    assert {lower for _, lower, _ in edges()} & inside


def core() -> list[Source]:
    return [s for s in library() if f"{s.module}.".startswith("tensorgrad.core.")]


def test_the_core_knows_no_op_or_kernel() -> None:
    wrong = [
        f"{source}:{found.line}: {found.name}"
        for source in core()
        for found in imports(source)
        if found.name.startswith("tensorgrad")
        and not f"{found.name}.".startswith(("tensorgrad.core.", "tensorgrad.startup."))
    ]
    assert wrong == []


def _length(node: ast.Module | ast.FunctionDef) -> int:
    """Return the lines without docstrings."""
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef
    first = [n.body[0] for n in ast.walk(node) if isinstance(n, kinds) and ast.get_docstring(n)]
    end = node.body[-1].end_lineno or 0
    begin = node.lineno if isinstance(node, ast.FunctionDef) else 1
    return end - begin + 1 - sum((e.end_lineno or 0) - e.lineno + 1 for e in first)


def test_the_core_is_read_in_one_sitting() -> None:
    assert 1500 < sum(_length(source.tree) for source in core()) <= 2500
    functions = [n for s in core() for n in ast.walk(s.tree) if isinstance(n, ast.FunctionDef)]
    assert [f.name for f in functions if _length(f) > 50] == []


def test_the_page_about_the_core_has_its_files_and_few_concepts() -> None:
    page = (ROOT / "docs" / "chapters" / "core.md").read_text(encoding="utf-8")
    files = [str(s) for s in core() if s.path.stem != "__init__"]
    assert [file for file in files if f"| `{file}` |" not in page] == []
    tables = re.findall(r"\| concept \|.*\n\|[-|]+\n((?:\|.*\n)+)", page)
    cpu, gpu = (table.count("\n") for table in tables)
    assert cpu <= 28
    assert cpu + gpu <= 36
    classes = {"Tensor", "Node", "Output", "Gradient", "LeafGradient", "Recompute", "Early", "Loan"}
    assert [name for name in classes if f"\n| {name} |" not in page] == []


def test_ops_launch_no_kernels() -> None:
    wrong = [
        f"{source}:{found.line}"
        for source in library()
        if source.module.startswith(("tensorgrad.ops", "tensorgrad.nn", "tensorgrad.optim"))
        for found in imports(source)
        if found.name.startswith("tensorgrad.kernels.loader")
    ]
    assert wrong == []


def test_the_picture_of_the_layers_is_up_to_date() -> None:
    assert PICTURE.read_text(encoding="utf-8") == picture(), "run python -m tests.layers"


def test_imports_are_absolute() -> None:
    wrong = [
        f"{source}:{found.line}: {found.name}"
        for source in (*library(), *examples())
        for found in imports(source)
        if found.name.startswith((".", "models", "parallel", "tests"))
    ]
    assert wrong == []


def test_each_optional_dependency_stays_where_it_belongs() -> None:
    wrong = [
        f"{source}:{found.line}: {found.name}"
        for source in library()
        for found in imports(source)
        for package, places in ONLY_IN.items()
        if f"{found.name}.".startswith(f"{package}.") and source.module not in places
    ]
    wrong += [
        f"{source}:{node.lineno}: .nccl"
        for source in library()
        if source.module not in ONLY_IN["cupy.cuda.nccl"]
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Attribute) and node.attr == "nccl"
    ]
    assert wrong == []


# Calls that make something of a file that anyone may have written, and the module of each.
READERS = {
    "json.load": "tensorgrad.io.readers",
    "json.loads": "tensorgrad.io.readers",
    "json.JSONDecoder": "tensorgrad.io.readers",
    "np.load": "tensorgrad.io.readers",
    "np.memmap": "tensorgrad.io.readers",
    "np.fromfile": "tensorgrad.io.readers",
    "np.loadtxt": "tensorgrad.io.readers",
    "np.genfromtxt": "tensorgrad.io.readers",
    "np.lib.format.read_magic": "tensorgrad.io.readers",
    "np.lib.format.read_array_header_1_0": "tensorgrad.io.readers",
    "np.lib.format.read_array": "tensorgrad.io.readers",
    "np.lib.format.open_memmap": "tensorgrad.io.readers",
    "safe_open": "tensorgrad.io.weights",
    "load_file": "tensorgrad.io.weights",
    "tokenizers.Tokenizer.from_str": "tensorgrad.data.tokenizer_file",
    "tokenizers.Tokenizer.from_file": "tensorgrad.data.tokenizer",
}
# They read no file, but what other processes of the same run send.
READ_MESSAGES = {
    *("tensorgrad.parallel.comm.collectives", "tensorgrad.parallel.comm.mpi_nccl"),
    *("tensorgrad.parallel.comm.watchdog_client", "tensorgrad.parallel.comm.watchdog"),
    "tensorgrad.bench.processes",
}


def test_files_are_read_in_one_place() -> None:
    called = [
        (ast.unparse(node.func).replace("numpy.", "np."), source, node.lineno)
        for source in (*library(), *examples())
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Call) and source.module not in READ_MESSAGES
    ]
    wrong = [
        f"{source}:{line}: {name}"
        for name, source, line in called
        if source.module != READERS.get(name, source.module)
    ]
    wrong += [
        f"{source}:{found.line}: {found.name}"
        for source in (*library(), *examples())
        for found in imports(source)
        if found.name.startswith(("json.", "numpy.lib")) or found.name == "numpy.load"
    ]
    assert wrong == []
    assert {"json.loads", "np.lib.format.read_magic", "safe_open"} <= {name for name, *_ in called}


def test_importing_a_module_needs_only_the_run_time_dependencies() -> None:
    allowed = RUN_TIME | {"tensorgrad"} | sys.stdlib_module_names
    wrong = [
        f"{source}:{found.line}: {found.name}"
        for source in library()
        for found in imports(source)
        if found.at_top
        and found.name.split(".")[0] not in allowed
        and (source.module, found.name) != ("tensorgrad.core.backend", "cupy")
    ]
    assert wrong == []


def test_the_public_parts_of_modules_are_documented() -> None:
    assert [f"{s}: {name}" for s in library() for name in _undocumented(s.tree, "module")] == []


def _undocumented(
    node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef, name: str
) -> Iterator[str]:
    if ast.get_docstring(node) is None:
        yield name
    if isinstance(node, ast.Module | ast.ClassDef):
        for child in node.body:
            if (
                isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
                and not child.name.startswith("_")
                and not _is_overload(child)
            ):
                yield from _undocumented(child, child.name)


def _is_overload(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(isinstance(d, ast.Name) and d.id == "overload" for d in node.decorator_list)


def test_the_library_prints_nothing() -> None:
    lines = [
        f"{source}:{node.lineno}"
        for source in library()
        if not _is_command(source)
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "print"
    ]
    assert lines == []


def _is_command(source: Source) -> bool:
    return source.module.startswith("tensorgrad.cli") or any(
        isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'"
        for node in source.tree.body
    )


def written_by_hand() -> list[Path]:
    folders = ("tensorgrad", "models", "parallel", "examples", "tests")
    return sorted(
        path
        for folder in folders
        for suffix in (".py", ".cu", ".cuh")
        for path in (ROOT / folder).rglob(f"*{suffix}")
    )


def test_names_of_files_say_what_is_in_them() -> None:
    assert [str(path) for path in written_by_hand() if path.stem in EMPTY_NAMES] == []


def test_lines_of_kernels_fit_into_100_columns() -> None:
    kernels = sorted((ROOT / "tensorgrad" / "kernels").rglob("*.cu*"))
    assert len(kernels) > 30
    assert not [
        f"{path.name}:{number}"
        for path in kernels
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if len(line) > 100
    ]


def test_tests_that_a_source_names_are_there() -> None:
    named = {
        (str(path.relative_to(ROOT)), test)
        for path in written_by_hand()
        if not path.is_relative_to(ROOT / "tests")
        for test in re.findall(r"tests/[\w/]+\.py", path.read_text(encoding="utf-8"))
    }
    assert len(named) > 10
    assert sorted(each for each in named if not (ROOT / each[1]).is_file()) == []
