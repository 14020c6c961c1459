"""Pipeline parallelism: each rank has some layers, and micro-batches pass from rank to rank.

    stage 0                     stage 1                     stage 2
    embed, blocks 0-3   ----->  blocks 4-8          ----->  blocks 9-11, norm, head, loss
                        <-----                      <-----
                        activations forward, their gradients back

The schedules (GPipe, 1F1B, interleaved 1F1B) are functions of schedule.py that return lists of
actions; this module executes them. A stage posts receives early and waits for a send only when it
must, so transfers overlap with computation. Gradients of a micro-batch are added in the same order
as in one process, and each part draws the same random numbers as there. So the results are the
same, except for the order of sums in the gradient norm and in a tied head: the gradient of its
token embedding is the sum of the first and the last stage's.
Tests: tests/parallel/test_pipeline.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from tensorgrad import random
from tensorgrad.core import backend
from tensorgrad.core.backend import Array, Shape
from tensorgrad.core.dtypes import Dtype, as_dtype
from tensorgrad.core.errors import ArgumentError
from tensorgrad.core.modes import replaced
from tensorgrad.core.record import no_grad
from tensorgrad.core.tensor import Tensor
from tensorgrad.models.language_model import LanguageModel, ModelPart
from tensorgrad.optim import FlatParameters, LossScaler, Optimizer
from tensorgrad.optim.clip import sum_of_squares
from tensorgrad.parallel.comm.collectives import Comm
from tensorgrad.parallel.comm.handle import Handle
from tensorgrad.parallel.nested import NestedStrategy
from tensorgrad.parallel.schedule import SCHEDULES, Action, Kind, check_schedule, with_transfers
from tensorgrad.parallel.stages import block_costs, check_not_shared, keep_parts, partition
from tensorgrad.train.strategy import (
    Batch,
    Count,
    Loss,
    MakeOptimizer,
    Strategy,
    count_targets,
    weighted,
)

_MOST_SENDS = 2  # gradients in flight at a time, each of which occupies memory until it arrives

_Unit = tuple[int, int]  # a micro-batch and a part


class _PartPass(NamedTuple):
    """A forward pass through a part: its input, if not tokens, and its output."""

    x: Tensor | None
    y: Tensor


class _PartOutput(NamedTuple):
    """The output of a part for a micro-batch, and the count of random numbers it draws."""

    shape: Shape
    dtype: Dtype
    draws: int

    def empty(self, like: Array) -> Array:
        """Return an uninitialised array for the output, on the device of `like`."""
        return backend.empty(self.shape, self.dtype, like)


class Pipeline(NestedStrategy):
    """Train a `LanguageModel` whose layers are divided among the ranks.

    Micro-batches are the parts into which the training loop divides a batch (`micro_batches`).

    Args:
        comm: the stages, in order.
        schedule: "1f1b", "gpipe", "interleaved", or "model-parallel": one micro-batch at a time.
        chunks: parts of the model on each stage; more than 1 only for "interleaved".
        data: how ranks with the same stage of several pipelines train together, as
            `DataParallel`; None: there is one pipeline.
        world: all ranks, which write checkpoints together; None: those of `comm`.

    Attributes:
        parts: the numbers of the blocks of each part; part i belongs to stage i % stages. Set by
            `prepare`.

    Raises:
        ArgumentError: the schedule is unknown, or does not allow this number of chunks.

    Example:
        >>> from tensorgrad.models import GPT2, GPT2Config
        >>> model = GPT2(GPT2Config(vocab_size=64, context=8, layers=2, heads=1, width=8))
        >>> strategy = tg.parallel.Pipeline(tg.parallel.world(), "1f1b")
        >>> optimizer = strategy.prepare(model, tg.optim.AdamW)
        >>> strategy.parts  # the only stage has both blocks
        [range(0, 2)]
    """

    def __init__(
        self,
        comm: Comm,
        schedule: str = "1f1b",
        chunks: int = 1,
        *,
        data: Strategy | None = None,
        world: Comm | None = None,
    ) -> None:
        check_schedule("Pipeline", schedule, chunks)
        if data is not None and data.by_block:
            raise ArgumentError(
                f"Pipeline: data is {type(data).__name__} of stage 2 or 3, expected stage 1: "
                "several micro-batches are in flight at a time, each at another block"
            )
        super().__init__(comm, data, world)
        self._schedule, self._chunks = schedule, chunks
        self.parts: list[range] = []
        self._actions_by_count: dict[int, list[Action]] = {}  # by the number of micro-batches
        self._outputs: dict[Any, list[_PartOutput]] = {}  # each part's, by shapes of a batch

    def prepare(self, model: Any, make_optimizer: MakeOptimizer) -> Optimizer:
        """Remove the layers of the other stages from the model; return the optimizer of the rest.

        Args:
            model: a LanguageModel, the same on all ranks, made from equal seeds. Afterwards all
                ranks call it alike, through the loss of the training loop or `generate`.
            make_optimizer: see `Strategy.prepare`.
        Raises:
            ArgumentError: it is another model, has fewer layers than parts, or has attention that
                is not causal; or a stage has nothing to train, or layers share a parameter.
            CommError: the ranks have different models.
        """
        if not getattr(model, "stage_table", dict)():
            raise ArgumentError(
                f"Pipeline: model is a {type(model).__name__}, expected a LanguageModel"
            )
        if not model.causal:
            raise ArgumentError(
                "Pipeline: model has attention that is not causal, as translation with a prefix "
                "does, expected causal attention: stages get no mask"
            )
        comm, count = self._comm, self._comm.size * self._chunks
        if len(model.blocks) < count:
            raise ArgumentError(
                f"Pipeline: the model has {len(model.blocks)} layers, expected {count} or more: "
                f"{comm.size} stages with {self._chunks} parts each"
            )
        if comm.size > 1:
            check_not_shared("Pipeline", model)
        kinds = {
            name: f"{weight.dtype}{list(weight.shape)}{'' if weight.requires_grad else ' frozen'}"
            for name, weight in model.named_parameters()
        }
        comm.agree("Pipeline", {"schedule": self._schedule, "chunks": self._chunks, **kinds})
        # Tensor parallel ranks may have different numbers of heads: the slowest decide for all.
        self._world.agree("Pipeline", {"layers": len(model.blocks)})
        costs = self._world.all_gather_objects(block_costs(model))
        self.parts = partition([max(cost) for cost in zip(*costs, strict=True)], count)
        self._tie(model)
        keep_parts(model, self.parts, range(comm.rank, count, comm.size))
        trains = comm.all_gather_objects(
            any(parameter.requires_grad for parameter in model.parameters())
        )
        if not all(trains):
            raise ArgumentError(
                f"Pipeline: all parameters of stage {trains.index(False)} are frozen, expected "
                f"some to train on each of the {comm.size} stages"
            )
        self._model, model.stages = model, self
        optimizer = self._inner.prepare(model, make_optimizer)
        self._flat: FlatParameters = optimizer.flat
        self._like: Array = optimizer.hyper
        return optimizer

    def compute_gradients(
        self,
        loss: Loss,
        parts: Sequence[Batch],
        scaler: LossScaler | None = None,
        count: Count = count_targets,
    ) -> Array:
        """Execute the schedule; see `Strategy.compute_gradients`.

        Args:
            loss: must return what the model returns when it is called with the arrays of a part
                of the batch. On all stages but the last this is an activation.
            parts: the micro-batches, the same on all stages.
            scaler: for float16.
            count: see `Strategy.compute_gradients`.
        """
        comm, before = self._comm, random.get_state()
        outputs = self._dry_run(loss, parts[0])
        step = _ScheduleRun(self, loss, parts, scaler, outputs, self.shares(parts, count))
        for action in self._actions(len(parts)):
            step.execute(action)
        total = step.end()
        draws = sum(output.draws for output in outputs)
        random.set_state({**before, "draw": before["draw"] + draws})
        if self._tied is not None:
            self._ends.all_reduce(self._model.head().grad)
        self._inner.reduce_gradients()
        comm.broadcast(total, comm.size - 1)
        return total

    def reduce_norm(self, squares: Array) -> None:
        """Add, in place, the squares of the other stages' gradients; count a tied head once."""
        if self._tied is not None and self._comm.rank > 0:
            slot = self._flat.slots[self._tied]
            for shard in self._flat.shards:
                begin = max(slot.offset, shard.begin) - shard.begin
                end = min(slot.span.stop - shard.begin, shard.grad.size)
                if begin < end:
                    with np.errstate(invalid="ignore"):  # inf - inf: this step will be skipped
                        squares -= sum_of_squares(shard.grad[begin:end])
        self._comm.all_reduce(squares)
        self._inner.reduce_norm(squares)

    def add_losses(
        self, loss: Loss, batches: Iterable[Batch], count: Count = count_targets
    ) -> tuple[float, float]:
        """Return the sum over this pipeline's batches of mean loss * targets, and the targets."""
        comm, last = self._comm, len(self.parts) - 1
        total: Array = 0.0
        targets: Array = 0.0
        sent = Handle()
        for batch in batches:
            outputs, counted = self._dry_run(loss, batch), count(*batch)
            x: Array | None = None
            for part in range(comm.rank, last + 1, comm.size):
                if part > 0 and comm.size > 1:
                    x = outputs[part - 1].empty(self._like)
                    comm.recv(x, (part - 1) % comm.size)
                x = self._run_part(loss, batch, part, x).y.data
                if part < last and comm.size > 1:
                    sent.wait()
                    sent = comm.send(x, (part + 1) % comm.size, wait=False)
                elif part == last:
                    total = total + x.astype(np.float64) * counted
            targets = targets + counted
        sent.wait()
        told = comm.broadcast_object(float(total), comm.size - 1)
        return float(told), float(targets)

    def sum(self, values: Sequence[float]) -> list[float]:
        """Return the sums over the pipelines, each of the maximum over its stages."""
        largest = np.array(values, "float64")
        self._comm.all_reduce(largest, "max")
        return self._inner.sum([float(value) for value in largest])

    def _tie(self, model: LanguageModel) -> None:
        """Connect first and last stage; with a tied head give both the same token embedding."""
        comm = self._comm
        at_end = comm.size > 1 and comm.rank in (0, comm.size - 1)
        self._ends = comm.split([0, comm.size - 1] if at_end else [comm.rank])
        self._tied: str | None = None
        if at_end and model.output is None:
            head = model.head()
            if head.requires_grad:
                self._tied = next(
                    name for name, parameter in model.named_parameters() if parameter is head
                )
            self._ends.broadcast(head.data)

    def next_logits(self, tokens: Any, cache: Any = None, mask: Any = None) -> Tensor:
        """Return the logits of the next tokens: all stages call it, through the model."""
        x: Tensor | None = None
        for part, blocks in enumerate(self.parts):
            owner = part % self._comm.size
            y: Tensor | None = None
            if owner == self._comm.rank:
                x = self._model.embed(tokens, cache) if x is None else x
                y = self._model.run_blocks(x, cache, mask, blocks)
                if part == len(self.parts) - 1:
                    y = self._model.last_logits(y)
            kind = None if y is None else [y.shape, str(y.dtype)]
            shape, dtype = self._comm.broadcast_object(kind, owner)
            array = (
                backend.empty(tuple(shape), as_dtype(dtype), self._like) if y is None else y.data
            )
            self._comm.broadcast(array, owner)
            x = Tensor(array)
        assert x is not None  # there is at least one part
        return x

    def _run_part(self, loss: Loss, batch: Batch, part: int, x: Array | None) -> _PartPass:
        """Run a part forward, on the activation `x` or, for the first part, on the tokens."""
        given = None if x is None else Tensor(x, requires_grad=True)
        now = ModelPart(self.parts[part], given, part == len(self.parts) - 1)
        with replaced(self._model, part=now):
            return _PartPass(given, loss(*batch))

    def _dry_run(self, loss: Loss, batch: Batch) -> list[_PartOutput]:
        """Return the outputs of all parts for such a batch; the first time, run it with zeros."""
        key = (self._model.training, *((array.shape, str(array.dtype)) for array in batch))
        if key not in self._outputs:
            comm, before = self._comm, random.get_state()
            found: list[_PartOutput] = []
            for part in range(len(self.parts)):
                told: Any = None
                if part % comm.size == comm.rank:
                    x = None
                    if part > 0:
                        x = found[-1].empty(self._like)
                        x.fill(0)
                    with no_grad():
                        y = self._run_part(loss, batch, part, x).y
                    draws = random.get_state()["draw"] - before["draw"]
                    told = [y.shape, str(y.dtype), draws]
                    random.set_state(before)
                shape, dtype, draws = comm.broadcast_object(told, part % comm.size)
                found.append(_PartOutput(tuple(shape), as_dtype(dtype), draws))
            self._outputs[key] = found
        return self._outputs[key]

    def _actions(self, micro: int) -> list[Action]:
        """Return the actions of this stage in a step with `micro` micro-batches."""
        if micro not in self._actions_by_count:
            stages = self._comm.size
            schedule = SCHEDULES[self._schedule]
            plans = [schedule(stages, micro, stage, self._chunks) for stage in range(stages)]
            self._actions_by_count[micro] = with_transfers(plans, self._comm.rank)
        return self._actions_by_count[micro]


