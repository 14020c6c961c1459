"""The package's exports: the documented names and nothing else."""

from __future__ import annotations

import ast
import importlib
import json
import re
import subprocess
import sys
from typing import Any

import pytest

import tensorgrad
from tensorgrad import errors
from tests.source_tree import ROOT, library

SOURCES = {source.module: source for source in library()}
# The root's docstring lists them; those of models are imported from the modules themselves.
DOCUMENTED = set(
    re.findall(r"\w+", (tensorgrad.__doc__ or "").partition("submodules:")[2].partition("each")[0])
) - {"and", "what"}
PUBLIC = ["tensorgrad", "tensorgrad.nn.init", "tensorgrad.nn.functional"]
PUBLIC += [f"tensorgrad.{name}" for name in sorted(DOCUMENTED)]
PUBLIC += sorted(name for name in SOURCES if name.startswith("tensorgrad.models."))


def python(script: str) -> Any:
    command = [sys.executable, "-W", "error", "-c", f"import json\n{script}"]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def defined(module: str) -> set[str]:
    """Name the classes and functions of a module."""
    kinds = (ast.FunctionDef, ast.ClassDef)
    return {node.name for node in SOURCES[module].tree.body if isinstance(node, kinds)}


def from_elsewhere(module: str) -> set[str]:
    """Name what a module imports from other libraries, anywhere outside its functions."""
    return {
        (alias.asname or alias.name).partition(".")[0]
        for statement in SOURCES[module].tree.body
        for node in ast.walk(statement)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
        if not (getattr(node, "module", None) or alias.name).startswith("tensorgrad")
    }


def test_the_documented_submodules_exist() -> None:
    assert {"autograd", "nn", "errors", "io", "models"} <= DOCUMENTED
    assert {f"tensorgrad.{name}" for name in DOCUMENTED} <= set(SOURCES)


def test_the_root_shows_the_public_names_alone() -> None:
    shown = python("import tensorgrad; print(json.dumps(dir(tensorgrad)))")
    names = {name for name in shown if not name.startswith("_")}
    assert names == {*tensorgrad.__all__, *DOCUMENTED}
    assert len(set(tensorgrad.__all__)) == len(tensorgrad.__all__)


def test_submodules_load_at_their_first_use_and_completely() -> None:
    later = sorted({"data", "models", "parallel", "testing", "train"} & DOCUMENTED)
    script = f"""
import sys, tensorgrad as tg
early = [name for name in {later} if f"tensorgrad.{{name}}" in sys.modules]
first = [tg.models.GPT2.__module__, "tensorgrad.data" in sys.modules]
modules = [getattr(tg, name) for name in {sorted(DOCUMENTED)}]
missing = [(str(m), name) for m in modules for name in dir(m) if not hasattr(m, name)]
print(json.dumps([early, first, len(modules), missing]))
"""
    expected = [[], ["tensorgrad.models.gpt2", False], len(DOCUMENTED), []]
    assert (len(later), python(script)) == (5, expected)


def test_models_has_the_models_of_its_modules() -> None:
    models = tensorgrad.models
    assert {getattr(models, name).__name__ for name in set(models.__all__) - {"PRESETS"}} == set(
        models.__all__
    ) - {"PRESETS"}
    classes = {
        name
        for module in ("gpt2", "transformer_lm", "sentiment", "translation", "language_model")
        for name, value in vars(getattr(models, module)).items()
        if isinstance(value, type) and issubclass(value, tensorgrad.nn.Module)
    }
    assert classes >= {"GPT2", "TransformerLM", "TranslationModel", "MeanClassifier"}
    assert {n for n in classes if not n.startswith("_")} - {"Module"} <= set(models.__all__)
    with pytest.raises(AttributeError, match=r"'tensorgrad\.models' has no attribute 'GPT3'"):
        models.GPT3  # type: ignore[attr-defined]  # noqa: B018


def test_inner_modules_can_still_be_imported() -> None:
    script = "import tensorgrad, tensorgrad.ops.philox\nfrom tensorgrad import core\n"
    assert python(f"{script}print(json.dumps(hasattr(tensorgrad, 'Path')))") is False


@pytest.mark.parametrize("module", PUBLIC)
def test_a_star_import_brings_what_the_library_defines(module: str) -> None:
    names: dict[str, Any] = {}
    exec(f"from {module} import *", names)
    assert set(names) & from_elsewhere(module) == set()
    if defined(module):
        assert set(names) - {"__builtins__"} == set(importlib.import_module(module).__all__)


def test_type_variables_are_private() -> None:
    variables = [
        f"{source}: {node.targets[0].id}"
        for source in SOURCES.values()
        for node in source.tree.body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.Call)
        and ast.unparse(node.value.func) in ("TypeVar", "ParamSpec")
    ]
    assert len(variables) > 2
    assert [name for name in variables if ": _" not in name] == []


def test_the_name_of_a_class_has_one_meaning() -> None:
    """Private names count too; a struct that crosses to CUDA is declared once in structs.py."""
    classes = [
        (node.name.lstrip("_"), str(source))
        for source in SOURCES.values()
        for node in ast.walk(source.tree)
        if isinstance(node, ast.ClassDef)
    ]
    crossing = defined("tensorgrad.kernels.structs")
    aliases = set()
    for path in sorted((ROOT / "tensorgrad").rglob("*.cu*")):
        text = re.sub("//.*", "", path.read_text(encoding="utf-8"))
        aliases |= {(name, path.name) for name in re.findall(r"\busing (\w+) =", text)}
        structs = re.findall(r"\b(?:struct|enum) (?:\w+\([^)]*\) )?(\w+)(?: : [^;{]*)? {", text)
        classes += [(name, path.name) for name in structs if name not in crossing]
    names = [name for name, _ in classes]
    assert {"MatmulOperand", "Node", "OnlineSoftmax"} <= set(names)
    assert [where for where in classes if names.count(where[0]) > 1] == []
    assert [where for where in aliases if where[0] in names] == []


def test_every_error_is_public() -> None:
    assert set(errors.__all__) == defined("tensorgrad.core.errors")
    assert {getattr(errors, name).__module__ for name in errors.__all__} == {"tensorgrad.errors"}


@pytest.mark.parametrize("name", ["backend", "dtypes", "errors"])
def test_public_modules_of_the_core_are_one_module(name: str) -> None:
    public = importlib.import_module(f"tensorgrad.{name}")
    assert public is importlib.import_module(f"tensorgrad.core.{name}")
    assert public is getattr(tensorgrad, name)
