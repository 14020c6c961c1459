"""Training in PyTorch, alone or with DistributedDataParallel: the peer of our training steps.

It uses bf16 autocast, scaled_dot_product_attention (cuDNN's on GPUs), fused AdamW, clipping by the
global norm, gradients as views of the buckets and, with `compiled`, torch.compile.
"""

from __future__ import annotations

import contextlib
import importlib
import socket
from collections.abc import Callable, Sequence
from typing import Any

from tensorgrad import backend
from tensorgrad.bench.steps import Step, family
from tensorgrad.bench.torch_gpt2 import gpt2
from tensorgrad.bench.torch_transformer_lm import transformer_lm
from tensorgrad.parallel import Comm

TORCH: dict[str, Callable[..., Any]] = {"gpt2": gpt2, "transformer-lm": transformer_lm}


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


class TorchTrainer:
    """A model of PyTorch with AdamW, clipping and what makes it fast.

    Args:
        torch: PyTorch.
        model: takes tokens and targets, and returns the mean loss.
        device: "cpu", "cuda" or "cuda:N".
        lr, betas, weight_decay: of AdamW.
        matrices: whether vectors have no weight decay.
        clip: largest global norm.
        autocast: whether matrix products are in bfloat16.
        cudnn: whether attention of a GPU is cuDNN's under autocast; otherwise PyTorch chooses.
        several: whether all ranks train together.
        compiled: whether the model is compiled.
        mode: of torch.compile.
    """

    def __init__(
        self,
        torch: Any,
        model: Any,
        device: str,
        *,
        lr: float = 6e-4,
        betas: tuple[float | None, float | None] = (0.9, 0.95),
        weight_decay: float = 0.1,
        matrices: bool = False,
        clip: float = 1.0,
        autocast: bool = False,
        cudnn: bool = False,
        several: bool = False,
        compiled: bool = False,
        mode: str = "default",
    ) -> None:
        torch.set_num_threads(backend.threads())
        self._torch, self._device, self._clip = torch, device, clip
        self._autocast, self._cudnn, self._mode = autocast, autocast and cudnn, mode
        self.model = self._run = model.to(device)
        if several:
            wrap = torch.nn.parallel.DistributedDataParallel
            self._run = wrap(model, gradient_as_bucket_view=True)
        if compiled:
            self._run = torch.compile(self._run, mode=mode)
        weights = list(model.parameters())
        vectors = [weight for weight in weights if matrices and weight.ndim <= 1]
        groups: list[dict[str, Any]] = [
            {"params": [w for w in weights if not matrices or w.ndim > 1]}
        ]
        groups += [{"params": vectors, "weight_decay": 0.0}] if vectors else []
        self.optimizer = torch.optim.AdamW(
            groups, lr, betas, weight_decay=weight_decay, fused=device != "cpu"
        )

    def loss(self, tokens: Any, targets: Any) -> Any:
        """Return the mean loss of a batch."""
        kind = self._device.partition(":")[0]
        with contextlib.ExitStack() as stack:
            if self._autocast:
                stack.enter_context(self._torch.autocast(kind, self._torch.bfloat16))
            if self._cudnn and kind == "cuda":  # the fastest that it has in 16 bits
                attention = importlib.import_module("torch.nn.attention")
                kernels = attention.sdpa_kernel(attention.SDPBackend.CUDNN_ATTENTION)
                stack.enter_context(kernels)
            if self._mode == "reduce-overhead":  # what the graphs before have returned is not used
                self._torch.compiler.cudagraph_mark_step_begin()
            return self._run(tokens, targets)

    def update(self) -> None:
        """Clip the gradients and take a step of the optimizer."""
        self._torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def step(self, parts: Sequence[tuple[Any, Any]]) -> Any:
        """Train on the parts of a batch; return the loss of the last one."""
        for tokens, targets in parts:
            loss = self.loss(tokens, targets)
            (loss if len(parts) == 1 else loss / len(parts)).backward()
        self.update()
        return loss.detach()


def training_step(
    torch: Any,
    config: Any,
    batch: int,
    device: str,
    *,
    micro_batches: int = 1,
    recompute: bool = False,
    **options: Any,
) -> Step:
    """Return a training step of this rank on random tokens.

    Args:
        torch: PyTorch.
        config: sizes of the model.
        batch: sequences of a rank.
        device: "cpu", "cuda" or "cuda:N".
        micro_batches: parts of a batch, one after the other.
        recompute: whether blocks are computed again in backward.
        options: of `TorchTrainer`.
    """
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(0)
    model = TORCH[family(config)](config, recompute=recompute)
    trainer = TorchTrainer(torch, model, device, cudnn=True, **options)
    size = (batch, config.context)
    x, y = (
        torch.randint(0, config.vocab_size, size, device=device).chunk(micro_batches) for _ in "xy"
    )
    parts = list(zip(x, y, strict=True))
    return lambda: trainer.step(parts)
