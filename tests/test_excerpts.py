"""Excerpts of the source: what they begin and end with, and errors. test_results.py renders all."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.excerpts import excerpt
from tests.results import rendered
from tests.source_tree import ROOT

FILE = '''\
def first(
    a: int,
    b: int,
) -> int:
    """Return a sum."""
    if a:

        c = a
    else:
        c = b
    return b + c
d = 1
'''


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "a.py").write_text(FILE)
    return tmp_path / "a.py"


def test_a_block_ends_with_its_last_more_indented_line(path: Path) -> None:
    assert excerpt(path, "def first") == f"```py\n{FILE.removesuffix('d = 1' + chr(10))}```"


def test_an_excerpt_ends_at_the_given_line_and_loses_its_indentation(path: Path) -> None:
    found = excerpt(path, "b: int", "return b")
    assert found.splitlines()[1:3] == ["    b: int,", ") -> int:"]
    path.write_text("".join(f"    {line}\n" for line in FILE.splitlines()))
    assert excerpt(path, "a: int", "return b").splitlines()[1] == "    a: int,"
    assert excerpt(path, "def first").splitlines()[1] == "def first("


def test_a_block_of_cuda_ends_with_its_bracket(tmp_path: Path) -> None:
    path = tmp_path / "a.cu"
    path.write_text("struct A {\n" + "    int a;\n" * 7 + "};\n\nint b;\n")
    assert excerpt(path, "struct A") == "```cuda\nstruct A {\n" + "    int a;\n" * 7 + "};\n```"


@pytest.mark.parametrize(
    ("first", "last", "words"),
    [
        ("nothing", "", "a.py: 0 lines have 'nothing', expected one"),
        ("c = ", "", "a.py: 2 lines have 'c = ', expected one"),
        ("def first", "nothing", "no line after 'def first' has 'nothing'"),
        ("if a:", "", "the excerpt from 'if a:' has 3 lines, expected 8 to 30"),
        ("def first", "def first", "no line after"),
    ],
)
def test_lines_that_are_not_there_are_an_error(
    path: Path, first: str, last: str, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        excerpt(path, first, last)


def test_an_excerpt_is_rendered_anew() -> None:
    where = "tensorgrad/core/record.py from if mode.grad_enabled: to return Tensor(outputs)"
    block = rendered(f"<!-- excerpt {where} -->\nold\n<!-- end -->")
    assert block.startswith(f"<!-- excerpt {where} -->\n\n```py\nif mode.grad_enabled:\n    edges")
    assert block.endswith("\nreturn Tensor(outputs)\n```\n\n<!-- end -->")
    assert rendered(block) == block
    source = (ROOT / "tensorgrad" / "core" / "record.py").read_text(encoding="utf-8")
    assert all(line.strip() in source for line in block.splitlines()[3:-3])
