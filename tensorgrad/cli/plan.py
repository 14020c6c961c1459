"""`tensorgrad plan`: memory, traffic and time of training a language model on many GPUs."""

from __future__ import annotations

import json as jsonlib
import math
from dataclasses import dataclass, replace
from typing import Any, Literal

from cyclopts import Parameter

from tensorgrad.cli.sizes import DEFAULT_MODEL, ModelOptions, given
from tensorgrad.core.errors import ArgumentError
from tensorgrad.models.presets import PRESETS
from tensorgrad.parallel.mesh import Mesh
from tensorgrad.parallel.planning import plan as planning
from tensorgrad.parallel.planning.advice import memory_advice
from tensorgrad.parallel.planning.estimate import Estimate, Speeds, TrainingJob, estimate
from tensorgrad.train.language import LanguageSettings
from tensorgrad.train.settings import DTYPES, OPTIMIZERS
from tensorgrad.train.strategy_settings import ZERO

_SPEEDS = Speeds()
_MOST_LAYERS, _MOST = 1000, 1 << 28
_USUAL_MEMORY = 80 * 2**30  # bytes of an H100; a job that needs more gets advice


@Parameter(name="*", group="Parallelism")
@dataclass(frozen=True)
class MeshOptions:
    """How the GPUs share the work.

    Args:
        dp: data parallel ranks.
        pp: pipeline stages.
        tp: tensor parallel ranks.
        parallel: what data parallel ranks shard: nothing (overlap), optimizer state (zero1),
            gradients too (zero2), parameters too (zero3); default: overlap, with --fit any.
        batch: sequences of a step, on all GPUs together.
        micro_batches: parts of a batch; default: 1, with --pp up to 4 times pp.
        pipeline_schedule: order of micro-batches in a pipeline.
        chunks: model chunks per stage, more if interleaved.
        sequence_parallel: shard activations between layers over the tp ranks.
        bucket_mb: size of a gradient bucket in MB; default: as in training.
        dtype: dtype of matrix products, as in training; bfloat16-parameters: of the parameters too,
            with float32 master weights.
        grad_dtype: dtype of gradients; bfloat16: of bfloat16-parameters on one GPU.
        optimizer: what updates the parameters, as in training.
    """

    dp: int = 1
    pp: int = 1
    tp: int = 1
    parallel: Literal["overlap", "zero1", "zero2", "zero3"] | None = None
    batch: int = 512
    micro_batches: int | None = None
    pipeline_schedule: Literal["gpipe", "1f1b", "interleaved"] = "1f1b"
    chunks: int = 1
    sequence_parallel: bool = False
    bucket_mb: float | None = None
    dtype: Literal[DTYPES] = "bfloat16-parameters"  # type: ignore[valid-type]
    grad_dtype: Literal["float32", "bfloat16"] = "float32"
    optimizer: Literal[tuple(OPTIMIZERS)] = "adamw"  # type: ignore[valid-type]


@Parameter(name="*", group="Speeds of the GPUs")
@dataclass(frozen=True)
class SpeedOptions:
    """The assumptions of the estimate of the time.

    Args:
        tflops: speed of matrix products that a GPU reaches, TFLOP/s.
        memory_bandwidth: bandwidth of a GPU's memory, GB/s.
        bandwidth: bandwidth of NCCL within a host, GB/s.
        network: bandwidth between hosts, GB/s a GPU.
        latency: time of a call of NCCL that moves nothing, microseconds.
        gpus_per_host: GPUs of a host.
    """

    tflops: float = _SPEEDS.flops / 1e12
    memory_bandwidth: float = _SPEEDS.memory_bandwidth / 1e9
    bandwidth: float = _SPEEDS.bandwidth / 1e9
    network: float = _SPEEDS.network / 1e9
    latency: float = _SPEEDS.latency * 1e6
    gpus_per_host: int = _SPEEDS.gpus_per_host

    def speeds(self) -> Speeds:
        """Return them in FLOP/s, bytes/s and seconds.

        Raises:
            ArgumentError: one of them is not positive.
        """
        for name, value in vars(self).items():
            if not 0 < value < math.inf:
                raise ArgumentError(f"{name}: got {value}, expected more than 0")
        giga = (self.memory_bandwidth * 1e9, self.bandwidth * 1e9, self.network * 1e9)
        return Speeds(self.tflops * 1e12, *giga, self.latency * 1e-6, self.gpus_per_host)


