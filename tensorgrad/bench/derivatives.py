"""`tensorgrad bench derivatives`: Hessian-vector products of GPT-2s beside one gradient.

The loss is the mean over random tokens; the vector is random, in the dtype of the parameters. The
product (`tensorgrad.hvp`) and the gradient (a training step without its update) are captured as
CUDA graphs, and take turns. `times_gradient` is the time of a product over that of a gradient: the
floor is 8/3, as a product needs 8 times the matrix products of a forward pass. `peak_mb` is the
reserved memory before the gradient is measured.

PyTorch's product is reverse over reverse with the math attention, which alone it differentiates
twice, and eager, as torch.compile refuses it; its gradient is compiled, with cuDNN's attention in
16 bits. Each row has its own process on a GPU. Tests: tests/bench/test_derivatives.py.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from tensorgrad import graph
from tensorgrad.autograd.functions import functional_call, hvp
from tensorgrad.bench.memory import release
from tensorgrad.bench.options import PRESET, Device, Peer, Precision, Sizes, is_measured
from tensorgrad.bench.pictures import bars
from tensorgrad.bench.step import measure_alone, note_failure, turns_of
from tensorgrad.bench.steps import Preset, RankTimer, Step, model_case, settings_of
from tensorgrad.bench.sweep import Case, Row, Sweep
from tensorgrad.bench.timing import seconds_of
from tensorgrad.bench.torch_ddp import TORCH
from tensorgrad.core import backend
from tensorgrad.core.tensor import Tensor
from tensorgrad.models.presets import model_name
from tensorgrad.parallel.comm.collectives import Comm
from tensorgrad.parallel.data import all_reduce_tree
from tensorgrad.profile.training_step import language_step
from tensorgrad.train.settings import has_narrow_products
from tensorgrad.train.times import memory

BATCHES = {"gpt2-124M": (8, 4), "gpt2-355M": (4,)}


def steps(case: Case, device: str) -> tuple[Step, Step]:
    """Return a Hessian-vector product and a gradient of a row, as functions without arguments."""
    settings, config = settings_of(case)
    step = language_step(settings, config, device, lazy=True)
    model, (x, y) = step.model, map(Tensor, step.parts[0])
    precision, parameters = settings.precision(), dict(model.named_parameters())
    rng = backend.namespace_on(device).random.default_rng(0)
    vector = {
        name: Tensor(rng.standard_normal(p.shape, np.float32).astype(p.dtype, copy=False))
        for name, p in parameters.items()
    }

    def loss(values: Any) -> Tensor:
        with precision():
            value: Tensor = functional_call(model, values, x, y)
            return value

    def product() -> Any:
        return hvp(loss, (parameters,), (vector,))[0]

    def gradient() -> None:
        step.optimizer.zero_grad()
        step.strategy.compute_gradients(step.loss, step.parts)

    return product, gradient


def measure_on_ranks(case: Case, device: str, comm: Comm) -> Row:
    """Return the time of a product whose mean over the ranks is taken, beside one of each rank."""
    product, _ = steps(case, device)
    timer, calls = RankTimer(comm, device, case["windows"]), 4
    alone = graph.capture(product, device)
    averaged = graph.capture(lambda: all_reduce_tree(product(), comm), device)
    for _ in range(3):
        alone(), averaged()
    times = [timer.seconds(call, calls) for call in (alone, averaged)]
    return {"hvp_ms": 1e3 * times[1], "alone_ms": 1e3 * times[0], "scaling": times[0] / times[1]}


def measure_derivatives(case: Case, device: str) -> Row:
    """Return the results of a row."""
    product, gradient = (graph.capture(each, device) for each in steps(case, device))
    row: Row = {"first_s": seconds_of(product, device)}
    for _ in range(2):
        seconds_of(product, device)
    row["peak_mb"] = round(memory(device != "cpu").get("peak_memory_mb", 0))
    times = turns_of(case, {"hvp": product, "gradient": gradient}, device)
    row |= {f"{name}_ms": timing["ms"] for name, timing in times.items()}
    row["times_gradient"] = row["hvp_ms"] / row["gradient_ms"]
    row |= {name: value for name, value in times["hvp"].items() if name != "ms"}
    del product, gradient
    return row | (_peers(case, device) if case["peer"] else {})


def _peers(case: Case, device: str) -> Row:
    """Return the results of PyTorch."""
    row: Row = {}
    for name in ("hvp", "gradient"):
        release()
        torch = importlib.import_module("torch")
        try:
            if device != "cpu":
                torch.cuda.reset_peak_memory_stats()
            times = turns_of(case, {name: _torch_step(name, case, device)}, device)
            row[f"peer_{name}_ms"] = times[name]["ms"]
            if name == "hvp" and device != "cpu":
                row["peer_peak_mb"] = round(torch.cuda.max_memory_reserved() / 1e6)
        except Exception as error:  # our figures of this row are right all the same
            note_failure(row, name, error)
    if "peer_hvp_ms" in row and "peer_gradient_ms" in row:
        row["peer_times_gradient"] = row["peer_hvp_ms"] / row["peer_gradient_ms"]
    return row


def _torch_step(name: str, case: Case, device: str) -> Step:
    """Return PyTorch's product or gradient."""
    settings, config = settings_of(case)
    torch: Any = importlib.import_module("torch")
    attention: Any = importlib.import_module("torch.nn.attention")
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(0)
    with torch.device(device):
        model = TORCH[model_name(config)](config)
        size = settings.batch, config.context
        x, y = (torch.randint(0, config.vocab_size, size) for _ in "xy")
    parameters = list(model.parameters())
    vector = [torch.randn_like(parameter) for parameter in parameters]
    narrow, kind = has_narrow_products(settings.dtype), device.partition(":")[0]
    run = torch.compile(model) if name == "gradient" else model
    kernels = [attention.SDPBackend.MATH]
    if name == "gradient":
        kernels = [attention.SDPBackend.CUDNN_ATTENTION, attention.SDPBackend.EFFICIENT_ATTENTION]
        kernels += [attention.SDPBackend.FLASH_ATTENTION, attention.SDPBackend.MATH]

    def gradient(again: bool = False) -> Any:
        cast = torch.autocast(kind, torch.bfloat16, enabled=narrow)
        with cast, attention.sdpa_kernel(kernels, set_priority=True):
            loss = run(x, y)
        return torch.autograd.grad(loss, parameters, create_graph=again)

    def product() -> Any:
        with attention.sdpa_kernel(kernels):
            return torch.autograd.grad(gradient(True), parameters, vector)

    return gradient if name == "gradient" else product


