"""The worked changes of CONTRIBUTING.md: each is applied to a copy, and its tests run there."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks import missing
from tests.source_tree import ROOT

pytestmark = pytest.mark.slow

TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
SECTIONS = {m[1]: m[2] for m in re.finditer(r"^## (Add .+?)\n(.*?)(?=^## )", TEXT, re.M | re.S)}
FILE = re.compile(r"^```\w+ (\S+/\S+)\n(.*?)^```$", re.M | re.S)
COMMAND = re.compile(r"^```sh\n(python .*?)\n```$", re.M | re.S)
CHANGES = {title: text for title, text in SECTIONS.items() if FILE.search(text)}
NUMBERS = ("No", "One", "Two", "Three", "Four", "Five")


def copy_of_the_repository(folder: Path) -> Path:
    """Copy what is tracked or new, with the links."""
    found = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    for name in found.strip("\0").split("\0"):
        if (ROOT / name).is_symlink() or (ROOT / name).exists():
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target, follow_symlinks=False)
    for compiled in ROOT.glob("*/**/__pycache__"):  # so that the copy need not be
        if (target := folder / compiled.relative_to(ROOT)).parent.is_dir():
            shutil.copytree(compiled, target, dirs_exist_ok=True)
    return folder


def test_the_changes_are_found() -> None:
    assert len(CHANGES) == 5


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a git checkout")
@pytest.mark.parametrize("title", CHANGES)
def test_a_worked_change_passes_its_tests(title: str, tmp_path: Path) -> None:
    text = CHANGES[title]
    if "parallel/" in text and missing():
        pytest.skip(str(missing()))
    files, (command,) = FILE.findall(text), COMMAND.findall(text)
    assert text.strip().startswith(f"{NUMBERS[len(files)]} files"), f"{len(files)} files"
    copy = copy_of_the_repository(tmp_path)
    for name, block in files:
        path = copy / name
        before = path.read_text(encoding="utf-8") + "\n\n" if path.exists() else ""
        path.write_text(before + block, encoding="utf-8")
    result = subprocess.run(
        [sys.executable, *shlex.split(command)[1:], "-p", "no:cacheprovider"],
        cwd=copy,
        env={
            **{k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")},
            "PYTHONPATH": str(copy),
        },
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert re.search(r"[1-9]\d* passed", result.stdout), result.stdout
