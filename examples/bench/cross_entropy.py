"""Cross entropy, forward and backward together: rows for kernels.py."""

from __future__ import annotations

from typing import Any

import tensorgrad as tg
from examples.bench.timing import Job, Jobs
from tensorgrad import Tensor, backend, no_grad
from tensorgrad.bench.timing import random_array
from tensorgrad.dtypes import bfloat16

ROWS = 8192
VOCABULARIES = (50304, 50257)  # GPT-2's, padded and not


def jobs(torch: Any) -> Jobs:
    """Yield the loss with its gradient, and the loss alone."""
    for vocabulary in VOCABULARIES:
        logits = Tensor(random_array((ROWS, vocabulary), bfloat16), requires_grad=True)
        targets = backend.cupy.random.default_rng(0).integers(0, vocabulary, ROWS)
        one = backend.cupy.ones((), "float32")

        def both(_: int, logits: Tensor = logits, targets: Any = targets, one: Any = one) -> Any:
            node = tg.cross_entropy(logits, targets).node
            assert node is not None
            return node.backward(one, node.saved or (), (True,))

        def loss_alone(_: int, logits: Tensor = logits, targets: Any = targets) -> Any:
            with no_grad():
                return tg.cross_entropy(logits, targets)

        peers = {} if torch is None else _peers(torch, vocabulary)
        size = f"{ROWS} x {vocabulary} bf16"
        yield Job("cross_entropy both", size, 4 * logits.size, both, peers)
        yield Job("cross_entropy loss alone", size, 2 * logits.size, loss_alone)


def _peers(torch: Any, vocabulary: int) -> dict[str, Any]:
    logits = torch.randn(
        (ROWS, vocabulary), device="cuda", dtype=torch.bfloat16, requires_grad=True
    )
    targets = torch.randint(0, vocabulary, (ROWS,), device="cuda")

    def function(x: Any) -> Any:
        return torch.nn.functional.cross_entropy(x, targets)

    return {
        name: lambda _, f=f: torch.autograd.grad(f(logits), logits)
        for name, f in (("eager", function), ("compiled", torch.compile(function)))
    }
