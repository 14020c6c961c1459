"""Module.graph: nodes, edges and clusters of small models."""

from __future__ import annotations

import os
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
    assert repr(found) == found.dot
    found.save(tmp_path / "model.dot")
    assert (tmp_path / "model.dot").read_text() == found.dot


def test_gpt2() -> None:
    config = GPT2Config(vocab_size=64, context=8, layers=2, heads=2, width=16)
    dot = GPT2(config).graph(np.zeros((1, 8), "int32")).dot
    _checked(dot)
    assert dot.count("TransformerBlock") == 2
    assert "(1, 8, 16) float32" in dot


def test_the_text_of_a_small_layer_whole() -> None:
    assert nn.Linear(3, 2, bias=False).graph(tg.zeros((1, 3))).dot == (
        "digraph {\n"
        "node [shape=box]\n"
        'subgraph cluster_1 { label="Linear"\n'
        'n2 [label="input\\n(1, 3) float32", shape=ellipse]\n'
        'n3 [label="weight\\n(2, 3) float32", shape=ellipse]\n'
        'n4 [label="linear\\n(1, 2) float32", shape=box]\n'
        "}\n"
        "n2 -> n4\n"
        "n3 -> n4\n"
        "}\n"
    )


def test_both_results_of_an_op_come_from_it() -> None:
    dot = nn.TransformerBlock(4, 1).graph(tg.zeros((1, 2, 4))).dot
    added = re.findall(r'(n\d+) \[label="add_layer_norm', dot)[-1]
    up, down = re.findall(r'(n\d+) \[label="linear', dot)[-2:]
    assert {(added, up), (added, down)} <= set(_checked(dot))  # the normed values, the residual


def test_errors_and_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(3, 2)
    with pytest.raises(tg.errors.ArgumentError, match="graph: inputs has length 0"):
        model.graph()
    with pytest.raises(tg.errors.ShapeError):
        model.graph(np.zeros((2, 5), "float32"))
    assert instrument.observer is None
    graph = model.graph(tg.zeros((1, 3)))
    program = tmp_path / "dot"
    program.write_text('#!/bin/sh\necho "$1"\nexec cat\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert graph._repr_svg_() == f"-Tsvg\n{graph.dot}"
    monkeypatch.setenv("PATH", "")
    assert graph._repr_svg_() is None
