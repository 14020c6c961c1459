"""`tensorgrad bench proposals`: cuBLASLt's kernels for the products of a GPT-2, under load.

The library estimates which of its kernels is the best for a product; which one `cublaslt.preferred`
takes instead was chosen by this table. Each proposal is repeated for some time, in turns with the
others of the product and on three sets of operands, so that the GPU is as warm as in training and,
where it reaches it, at its limit of power. A row has the time of the first proposal, that of the
one that is taken, and for each its tile and its time relative to the first; * marks what is taken,
"split" what divides the terms. Needs a GPU. Tests: tests/bench/test_proposals.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

from tensorgrad.bench.options import check_gpu
from tensorgrad.bench.pictures import bars
from tensorgrad.bench.steps import GPT2S, sized
from tensorgrad.bench.sweep import Case, Row, Sweep
from tensorgrad.bench.timing import Call, in_turns, random_array, under_load
from tensorgrad.core import backend
from tensorgrad.core.dtypes import Dtype, as_dtype, float32
from tensorgrad.core.errors import ArgumentError
from tensorgrad.kernels import cublaslt
from tensorgrad.kernels.gpu import GpuMonitor, clock_and_watts
from tensorgrad.kernels.matmul import cublas
from tensorgrad.kernels.matmul.problem import MatmulProblem, problem
from tensorgrad.models.gpt2 import GPT2Config
from tensorgrad.ops.linear_cross_entropy import rows_at_a_time

TURNS = 3
# Values of cublasLtMatmulTile_t that were seen on Hopper: columns of y x rows of y.
TILES = {
    17: "64x128", 18: "128x64", 19: "64x256", 20: "128x128", 21: "256x64", 23: "128x256",
    24: "256x128", 28: "96x128", 29: "128x160", 31: "192x128", 32: "128x192", 201: "176x128",
    209: "192x192", 247: "320x64", 248: "320x128", 495: "256x96",
}  # fmt: skip


_SIZES = ("rows", "columns", "terms", "layout")


class Product(NamedTuple):
    """A product of a training step."""

    name: str
    rows: int
    columns: int
    terms: int
    layout: str  # operands: "n" where rows are contiguous, "t" where columns are
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


def measure_product(product: Product, seconds: float, monitor: GpuMonitor) -> Row:
    """Return the times of the proposals of a product."""
    sets = [operands(product, 3 * i) for i in range(3)]
    described = cublas.described(sets[0])
    found = cublaslt.proposals(described, 0)
    taken = cublaslt.prepare(described, 0)
    calls = [_call(proposal.plan, sets) for proposal in found]
    under_load(calls[0], seconds)
    monitor.take()
    times = in_turns([partial(under_load, call, seconds / TURNS) for call in calls], TURNS)
    own = [bytes(proposal.plan.algorithm) == bytes(taken.algorithm) for proposal in found]
    ratios = [ms / times[0] for ms in times]
    names = [
        f"{TILES.get(p.tile, p.tile)}{'*' * mine}{' split' if p.plan.workspace else ''}"
        for p, mine in zip(found, own, strict=True)
    ]
    microseconds = 1e3 * times[0] / len(sets)
    return {
        "us": microseconds,
        "taken_us": microseconds * ratios[own.index(True)],
        "proposals": "  ".join(f"{n} {r:.3f}" for n, r in zip(names, ratios, strict=True)),
        **clock_and_watts(monitor.take()),
    }


def _call(plan: cublaslt.CublasPlan, sets: Sequence[MatmulProblem]) -> Call:
    def call(_: int) -> None:
        for operands in sets:
            cublas.run(plan, operands)

    return call


def proposals_sweep(
    *,
    preset: Literal[tuple(GPT2S)] = "gpt2-124M",  # type: ignore[valid-type]
    batch: int = 32,
    dtype: Literal["bfloat16", "float16"] = "bfloat16",
    grad_dtype: Literal["float32", "bfloat16", "float16"] = "float32",
    seconds: float = 0.3,
) -> Iterator[Sweep]:
    """Measure each kernel that cuBLASLt proposes for the products of a GPT-2, under load.

    Args:
        preset: of the model.
        batch: sequences of 1,024 tokens.
        dtype: of activations and parameters.
        grad_dtype: of the gradients of blocks.
        seconds: for each proposal.
    """
    if grad_dtype not in ("float32", dtype):
        raise ArgumentError(f"--grad-dtype: got {grad_dtype}, expected float32 or {dtype}")
    dtypes = as_dtype(dtype), as_dtype(grad_dtype)
    found = {product.name: product for product in products(sized(preset), 1024 * batch, *dtypes)}
    shared = {"preset": preset, "batch": batch, "seconds": seconds}
    cases = [
        {"product": name, **dict(zip(_SIZES, product[1:5], strict=True)),
         "dtype": str(product.operands), "result_dtype": str(product.result), **shared}
        for name, product in found.items()
    ]  # fmt: skip
    check_gpu("proposals")

    def measure(case: Case) -> Row:
        with GpuMonitor(backend.gpu_index("cuda"), 0.2) as monitor:
            return measure_product(found[case["product"]], seconds, monitor)

    draw = bars("cuBLASLt's first proposal and ours", "us", ("product",), ("us", "taken_us"))
    yield Sweep("proposals", cases, measure, ("us", "taken_us", "proposals"), draw, "cuda")
