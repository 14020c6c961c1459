"""Estimate of a training step of a language model on a mesh: memory of a GPU, bytes sent, time.

It follows from the formulas of costs.py; nothing is measured. Memory is that of the fullest GPU.
Traffic and time are those of the stage that computes longest. plan.py prints an estimate, and finds
the smallest mesh that fits. Tests: tests/parallel/planning/test_plan.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from tensorgrad.core.checks import check_integer
from tensorgrad.core.errors import ArgumentError
from tensorgrad.models.language_model import LanguageModel
from tensorgrad.parallel.bucket_size import Overlap, all_reduce_bandwidth, default_bucket_bytes
from tensorgrad.parallel.mesh import Mesh
from tensorgrad.parallel.planning.costs import BlockSizes, Costs, cut_blocks, divides
from tensorgrad.parallel.schedule import bubble_fraction, check_schedule, max_in_flight
from tensorgrad.parallel.tensor import ShardRow, rows_of
from tensorgrad.train.settings import DTYPES, OPTIMIZERS, has_narrow_products

_WIDE = 4  # bytes of a gradient, float32
_GRADIENT_READS = 2  # reads in a clipped step: for the norm, and for the update
_FLOAT32 = 66.9 / 989.4  # float32 FLOP/s over those of 16-bit products, in an H100's data sheet
_LOW_BITS = 2  # bytes of a bfloat16 parameter's master weight in the optimizer's state
_SLOTS = 2  # copies of whole parameters or gradients of blocks (shards.py)
_SENDS = 4  # activations and gradients in flight between stages


@dataclass(frozen=True)
class TrainingJob:
    """A model to train, and how to parallelize it.

    Args:
        config: of the model.
        mesh: dp, pp and tp.
        batch: sequences of a step, on all ranks together.
        micro_batches: micro-batches of a step, one after the other on each rank.
        zero: what dp ranks shard: 0 nothing, 1 optimizer state, 2 also gradients, 3 also
            parameters.
        schedule: one of SCHEDULES.
        chunks: parts of the model on each stage.
        sequence: whether tp ranks share the rows between the layers.
        dtype: one of DTYPES of train/settings.py, such as "bfloat16" (autocast) and
            "bfloat16-parameters" (parameters and activations, with a float32 master copy).
        grad_dtype: of the gradients: "float32", or "bfloat16" for "bfloat16-parameters" on one GPU.
        optimizer: one of OPTIMIZERS of train/settings.py.
        model: the class of the model; None: the one that has the config.
    Raises:
        ArgumentError: sizes are out of range or do not divide; the message has the numbers.
    """

    config: Any
    mesh: Mesh = field(default_factory=Mesh)
    batch: int = 8
    micro_batches: int = 1
    zero: int = 0
    schedule: str = "1f1b"
    chunks: int = 1
    sequence: bool = False
    dtype: str = "bfloat16-parameters"
    grad_dtype: str = "float32"
    optimizer: str = "adamw"
    model: type[LanguageModel] | None = None

    def __post_init__(self) -> None:
        """Check that the sizes fit together."""
        mesh = self.mesh
        for name in ("batch", "micro_batches"):
            check_integer("plan", name, getattr(self, name), 1)
        if self.zero not in range(4):
            raise ArgumentError(f"plan: zero is {self.zero}, expected 0 to 3")
        for name, choices in (("dtype", DTYPES), ("optimizer", OPTIMIZERS)):
            if getattr(self, name) not in choices:
                raise ArgumentError(
                    f"plan: {name} is {getattr(self, name)!r}, expected one of {', '.join(choices)}"
                )
        narrow = ("bfloat16", "bfloat16-parameters", 1)
        if self.grad_dtype != "float32" and (self.grad_dtype, self.dtype, mesh.size) != narrow:
            raise ArgumentError(
                f"plan: grad_dtype is {self.grad_dtype!r} with dtype {self.dtype} on {mesh.size} "
                "GPUs, expected float32, or bfloat16 with bfloat16-parameters on one GPU"
            )
        check_schedule("plan", self.schedule, self.chunks)
        if self.batch % (mesh.dp * self.micro_batches):
            raise ArgumentError(
                f"plan: batch is {self.batch} sequences, expected a multiple of "
                f"dp * micro_batches, {mesh.dp} * {self.micro_batches}"
            )
        if self.schedule == "interleaved" and self.chunks > 1 and self.micro_batches % mesh.pp:
            raise ArgumentError(
                f"plan: micro_batches is {self.micro_batches}, expected a multiple of the "
                f"{mesh.pp} stages for interleaved"
            )
        if self.sequence and self.config.context % mesh.tp:
            raise ArgumentError(
                f"plan: the context is {self.config.context}, expected a multiple of tp, {mesh.tp}"
            )
        self.parts(0)

    @cached_property
    def costs(self) -> Costs:
        """The costs of the layers on one rank."""
        item = 2 if has_narrow_products(self.dtype) else 4
        return Costs(self.config, self.mesh.tp, self.sequence, item, self._has_autocast, self.model)

    @property
    def grad_item(self) -> int:
        """Bytes of a gradient."""
        return 2 if self.grad_dtype == "bfloat16" else _WIDE

    @property
    def _has_autocast(self) -> bool:
        return self.dtype in ("bfloat16", "float16")

    def parts(self, stage: int) -> tuple[range, ...]:
        """Return the numbers of the blocks of each part of a stage."""
        return cut_blocks(self.costs, self.mesh.pp * self.chunks)[stage :: self.mesh.pp]

    def numbers(self, stage: int) -> list[int]:
        """Return the numbers of the blocks of a stage."""
        return [number for part in self.parts(stage) for number in part]

    def blocks(self, stage: int) -> list[BlockSizes]:
        """Return the sizes of the blocks of a stage."""
        sizes = self.costs.blocks
        return [sizes[number] for number in self.numbers(stage)]

    @property
    def tokens(self) -> int:
        """The tokens of a micro-batch on one rank."""
        context: int = self.config.context
        return self.batch // (self.mesh.dp * self.micro_batches) * context

    @property
    def problems(self) -> list[str]:
        """Why this mesh cannot train the model, although its costs can be estimated."""
        tp = self.mesh.tp
        rows = rows_of(replace(self.costs, tp=1).model) if tp > 1 else ()
        found = list(dict.fromkeys(_misfit(row, tp) for row in rows if not divides(row, tp)))
        if self.mesh.pp > 1 and self.zero > 1:
            found.append(f"ZeRO {self.zero} is not for pipelines, where several blocks are in use")
        return found


def _misfit(row: ShardRow, ranks: int) -> str:
    """Return why a number of ranks cannot share a layer equally."""
    _, kind, _, units, _ = row.shard
    if units is not None:
        name = "heads" if getattr(row.module, "heads", units) == units else "key and value heads"
        return f"the {name} are {units}, expected one or more for each of tp, {ranks}"
    name = "token embedding" if kind == "vocabulary" else "hidden width"
    size = row.layer.weight.shape[row.axis]
    short = f"the {name} is {size}, not a multiple of tp, {ranks}"
    return f"{short}: the estimate is of the fullest rank"


@dataclass(frozen=True)
class Speeds:
    """Speeds of the machines.

    Args:
        flops: achieved by a GPU in the matrix products of a step, FLOP/s.
        memory_bandwidth: of a GPU, bytes/s.
        bandwidth: of NCCL between GPUs of one host, bytes/s (its bus bandwidth).
        network: the same between hosts, for each GPU.
        latency: of a call, seconds.
        gpus_per_host: number of consecutive ranks on one host.
    Raises:
        ArgumentError: one of them is not positive.
    """

    flops: float = 400e12
    memory_bandwidth: float = 4e12
    bandwidth: float = 280e9
    network: float = 45e9
    latency: float = 20e-6
    gpus_per_host: int = 8

    def __post_init__(self) -> None:
        """Check the numbers."""
        for name, value in vars(self).items():
            if not 0 < value < math.inf:
                raise ArgumentError(f"plan: {name} is {value}, expected a positive number")

    def link(self, span: int) -> float:
        """Return the bandwidth among ranks that lie within `span` consecutive ones."""
        return self.bandwidth if span <= self.gpus_per_host else self.network

    def traffic(
        self, what: str, axis: str, span: int, calls: int, size: float, hidden: float = 0.0
    ) -> Traffic:
        """Return calls that send `size` bytes in all, `hidden` seconds of which overlap."""
        seconds = calls * self.latency + size / self.link(span)
        return Traffic(what, axis, calls, size, seconds, max(seconds - hidden, seconds / calls))


@dataclass(frozen=True)
class Traffic:
    """A kind of communication of a rank in a step.

    Attributes:
        what: what is sent.
        axis: among which ranks of the mesh.
        calls: number of calls.
        bytes: sent in all calls.
        seconds: duration of all calls.
        exposed: seconds of these that the computation waits.
    """

    what: str
    axis: str
    calls: int
    bytes: float
    seconds: float
    exposed: float


@dataclass(frozen=True)
class Estimate:
    """Memory, traffic and time of a training job.

    Attributes:
        job, speeds: the arguments of `estimate`.
        stage: the stage whose GPUs are fullest.
        memory: bytes on these GPUs, by purpose.
        sent: by a rank of the stage that computes longest.
        time: seconds of a step, by purpose.
    """

    job: TrainingJob
    speeds: Speeds
    stage: int
    memory: dict[str, float]
    sent: list[Traffic]
    time: dict[str, float]

    @property
    def bytes(self) -> float:
        """The memory of the fullest GPU."""
        return sum(self.memory.values())

    @property
    def seconds(self) -> float:
        """The time of a step."""
        return sum(self.time.values())

    @property
    def bubble_fraction(self) -> float:
        """The fraction of the pipeline's time in which a stage is idle."""
        job = self.job
        return bubble_fraction(job.schedule, job.mesh.pp, job.micro_batches, job.chunks)

    @property
    def tokens_per_second(self) -> float:
        """The throughput of all GPUs together."""
        context: int = self.job.config.context
        return self.job.batch * context / self.seconds

    @property
    def flops_per_second(self) -> float:
        """The FLOP/s of each GPU that the model needs, three times its forward pass."""
        flops: float = self.job.config.training_flops()
        return flops * self.tokens_per_second / self.job.mesh.size


