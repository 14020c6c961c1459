"""The commands of docs/guides/systems-questions.md run at small sizes, and its plans are right."""

from __future__ import annotations

import csv
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from tensorgrad.cli import main
from tests.ranks import run_ranks
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
    if parts[0] == "mpirun":
        ranks, parts = int(parts[2]), parts[3:]
        if parts[:2] == ["python", "-m"]:
            run_ranks(parts[2], ranks, parts[3:])
        else:
            assert parts[0] == "tensorgrad"
            script = folder / "in_a_folder.py"
            script.write_text(IN_A_FOLDER)
            run_ranks(script, ranks, [folder, *parts[1:]])
    elif parts[0] == "python":
        path = {**os.environ, "PYTHONPATH": str(ROOT)}
        program = [sys.executable, str(ROOT / parts[1]), *parts[2:]]
        done = subprocess.run(
            program, cwd=folder, env=path, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stdout + done.stderr
    else:
        assert parts[0] == "tensorgrad"
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            assert main(parts[1:]) == 0
    for table in folder.rglob("*.csv"):
        with table.open(newline="") as file:
            rows = list(csv.DictReader(file))
        assert rows
        assert all(row.get("status", "ok") == "ok" for row in rows)


def small_commands() -> Iterator[object]:
    for command in commands(CPU):
        marks = [pytest.mark.mpi] if command.startswith("mpirun") else []
        yield pytest.param(command, id=command[:60], marks=marks)


@pytest.mark.parametrize("command", list(small_commands()))
def test_a_small_command_runs(command: str, tmp_path: Path) -> None:
    run(command, tmp_path)
    writes = name_of(command)[-1] not in ("plan", "data", "examples/bench/profiler.py")
    assert any(tmp_path.rglob("*.csv")) == writes


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
        run("python examples/bench/profiler.py --preset none", tmp_path)
    (tmp_path / "found.csv").write_text("case,status\n1,error\n")
    with pytest.raises(AssertionError):
        run("tensorgrad plan", tmp_path)
    assert name_of("mpirun --bind-to none -n 2 tensorgrad bench comm --sizes 1") == (
        "mpirun", "tensorgrad", "bench", "comm",
    )  # fmt: skip
