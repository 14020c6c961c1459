"""Steps captured into a CUDA graph: no wait for the host, and the same bits as eager ones.

Capture fails where anything copies between host and device or waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tensorgrad as tg
from tensorgrad import Tensor, dtypes, optim
from tensorgrad.core import backend
from tensorgrad.testing import Capture
from tests.optim import toy

pytestmark = pytest.mark.gpu

OPTIMIZERS: dict[str, Callable[..., optim.Optimizer]] = {
    "sgd": lambda p: optim.SGD(p, lr=0.1, weight_decay=0.1),
    "nesterov": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: optim.Adam(p, lr=0.1, weight_decay=0.1),
    "adamw": lambda p: optim.AdamW(p, lr=0.1, weight_decay=0.1),
    "lion": lambda p: optim.Lion(p, lr=0.1, weight_decay=0.1),
    "muon": lambda p: optim.Muon(p, lr=0.1, weight_decay=0.1),
    "muon and adamw": lambda p: optim.Muon(
        p, lr=0.1, matrices=lambda name, _: name == "h.0.weight", decay=optim.decays_matrices
    ),
    "adafactor": lambda p: optim.Adafactor(p, lr=0.1, weight_decay=0.1),
    "groups": lambda p: optim.AdamW(in_groups(p), lr=0.1, weight_decay=0.1),
    "adafactor in groups": lambda p: optim.Adafactor(in_groups(p), lr=0.1, weight_decay=0.1),
}
MATRICES = {name: shape for name, shape in toy.SHAPES.items() if len(shape) == 2}


def in_groups(parameters: Any) -> list[dict[str, Any]]:
    """Return the parameters in two groups, the second with options of its own."""
    pairs = list(parameters)
    return [{"params": pairs[:2]}, {"params": pairs[2:], "lr": 0.05, "weight_decay": 0.3}]


def everything(optimizer: optim.Optimizer) -> list[Any]:
    return [optimizer.flat.data, optimizer.hyper, *optimizer.state.values()]


@pytest.mark.parametrize("options", ["plain", "clipped", "scaled"])
@pytest.mark.parametrize("dtype", [dtypes.float32, dtypes.bfloat16], ids=str)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_optimizer_steps(kind: str, dtype: Any, options: str) -> None:
    """Gradients, learning rate and loss scale change between launches; one step overflows."""

    def prepare() -> tuple[Any, optim.Optimizer, Callable[[], Any], Any]:
        shapes = MATRICES if kind == "muon" else toy.SHAPES
        tensors = toy.parameters(dtype, "cuda", shapes=shapes)
        optimizer = OPTIMIZERS[kind](tensors.items())
        scaler = optim.LossScaler(scale=8.0, interval=2) if options == "scaled" else None
        limit = None if options == "plain" else 0.5
        return tensors, optimizer, lambda: optimizer.step(max_norm=limit, scaler=scaler), scaler

    (eager, one, step, scaler), (captured, two, other, other_scaler) = prepare(), prepare()
    toy.set_gradients(captured, 0)
    assert not two.flat.without_gradient()  # the host reads what was written, before the capture
    launch = Capture(other)
    for number in range(5):
        for tensors, optimizer in ((eager, one), (captured, two)):
            toy.set_gradients(tensors, number)
            if number == 3 and options != "plain":
                optimizer.flat.grad[5] = np.inf
            if number:
                optimizer.lr = 0.1 / number
        before = [array.copy() for array in everything(two)]
        if number:
            launch()
        step()
        assert toy.same_bits(everything(one), everything(two)), number
        if number == 3 and options != "plain":
            places = slice(None, 2)  # learning rate and count; the factor says that it was skipped
            assert toy.same_bits([before[1][places]], [two.hyper[places]])
            assert toy.same_bits([before[0], *before[2:]], [two.flat.data, *two.state.values()])
    if scaler is not None:
        assert scaler.state_dict() == other_scaler.state_dict()


def loss_of_norms(arrays: list[Any], targets: Any, classes: int) -> list[Any]:
    x, weight, bias = (Tensor(a, requires_grad=True) for a in arrays)
    y = tg.rms_norm(tg.layer_norm(x, weight, bias), weight)
    loss = tg.cross_entropy(y[:, :classes], targets, label_smoothing=0.1, z_loss=0.01)
    (loss * 2.0).backward()
    return [loss.data, x.grad, weight.grad, bias.grad]


@pytest.mark.parametrize("dtype", dtypes.FLOATS, ids=str)
@pytest.mark.parametrize("width", [100, 2048, 20000])
def test_norms_and_cross_entropy(width: int, dtype: Any) -> None:
    rng = backend.cupy.random.default_rng(width)
    shapes = [(70, width), (width,), (width,)]
    arrays = [rng.standard_normal(shape).astype(dtype) for shape in shapes]
    targets = backend.cupy.arange(70) % width
    targets[3] = -100
    launch = Capture(lambda: loss_of_norms(arrays, targets, width - 3))
    arrays[0] *= 0.5  # the graph reads what the arrays hold when it is launched
    targets[4] = -100
    launch()
    expected = loss_of_norms(arrays, targets, width - 3)
    assert toy.same_bits(launch.result, expected)
