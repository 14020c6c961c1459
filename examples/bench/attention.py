"""Flash attention: rows for kernels.py.

Peers are PyTorch's scaled_dot_product_attention with FlashAttention-2 and with cuDNN, in TF32 with
its memory-efficient kernels, and our own unfused ops, which store the matrix of attention weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import tensorgrad as tg
from examples.bench.timing import Job, Jobs
from tensorgrad import Tensor, backend
from tensorgrad.bench.timing import Call, random_array
from tensorgrad.dtypes import bfloat16, float32

# (B, H, S, D)
SHAPES = (
    (1, 12, 8192, 64),
    (1, 12, 16384, 64),
    (32, 12, 1024, 64),
    (8, 16, 4096, 128),
    (2, 16, 16384, 128),
)
OTHER_WIDTHS = ((8, 16, 4096, 32), (8, 16, 4096, 96), (4, 8, 4096, 256))
TF32_SHAPES = ((16, 12, 1024, 64), (4, 16, 4096, 64), (4, 16, 4096, 128))
SHORT = ((682, 8, 24, 64), (256, 8, 64, 64))
UNFUSED = ((32, 12, 1024, 64), (1, 12, 8192, 64), (1, 12, 16384, 64))


def jobs(torch: Any) -> Jobs:
    """Yield forward and backward of every shape, and their sum against unfused ops."""
    for shape in (*SHAPES, *OTHER_WIDTHS, *SHORT):
        for kind in ("causal", "full", *(["mask"] if shape in SHORT else [])):
            yield from _passes(torch, shape, kind)
    for shape in TF32_SHAPES:
        for kind in ("causal", "full"):
            yield from _passes(torch, shape, kind, tf32=True)
    for shape in UNFUSED:
        yield _against_unfused(shape)
    yield from _features()


def operations(shape: tuple[int, int, int, int], causal: bool) -> float:
    """Return the usual count of floating-point operations forward; backward has 2.5 times that."""
    batch, heads, length, width = shape
    return 4 * batch * heads * length**2 * width * (0.5 if causal else 1)


def _passes(torch: Any, shape: tuple[int, int, int, int], kind: str, tf32: bool = False) -> Jobs:
    """Yield forward and backward; a "mask" hides half of the keys, others in each sequence."""
    dtype, name = (float32, "attention tf32") if tf32 else (bfloat16, "attention")
    q, k, v = (Tensor(random_array(shape, dtype, i), requires_grad=True) for i in range(3))
    dy = random_array(shape, dtype, 3)
    causal, mask = kind == "causal", None
    if kind == "mask":
        batch, _, length, _ = shape
        scores = random_array((batch, 1, length, length), bfloat16, 4)
        mask = backend.cupy.where(scores > 0, 0, -math.inf).astype("float32")
        mask[..., 0] = 0
    given = None if mask is None else Tensor(mask)

    def forward(_: int) -> Tensor:
        with tg.autocast("tf32", enabled=tf32):
            return tg.attention(q, k, v, given, causal)

    node = forward(0).node
    assert node is not None
    saved = node.saved or ()
    peers = [{}, {}] if torch is None else _peers(torch, shape, causal, mask, tf32)
    size = f"{', '.join(map(str, shape))} {kind}"
    amount = operations(shape, causal)
    yield Job(f"{name} forward", size, amount, forward, peers[0], "TFLOP/s")
    yield Job(f"{name} backward", size, 2.5 * amount,
              lambda _: node.backward(dy, saved, (True,) * 3), peers[1], "TFLOP/s")  # fmt: skip


def _peers(
    torch: Any, shape: tuple[int, int, int, int], causal: bool, mask: Any, tf32: bool
) -> list[dict[str, Call]]:
    attention = torch.nn.functional.scaled_dot_product_attention
    if tf32:
        torch.backends.cuda.matmul.allow_tf32 = True
    dtype = torch.float32 if tf32 else torch.bfloat16
    q, k, v = (torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3))
    dy = torch.randn(shape, device="cuda", dtype=dtype)
    added = None if mask is None else torch.from_dlpack(mask).to(torch.bfloat16)
    kinds = torch.nn.attention.SDPBackend
    backends = {"flash-2": kinds.FLASH_ATTENTION, "cudnn": kinds.CUDNN_ATTENTION}
    if tf32:
        backends = {"efficient": kinds.EFFICIENT_ATTENTION}
    elif mask is not None:  # FlashAttention takes no mask
        backends = {"efficient": kinds.EFFICIENT_ATTENTION, "cudnn": kinds.CUDNN_ATTENTION}
    found: list[dict[str, Call]] = [{}, {}]
    for name, kind in backends.items():

        def forward(_: int, kind: Any = kind) -> Any:
            with torch.nn.attention.sdpa_kernel(kind):
                return attention(q, k, v, added, is_causal=causal)

        try:
            y = forward(0)
            torch.autograd.grad(y, (q, k, v), dy, retain_graph=True)
        except RuntimeError:  # the backend does not support the head width
            continue
        found[0][name] = forward

        def backward(_: int, y: Any = y) -> Any:
            return torch.autograd.grad(y, (q, k, v), dy, retain_graph=True)

        found[1][name] = backward
    return found


def _against_unfused(shape: tuple[int, int, int, int]) -> Job:
    """Return forward and backward, and the same by ops that store the matrix of weights."""
    q, k, v = (Tensor(random_array(shape, bfloat16, i), requires_grad=True) for i in range(3))
    dy = random_array(shape, bfloat16, 3)
    cupy = backend.cupy
    later = cupy.triu(cupy.ones((shape[2], shape[2]), bool), 1)
    mask = Tensor(cupy.where(later, -math.inf, 0).astype(bfloat16))

    def fused() -> Tensor:
        return tg.attention(q, k, v, causal=True)

    def unfused() -> Tensor:
        scores = tg.matmul(q, k.swapaxes(-1, -2)) * (1 / math.sqrt(shape[3])) + mask
        return tg.matmul(tg.softmax(scores), v)

    def both(function: Callable[[], Tensor]) -> Call:
        def call(_: int) -> None:
            for tensor in (q, k, v):
                tensor.grad = None
            function().backward(dy)

        return call

    size = f"{', '.join(map(str, shape))} causal"
    peers = {"unfused": both(unfused)}
    return Job("attention both", size, 3.5 * operations(shape, True), both(fused), peers, "TFLOP/s")


def _features() -> Jobs:
    """Yield forward passes with rarer options; operations are those of the plain causal pass."""
    shape = (4, 16, 4096, 128)
    q, k, v = (Tensor(random_array(shape, bfloat16, i)) for i in range(3))
    size = f"{', '.join(map(str, shape))} causal"
    padding = Tensor(backend.cupy.arange(4096)[None, None, None] < 4000)
    lengths = Tensor(backend.cupy.arange(0, 4 * 4096 + 1, 4096, dtype="int32"))
    rows = [t.swapaxes(1, 2).reshape(-1, 16, 128) for t in (q, k, v)]
    runs: dict[str, Call] = {
        "plain": lambda _: tg.attention(q, k, v, causal=True),
        "window 512": lambda _: tg.attention(q, k, v, causal=True, window=512),
        "padding mask": lambda _: tg.attention(q, k, v, padding, causal=True),
        "dropout": lambda _: tg.attention(q, k, v, causal=True, dropout=0.1),
        "varlen": lambda _: tg.attention_varlen(
            rows[0], rows[1], rows[2], lengths, max_length=4096, causal=True
        ),
    }
    for name, run in runs.items():
        yield Job(f"attention {name}", size, operations(shape, True), run, unit="TFLOP/s")