class _ScheduleRun:
    """The execution of one step's actions, and the arrays in flight."""

    def __init__(
        self,
        pipeline: Pipeline,
        loss: Loss,
        batches: Sequence[Batch],
        scaler: LossScaler | None,
        outputs: Sequence[_PartOutput],
        shares: Array | None,
    ) -> None:
        self._pipeline, self._loss, self._scaler = pipeline, loss, scaler
        self._batches, self._outputs, self._shares = batches, outputs, shares
        self._comm, self._random = pipeline._comm, random.get_state()
        self._passes: dict[_Unit, _PartPass] = {}  # forward is done, backward is not
        self._receives: dict[Action, tuple[Array, Handle]] = {}
        self._outputs_sent: dict[_Unit, Handle] = {}  # activations in flight to the next part
        self._gradients: dict[_Unit, Array] = {}  # gradients of inputs
        self._gradients_sent: deque[Handle] = deque()  # gradients in flight to the previous part
        self._total: Array = 0.0

    def execute(self, action: Action) -> None:
        """Execute one action of the schedule."""
        kind, micro, part = action
        unit, size = (micro, part), self._comm.size
        if kind == "forward":
            self._go_forward(unit)
        elif kind == "backward":
            self._go_backward(unit)
        elif kind == "send_output":
            y = self._passes[unit].y.data
            self._outputs_sent[unit] = self._comm.send(y, (part + 1) % size, wait=False)
        elif kind == "send_gradient":
            if len(self._gradients_sent) == _MOST_SENDS:
                self._gradients_sent.popleft().wait()
            dx = self._gradients.pop(unit)
            self._gradients_sent.append(self._comm.send(dx, (part - 1) % size, wait=False))
        else:
            output, source = (part - 1, part - 1) if kind == "receive_input" else (part, part + 1)
            array = self._outputs[output].empty(self._pipeline._like)
            self._receives[action] = array, self._comm.recv(array, source % size, wait=False)

    def end(self) -> Array:
        """Wait for all sends; return the sum of the losses, on the last stage."""
        for handle in self._gradients_sent:
            handle.wait()
        total = self._outputs[-1].empty(self._pipeline._like)
        total[...] = self._total
        return total

    def _go_forward(self, unit: _Unit) -> None:
        micro, part = unit
        count, last = len(self._batches), len(self._outputs) - 1
        x = None
        if part > 0:
            local = self._passes.get((micro, part - 1))
            x = self._received("receive_input", unit) if local is None else local.y.data
        draw = self._random["draw"] + sum(output.draws for output in self._outputs[:part])
        stream = self._pipeline.rank * count + micro
        random.set_state({**self._random, "draw": draw, "stream": stream})
        given, y = self._pipeline._run_part(self._loss, self._batches[micro], part, x)
        if part == last:
            y = weighted(y, self._shares, micro)
            self._total = self._total + y.data
            y = y * (1 / count) if count > 1 else y
            y = y if self._scaler is None else self._scaler.scale(y)
        self._passes[unit] = _PartPass(given, y)

    def _go_backward(self, unit: _Unit) -> None:
        micro, part = unit
        x, y = self._passes.pop(unit)
        dy = None
        if part < len(self._outputs) - 1:
            dy = self._gradients.pop((micro, part + 1), None)
            dy = self._received("receive_gradient", unit) if dy is None else dy
        if unit in self._outputs_sent:
            self._outputs_sent.pop(unit).wait()  # it has arrived, since its gradient has come back
        if y.requires_grad:  # false if all of the first part is frozen
            with self._pipeline._inner.no_sync():
                y.backward(dy)
        if x is not None:
            self._gradients[unit] = x.grad

    def _received(self, kind: Kind, unit: _Unit) -> Array:
        array, handle = self._receives.pop(Action(kind, *unit))
        handle.wait()
        return array
