"""GPT-2 in PyTorch with DistributedDataParallel, the peer of parallel training.

It uses bf16 autocast, scaled_dot_product_attention (cuDNN's on GPUs), fused AdamW, clipping by the
global norm, gradients as views of the buckets and, with `compiled`, torch.compile. The ranks are
those of `comm`.
"""

from __future__ import annotations

import contextlib
import importlib
import socket
from collections.abc import Callable
from typing import Any

from tensorgrad import backend
from tensorgrad.bench.torch_gpt2 import gpt2
from tensorgrad.models.gpt2 import GPT2Config
from tensorgrad.parallel import Comm

Step = Callable[[], object]


def join(torch: Any, comm: Comm, device: str) -> None:
    """Connect PyTorch on all ranks: NCCL on GPUs, gloo on CPUs."""
    host = "127.0.0.1" if comm.local_size == comm.size else socket.gethostname()
    with socket.socket() as probe:
        probe.bind(("", 0))
        place = comm.broadcast_object([host, probe.getsockname()[1]])
    if device != "cpu":
        torch.cuda.set_device(backend.gpu_index(device))
    torch.distributed.init_process_group(
        "gloo" if device == "cpu" else "nccl",
        init_method=f"tcp://{place[0]}:{place[1]}",
        rank=comm.rank,
        world_size=comm.size,
    )


def training_step(
    torch: Any,
    config: GPT2Config,
    batch: int,
    device: str,
    *,
    autocast: bool,
    several: bool,
    compiled: bool,
    mode: str = "default",
    micro_batches: int = 1,
    recompute: bool = False,
) -> Step:
    """Return a training step of this rank.

    Args:
        torch: PyTorch.
        config: sizes of the model.
        batch: sequences of a rank.
        device: "cpu", "cuda" or "cuda:N".
        autocast: whether matrix products are in bfloat16.
        several: whether all ranks train together.
        compiled: whether the model is compiled.
        mode: of torch.compile.
        micro_batches: parts of a batch, one after the other.
        recompute: whether blocks are computed again in backward.
    """
    torch.set_num_threads(backend.threads())
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(0)
    model = gpt2(config, recompute).to(device)
    run = model
    if several:
        wrap = torch.nn.parallel.DistributedDataParallel
        run = wrap(model, gradient_as_bucket_view=True)
    if compiled:
        run = torch.compile(run, mode=mode)
    optimizer = torch.optim.AdamW(
        model.parameters(), 6e-4, (0.9, 0.95), weight_decay=0.1, fused=device != "cpu"
    )
    size = (batch, config.context)
    x, y = (
        torch.randint(0, config.vocab_size, size, device=device).chunk(micro_batches) for _ in "xy"
    )
    kind = device.partition(":")[0]

    def loss_of(tokens: Any, targets: Any) -> Any:
        with contextlib.ExitStack() as stack:
            if autocast:
                stack.enter_context(torch.autocast(kind, torch.bfloat16))
            if autocast and kind == "cuda":  # the fastest that it has there
                attention = importlib.import_module("torch.nn.attention")
                kernels = attention.sdpa_kernel(attention.SDPBackend.CUDNN_ATTENTION)
                stack.enter_context(kernels)
            loss = run(tokens, targets)
        return loss if micro_batches == 1 else loss / micro_batches

    def step() -> None:
        for tokens, targets in zip(x, y, strict=True):
            if mode == "reduce-overhead":  # what the graphs before have returned is not used
                torch.compiler.cudagraph_mark_step_begin()
            loss_of(tokens, targets).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step
