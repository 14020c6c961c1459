"""Adapters of CS336's assignment 2. In its tests, `adapters.py` becomes

from cs336.systems import *
"""

from __future__ import annotations

from typing import Any

import torch

import tensorgrad as tg
from cs336.distributed import DataParallel, FullyShardedDataParallel, ShardedOptimizer
from cs336.training import shared

__all__ = [
    "ddp_bucketed_on_after_backward",
    "ddp_bucketed_on_train_batch_start",
    "ddp_individual_parameters_on_after_backward",
    "ddp_on_after_backward",
    "fsdp_gather_full_params",
    "fsdp_on_after_backward",
    "get_ddp",
    "get_ddp_bucketed",
    "get_ddp_individual_parameters",
    "get_flashattention_autograd_function_pytorch",
    "get_flashattention_autograd_function_triton",
    "get_fsdp",
    "get_sharded_optimizer",
]


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


def get_flashattention_autograd_function_pytorch() -> Any:
    """Return the attention; without PyTorch's ops, it is tensorgrad's."""
    return FlashAttention


def get_flashattention_autograd_function_triton() -> Any:
    """Return the attention; without Triton, it is tensorgrad's CUDA kernels."""
    return FlashAttention


def get_ddp(module: Any) -> DataParallel:
    """Return the module with gradients that are averaged one by one during backward."""
    return DataParallel(module)


def ddp_on_after_backward(ddp_model: DataParallel, optimizer: Any) -> None:
    """Wait for the averages."""
    ddp_model.finish_gradients()


def get_ddp_individual_parameters(module: Any) -> DataParallel:
    """Return the module with gradients that are averaged one by one during backward."""
    return DataParallel(module)


def ddp_individual_parameters_on_after_backward(ddp_model: DataParallel, optimizer: Any) -> None:
    """Wait for the averages."""
    ddp_model.finish_gradients()


def get_ddp_bucketed(module: Any, bucket_size_mb: float) -> DataParallel:
    """Return the module with gradients that are averaged in buckets during backward."""
    return DataParallel(module, bucket_size_mb)


def ddp_bucketed_on_after_backward(ddp_model: DataParallel, optimizer: Any) -> None:
    """Wait for the averages."""
    ddp_model.finish_gradients()


def ddp_bucketed_on_train_batch_start(ddp_model: DataParallel, optimizer: Any) -> None:
    """Do nothing: `finish_gradients` has prepared the next batch."""


def get_fsdp(module: Any, compute_dtype: Any = None) -> FullyShardedDataParallel:
    """Return the module with weights that are divided among the ranks."""
    return FullyShardedDataParallel(module, compute_dtype)


def fsdp_on_after_backward(fsdp_model: FullyShardedDataParallel, optimizer: Any) -> None:
    """Wait for the gradients."""
    fsdp_model.finish_gradients()


def fsdp_gather_full_params(fsdp_model: FullyShardedDataParallel) -> dict[str, Any]:
    """Return all parameters, whole."""
    return fsdp_model.full_parameters()


def get_sharded_optimizer(params: Any, optimizer_cls: type, **kwargs: Any) -> ShardedOptimizer:
    """Return an optimizer of which each rank has the state of its own parameters."""
    return ShardedOptimizer(params, optimizer_cls, **kwargs)