def plan(
    *,
    model: ModelOptions = DEFAULT_MODEL,
    mesh: MeshOptions = MeshOptions(),
    speeds: SpeedOptions = SpeedOptions(),
    fit: bool = False,
    memory: str | None = None,
    reserved: str = "1GiB",
    max_gpus: int = 16384,
    json: bool = False,
) -> int:
    """Plan the training of a model on many GPUs: memory, traffic and time, or the smallest mesh.

    No GPU is needed: all follows from formulas.

    Args:
        fit: find the smallest mesh that fits in --memory.
        memory: memory of a GPU, with its unit, such as 80GiB.
        reserved: memory for CUDA, kernels and NCCL.
        max_gpus: largest number of GPUs for --fit.
        json: print JSON, in bytes and seconds.
    """
    most = None if memory is None else planning.bytes_of(memory)
    if most == 0:
        raise ArgumentError(f"--memory: got {memory}, expected more than 0")
    kept = planning.bytes_of(reserved, "reserved")
    _check_most(model, mesh)
    settings = _settings(model)
    if fit:
        found = _fitted(settings, mesh, speeds, most, kept, max_gpus)
    else:
        found = estimate(_job(settings, mesh), speeds.speeds(), _bucket(mesh))
    if json:
        print(jsonlib.dumps(planning.to_json(found, kept), indent=1))
    else:
        print(planning.table(_name(settings), found, most, kept))
        limit = _USUAL_MEMORY if most is None else most
        if found.bytes + kept > limit:
            print(f"\n{memory_advice(found.job, limit, kept)}")
    return 0


def _check_most(*options: Any) -> None:
    """Raise ArgumentError where a size is beyond what can be planned in some seconds."""
    for name, value in given(*options).items():
        most = _MOST_LAYERS if name in ("layers", "pp") else _MOST
        if isinstance(value, int) and value > most:
            raise ArgumentError(
                f"--{name.replace('_', '-')}: got {value:,}, expected at most {most:,}"
            )


def _settings(model: ModelOptions) -> LanguageSettings:
    """Return the sizes of the model as settings of training; the default is GPT-2 124M.

    A token embedding that can have padding has a multiple of 128 rows.
    """
    options = given(model)
    if model.model is None:
        options.setdefault("preset", "gpt2-124M")
    settings = LanguageSettings(**options)
    if model.vocab_multiple is None and hasattr(settings.model_class.Config, "vocab_multiple"):
        return replace(settings, vocab_multiple=128)
    return settings


def _name(settings: LanguageSettings) -> str:
    """Return the preset, or the model and its sizes where an option changes one of the preset's."""
    config = settings.config()
    known = LanguageSettings(preset=settings.preset, vocab_multiple=settings.vocab_multiple)
    if settings.preset in PRESETS and config == known.config():
        return str(settings.preset)
    hidden = getattr(config, "hidden", None)
    inside = "" if hidden is None else f"hidden width {hidden:,}, "
    return (
        f"{settings.model_class.__name__} with {config.layers} layers, {config.heads} heads, width "
        f"{config.width:,}, {inside}context {config.context:,}, vocabulary {config.vocab_size:,}"
    )


def _job(settings: LanguageSettings, mesh: MeshOptions) -> TrainingJob:
    """Return what to train, and how to parallelize it."""
    micro_batches = mesh.micro_batches
    if micro_batches is None:
        micro_batches = planning.usual_micro_batches(mesh.batch, mesh.dp, mesh.pp)
    return TrainingJob(
        settings.config(),
        Mesh(mesh.dp, mesh.pp, mesh.tp),
        mesh.batch,
        micro_batches,
        ZERO.get(mesh.parallel or "", 0),
        mesh.pipeline_schedule,
        mesh.chunks,
        mesh.sequence_parallel,
        mesh.dtype,
        mesh.grad_dtype,
        mesh.optimizer,
        settings.model_class,
    )


def _fitted(
    settings: LanguageSettings,
    mesh: MeshOptions,
    speeds: SpeedOptions,
    memory: float | None,
    reserved: float,
    most: int,
) -> Estimate:
    """Return the estimate on the smallest mesh that fits in the memory.

    Raises:
        ArgumentError: an option gives what is to be found, or no mesh fits.
    """
    for name in ("dp", "pp", "tp", "micro_batches"):
        value = getattr(mesh, name)
        if value not in (1, None) or (name == "micro_batches" and value == 1):
            raise ArgumentError(
                f"--fit: got --{name.replace('_', '-')} {value}, expected without: it finds dp, "
                "pp, tp and micro-batches itself"
            )
    if memory is None:
        raise ArgumentError(
            "--memory: got none, expected the memory of a GPU for --fit, such as 80GiB"
        )
    zero = None if mesh.parallel is None else ZERO.get(mesh.parallel, 0)
    return planning.fit(
        _job(settings, mesh), memory, speeds.speeds(), most, zero, reserved, _bucket(mesh)
    )


def _bucket(mesh: MeshOptions) -> float | None:
    if mesh.bucket_mb is not None and not mesh.bucket_mb > 0:
        raise ArgumentError(f"--bucket-mb: got {mesh.bucket_mb}, expected more than 0")
    return None if mesh.bucket_mb is None else mesh.bucket_mb * 1e6
