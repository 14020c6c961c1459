"""`Module.summary`: parameters, shapes, memory and FLOPs of a model, layer by layer.

Tests: tests/nn/test_summary.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from tensorgrad.core import instrument
from tensorgrad.core.backend import Shape
from tensorgrad.core.modes import replaced
from tensorgrad.ops.work import forward_flops

if TYPE_CHECKING:
    from tensorgrad.nn.module import Module

_HEADER = ("layer", "kind", "output", "parameters", "FLOPs")


class LayerSummary(NamedTuple):
    """A module of a model, with all inside of it.

    Attributes:
        name: as in `named_modules`; "" for the model itself.
        kind: the class.
        shape: of the result of its last call; None where it was not called, as a part of a fused
            op of a module above, or returned no tensor.
        parameters: elements, each parameter counted once.
        flops: of the matrix products in all its calls.
    """

    name: str
    kind: str
    shape: Shape | None
    parameters: int
    flops: float


class Summary:
    """List the layers and parameters of a model; `print` shows them as a table.

    `Module.summary` makes it.

    Args:
        model: the model.
        recorder: what a forward pass of the model has told; empty where there was none.

    Attributes:
        layers: the modules, parents first.
        parameters: elements of all parameters.
        trained: those of them that require a gradient.
        parameter_bytes, buffer_bytes: memory of parameters and of buffers.
        result_bytes: memory of the results of all ops of the forward pass.
        flops: of the matrix products of the forward pass; a multiplication and an addition are two.

    Example:
        >>> model = tg.nn.Sequential(tg.nn.Linear(3, 8), tg.nn.ReLU(), tg.nn.Linear(8, 2))
        >>> summary: tg.nn.Summary = model.summary(tg.ones((5, 3)))
        >>> summary.parameters, summary.flops  # 3 * 8 + 8 + 8 * 2 + 2; 2 * 5 * (3 * 8 + 8 * 2)
        (50, 400.0)
    """

    def __init__(self, model: Module, recorder: _Recorder) -> None:
        self.layers = [
            LayerSummary(
                name,
                type(module).__name__,
                recorder.shapes.get(id(module)),
                sum(parameter.size for parameter in module.parameters()),
                recorder.flops.get(id(module), 0.0),
            )
            for name, module in model.named_modules()
        ]
        parameters = list(model.parameters())
        self.parameters = sum(parameter.size for parameter in parameters)
        self.trained = sum(parameter.size for parameter in parameters if parameter.requires_grad)
        self.parameter_bytes = sum(int(parameter.data.nbytes) for parameter in parameters)
        self.buffer_bytes = sum(int(buffer.data.nbytes) for buffer in model.buffers())
        self.result_bytes = recorder.result_bytes
        self.flops = recorder.all_flops

    def __str__(self) -> str:
        """Return the table, and the totals below it."""
        rows = [
            (
                "  " * layer.name.count(".") * bool(layer.name) + (layer.name or "(model)"),
                layer.kind,
                "" if layer.shape is None else str(layer.shape),
                f"{layer.parameters:,}",
                f"{layer.flops:,.0f}" if layer.flops else "",
            )
            for layer in self.layers
        ]
        widths = [max(map(len, column)) for column in zip(_HEADER, *rows, strict=True)]
        lines = [
            "  ".join(
                text.ljust(width) if place < 3 else text.rjust(width)
                for place, (text, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in (_HEADER, *rows)
        ]
        mib = 2**20
        totals = (
            f"parameters {self.parameters:,} ({self.trained:,} trained), "
            f"{self.parameter_bytes / mib:.1f} MiB; buffers {self.buffer_bytes / mib:.1f} MiB"
        )
        forward = (
            f"forward {self.flops:,.0f} FLOPs in matrix products; "
            f"results of ops {self.result_bytes / mib:.1f} MiB"
        )
        return "\n".join([*lines, "", totals, *([forward] if self.result_bytes else [])])

    __repr__ = __str__


def summarize(model: Module, inputs: Sequence[Any]) -> Summary:
    """Return the summary of a model that is called with `inputs`, unless there are none."""
    recorder = _Recorder()
    if inputs:
        with replaced(instrument, observer=recorder):
            model(*inputs)
    return Summary(model, recorder)


class _Recorder(instrument.Observer):
    """Note the shapes of layers and the FLOPs of ops."""

    def __init__(self) -> None:
        self.shapes: dict[int, Shape] = {}
        self.flops: dict[int, float] = {}
        self.all_flops = 0.0
        self.result_bytes = 0
        self._inside: list[int] = []

    def layer(self, module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return `module.forward(*args, **kwargs)`."""
        self._inside.append(id(module))
        try:
            y = module.forward(*args, **kwargs)
        finally:
            self._inside.pop()
        shape = getattr(y, "shape", None)
        if shape is not None:
            self.shapes[id(module)] = shape
        return y

    def op(
        self, name: str, output: Any, inputs: Sequence[Any], node: Any, saved: tuple[Any, ...]
    ) -> None:
        """Add the FLOPs of an op to the layers around it."""
        flops = forward_flops(name, inputs, output, saved)
        self.all_flops += flops
        self.further_outputs((output,))
        for layer in set(self._inside):
            self.flops[layer] = self.flops.get(layer, 0.0) + flops

    def further_outputs(self, outputs: Sequence[Any]) -> None:
        """Add the memory of results."""
        self.result_bytes += sum(int(getattr(output, "nbytes", 0)) for output in outputs)
