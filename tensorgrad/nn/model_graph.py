"""`Module.graph`: the layers and ops of a forward pass as Graphviz text.

Tests: tests/nn/test_model_graph.py.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tensorgrad.core import instrument
from tensorgrad.core.errors import ArgumentError
from tensorgrad.core.modes import replaced

if TYPE_CHECKING:
    from tensorgrad.nn.module import Module


class ModelGraph:
    """The graph of a forward pass; a notebook shows it as a picture where Graphviz is installed.

    Args:
        dot: Graphviz text. Calls of layers are clusters, ops are boxes with the shape and dtype of
            their result, parameters and other inputs are ellipses.

    Attributes:
        dot: the text.

    Example:
        >>> graph: tg.nn.ModelGraph = tg.nn.Linear(3, 2).graph(tg.ones((1, 3)))
        >>> print(graph)
        digraph {
        node [shape=box]
        subgraph cluster_1 { label="Linear"
        ...
    """

    def __init__(self, dot: str) -> None:
        self.dot = dot

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the text to a file, for `dot -Tsvg model.dot -o model.svg`."""
        Path(path).write_text(self.dot, encoding="utf-8")

    def __repr__(self) -> str:
        return self.dot

    def _repr_svg_(self) -> str | None:
        """Return the picture; None without the program `dot`: a notebook then shows the text."""
        program = shutil.which("dot")
        if program is None:
            return None
        command = [program, "-Tsvg"]
        drawn = subprocess.run(command, input=self.dot.encode(), capture_output=True, check=True)
        return drawn.stdout.decode()


def draw(model: Module, inputs: Sequence[Any]) -> ModelGraph:
    """Return the graph of `model(*inputs)`."""
    if not inputs:
        raise ArgumentError("graph: inputs has length 0, expected what the model is called with")
    recorder = _GraphRecorder(model)
    with replaced(instrument, observer=recorder):
        model(*inputs)
    return ModelGraph("\n".join(["digraph {", *recorder.nodes, *recorder.edges, "}", ""]))


class _GraphRecorder(instrument.Observer):
    """Write clusters, nodes and edges."""

    def __init__(self, model: Module) -> None:
        self.nodes = ["node [shape=box]"]
        self.edges: list[str] = []
        self._layers = {id(module): name for name, module in model.named_modules()}
        self._parameters = {
            id(parameter.data): name for name, parameter in model.named_parameters()
        }
        self._sources: dict[int, str] = {}  # id of an array: its node
        self._kept: list[Any] = []  # the arrays, so that no id is used twice
        self._count = 0

    def layer(self, module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return `module.forward(*args, **kwargs)`, its ops in a cluster."""
        title = f"{self._layers.get(id(module), '')} {type(module).__name__}".strip()
        self._count += 1
        self.nodes.append(f"subgraph cluster_{self._count} {{ label={json.dumps(title)}")
        try:
            return module.forward(*args, **kwargs)
        finally:
            self.nodes.append("}")

    def op(
        self, name: str, output: Any, inputs: Sequence[Any], node: Any, saved: tuple[Any, ...]
    ) -> None:
        """Add an op, and an edge from each input."""
        arrays = [operand.data for operand in inputs if operand is not None]
        sources = [self._sources.get(id(array)) or self._leaf(array) for array in arrays]
        target = self._node(name, output, "box")
        self.edges += [f"{source} -> {target}" for source in sources]

    def further_outputs(self, outputs: Sequence[Any]) -> None:
        """Let the op noted last be the source of these arrays too."""
        for output in outputs:
            self._keep(output, f"n{self._count}")

    def _leaf(self, array: Any) -> str:
        """Add a parameter or another array that no op has computed."""
        return self._node(self._parameters.get(id(array), "input"), array, "ellipse")

    def _node(self, name: str, array: Any, shape: str) -> str:
        self._count += 1
        node = f"n{self._count}"
        label = json.dumps(f"{name}\n{array.shape} {array.dtype}")
        self.nodes.append(f"{node} [label={label}, shape={shape}]")
        self._keep(array, node)
        return node

    def _keep(self, array: Any, node: str) -> None:
        self._sources[id(array)] = node
        self._kept.append(array)
