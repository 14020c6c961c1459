"""Data parallelism for PyTorch's modules, over tensorgrad's collectives.

The course's tests start ranks that PyTorch connects with gloo; `GlooNetwork` moves the arrays of a
`tensorgrad.parallel.Comm` over that connection. So the collectives here are tensorgrad's: they
average, and ranks that call different ones get an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist

import tensorgrad as tg
from cs336.bridge import shared
from tensorgrad.backend import Array
from tensorgrad.parallel import Comm, Handle
from tensorgrad.parallel.buckets import assign_buckets
from tensorgrad.parallel.comm.transport import CommCall, Finish, Network


class GlooNetwork:
    """The transport of a `Comm` over PyTorch's process group; GPU arrays go through the host."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.ranks = tuple(range(self.size))
        self.local_rank, self.local_size = self.rank, self.size

    def begin(self, call: CommCall) -> Finish:
        """Begin one of the transfers below."""
        data, out, op = call.data, call.out, call.op
        if call.name == "reduce_scatter":
            return self.reduce_scatter(data, out, op)
        if call.name == "all_gather":
            return self.all_gather(data, out)
        return self.all_reduce(out, op) if op else self.broadcast(out, call.root)

    def all_reduce(self, array: Array, op: str) -> Finish:
        """Reduce in place."""
        operation = dist.ReduceOp.MAX if op == "max" else dist.ReduceOp.SUM
        work = dist.all_reduce(torch.from_numpy(array), operation, async_op=True)

        def finish() -> None:
            work.wait()
            if op == "mean":
                array[...] /= self.size

        return finish

    def reduce_scatter(self, array: Array, out: Array, op: str) -> Finish:
        """Reduce piece r of the array into `out` of rank r."""
        whole = array.copy()
        reduced = self.all_reduce(whole, op)

        def finish() -> None:
            reduced()
            out[...] = whole.reshape(self.size, -1)[self.rank].reshape(out.shape)

        return finish

    def all_gather(self, data: Array, out: Array) -> Finish:
        """Put the bytes of all ranks into `out`."""
        pieces = list(torch.from_numpy(out.reshape(self.size, -1)).unbind())
        piece = torch.from_numpy(data.reshape(-1).copy())
        return cast(Finish, dist.all_gather(pieces, piece, async_op=True).wait)

    def broadcast(self, data: Array, root: int) -> Finish:
        """Send the bytes of `root` to all."""
        return cast(Finish, dist.broadcast(torch.from_numpy(data), root, async_op=True).wait)

    def begin_call(self, call: str) -> None:
        """Do nothing: there is no watchdog."""

    def same(self, number: int) -> bool:
        """Return on all ranks whether all pass the same number."""
        ends = torch.tensor([number, -number])
        dist.all_reduce(ends, dist.ReduceOp.MAX)
        return bool(ends[0] == -ends[1])

    def exchange(self, text: str) -> list[str]:
        """Return the texts of all ranks."""
        texts = [""] * self.size
        dist.all_gather_object(texts, text)
        return texts

    def connect_gpus(self, device: int) -> GlooNetwork:
        """Return this network: arrays of GPUs go through the host."""
        return self


def communicator() -> Comm:
    """Return tensorgrad's communicator of the ranks that PyTorch has connected."""
    return Comm(cast(Network, GlooNetwork()))


