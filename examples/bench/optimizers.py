"""Optimizer steps and the norm of all gradients: rows for kernels.py."""

from __future__ import annotations

from typing import Any

from examples.bench.timing import Job, Jobs, random_array
from tensorgrad import Tensor, optim
from tensorgrad.dtypes import as_dtype

WIDTH, COUNT = 1024, 114  # matrices that make 120M parameters


def jobs(torch: Any) -> Jobs:
    """Yield AdamW for 120M parameters, and the norm of their gradients."""
    size = COUNT * WIDTH**2
    for dtype, moved in (("float32", 28), ("bfloat16", 32)):
        tensors = [
            Tensor(random_array((WIDTH, WIDTH), as_dtype(dtype), i), requires_grad=True)
            for i in range(COUNT)
        ]
        optimizer = optim.AdamW([(f"weight{i}", t) for i, t in enumerate(tensors)])
        optimizer.flat.grad[...] = random_array((size,))
        peers = {} if torch is None or dtype != "float32" else {"fused": _fused(torch)}
        yield Job(f"AdamW {dtype}", "120M parameters", moved * size,
                  lambda _, o=optimizer: o.step(), peers)  # type: ignore[misc]  # fmt: skip
    yield Job("norm of gradients", "120M float32", 4 * size,
              lambda _: optim.grad_norm(optimizer.flat))  # fmt: skip


def _fused(torch: Any) -> Any:
    parameters = [
        torch.nn.Parameter(torch.randn(WIDTH, WIDTH, device="cuda")) for _ in range(COUNT)
    ]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    peer = torch.optim.AdamW(parameters, fused=True)
    return lambda _: peer.step()
