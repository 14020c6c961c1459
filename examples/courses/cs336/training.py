"""Batches, clipping, AdamW, the schedule and checkpoints, for PyTorch's tensors and modules."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import tensorgrad as tg
from cs336.bridge import shared
from tensorgrad.io.readers import parse_json
from tensorgrad.optim import schedule
from tensorgrad.optim.clip import clip_grad_norm

File = str | os.PathLike[str] | Any  # or an open file of bytes


def get_batch(dataset: Any, batch_size: int, context_length: int, device: str) -> tuple[Any, Any]:
    """Return inputs and targets, each (B, T), from uniform places of a text.

    Args:
        dataset: token ids, 1-D.
        batch_size: B.
        context_length: T.
        device: PyTorch's name of it.
    """
    starts = np.random.default_rng().integers(0, len(dataset) - context_length, (batch_size, 1))
    tokens = np.asarray(dataset[starts + np.arange(context_length + 1)], np.int64)
    return tuple(torch.from_numpy(part).to(device) for part in (tokens[:, :-1], tokens[:, 1:]))


def clip_gradients(parameters: Iterable[Any], max_l2_norm: float) -> None:
    """Scale the gradients of PyTorch's parameters in place, to a total norm of at most this."""
    tensors = []
    for parameter in parameters:
        if parameter.grad is not None:
            tensor = shared(parameter)
            tensor.grad = shared(parameter.grad).data
            tensors.append(tensor)
    clip_grad_norm(tensors, max_l2_norm)


def cosine_schedule(
    it: int,
    max_learning_rate: float,
    min_learning_rate: float,
    warmup_iters: int,
    cosine_cycle_iters: int,
) -> float:
    """Return the learning rate of an iteration: 0 in the first, after warmup half a cosine."""
    if it < warmup_iters:  # tensorgrad's warmup begins with a rate above 0
        return max_learning_rate * it / warmup_iters
    return schedule.cosine(
        it, max_learning_rate, cosine_cycle_iters, warmup_iters, min_learning_rate
    )


class AdamW(torch.optim.Optimizer):  # type: ignore[misc]  # PyTorch's class is Any here
    """`tensorgrad.optim.AdamW` as an optimizer of PyTorch.

    Args:
        params: PyTorch's parameters, or groups of them.
        lr: learning rate.
        betas: decays of the means of gradients and of their squares.
        eps: added to the root of the latter.
        weight_decay: of all parameters.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> None:
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        )
        self._optimizers: dict[Any, tuple[Any, tg.optim.AdamW]] = {}

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that have a gradient; return what the closure returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        return loss

    def _update(self, parameter: Any, group: dict[str, Any]) -> None:
        values = shared(parameter)
        if parameter not in self._optimizers:
            self._optimizers[parameter] = self._optimizer(values, group, self.state[parameter])
        leaf, adamw = self._optimizers[parameter]
        leaf.data[...] = values.data
        leaf.grad[...] = shared(parameter.grad).data
        adamw.lr = group["lr"]
        adamw.step()
        values.data[...] = leaf.data
        state = adamw.state_dict()
        self.state[parameter] = {
            "step": state["step"],
            "exp_avg": torch.from_dlpack(tg.Tensor(state["m/0"])),
            "exp_avg_sq": torch.from_dlpack(tg.Tensor(state["v/0"])),
        }

    def _optimizer(
        self, values: tg.Tensor, group: dict[str, Any], state: dict[str, Any]
    ) -> tuple[tg.Tensor, tg.optim.AdamW]:
        """Return a copy of a parameter and its optimizer, with the state that was loaded."""
        leaf = values.copy().requires_grad_()
        groups = [{"params": [leaf], "weight_decay": group["weight_decay"]}]
        adamw = tg.optim.AdamW(groups, group["lr"], group["betas"], group["eps"])
        if state:
            adamw.load_state_dict(
                {
                    "step": int(state["step"]),
                    "lr": group["lr"],
                    "m/0": shared(state["exp_avg"]),
                    "v/0": shared(state["exp_avg_sq"]),
                }
            )
        return leaf, adamw

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` of an optimizer with the same parameters returned."""
        super().load_state_dict(state_dict)
        self._optimizers.clear()


def save_checkpoint(model: Any, optimizer: Any, iteration: int, out: File) -> None:
    """Write a model and an optimizer of PyTorch to one safetensors file, with `tg.save`.

    Args:
        model: any module.
        optimizer: any optimizer whose state holds tensors and numbers.
        iteration: how many have been done.
        out: the path, or an open file of bytes.
    """
    state = optimizer.state_dict()
    values = {
        "iteration": iteration,
        "model": _to_tensorgrad(model.state_dict()),
        "state": {str(number): _to_tensorgrad(entry) for number, entry in state["state"].items()},
        "param_groups": json.dumps({"groups": state["param_groups"]}),
    }
    if isinstance(out, str | os.PathLike):
        tg.save(values, out)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "checkpoint")
        tg.save(values, path)
        out.write(path.read_bytes())


def load_checkpoint(src: File, model: Any, optimizer: Any) -> int:
    """Load what `save_checkpoint` wrote into a model and an optimizer; return the iterations."""
    if isinstance(src, str | os.PathLike):
        values = tg.load(src)
    else:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "checkpoint")
            path.write_bytes(src.read())
            values = tg.load(path)
    model.load_state_dict(_to_torch(values["model"]))
    groups = [
        {
            key: tuple(v) if isinstance(v, list) and key != "params" else v
            for key, v in group.items()
        }
        for group in parse_json(values["param_groups"], "load_checkpoint")["groups"]
    ]
    entries = {int(number): _to_torch(entry) for number, entry in values["state"].items()}
    optimizer.load_state_dict({"state": entries, "param_groups": groups})
    return int(values["iteration"])


def _to_tensorgrad(state: dict[str, Any]) -> dict[str, Any]:
    return {k: shared(v) if isinstance(v, torch.Tensor) else v for k, v in state.items()}


def _to_torch(state: dict[str, Any]) -> dict[str, Any]:
    return {k: torch.from_dlpack(v) if isinstance(v, tg.Tensor) else v for k, v in state.items()}
