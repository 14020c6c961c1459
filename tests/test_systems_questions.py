"""The commands of docs/guides/systems-questions.md run at small sizes, and its plans are right."""

from __future__ import annotations

import csv
import re
import shlex
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from tensorgrad.cli import main
from tests.ranks import run_each
from tests.source_tree import ROOT

pytestmark = pytest.mark.slow

PAGE = ROOT / "docs" / "guides" / "systems-questions.md"
BLOCK = re.compile(r"^```(sh|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
QUESTIONS, CPU = PAGE.read_text(encoding="utf-8").split("\n## On a CPU\n")
IN_A_FOLDER = """
import os, sys
from tensorgrad.cli import main
os.chdir(sys.argv[1])
sys.exit(main(sys.argv[2:]))
"""


def commands(text: str) -> list[str]:
    """Return the commands of the blocks of a shell, one line each."""
    blocks = [block for kind, block in BLOCK.findall(text) if kind == "sh"]
    return "".join(blocks).replace("\\\n", " ").splitlines()


def name_of(command: str) -> tuple[str, ...]:
    """Return the program, and of `tensorgrad` and mpirun the words before the first option."""
    parts = shlex.split(re.sub(r"^mpirun (--bind-to none )?-n \d+ ", "mpirun ", command))
    end = next((i for i, part in enumerate(parts) if part.startswith("--")), len(parts))
    return tuple(parts[:end])


def run(command: str, folder: Path) -> None:
    """Run a command of the page in a folder.

    Raises:
        AssertionError: its exit status is not 0, or a case of its tables is not ok.
    """
    parts = shlex.split(command)
    assert parts[0] == "tensorgrad"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(parts[1:]) == 0
    check_tables(folder)


def check_tables(folder: Path) -> None:
    for table in folder.rglob("*.csv"):
        with table.open(newline="") as file:
            rows = list(csv.DictReader(file))
        assert rows
        assert all(row.get("status", "ok") == "ok" for row in rows)


@pytest.mark.parametrize(
    "command", [c for c in commands(CPU) if not c.startswith("mpirun")], ids=lambda c: c[:60]
)
def test_a_small_command_runs(command: str, tmp_path: Path) -> None:
    run(command, tmp_path)
    writes = name_of(command)[-1] != "plan"
    assert any(tmp_path.rglob("*.csv")) == writes


@pytest.mark.mpi
def test_the_small_commands_of_ranks_run(tmp_path: Path) -> None:
    script = tmp_path / "in_a_folder.py"
    script.write_text(IN_A_FOLDER)
    runs, folders = [], []
    for number, command in enumerate(c for c in commands(CPU) if c.startswith("mpirun")):
        launcher, n, ranks, program, *rest = shlex.split(command)
        assert (launcher, n, ranks, program) == ("mpirun", "-n", "2", "tensorgrad")
        folder = tmp_path / str(number)
        folder.mkdir()
        folders.append(folder)
        runs.append([folder, *rest])
    assert len(runs) > 3
    for result, folder in zip(run_each(script, 2, runs, tmp_path), folders, strict=True):
        assert result.returncode == 0, result.stderr
        check_tables(folder)
        assert any(folder.rglob("*.csv"))


def test_every_command_has_a_small_version() -> None:
    small = {name_of(command) for command in commands(CPU)}
    asked = {name_of(command) for command in commands(QUESTIONS)}
    assert len(asked) >= 11
    assert asked - small == set()


def plans() -> Iterator[tuple[str, list[str]]]:
    """Yield the commands of the planner, and the lines that the page quotes of their output."""
    blocks: list[tuple[str, str]] = [*BLOCK.findall(QUESTIONS), ("", "")]
    for (kind, block), (next_kind, next_block) in pairwise(blocks):
        for command in commands(f"```sh\n{block}```\n") if kind == "sh" else ():
            if name_of(command) == ("tensorgrad", "plan"):
                yield command, next_block.splitlines() if next_kind == "text" else []


def missing(command: str, quoted: list[str], capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return the quoted lines that the output of a plan does not have."""
    assert main(shlex.split(command)[1:]) == 0
    out = capsys.readouterr().out
    return [line for line in quoted if " ".join(line.split()) not in " ".join(out.split())]


def test_plans_are_quoted_as_they_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    found = list(plans())
    assert sum(len(quoted) > 0 for _, quoted in found) >= 4
    for command, quoted in found:
        assert missing(command, quoted, capsys) == []


def test_the_checks_would_notice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert missing("tensorgrad plan --dp 2", ["  total   1.23"], capsys) == ["  total   1.23"]
    with pytest.raises(AssertionError):
        run("tensorgrad plan --dp 0", tmp_path)
    with pytest.raises(AssertionError):
        run("tensorgrad bench profiler --preset none", tmp_path)
    (tmp_path / "found.csv").write_text("case,status\n1,error\n")
    with pytest.raises(AssertionError):
        run("tensorgrad plan", tmp_path)
    assert name_of("mpirun --bind-to none -n 2 tensorgrad bench comm --sizes 1") == (
        "mpirun", "tensorgrad", "bench", "comm",
    )  # fmt: skip
