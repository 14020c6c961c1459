"""Optimizer steps and the global gradient norm: rows for kernels.py.

The least bytes for a parameter: AdamW in float32 reads p, m, v and the gradient and writes p, m
and v, 4 bytes each: 28. With bfloat16 parameters too, as p is in two halves of 2 bytes. SGD has no
m and v: 12; momentum adds one: 20. Clipping reads the gradient once more, for its norm: 4.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from examples.bench.timing import Job, Jobs
from tensorgrad import Tensor, optim
from tensorgrad.bench.timing import random_array
from tensorgrad.dtypes import as_dtype

WIDTH, COUNT = 1024, 114  # matrices that make 120M parameters
SIZE = COUNT * WIDTH**2


def jobs(torch: Any) -> Jobs:
    """Yield steps of 120M parameters, and the norm of their gradients."""
    for name, dtype, moved, make, peer in (
        ("AdamW", "float32", 28, optim.AdamW, "AdamW"),
        ("AdamW", "bfloat16", 28, optim.AdamW, None),
        ("SGD", "float32", 12, optim.SGD, "SGD"),
        ("SGD, Nesterov", "float32", 20, _nesterov, "Nesterov"),
    ):
        tensors = [
            Tensor(random_array((WIDTH, WIDTH), as_dtype(dtype), i), requires_grad=True)
            for i in range(COUNT)
        ]
        optimizer = make([(f"weight{i}", t) for i, t in enumerate(tensors)])
        optimizer.flat.grad[...] = random_array((SIZE,))
        peers = {} if torch is None or peer is None else _peers(torch, peer)
        plain = {key: call for key, call in peers.items() if "clipped" not in key}
        clipped = {key: call for key, call in peers.items() if "clipped" in key}
        yield Job(name, f"120M {dtype}", moved * SIZE, _step(optimizer), plain)
        if name == "AdamW":
            yield Job(f"{name}, clipped", f"120M {dtype}", (moved + 4) * SIZE,
                      _step(optimizer, max_norm=1.0), clipped)  # fmt: skip
            scaled = _step(optimizer, max_norm=1.0, scaler=optim.LossScaler(1.0))
            yield Job(f"{name}, clipped, scaled", f"120M {dtype}", (moved + 4) * SIZE, scaled)
    yield Job("norm of gradients", "120M float32", 4 * SIZE,
              lambda _: optim.grad_norm(optimizer.flat))  # fmt: skip


def _nesterov(parameters: Any) -> optim.SGD:
    return optim.SGD(parameters, momentum=0.9, nesterov=True)


def _step(optimizer: optim.Optimizer, **options: Any) -> Callable[[int], object]:
    return lambda _: optimizer.step(**options)


def _peers(torch: Any, name: str) -> dict[str, Any]:
    """Return PyTorch's fused step, and the same after clipping."""
    parameters = [
        torch.nn.Parameter(torch.randn(WIDTH, WIDTH, device="cuda")) for _ in range(COUNT)
    ]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    if name == "AdamW":
        peer = torch.optim.AdamW(parameters, fused=True)
    else:
        options = {"momentum": 0.9, "nesterov": True} if name == "Nesterov" else {}
        peer = torch.optim.SGD(parameters, lr=1e-3, fused=True, **options)

    def clipped(_: int) -> None:
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        peer.step()

    return {"fused": lambda _: peer.step(), "fused, clipped": clipped}
