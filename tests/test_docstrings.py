"""Every public callable documents its arguments, its result and an example that runs."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil
import re
import sys
import types
import typing
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tensorgrad as tg

_OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
_SECTION = re.compile(r"^(Args|Attributes|Returns|Yields|Raises|Source|Example):", re.MULTILINE)
_NAMES = re.compile(r"^    (\*{0,2}\w+(?:, \*{0,2}\w+)*):", re.MULTILINE)
_SKIPPED_PARAMETERS = {"self", "cls"}


def _public(area: str = "") -> dict[str, Any]:
    """Return the public callables defined in the modules of a name or below, by full name."""
    found: dict[int, tuple[str, Any]] = {}
    for path in ("tensorgrad", *_modules()):
        module = importlib.import_module(path)
        for public in getattr(module, "__all__", ()):
            value = getattr(module, public)
            home = getattr(value, "__module__", None) or ""
            if callable(value) and not _is_typing(value) and f"{home}.".startswith(f"{area}."):
                name = getattr(value, "__name__", public)  # that of the op where it is an alias
                found.setdefault(id(value), (f"{home}.{name}", value))
    return dict(found.values())


@cache
def _modules() -> list[str]:
    modules = pkgutil.walk_packages(tg.__path__, f"{tg.__name__}.")
    return [module.name for module in modules if "._" not in module.name]


def _is_typing(value: Any) -> bool:
    """Whether a value only serves type checkers."""
    alias = isinstance(value, (types.GenericAlias, types.UnionType)) or typing.get_origin(value)
    return bool(alias) or getattr(value, "_is_protocol", False)


def _sections(text: str) -> dict[str, str]:
    """Return the text of each section of a docstring."""
    parts = _SECTION.split(text)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def _missing(public: str, value: Any) -> Iterator[str]:
    """Yield what the docstring of a public callable lacks."""
    sections = _sections(inspect.getdoc(value) or "")
    expected = _parameters(value)
    text = sections.get("Args", sections.get("Attributes", ""))
    documented = [name.lstrip("*") for line in _NAMES.findall(text) for name in line.split(", ")]
    if expected != documented:
        yield f"Args are {documented}, expected {expected}"
    if _returns(value) and not sections.keys() & {"Returns", "Yields"}:
        yield "no Returns"
    example = sections.get("Example", "")
    lines = [line for line in example.splitlines() if line.strip().startswith((">>>", "..."))]
    if not lines:
        yield "no Example"
    elif not any(re.search(rf"\b{re.escape(public)}\b", line) for line in lines):
        yield "the Example does not use it"
    elif len(example.splitlines()) - 1 <= len(lines) and "+SKIP" not in example:
        yield "the Example shows no value"


def _parameters(value: Any) -> list[str]:
    """Return the names of the parameters to document."""
    try:
        parameters = inspect.signature(value).parameters
    except (TypeError, ValueError):
        return []
    if isinstance(value, type) and issubclass(value, BaseException):
        return []
    return [
        name
        for name, parameter in parameters.items()
        if name not in _SKIPPED_PARAMETERS
        and not name.startswith("_")
        and parameter.annotation not in ("None", "Never")
    ]


_NOTHING = (None, "None", "NoReturn", "Iterator[None]", type(None))  # a context manager of nothing


def _returns(value: Any) -> bool:
    if isinstance(value, type):
        return False
    return getattr(value, "__annotations__", {}).get("return") not in _NOTHING


_NUMBER = re.compile(r"-?\d+\.\d*(?:e[+-]?\d+)?")


class _Checker(doctest.OutputChecker):
    """Compares floats to seven digits: the last ones differ between processors."""

    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        """Whether an example printed what it should."""
        if super().check_output(want, got, optionflags):
            return True
        expected, printed = ([float(x) for x in _NUMBER.findall(text)] for text in (want, got))
        if printed != pytest.approx(expected, rel=1e-7, abs=1e-12):
            return False
        texts = [_NUMBER.sub("0.0", text) for text in (want, got)]
        return super().check_output(texts[0], texts[1], optionflags)


class _Runner(doctest.DocTestRunner):
    """Collects the failures of examples as text."""

    def failures_of(self, public: str, value: Any) -> str:
        """Run the examples of a docstring; return what failed."""
        lines: list[str] = []
        finder = doctest.DocTestFinder(recurse=False)
        for test in finder.find(value, public, module=False, globs={"tg": tg, "np": np}):
            self.run(test, out=lines.append)
        return "".join(lines)


def _problems(area: str) -> Iterator[str]:
    for name, value in _public(area).items():
        public = name.rpartition(".")[2]
        for missing in _missing(public, value):
            yield f"{name}: {missing}"
        failed = _Runner(_Checker(), optionflags=_OPTIONS).failures_of(public, value)
        if failed:
            yield f"{name}: the Example fails:\n{failed}"


@pytest.mark.parametrize(
    ("got", "right"),
    [("[2.0, -3.0000000000000004]", True), ("[2.0, -3.001]", False), ("[2.0]", False)],
)
def test_examples_show_numbers_to_seven_digits(got: str, right: bool) -> None:
    assert _Checker().check_output("[2.0, -3.0]\n", f"{got}\n", _OPTIONS) is right


@pytest.mark.parametrize("area", [module.name for module in pkgutil.iter_modules(tg.__path__)])
def test_public_callables_document_arguments_result_and_an_example(
    area: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    problems = list(_problems(f"tensorgrad.{area}"))
    assert not problems, "\n".join(problems)


if __name__ == "__main__":
    import os
    import tempfile

    os.chdir(tempfile.mkdtemp())
    for chosen in sys.argv[1:] or ["tensorgrad"]:
        for problem in _problems(chosen):
            print(problem)
