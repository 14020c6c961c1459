"""What cuBLASLt proposes for the products of a GPT-2, under sustained load: microseconds of each.

    python -m examples.bench.proposals --preset gpt2-1558M --batch 8 --json proposals.json

The library estimates which of its kernels is the best for a product; which one `cublaslt.preferred`
takes instead was chosen by this table. Each proposal is repeated for --seconds, in turns with the
others of the product and on three sets of operands, so that the GPU is as warm as in training and,
where it reaches it, at its limit of power. A line has the time of the first proposal, the GPU's
clock and power, and for each proposal its tile and its time relative to the first; * marks what is
taken, "split" what divides the terms. Needs a GPU.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from tensorgrad import backend
from tensorgrad.bench.timing import Call, in_turns, random_array, under_load
from tensorgrad.command import command
from tensorgrad.dtypes import Dtype, as_dtype, float32
from tensorgrad.errors import ArgumentError, DeviceError
from tensorgrad.files import write_json
from tensorgrad.gpu import GpuMonitor, clock_and_watts, clock_and_watts_text
from tensorgrad.kernels import cublaslt
from tensorgrad.kernels.matmul import cublas
from tensorgrad.kernels.matmul.problem import MatmulProblem, problem
from tensorgrad.models.gpt2 import PRESETS, GPT2Config
from tensorgrad.ops.linear_cross_entropy import rows_at_a_time

TURNS = 3
# Of cublasLtMatmulTile_t, those that were seen on Hopper: columns of y x rows of y.
TILES = {
    17: "64x128", 18: "128x64", 19: "64x256", 20: "128x128", 21: "256x64", 23: "128x256",
    24: "256x128", 28: "96x128", 29: "128x160", 31: "192x128", 32: "128x192", 201: "176x128",
    209: "192x192", 247: "320x64", 248: "320x128", 495: "256x96",
}  # fmt: skip


class Product(NamedTuple):
    """A product of a training step."""

    name: str
    rows: int
    columns: int
    terms: int
    layout: str  # of operands: "n" where rows are contiguous, "t" where columns are
    result: Dtype
    operands: Dtype
    bias: bool = False
    residual: bool = False


def products(config: GPT2Config, rows: int, dtype: Dtype, grad_dtype: Dtype) -> Iterator[Product]:
    """Yield the products of a step that cuBLASLt may compute: all but those with GELU.

    Args:
        config: of the model.
        rows: tokens of a micro-batch; the head takes them in chunks.
        dtype: of activations and parameters: bfloat16 or float16.
        grad_dtype: of the gradients of blocks; that of the head is float32.
    """
    width, vocabulary = config.width, config.rows
    chunk = rows_at_a_time("proposals", None, rows, 2 * vocabulary, False)
    qkv, projection = ("qkv", 3 * width, width), ("projection", width, width)
    up, down = ("up", 4 * width, width), ("down", width, 4 * width)
    for name, columns, terms in (qkv, projection, down):
        residual = name == "down"
        yield Product(name, rows, columns, terms, "nt", dtype, dtype, True, residual)
    yield Product("logits", chunk, vocabulary, width, "nt", dtype, dtype)
    # The gradient of the input of `down` ends with the derivative of GELU.
    for name, columns, terms in (qkv, projection, up):
        yield Product(f"d {name} input", rows, terms, columns, "nn", dtype, dtype)
    yield Product("d logits input", chunk, width, vocabulary, "nn", dtype, dtype)
    for name, columns, terms in (qkv, projection, down, up):
        yield Product(f"d {name} weight", columns, terms, rows, "tn", grad_dtype, dtype)
    yield Product("d logits weight", vocabulary, width, chunk, "tn", float32, dtype)


def operands(product: Product, seed: int) -> MatmulProblem:
    """Return the product of random numbers."""
    rows, columns, terms, dtype = product.rows, product.columns, product.terms, product.operands
    a = _matrix(rows, terms, dtype, product.layout[0], seed)
    b = _matrix(terms, columns, dtype, product.layout[1], seed + 1)
    y = backend.cupy.empty((rows, columns), product.result)
    bias = random_array((columns,), dtype, seed) if product.bias else None
    residual = random_array(y.shape, dtype, seed) if product.residual else None
    return problem(a, b, y, bias=bias, residual=residual)


def _matrix(rows: int, columns: int, dtype: Dtype, layout: str, seed: int) -> Any:
    if layout == "n":
        return random_array((rows, columns), dtype, seed)
    return random_array((columns, rows), dtype, seed).T


def measure(product: Product, seconds: float, monitor: GpuMonitor) -> dict[str, Any]:
    """Return the line of a product."""
    sets = [operands(product, 3 * i) for i in range(3)]
    described = cublas.described(sets[0])
    found = cublaslt.proposals(described, 0)
    taken = cublaslt.prepare(described, 0)
    calls = [_call(each.plan, sets) for each in found]
    under_load(calls[0], seconds)
    monitor.take()
    times = in_turns([partial(under_load, call, seconds / TURNS) for call in calls], TURNS)
    microseconds = [1e3 * ms / len(sets) for ms in times]
    return {
        **product._asdict(),
        "result": str(product.result),
        "operands": str(product.operands),
        "us": microseconds[0],
        **clock_and_watts(monitor.take()),
        "proposals": [
            {
                "tile": TILES.get(each.tile, each.tile),
                "workspace": each.plan.workspace,
                "us": us,
                "ratio": us / microseconds[0],
                "taken": bytes(each.plan.algorithm) == bytes(taken.algorithm),
            }
            for each, us in zip(found, microseconds, strict=True)
        ],
    }


def _call(plan: cublaslt.CublasPlan, sets: Sequence[MatmulProblem]) -> Call:
    def call(_: int) -> None:
        for each in sets:
            cublas.run(plan, each)

    return call


def to_text(line: dict[str, Any]) -> str:
    """Return a line of the table."""
    size = f"{line['rows']} x {line['columns']} x {line['terms']} {line['layout']}"
    ways = (
        f"{each['tile']}{'*' if each['taken'] else ''}{' split' if each['workspace'] else ''} "
        f"{each['ratio']:.3f}"
        for each in line["proposals"]
    )
    load = clock_and_watts_text(line)
    return f"{line['name']:18} {size:26} {line['us']:8.1f} us  {load:16} {'  '.join(ways)}"


@command
def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the products of a model."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.bench.proposals", description=__doc__.partition("\n")[0]
    )
    add = parser.add_argument
    add("--preset", choices=sorted(PRESETS), default="gpt2-124M")
    add("--batch", type=int, default=32, help="sequences of 1,024 tokens (default: 32)")
    add("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    add("--grad-dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    add("--seconds", type=float, default=0.3, help="for each proposal (default: 0.3)")
    add("--json", type=Path, help="file to write")
    given = parser.parse_args(arguments)
    if given.grad_dtype not in ("float32", given.dtype):
        raise ArgumentError(
            f"--grad-dtype: got {given.grad_dtype}, expected float32 or {given.dtype}"
        )
    if given.batch < 1 or given.seconds <= 0:
        raise ArgumentError(
            f"--batch, --seconds: got {given.batch} and {given.seconds}, expected more than 0"
        )
    if not backend.gpu_count():
        raise DeviceError("proposals: no GPU was found, expected one to measure on")
    lines = []
    rows = 1024 * given.batch
    config = replace(PRESETS[given.preset], vocab_multiple=128)
    dtypes = as_dtype(given.dtype), as_dtype(given.grad_dtype)
    with GpuMonitor(0, 0.2) as monitor:
        for product in products(config, rows, *dtypes):
            lines.append(measure(product, given.seconds, monitor))
            print(to_text(lines[-1]), flush=True)
            backend.cupy.get_default_memory_pool().free_all_blocks()
    if given.json is not None:
        write_json(given.json, lines, 1)


if __name__ == "__main__":
    sys.exit(main())
