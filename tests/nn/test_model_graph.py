"""Module.graph: nodes, edges and clusters of small models."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

import tensorgrad as tg
from tensorgrad import nn
from tensorgrad.core import instrument
from tensorgrad.models.gpt2 import GPT2, GPT2Config


def _checked(dot: str) -> list[tuple[str, str]]:
    """Return the edges, once all refer to nodes and all braces are closed."""
    assert dot.count("{") == dot.count("}")
    nodes = re.findall(r"^(n\d+) \[", dot, re.MULTILINE)
    assert len(set(nodes)) == len(nodes)
    edges = re.findall(r"^(n\d+) -> (n\d+)$", dot, re.MULTILINE)
    assert edges
    assert {end for edge in edges for end in edge} <= set(nodes)
    return edges


def test_two_layers_and_a_shared_one(tmp_path: Path) -> None:
    shared = nn.Linear(4, 4)
    found = nn.Sequential(shared, nn.ReLU(), shared).graph(tg.zeros((5, 4)))
    edges = _checked(found.dot)
    assert found.dot.count('label="0 Linear"') == 2
    assert found.dot.count("0.weight") == 1
    (weight,) = re.findall(r'(n\d+) \[label="0\.weight\\n\(4, 4\) float32"', found.dot)
    assert sum(start == weight for start, _ in edges) == 2
    (relu,) = re.findall(r'(n\d+) \[label="relu\\n\(5, 4\) float32"', found.dot)
    assert {start for start, _ in edges} >= {relu}
    assert {end for _, end in edges} >= {relu}
    found.save(tmp_path / "model.dot")
    assert (tmp_path / "model.dot").read_text() == found.dot


def test_gpt2() -> None:
    config = GPT2Config(vocab_size=64, context=8, layers=2, heads=2, width=16)
    dot = GPT2(config).graph(np.zeros((1, 8), "int32")).dot
    _checked(dot)
    assert dot.count("TransformerBlock") == 2
    assert "(1, 8, 16) float32" in dot


def test_errors_and_no_program(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(3, 2)
    with pytest.raises(tg.errors.ArgumentError, match="graph: inputs has length 0"):
        model.graph()
    with pytest.raises(tg.errors.ShapeError):
        model.graph(np.zeros((2, 5), "float32"))
    assert instrument.observer is None
    monkeypatch.setenv("PATH", "")
    assert model.graph(tg.zeros((1, 3)))._repr_svg_() is None
