from __future__ import annotations

import ast
import re
from pathlib import Path

import numpy as np
import pytest

from examples import edge_of_stability
from tensorgrad.train.log import read_metrics
from tests.source_tree import ROOT

SIZES = "--layers 1 --heads 1 --width 8 --context 8 --vocab 300 --batch 2 --device cpu"


def test_it_draws_the_sharpness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    words = ["above", "below", "curve", "slope", "valley"]
    Path("text.txt").write_text(" ".join(rng.choice(words, 3000)))
    command = f"--data text.txt --out run --lr 0.25 --evaluate-every 2 --steps 2 {SIZES}"
    assert edge_of_stability.main(command.split()) == 0
    assert Path("run/edge.png").read_bytes().startswith(b"\x89PNG")
    records = read_metrics(Path("run/metrics.jsonl"))
    measured = {r["step"]: r["sharpness"] for r in records if "sharpness" in r}
    assert list(measured) == [0, 2]
    assert all(0 < value < 1e4 for value in measured.values())
    assert {r["threshold"] for r in records if "sharpness" in r} == {8.0}
    losses = [r["loss"] for r in records if "loss" in r]
    assert len(losses) == 2
    assert losses[-1] < losses[0]


def first_line(program: Path) -> str:
    return (ast.get_docstring(ast.parse(program.read_text())) or "").partition("\n")[0]


def test_the_readme_lists_every_program() -> None:
    text = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| \[`(\w+\.py)`\]\(\1\) \| (.+) \|$", text, re.MULTILINE)
    programs = sorted((ROOT / "examples").glob("*.py"))
    assert listed == [(path.name, first_line(path)) for path in programs]
    for link in re.findall(r"\]\(([^)]+)\)", text):
        assert (ROOT / "examples" / link).exists(), link
