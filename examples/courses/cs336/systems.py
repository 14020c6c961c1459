"""Adapters of CS336's assignment 2. In its tests, `adapters.py` becomes

from cs336.systems import *
"""

from __future__ import annotations

from typing import Any

import torch

import tensorgrad as tg
from cs336.bridge import shared
from cs336.distributed import DataParallel as get_ddp
from cs336.distributed import FullyShardedDataParallel as get_fsdp
from cs336.distributed import Replicas
from cs336.distributed import ShardedOptimizer as get_sharded_optimizer

__all__ = [
    "ddp_bucketed_on_after_backward", "ddp_bucketed_on_train_batch_start",
    "ddp_individual_parameters_on_after_backward", "ddp_on_after_backward",
    "fsdp_gather_full_params", "fsdp_on_after_backward", "get_ddp", "get_ddp_bucketed",
    "get_ddp_individual_parameters", "get_flashattention_autograd_function_pytorch",
    "get_flashattention_autograd_function_triton", "get_fsdp", "get_sharded_optimizer",
]  # fmt: skip


class FlashAttention(torch.autograd.Function):  # type: ignore[misc]  # PyTorch's class is Any here
    """`tensorgrad.attention` of (B, T, D): on a GPU its CUDA kernels, otherwise NumPy."""

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, is_causal: bool = False) -> Any:
        """Return (B, Tq, D); save the logarithms of the sums of exp(scores), (B, Tq)."""
        q, k, v = ctx.leaves = [shared(x)[:, None].requires_grad_() for x in (q, k, v)]
        ctx.y, logsumexp = tg.attention(q, k, v, causal=is_causal, return_logsumexp=True)
        ctx.save_for_backward(torch.from_dlpack(logsumexp[:, 0]))
        return torch.from_dlpack(ctx.y.detach()[:, 0])

    @staticmethod
    def backward(ctx: Any, dy: Any) -> tuple[Any, ...]:
        """Return the gradients of q, k and v."""
        ctx.y.backward(shared(dy)[:, None])
        return *(torch.from_dlpack(tg.Tensor(x.grad)[:, 0]) for x in ctx.leaves), None


def get_flashattention_autograd_function_triton() -> Any:
    """Return the attention; with neither PyTorch's ops nor Triton, it is tensorgrad's."""
    return FlashAttention


get_flashattention_autograd_function_pytorch = get_flashattention_autograd_function_triton

get_ddp_bucketed = get_ddp_individual_parameters = get_ddp


def ddp_on_after_backward(ddp_model: Replicas, optimizer: Any) -> None:
    """Wait for the averages of the gradients."""
    ddp_model.finish_gradients()


ddp_bucketed_on_after_backward = ddp_on_after_backward
ddp_individual_parameters_on_after_backward = ddp_on_after_backward


def ddp_bucketed_on_train_batch_start(ddp_model: Replicas, optimizer: Any) -> None:
    """Do nothing: `finish_gradients` has prepared the next batch."""


def fsdp_on_after_backward(fsdp_model: Replicas, optimizer: Any) -> None:
    """Wait for the averages of the gradients."""
    fsdp_model.finish_gradients()


def fsdp_gather_full_params(fsdp_model: get_fsdp) -> dict[str, Any]:
    """Return all parameters, whole."""
    return fsdp_model.full_parameters()
