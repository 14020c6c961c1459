"""Head and loss of a GPT-2, forward and backward: time and peak memory, fused and unfused.

    python -m examples.bench.linear_cross_entropy --compiled

Memory is the peak of what is allocated beyond the operands and their gradients. `--chunks` tries
other chunk sizes.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import tensorgrad as tg
from examples.bench.timing import loaded
from tensorgrad import Tensor, backend
from tensorgrad.bench.timing import milliseconds, random_array
from tensorgrad.dtypes import bfloat16
from tensorgrad.gpu import GpuMonitor, clock_and_watts_text

ROWS, WIDTH, VOCABULARY = 32 * 1024, 768, 50304


def show(name: str, call: Callable[[], object], peak: Callable[[], int]) -> None:
    """Print the time of a call, its peak memory, which `peak` returns and resets, and the load."""
    call()
    peak()
    call()
    mebibytes = peak() / 2**20
    ms = milliseconds(lambda _: call())
    with GpuMonitor(0, 0.05) as monitor:
        load = clock_and_watts_text(loaded(lambda _: call(), monitor, 1.0))
    teraflops = 6 * ROWS * WIDTH * VOCABULARY / ms / 1e9
    print(
        f"{name:24} {ms:8.2f} ms {teraflops:7.0f} TFLOP/s {mebibytes:8.0f} MiB  {load}", flush=True
    )


def ours(chunks: list[int]) -> None:
    """Measure the fused op, with the default chunk and others, and the two ops."""
    cupy = backend.cupy
    x = Tensor(random_array((ROWS, WIDTH), bfloat16), requires_grad=True)
    embedding = 0.02 * random_array((VOCABULARY, WIDTH), seed=1)
    weight = Tensor(embedding.astype(bfloat16), requires_grad=True)
    targets = cupy.random.default_rng(0).integers(0, VOCABULARY, ROWS)
    for leaf in (x, weight):
        leaf.grad = cupy.zeros(leaf.shape, "float32")
    pool, hook = cupy.get_default_memory_pool(), _Peak()

    def peak() -> int:
        found = int(hook.most - hook.start)
        hook.most = 0
        hook.start = pool.used_bytes()
        return found

    def unfused() -> None:
        tg.cross_entropy(tg.linear(x, weight), targets).backward()

    with hook:
        show("linear, cross_entropy", unfused, peak)
        for chunk in (None, *chunks):
            name = "linear_cross_entropy" + ("" if chunk is None else f" {chunk}")

            def fused(chunk: int | None = chunk) -> None:
                tg.linear_cross_entropy(x, weight, targets, chunk=chunk).backward()

            show(name, fused, peak)


class _Peak:
    """Record the peak memory in use of CuPy's pool."""

    def __new__(cls) -> Any:
        class Hook(backend.cupy.cuda.MemoryHook):  # type: ignore[misc]  # CuPy is Any
            name, most, start = "peak", 0, 0

            def malloc_postprocess(self, **_: Any) -> None:
                self.most = max(self.most, backend.cupy.get_default_memory_pool().used_bytes())

        return Hook()


def theirs(torch: Any, compiled: bool) -> None:
    """Measure PyTorch."""
    x = torch.randn(ROWS, WIDTH, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(VOCABULARY, WIDTH, device="cuda", dtype=torch.bfloat16) * 0.02
    weight.requires_grad_()
    targets = torch.randint(0, VOCABULARY, (ROWS,), device="cuda")

    def loss(x: Any, weight: Any) -> Any:
        return torch.nn.functional.cross_entropy(x @ weight.T, targets)

    def peak() -> int:
        found = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return int(found)

    functions = {"PyTorch eager": loss}
    if compiled:
        functions["PyTorch compiled"] = torch.compile(loss)
    for name, function in functions.items():

        def step(function: Any = function) -> None:
            function(x, weight).backward()

        show(name, step, peak)


def main() -> None:
    """Print one line for each implementation."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--chunks", type=int, nargs="*", default=[], help="chunk sizes to try, in rows"
    )
    parser.add_argument("--compiled", action="store_true", help="measure torch.compile too")
    options = parser.parse_args()
    if not backend.gpu_count():
        parser.error("no GPU was found")
    print(f"{ROWS} rows, C {WIDTH}, V {VOCABULARY}, bfloat16")
    ours(options.chunks)
    backend.cupy.get_default_memory_pool().free_all_blocks()
    if importlib.util.find_spec("torch") is not None:
        theirs(importlib.import_module("torch"), options.compiled)


if __name__ == "__main__":
    main()
