"""layer_norm and rms_norm: rows for kernels.py."""

from __future__ import annotations

from typing import Any

import tensorgrad as tg
from examples.bench.timing import Job, Jobs
from tensorgrad import Tensor
from tensorgrad.bench.timing import random_array
from tensorgrad.dtypes import bfloat16

ROWS = 32768
WIDTHS = (768, 1600, 4096)


def jobs(torch: Any) -> Jobs:
    """Yield forward and backward for each width, in bfloat16."""
    for width in WIDTHS:
        sets = max(1, 2**29 // (ROWS * width * 2))  # together larger than the L2 cache
        yield from _layer_norm(torch, width, sets)
    x = Tensor(random_array((ROWS, 768), bfloat16))
    weight = Tensor(random_array((768,), bfloat16))
    yield Job("rms_norm forward", f"{ROWS} x 768 bf16", ROWS * 768 * 4,
              lambda i: tg.rms_norm(x, weight))  # fmt: skip


def _layer_norm(torch: Any, width: int, sets: int) -> Jobs:
    shape, size = (ROWS, width), f"{ROWS} x {width} bf16"
    inputs = [Tensor(random_array(shape, bfloat16, i), requires_grad=True) for i in range(sets)]
    dys = [random_array(shape, bfloat16, 100 + i) for i in range(sets)]
    weight, bias = (Tensor(random_array((width,), bfloat16), requires_grad=True) for _ in range(2))
    outputs = [tg.layer_norm(x, weight, bias).node for x in inputs]

    def backward(i: int) -> Any:
        node = outputs[i % sets]
        assert node is not None
        found = node.backward(dys[i % sets], node.saved or (), (True, True, True))
        return found

    peers = [{}, {}] if torch is None else _peers(torch, shape, sets)
    yield Job("layer_norm forward", size, ROWS * width * 4,
              lambda i: tg.layer_norm(inputs[i % sets], weight, bias), peers[0])  # fmt: skip
    yield Job("layer_norm backward", size, ROWS * width * 6, backward, peers[1])


def _peers(torch: Any, shape: tuple[int, int], sets: int) -> list[dict[str, Any]]:
    options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    inputs = [torch.randn(shape, requires_grad=True, **options) for _ in range(sets)]
    dys = [torch.randn(shape, **options) for _ in range(sets)]
    weight, bias = (torch.randn(shape[1], requires_grad=True, **options) for _ in range(2))

    def function(x: Any) -> Any:
        return torch.nn.functional.layer_norm(x, shape[1:], weight, bias)

    found: list[dict[str, Any]] = [{}, {}]
    for name, f in (("eager", function), ("compiled", torch.compile(function))):
        outputs: list[Any] = []

        def forward(i: int, f: Any = f) -> Any:
            return f(inputs[i % sets])

        def backward(i: int, f: Any = f, outputs: list[Any] = outputs) -> Any:
            if not outputs:
                outputs.extend(f(x) for x in inputs)
            inside = (inputs[i % sets], weight, bias)
            return torch.autograd.grad(outputs[i % sets], inside, dys[i % sets], retain_graph=True)

        found[0][name], found[1][name] = forward, backward
    return found
