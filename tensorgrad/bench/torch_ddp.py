"""Training in PyTorch, alone, with DDP or with FSDP2: the peer of our training steps.

It uses bf16 autocast, scaled_dot_product_attention (cuDNN's on GPUs), fused AdamW, clipping by the
global norm, gradients as views of the buckets and, with `compiled`, torch.compile. FSDP2 shards
float32 parameters by block, gathers them in bf16 and reduces gradients in float32.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import socket
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from tensorgrad.bench.steps import Step
from tensorgrad.bench.torch_gpt2 import gpt2
from tensorgrad.bench.torch_transformer_lm import transformer_lm
from tensorgrad.core import backend
from tensorgrad.models.presets import model_name
from tensorgrad.parallel import Comm
from tensorgrad.train.settings import TrainSettings, has_narrow_products

TORCH: dict[str, Callable[..., Any]] = {"gpt2": gpt2, "transformer-lm": transformer_lm}


def join(torch: Any, comm: Comm, device: str) -> None:
    """Connect PyTorch on all ranks: NCCL on GPUs, gloo on CPUs."""
    host = "127.0.0.1" if comm.local_size == comm.size else socket.gethostname()
    with socket.socket() as probe:
        probe.bind(("", 0))
        host, port = comm.broadcast_object([host, probe.getsockname()[1]])
    if device != "cpu":
        torch.cuda.set_device(backend.gpu_index(device))
    link, place = "gloo" if device == "cpu" else "nccl", f"tcp://{host}:{port}"
    torch.distributed.init_process_group(
        link, init_method=place, rank=comm.rank, world_size=comm.size
    )


class TorchTrainer:
    """A model of PyTorch with AdamW, clipping and what makes it fast.

    Args:
        settings: whose AdamW, clipping, dtype and seed count.
        model: returns a model that takes tokens and targets, and returns the mean loss.
        device: "cpu", "cuda" or "cuda:N".
        matrices: whether vectors have no weight decay.
        cudnn: whether attention of a GPU is cuDNN's under autocast; otherwise PyTorch chooses.
        together: how all ranks train together, "ddp" or "fsdp"; "": each for itself.
        compiled: whether the model is compiled.
        mode: of torch.compile.
    """

    def __init__(
        self,
        settings: TrainSettings,
        model: Callable[[], Any],
        device: str,
        *,
        matrices: bool = False,
        cudnn: bool = False,
        together: str = "",
        compiled: bool = False,
        mode: str = "default",
    ) -> None:
        self._torch = torch = importlib.import_module("torch")
        torch.set_num_threads(backend.threads())
        torch.manual_seed(settings.seed)
        self._autocast = has_narrow_products(settings.dtype)
        self._device, self._clip, self._mode = device, settings.clip or math.inf, mode
        self._cudnn = self._autocast and cudnn
        self.model = self._run = model().to(device)
        if together == "fsdp":
            self._shard(compiled)
        else:
            if together:
                wrap = torch.nn.parallel.DistributedDataParallel
                self._run = wrap(self.model, gradient_as_bucket_view=True)
            if compiled:
                self._run = torch.compile(self._run, mode=mode)
        decayed, vectors = list(self.model.parameters()), []
        if matrices:
            vectors = [weight for weight in decayed if weight.ndim <= 1]
            decayed = [weight for weight in decayed if weight.ndim > 1]
        groups = [{"params": decayed}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(
            groups[: 1 + bool(vectors)], settings.lr, (settings.beta1, settings.beta2),
            weight_decay=settings.weight_decay, fused=device != "cpu",
        )  # fmt: skip

    def _shard(self, compiled: bool) -> None:
        """Shard the model; the parts between FSDP's hooks are compiled, a graph ends at each."""
        torch, model = self._torch, self.model
        fsdp = importlib.import_module("torch.distributed.fsdp")
        narrow = (torch.bfloat16, torch.float32) if self._autocast else ()
        shard = partial(
            fsdp.fully_shard,
            mesh=torch.distributed.init_device_mesh(
                self._device.partition(":")[0], (torch.distributed.get_world_size(),)
            ),
            mp_policy=fsdp.MixedPrecisionPolicy(*narrow),
        )
        if compiled:
            model.loss = torch.compile(model.loss, mode=self._mode)
            for number, block in enumerate(model.blocks):
                model.blocks[number] = torch.compile(block, mode=self._mode)
        for block in model.blocks:
            shard(block)
        shard(model)

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
            if self._mode == "reduce-overhead":  # results of the graphs before are not used
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


def training_step(settings: TrainSettings, config: Any, device: str, **options: Any) -> Step:
    """Return a training step of this rank on random tokens.

    Args:
        settings: of our step; its batch is that of a rank.
        config: sizes of the model.
        device: "cpu", "cuda" or "cuda:N".
        options: of `TorchTrainer`.
    """
    torch = importlib.import_module("torch")
    torch.set_float32_matmul_precision("high")
    recompute = getattr(settings, "recompute", False)

    def model() -> Any:
        with torch.device(device):  # a host takes half a minute for the values of 1.5B parameters
            return TORCH[model_name(config)](config, recompute=recompute)

    trainer = TorchTrainer(settings, model, device, cudnn=True, **options)
    size = settings.batch, config.context
    x, y = (
        torch.randint(0, config.vocab_size, size, device=device).chunk(settings.micro_batches)
        for _ in "xy"
    )
    parts = list(zip(x, y, strict=True))
    return lambda: trainer.step(parts)
