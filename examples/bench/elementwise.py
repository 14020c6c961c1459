"""Map, zip and fused functions on 64M elements: rows for kernels.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorgrad as tg
from examples.bench.timing import Job, Jobs
from tensorgrad import Tensor, no_grad
from tensorgrad.bench.timing import random_array
from tensorgrad.dtypes import bfloat16, float32

SHAPE = (16384, 4096)


def jobs(torch: Any) -> Jobs:
    """Yield forward and backward of each function, in bfloat16 and float32."""
    for dtype in (bfloat16, float32):
        x, other = (Tensor(random_array(SHAPE, dtype, i), requires_grad=True) for i in range(2))
        bias = Tensor(random_array(SHAPE[1:], dtype, 2), requires_grad=True)
        dy = random_array(SHAPE, dtype, 3)
        theirs = _Peers(torch, str(dtype)) if torch is not None else None
        for name, f, inputs in (
            ("add", tg.add, (x, other)),
            ("gelu", lambda x: tg.gelu(x, "tanh"), (x,)),
            ("gelu erf", tg.gelu, (x,)),
            ("silu", tg.silu, (x,)),
            ("swiglu", tg.swiglu, (x, other)),
            ("bias_gelu", tg.bias_gelu, (x, bias)),
        ):
            large = sum(t.size == x.size for t in inputs)
            once = x.size * dtype.itemsize
            size = f"64M {'bf16' if dtype == bfloat16 else 'fp32'}"
            forward, backward = theirs.of(name) if theirs else ({}, {})
            yield Job(f"{name} forward", size, (large + 1) * once, _without_graph(f, inputs),
                      forward)  # fmt: skip
            if name != "add":
                yield Job(f"{name} backward", size, (2 * large + 1) * once,
                          _backward(f(*inputs), dy), backward)  # fmt: skip


def _without_graph(f: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> Callable[[int], Any]:
    def run(_: int) -> Tensor:
        with no_grad():
            return f(*inputs)

    return run


def _backward(y: Tensor, dy: Any) -> Callable[[int], Any]:
    node = y.node
    assert node is not None
    needs = [edge is not None for edge in node.edges]
    return lambda _: node.backward(dy, node.saved or (), needs)


class _Peers:
    """The same functions in PyTorch, eager and compiled."""

    def __init__(self, torch: Any, dtype: str) -> None:
        options: dict[str, Any] = {"device": "cuda", "dtype": getattr(torch, dtype)}
        self.torch = torch
        x, other = (torch.randn(SHAPE, requires_grad=True, **options) for _ in range(2))
        bias = torch.randn(SHAPE[1:], requires_grad=True, **options)
        self.dy = torch.randn(SHAPE, **options)
        f = torch.nn.functional
        self.functions: dict[str, Any] = {
            "add": (lambda x, y: x + y, (x, other)),
            "gelu": (lambda x: f.gelu(x, approximate="tanh"), (x,)),
            "gelu erf": (lambda x: f.gelu(x), (x,)),
            "silu": (lambda x: f.silu(x), (x,)),
            "swiglu": (lambda x, y: f.silu(x) * y, (x, other)),
            "bias_gelu": (lambda x, b: f.gelu(x + b, approximate="tanh"), (x, bias)),
        }

    def of(self, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return forward and backward of one function."""
        torch, (function, inputs) = self.torch, self.functions[name]
        found: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
        for kind, f in (("eager", function), ("compiled", torch.compile(function))):
            outputs: list[Any] = []

            def forward(_: int, f: Any = f) -> Any:
                with torch.no_grad():
                    return f(*inputs)

            def backward(_: int, f: Any = f, outputs: list[Any] = outputs) -> Any:
                if not outputs:
                    outputs.append(f(*inputs))
                return torch.autograd.grad(outputs[0], inputs, self.dy, retain_graph=True)

            found[0][kind], found[1][kind] = forward, backward
        return found