def derivatives_sweep(
    *,
    preset: tuple[Preset, ...] = ("gpt2-124M", "gpt2-355M"),
    batch: tuple[int, ...] = (),
    sizes: Sizes = PRESET,
    dtype: Precision = "bfloat16-parameters",
    peer: Peer = None,
    seconds: float = 0.5,
    windows: int = 5,
    device: Device = "auto",
    comm: Comm,
) -> Iterator[Sweep]:
    """Measure Hessian-vector products of language models beside one gradient, and PyTorch's.

    On several ranks: the mean of the ranks' products, beside a product alone.

    Args:
        preset: models.
        batch: sequences (default: by the model, 4 and 8).
        dtype: as in training.
        seconds: least length of a timed window.
        windows: of each side, of which the median counts.
    """
    names = "PyTorch" if comm.size == 1 and is_measured(peer) else ""
    cases = [
        {
            **model_case(name, sequences, dtype, sizes),
            **{"peer": names, "seconds": seconds, "windows": windows},
        }
        for name in dict.fromkeys(preset)
        for sequences in dict.fromkeys(batch or BATCHES.get(name, (4,)))
    ]
    results = (
        *("hvp_ms", "gradient_ms", "times_gradient", "peak_mb", "first_s"),
        *("peer_hvp_ms", "peer_gradient_ms", "peer_times_gradient", "peer_peak_mb"),
    )
    hidden = "layers", "width", "heads", "vocab"
    shown = "hvp_ms", "gradient_ms", "peer_hvp_ms", "peer_gradient_ms"
    draw = bars("Hessian-vector product", "ms", ("preset", "batch"), shown)
    if comm.size > 1:
        yield Sweep(
            "derivatives-ranks",
            [{**case, "ranks": comm.size} for case in cases],
            partial(measure_on_ranks, device=device, comm=comm),
            ("hvp_ms", "alone_ms", "scaling"),
            bars(
                "Hessian-vector product on ranks", "ms", ("preset", "batch"), ("hvp_ms", "alone_ms")
            ),
            device,
            hidden=hidden,
        )
        return
    measure = partial(measure_alone, measure_derivatives, device=device)
    yield Sweep("derivatives", cases, measure, results, draw, device, hidden=hidden)