def stage_memory(job: TrainingJob, stage: int) -> dict[str, float]:
    """Return the bytes on a GPU of a stage, by purpose.

    Args:
        job: what to train.
        stage: 0 to pp - 1.
    """
    costs, mesh, tokens = job.costs, job.mesh, job.tokens
    parts = job.parts(stage)
    first, last = stage == 0, stage == mesh.pp - 1
    root = costs.root_parameters(first, last)
    blocks = sorted(block.parameters for block in job.blocks(stage))
    every, slots = sum(blocks), sum(blocks[-_SLOTS:])
    shared = root + slots + every / mesh.dp  # blocks are sharded, the root is not
    parameters = shared if job.zero == 3 else root + every
    gradients = shared if job.zero >= 2 else root + every
    place = job.optimizer, job.numbers(stage), first, last
    state = costs.state_bytes(*place)
    if job.dtype in ("bfloat16-parameters", "fp8"):
        state += _LOW_BITS * (root + every)
    state = state / (mesh.dp if job.zero else 1) + costs.factor_bytes(*place)
    remembered = max_in_flight(job.schedule, mesh.pp, job.micro_batches, stage, job.chunks)
    if mesh.pp == 1 and job.schedule == "gpipe":
        remembered = 1  # without a pipeline, backward of each micro-batch follows its forward
    kept = max(costs.kept_by_blocks(part, tokens) for part in parts)
    ends = costs.kept_by_embedding(tokens) if first or last else 0.0
    if last:
        ends += costs.kept_by_head(tokens)
    at_ends = (
        remembered if job.chunks == 1 else min(job.micro_batches, -(-remembered // job.chunks))
    )
    copies = at_ends * costs.weight_copies([], last)
    copies += remembered * max(
        costs.weight_copies(costs.blocks[part.start : part.stop]) for part in parts
    )
    work = max(costs.block_work(tokens), costs.head_work(tokens) if last else 0.0)
    return {
        "parameters": parameters * costs.wide,
        "gradients": gradients * job.grad_item,
        "optimizer state": state,
        "activations": remembered * kept,
        "tokens, loss and head": at_ends * ends,
        "16-bit copies of weights": copies,
        "work": work,
        "messages between stages": _SENDS * costs.boundary(tokens) if mesh.pp > 1 else 0.0,
    }


def estimate(
    job: TrainingJob, speeds: Speeds | None = None, bucket: float | None = None
) -> Estimate:
    """Return the estimate of a job.

    Args:
        job: what to train, and on which mesh.
        speeds: of the machines; default: about those of an H200 host.
        bucket: bytes of gradients in a bucket; None: as in training.
    Raises:
        ArgumentError: the bucket is not above 0.
    """
    if bucket is not None and not bucket > 0:
        raise ArgumentError(f"plan: bucket is {bucket} bytes, expected more than 0")
    speeds = Speeds() if speeds is None else speeds
    memories = [stage_memory(job, stage) for stage in range(job.mesh.pp)]
    stage = max(range(job.mesh.pp), key=lambda each: (sum(memories[each].values()), -each))
    slowest = max(range(job.mesh.pp), key=lambda each: (sum(_compute(job, each)), each))
    forward, backward = _compute(job, slowest)
    sent = [*_sent_by_layers(job, speeds, slowest), *_sent_by_stages(job, speeds, slowest)]
    sent += _sent_by_copies(job, speeds, slowest, backward / speeds.flops, bucket)
    compute = job.micro_batches * (forward + backward) / speeds.flops
    layers = sum(transfer.exposed for transfer in sent if transfer.axis == "tp")
    bubble = bubble_fraction(job.schedule, job.mesh.pp, job.micro_batches, job.chunks)
    for_update = list(_sent_by_update(job, speeds, slowest))
    time = {
        "compute": compute,
        "send within layers": layers,
        "pipeline bubble": (compute + layers) * bubble / (1 - bubble),
        "send between stages": sum(transfer.exposed for transfer in sent if transfer.axis == "pp"),
        "send gradients and parameters": sum(
            transfer.exposed for transfer in sent if transfer.axis == "dp"
        ),
        "optimizer": _update_seconds(job, speeds, slowest),
        "send for the optimizer": sum(transfer.exposed for transfer in for_update),
    }
    return Estimate(job, speeds, stage, memories[stage], sent + for_update, time)


def _update_seconds(job: TrainingJob, speeds: Speeds, stage: int) -> float:
    """Return the time of the optimizer's step: memory traffic, and products of float32."""
    numbers, ends = job.numbers(stage), (stage == 0, stage == job.mesh.pp - 1)
    moved = job.costs.moved_bytes(job.optimizer, numbers, *ends)
    moved -= _GRADIENT_READS * (_WIDE - job.grad_item) * _held(job, stage)
    flops = job.costs.update_flops(job.optimizer, numbers)
    seconds = moved / speeds.memory_bandwidth + flops / (_FLOAT32 * speeds.flops)
    return seconds / (job.mesh.dp if job.zero else 1)


def _held(job: TrainingJob, stage: int) -> int:
    """Return the parameters of a stage on a rank."""
    root = job.costs.root_parameters(stage == 0, stage == job.mesh.pp - 1)
    return sum(block.parameters for block in job.blocks(stage)) + root


def _compute(job: TrainingJob, stage: int) -> tuple[float, float]:
    """Return the FLOPs of a stage for a micro-batch, forward and backward."""
    forward, backward = job.costs.flops(job.blocks(stage), stage == job.mesh.pp - 1)
    return forward * job.tokens, backward * job.tokens


def _sent_by_layers(job: TrainingJob, speeds: Speeds, stage: int) -> Iterator[Traffic]:
    """Yield the traffic of tensor parallel ranks: sums of blocks, and at both ends."""
    ranks = job.mesh.tp
    if ranks == 1:
        return
    sums = sum(block.sums for block in job.blocks(stage))
    ends = int(stage == 0) + int(stage == job.mesh.pp - 1)
    calls = job.micro_batches * (2 * sums + ends)
    # Outputs of layers are sums in `item`, gradients of norms' outputs in `wide`.
    size = sums * (job.costs.item + job.costs.wide) + ends * job.costs.wide
    sent = 2 * (ranks - 1) / ranks * job.micro_batches * job.costs.width * job.tokens * size
    if job.sequence:
        calls *= 2  # a gather and a scatter instead of each all-reduce
    what = "activations, gather and scatter" if job.sequence else "activations, all-reduce"
    yield speeds.traffic(what, "tp", ranks, calls, sent)


def _sent_by_update(job: TrainingJob, speeds: Speeds, stage: int) -> Iterator[Traffic]:
    """Yield the traffic of optimizers that need whole matrices, of which ranks have parts."""
    mesh, numbers = job.mesh, job.numbers(stage)
    gathered = job.costs.gathered_bytes(job.optimizer, numbers)
    joined = job.costs.joined_bytes(job.optimizer, numbers)
    if mesh.dp > 1 and job.zero and gathered:
        size = (mesh.dp - 1) / mesh.dp * gathered
        yield speeds.traffic("momentum, all-gather", "dp", mesh.dp * mesh.tp, len(numbers), size)
    if mesh.tp > 1 and joined:
        size = 2 * (mesh.tp - 1) / mesh.tp * joined
        calls = sum(len(block.shapes) for block in job.blocks(stage))
        yield speeds.traffic("matrices of updates, all-reduce", "tp", mesh.tp, calls, size)


def _sent_by_stages(job: TrainingJob, speeds: Speeds, stage: int) -> Iterator[Traffic]:
    """Yield the traffic between stages: activations, gradients, and that of a tied head."""
    mesh = job.mesh
    if mesh.pp == 1:
        return
    size = job.costs.boundary(job.tokens)
    ends = (stage == 0) + (stage == mesh.pp - 1)  # which have a neighbour on one side only
    calls = job.micro_batches * (2 * job.chunks - ends)
    one = speeds.latency + size / speeds.link(mesh.size)
    waits = 2 * (mesh.pp - 1) * one  # while the pipeline fills and drains; otherwise it computes
    yield Traffic("activations and gradients", "pp", calls, calls * size, calls * one, waits)
    if stage in (0, mesh.pp - 1) and job.costs.model.output is None:
        size = _WIDE * job.costs.head
        yield speeds.traffic("gradient of the token embedding", "pp", mesh.size, 1, size)


def _sent_by_copies(
    job: TrainingJob, speeds: Speeds, stage: int, backward: float, bucket: float | None
) -> Iterator[Traffic]:
    """Yield the traffic of data parallel ranks: gradients, and sharded parameters."""
    mesh, item = job.mesh, job.costs.wide
    if mesh.dp == 1:
        return
    link = "dp", mesh.dp * mesh.tp
    fraction = (mesh.dp - 1) / mesh.dp
    parameters, blocks = _held(job, stage), job.blocks(stage)
    inside = sum(block.parameters for block in blocks)
    root = parameters - inside
    overlaps = mesh.pp == 1  # a pipeline sends gradients when it has drained

    if job.zero < 2:
        gradients = _WIDE * parameters
        bucket = bucket or default_bucket_bytes(gradients)
        factor = 2 if job.zero == 0 else 1
        calls = max(1, math.ceil(gradients / bucket))
        name = "gradients, all-reduce" if job.zero == 0 else "gradients, reduce-scatter"
        sent = speeds.traffic(name, *link, calls, factor * fraction * gradients)
        if overlaps:
            rate = all_reduce_bandwidth(speeds.link(link[1]), mesh.dp) * 2 / factor
            last = _WIDE * job.costs.root_parameters(first=True, last=False)
            model = Overlap(gradients, backward, rate, speeds.latency, last=last)
            sent = replace(sent, exposed=model.overhead(bucket))
        yield sent
    else:
        calls = job.micro_batches * len(blocks) + 1
        size = fraction * _WIDE * (job.micro_batches * inside + root)
        hidden = job.micro_batches * backward if overlaps else 0.0
        yield speeds.traffic("gradients, reduce-scatter", *link, calls, size, hidden)
    if job.zero in (1, 2):
        yield speeds.traffic("parameters, all-gather", *link, 1, fraction * item * parameters)
    elif job.zero == 3:
        passes = job.micro_batches * max(1, 2 * len(blocks) - _SLOTS)
        size = fraction * item * (passes * inside / len(blocks) + root)
        hidden = 1.5 * job.micro_batches * backward if overlaps else 0.0
        yield speeds.traffic("parameters, all-gather", *link, passes + 1, size, hidden)
