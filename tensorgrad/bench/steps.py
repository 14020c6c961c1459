"""Training steps of a GPT-2 on random tokens, and their time and memory on all ranks.

The step is that of the training loop: gradients, clipping, AdamW, with the strategy of the ranks.
Tests: tests/bench/test_steps.py.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal
from unittest.mock import patch

import numpy as np

from tensorgrad import backend, graph, nn, random
from tensorgrad.amp import AUTOCAST, autocast
from tensorgrad.bench.memory import peak_memory
from tensorgrad.bench.options import PRECISIONS, PRESET, Sizes
from tensorgrad.bench.timing import phases, synchronize
from tensorgrad.checks import check_integer
from tensorgrad.errors import ArgumentError
from tensorgrad.models import gpt2, presets
from tensorgrad.models.language_model import LanguageModel
from tensorgrad.optim import AdamW, LossScaler, Optimizer
from tensorgrad.optim.flat import FlatParameters, NamedParameters
from tensorgrad.parallel.comm.collectives import Comm
from tensorgrad.parallel.comm.handle import Handle
from tensorgrad.tensor import Tensor
from tensorgrad.train.settings import with_gradients_of
from tensorgrad.train.strategy import Batch, Strategy

GPT2S = {
    name: replace(config, vocab_multiple=128)
    for name, config in {**gpt2.PRESETS, "char": gpt2.GPT2Config(10000, 256, 6, 6, 384)}.items()
}
MODELS: dict[str, Any] = {**GPT2S, "llama-124M": presets.PRESETS["llama-124M"]}
_NAMES = tuple(MODELS)
Preset = Literal[_NAMES]  # type: ignore[valid-type]

Step = Callable[[], object]


def sized(preset: str, sizes: Sizes = PRESET) -> Any:
    """Return a model of MODELS; a GPT-2 has its vocabulary padded to a multiple of 128.

    Raises:
        ArgumentError: there is no such preset, or the sizes do not fit.
    """
    if preset not in MODELS:
        raise ArgumentError(f"bench: preset is {preset!r}, expected {', '.join(MODELS)}")
    given = {"vocab_size" if n == "vocab" else n: size for n, size in sizes.given().items()}
    return replace(MODELS[preset], **given)


MODEL = ("preset", "layers", "width", "heads", "context", "vocab", "batch", "dtype")


def family(config: Any) -> str:
    """Return the name of the model that has such sizes, of models/presets.py."""
    return next(name for name, model in presets.MODELS.items() if type(config) is model.Config)


def sizes_of(config: Any) -> dict[str, int]:
    """Return the sizes of a model by parameter of a case."""
    sizes = {name: getattr(config, name) for name in ("layers", "width", "heads", "context")}
    return {**sizes, "vocab": config.vocab_size}


def model_case(preset: str, batch: int, dtype: str, sizes: Sizes = PRESET) -> dict[str, Any]:
    """Return the parameters of MODEL, after a check; see `sized` and `StepSettings`."""
    config = sized(preset, sizes)
    StepSettings(config, batch, dtype)
    return {"preset": preset, **sizes_of(config), "batch": batch, "dtype": dtype}


def settings_of(case: Mapping[str, Any], **others: Any) -> StepSettings:
    """Return the settings of a case with the parameters of MODEL; `others` of `StepSettings`."""
    config = sized(case["preset"], Sizes(**{name: case[name] for name in MODEL[1:6]}))
    return StepSettings(config, case["batch"], case["dtype"], **others)


@dataclass(frozen=True)
class StepSettings:
    """A model and a batch.

    Args:
        config: sizes of the model.
        batch: sequences of a rank.
        precision: "float32"; "tf32" and "bfloat16": autocast; "bfloat16-parameters": parameters
            too, with float32 copies in the optimizer; "float16": autocast with a loss scaler.
        attention: one of `nn.ATTENTION_KERNELS`.
        recompute: whether blocks are computed again in backward.
        recompute_norms: whether the outputs of their norms are.
        micro_batches: parts of a batch, one after the other.
        grad_dtype: "float32", or "bfloat16" for "bfloat16-parameters" in one process.
        seed: of the weights.
    Raises:
        ArgumentError: an argument is out of its range.
    """

    config: Any
    batch: int = 8
    precision: str = "float32"
    attention: str = "flash"
    recompute: bool = False
    recompute_norms: bool = False
    micro_batches: int = 1
    grad_dtype: str = "float32"
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the arguments."""
        if self.precision not in PRECISIONS:
            raise ArgumentError(
                f"bench: precision is {self.precision!r}, expected {', '.join(PRECISIONS)}"
            )
        for name in ("batch", "micro_batches"):
            check_integer("bench", name, getattr(self, name), 1)
        if self.batch % self.micro_batches:
            raise ArgumentError(
                f"bench: micro_batches is {self.micro_batches}, expected a divisor of the batch, "
                f"{self.batch}"
            )

    @property
    def tokens(self) -> int:
        """Tokens of a batch."""
        return self.batch * int(self.config.context)

    def model(self, device: str) -> LanguageModel:
        """Return the model with its first weights."""
        random.seed(self.seed)
        with nn.init.on(device):
            kind: Any = presets.MODELS[family(self.config)]
            model: LanguageModel = kind(self.config)
        wide = "float32" if self.precision != "bfloat16-parameters" else "bfloat16"
        model.to(device, wide)
        nn.use_attention(model, self.attention)
        model.recompute = self.recompute
        model.recompute_norms = self.recompute_norms
        return model

    def parts(self, device: str, rank: int = 0) -> list[Batch]:
        """Return micro-batches of random tokens and targets on the device."""
        rng = np.random.default_rng(rank)
        shape = (2, self.batch // self.micro_batches, self.config.context)
        return [
            tuple(
                backend.to_device(tokens.astype(np.int32), device)
                for tokens in rng.integers(0, self.config.vocab_size, shape)
            )
            for _ in range(self.micro_batches)
        ]

    def casts(self) -> AbstractContextManager[None]:
        """Return the context in which the loss is computed."""
        return autocast(self.precision) if self.precision in AUTOCAST else nullcontext()

    def scaler(self) -> LossScaler | None:
        """Return a loss scaler for float16, None for the other precisions."""
        return LossScaler() if self.precision == "float16" else None

    def optimizer(self, parameters: FlatParameters | NamedParameters) -> AdamW:
        """Return the optimizer."""
        flat = with_gradients_of(self.grad_dtype, parameters)
        return AdamW(flat, 6e-4, (0.9, 0.95), weight_decay=0.1)


def train_function(
    loss: Callable[..., Tensor], optimizer: Optimizer, clip: float, scaler: LossScaler | None = None
) -> Callable[..., Tensor]:
    """Return a training step in one process, which takes the arguments of the loss."""

    def step(*arrays: Any) -> Tensor:
        optimizer.zero_grad()
        value = loss(*arrays)
        (value if scaler is None else scaler.scale(value)).backward()
        optimizer.step(clip, scaler)
        return value

    return step


class PhasedStep:
    """A training step in one process, by phase: forward, backward, optimizer.

    Args:
        settings: the model and the batch.
        device: "cpu", "cuda" or "cuda:N".
    """

    def __init__(self, settings: StepSettings, device: str) -> None:
        self._settings, self._device = settings, device
        self._model = settings.model(device)
        self._part = settings.parts(device)[0]
        self._optimizer: AdamW | None = None
        self._scaler = settings.scaler()

    def prepare(self) -> None:
        """Make the optimizer."""
        self._optimizer = self._settings.optimizer(self._model.named_parameters())

    def forward(self) -> Tensor:
        """Return the loss."""
        with self._settings.casts():
            x, y = map(Tensor, self._part)
            return self._model.forward(x, y)

    def __call__(self) -> list[float]:
        """Train one step; return the seconds of each phase."""
        optimizer, scaler = self._optimizer, self._scaler
        assert optimizer is not None
        optimizer.zero_grad()
        return phases(
            self._device,
            self.forward,
            lambda loss: (loss if scaler is None else scaler.scale(loss)).backward(),
            lambda: optimizer.step(1.0, scaler),
        )


def training_step(
    settings: StepSettings, strategy: Strategy, device: str, captured: bool = False
) -> Step:
    """Return a training step of this rank.

    Args:
        settings: the model and the batch.
        strategy: the strategy.
        device: "cpu", "cuda" or "cuda:N".
        captured: whether it is a CUDA graph from the third call on; on a CPU it never is.
    """
    _, step = model_and_step(settings, strategy, device)
    return graph.capture(step, device) if captured else step


def model_and_step(
    settings: StepSettings, strategy: Strategy, device: str
) -> tuple[LanguageModel, Step]:
    """Return a model and its training step of this rank, which is not captured."""
    model = settings.model(device)
    optimizer, scaler = strategy.prepare(model, settings.optimizer), settings.scaler()
    strategy.begin(0, [])
    parts = settings.parts(device, strategy.rank)

    def loss(x: Any, y: Any) -> Tensor:
        with settings.casts():
            return model.forward(Tensor(x), Tensor(y))

    def step() -> None:
        optimizer.zero_grad()
        strategy.compute_gradients(loss, parts, scaler)
        optimizer.step(1.0, scaler, strategy.reduce_norm)
        strategy.after_step()

    return model, step


@dataclass(frozen=True)
class RankTimer:
    """Time and memory of calls that all ranks make together.

    Args:
        comm: the ranks.
        device: of this rank.
        windows: number of windows of calls; their median is the result.
    """

    comm: Comm
    device: str
    windows: int

    def wait(self) -> None:
        """Wait for the GPU."""
        synchronize(self.device)

    def seconds(self, call: Step, calls: int) -> float:
        """Return the median time of a call on the slowest rank, after one to warm up."""
        call()
        windows = []
        for _ in range(self.windows):
            self.wait()
            self.comm.barrier()
            begin = time.perf_counter()
            for _ in range(calls):
                call()
            self.wait()
            windows.append(time.perf_counter() - begin)
        return self.largest(statistics.median(windows) / calls)

    def idle(self, step: Step, steps: int) -> list[float]:
        """Return for each rank the fraction of the time of some steps that it waits for others."""
        spans: list[tuple[Any, Any]] = []
        wait = Handle.wait

        def timed(handle: Handle) -> None:
            before = self._moment()
            wait(handle)
            spans.append((before, self._moment()))

        self.comm.barrier()
        with patch.object(Handle, "wait", timed):
            begin = self._moment()
            for _ in range(steps):
                step()
            end = self._moment()
        self.wait()
        waited = sum(self._between(*span) for span in spans)
        fractions = self.comm.all_gather_objects(waited / self._between(begin, end))
        return [float(fraction) for fraction in fractions]

    def _moment(self) -> Any:
        """Return the time, or on a GPU an event of its current stream."""
        if self.device == "cpu":
            return time.perf_counter()
        event = backend.cupy.cuda.Event()
        event.record()
        return event

    def _between(self, begin: Any, end: Any) -> float:
        """Return the seconds between two past moments."""
        if self.device == "cpu":
            return float(end - begin)
        return float(backend.cupy.cuda.get_elapsed_time(begin, end)) / 1e3

    def largest(self, value: float) -> float:
        """Return the largest value of all ranks."""
        return max(float(each) for each in self.comm.all_gather_objects(value))

    @contextmanager
    def peak(self, line: dict[str, Any]) -> Iterator[None]:
        """Add the peak memory of the `with` block on any rank to the line, in MB.

        "peak MB" is the memory of arrays. "device MB" is all memory that is used on a GPU then,
        with CUDA's, NCCL's and the free blocks of the memory pool.
        """
        with peak_memory(self.device) as peak:
            yield
        line["peak MB"] = self.largest(peak.bytes / 1e6)
        if self.device != "cpu":
            free, total = backend.cupy.cuda.runtime.memGetInfo()
            line["device MB"] = self.largest((total - free) / 1e6)