class Averages:
    """Averages the gradients of PyTorch's parameters over the ranks while backward runs.

    Args:
        comm: of the ranks.
        buckets: the parameters; gradients of one bucket travel together, after the last of them.
    """

    def __init__(self, comm: Comm, buckets: Sequence[Sequence[Any]]) -> None:
        self._comm, self._buckets = comm, buckets
        self._missing = [len(bucket) for bucket in buckets]  # gradients that backward will make
        self._sent: list[tuple[Handle, Array, Sequence[Any]]] = []
        for number, bucket in enumerate(buckets):
            for parameter in bucket:
                parameter.register_post_accumulate_grad_hook(partial(self._ready, number))

    def _ready(self, number: int, _: Any) -> None:
        self._missing[number] -= 1
        if not self._missing[number]:
            bucket = self._buckets[number]
            flat = tg.concatenate([shared(p.grad).reshape(-1) for p in bucket]).data
            self._sent.append((self._comm.all_reduce(flat, "mean", wait=False), flat, bucket))

    def finish(self) -> None:
        """Wait for the averages, and put them in place of the gradients."""
        for handle, flat, bucket in self._sent:
            handle.wait()
            ends = np.cumsum([p.numel() for p in bucket])
            for p, part in zip(bucket, np.split(flat, ends[:-1]), strict=True):
                shared(p.grad).data[...] = part.reshape(p.shape)
        self._sent.clear()
        self._missing = [len(bucket) for bucket in self._buckets]


class Replicas(torch.nn.Module):  # type: ignore[misc]  # PyTorch's class is Any here
    """A module that begins with the values of rank 0; the base of both kinds of parallelism."""

    _averages: Averages

    def __init__(self, module: Any) -> None:
        super().__init__()
        self._comm = communicator()
        for value in module.state_dict().values():
            self._comm.broadcast(shared(value).data)
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's result."""
        return self.module(*args, **kwargs)

    def finish_gradients(self) -> None:
        """Wait for the averages, after backward and before the optimizer's step."""
        self._averages.finish()


class DataParallel(Replicas):
    """A module whose gradients are averaged over the ranks while backward runs.

    Args:
        module: begins with the values of rank 0.
        bucket_size_mb: size of a bucket of gradients (10^6 bytes), which travel together; 0: each
            gradient alone.
    """

    def __init__(self, module: Any, bucket_size_mb: float = 0.0) -> None:
        super().__init__(module)
        wanted = {name: p for name, p in module.named_parameters() if p.requires_grad}
        numbers = {name: number for number, name in enumerate(wanted)}
        if bucket_size_mb:
            numbers = assign_buckets({n: shared(p) for n, p in wanted.items()}, bucket_size_mb)
        buckets: dict[int, list[Any]] = {}
        for name, number in numbers.items():
            buckets.setdefault(number, []).append(wanted[name])
        self._averages = Averages(self._comm, list(buckets.values()))


class ShardedOptimizer(torch.optim.Optimizer):  # type: ignore[misc]  # likewise
    """An optimizer of which each rank has the state of its own parameters, and updates these.

    Args:
        params: the same parameters, or groups of them, on all ranks.
        optimizer_cls: the class of the optimizer of each rank.
        kwargs: its options.
    """

    def __init__(self, params: Any, optimizer_cls: type, **kwargs: Any) -> None:
        self._make = optimizer_cls
        self._comm = communicator()
        self._local: Any = None
        self._groups: list[tuple[dict[str, Any], dict[str, Any]]] = []  # all ranks', and the local
        self._owners: list[tuple[Any, int]] = []
        self._loads = [0] * self._comm.size
        super().__init__(params, kwargs)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters; each goes to the rank that has the fewest elements."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        local_params = []
        for parameter in group["params"]:
            owner = int(np.argmin(self._loads))
            self._loads[owner] += parameter.numel()
            self._owners.append((parameter, owner))
            if owner == self._comm.rank:
                local_params.append(parameter)
        if not local_params:
            return
        local = {**group, "params": local_params}
        if self._local is None:
            self._local = self._make([local], **self.defaults)
        else:
            self._local.add_param_group(local)
        self._groups.append((group, self._local.param_groups[-1]))

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update this rank's parameters, and send them to the others."""
        for group, local in self._groups:  # a schedule may have set another learning rate
            local.update({key: value for key, value in group.items() if key != "params"})
        loss = None if closure is None else closure()
        if self._local is not None:
            self._local.step()
        for parameter, owner in self._owners:
            self._comm.broadcast(shared(parameter).data, owner)
        return loss


