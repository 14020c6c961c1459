"""AdamW steps over flat buffers, in milliseconds and GB/s, beside PyTorch where it is installed.

    python examples/bench/optim.py --parameters 120000000 --device cuda

GB/s counts the bytes that must move: parameters, gradients and both moments are read, all but the
gradients written; clipping reads the gradients once more.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from tensorgrad import Tensor, backend, optim
from tensorgrad.dtypes import as_dtype

REPEATS = 20
WIDTH = 1024  # of the matrices that the parameters are made of


def milliseconds(step: Callable[[], object], wait: Callable[[], object]) -> float:
    """Return the median time of one step."""
    for _ in range(3):
        step()
    wait()
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        step()
        wait()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


def ours(matrices: list[np.ndarray], dtype: str, device: str) -> Iterator[tuple[str, float, int]]:
    """Yield what is measured, its time, and the bytes that move for each parameter."""
    tensors = [
        Tensor(backend.to_device(m.astype(as_dtype(dtype)), device), requires_grad=True)
        for m in matrices
    ]
    optimizer = optim.AdamW([(f"weight{i}", t) for i, t in enumerate(tensors)])
    optimizer.flat.grad.fill(1e-3)
    wait = (lambda: None) if device == "cpu" else backend.cupy.cuda.runtime.deviceSynchronize
    moved = 28 if dtype == "float32" else 32  # the master copy, and the parameters both ways
    yield "AdamW", milliseconds(optimizer.step, wait), moved
    yield "AdamW, clipped", milliseconds(lambda: optimizer.step(max_norm=1.0), wait), moved + 4


def theirs(matrices: list[np.ndarray], device: str) -> Iterator[tuple[str, float, int]]:
    """Yield the same for PyTorch, in float32."""
    import torch

    torch.set_num_threads(backend.threads())
    wait = (lambda: None) if device == "cpu" else torch.cuda.synchronize
    for kind in ("fused", "foreach"):
        parameters = [torch.nn.Parameter(torch.tensor(m, device=device)) for m in matrices]
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, 1e-3)
        peer = torch.optim.AdamW(parameters, **{kind: True})

        def clipped(parameters: list[Any] = parameters, peer: Any = peer) -> None:
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            peer.step()

        yield f"PyTorch {kind}", milliseconds(peer.step, wait), 28
        yield f"PyTorch {kind}, clipped", milliseconds(clipped, wait), 32


def main() -> None:
    """Print one line a measurement."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parameters", type=int, default=10_000_000, help="how many in all")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    options = parser.parse_args()
    count = max(1, options.parameters // WIDTH**2)
    rng = np.random.default_rng(0)
    matrices = [rng.standard_normal((WIDTH, WIDTH), np.float32) for _ in range(count)]
    total = count * WIDTH**2
    print(f"{total:,} parameters in {count} matrices on {options.device}")
    print(f"{'':28}    ms     GB/s")
    for dtype in ("float32", "bfloat16"):
        for name, time_ms, moved in ours(matrices, dtype, options.device):
            label = f"{name}, {dtype}"
            print(f"{label:28} {time_ms:6.2f} {total * moved / time_ms / 1e6:8.1f}")
    if importlib.util.find_spec("torch") is not None:
        for name, time_ms, moved in theirs(matrices, options.device):
            print(f"{name:28} {time_ms:6.2f} {total * moved / time_ms / 1e6:8.1f}")


if __name__ == "__main__":
    main()