class _Shard:
    """The weight of one layer: a piece on each rank, and whole while forward or backward runs."""

    def __init__(self, layer: Any, comm: Comm, dtype: Any) -> None:
        self._comm, self._dtype, self._layer = comm, dtype, layer
        whole = layer.weight.detach()
        self.shape, self._size = whole.shape, whole.numel()
        flat = whole.new_zeros(comm.size, -(-self._size // comm.size))  # the last one may be padded
        flat.view(-1)[: self._size] = whole.reshape(-1)
        self.piece = torch.nn.Parameter(flat[comm.rank].clone())
        self._whole: Any = None
        layer.weight = self.piece
        layer.register_forward_pre_hook(lambda *_: self._begin_forward())
        layer.register_forward_hook(lambda *_: self._end_forward())
        if type(layer).__name__ == "Linear":  # backward of an embedding reads no weight
            layer.register_full_backward_pre_hook(lambda *_: self._fill())
        self._pending: tuple[Handle, Array] | None = None

    def gathered(self, dtype: Any = None) -> Any:
        """Return the whole weight."""
        data = shared(self.piece.to(dtype or self.piece.dtype)).data
        whole = torch.from_dlpack(tg.Tensor(self._comm.all_gather(data)))
        return whole.reshape(-1)[: self._size].view(self.shape)

    def _begin_forward(self) -> None:
        self._whole = torch.nn.Parameter(self.gathered(self._dtype).clone())
        self._whole.register_post_accumulate_grad_hook(self._reduce)
        self._layer._parameters["weight"] = self._whole

    def _end_forward(self) -> None:
        self._layer._parameters["weight"] = self.piece
        if not torch.is_grad_enabled():
            self._whole = None
        else:
            self._whole.untyped_storage().resize_(0)  # backward's graph keeps the tensor, empty

    def _fill(self) -> None:
        whole = self._whole
        if not whole.untyped_storage().size():
            whole.untyped_storage().resize_(self._size * whole.element_size())
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(whole):
                whole.copy_(self.gathered(self._dtype))

    def _reduce(self, whole: Any) -> None:
        """Begin to average the gradient: each rank gets the part of its piece."""
        grad = whole.grad.to(self.piece.dtype).reshape(-1)
        padded = grad.new_zeros(self.piece.numel() * self._comm.size)
        padded[: self._size] = grad
        mean = torch.empty_like(self.piece)
        handle = self._comm.reduce_scatter(
            shared(padded).data, shared(mean).data, "mean", wait=False
        )
        self._pending = handle, mean
        whole.grad = self._whole = None

    def finish(self) -> None:
        """Wait for the gradient, and add it to the piece's."""
        if self._pending is not None:
            handle, mean = self._pending
            handle.wait()
            self.piece.grad = mean if self.piece.grad is None else self.piece.grad + mean
            self._pending = None


class FullyShardedDataParallel(Replicas):
    """A module whose linear layers and embeddings have their weights divided among the ranks.

    The other parameters are on all ranks, and their gradients averaged.

    Args:
        module: begins with the values of rank 0.
        compute_dtype: of the weights while forward and backward run; default: their own.
    """

    def __init__(self, module: Any, compute_dtype: Any = None) -> None:
        super().__init__(module)
        self._shards = {
            f"{name}.weight": _Shard(layer, self._comm, compute_dtype)
            for name, layer in module.named_modules()
            if type(layer).__name__ in ("Linear", "Embedding")
        }
        parameters = module.named_parameters()
        replicated = [p for name, p in parameters if p.requires_grad and name not in self._shards]
        self._averages = Averages(self._comm, [[p] for p in replicated])

    def finish_gradients(self) -> None:
        """Wait for the averages, after backward and before the optimizer's step."""
        super().finish_gradients()
        for shard in self._shards.values():
            shard.finish()

    def full_parameters(self) -> dict[str, Any]:
        """Return all parameters, whole."""
        whole = {name: p.detach() for name, p in self.module.named_parameters()}
        return whole | {name: shard.gathered().detach() for name, shard in self._shards.items()}
