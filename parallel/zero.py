"""ZeRO stages 1, 2 and 3: data parallelism that shards what ranks would hold several times.

In plain data parallelism all ranks hold the same optimizer state, gradients and parameters. With
ZeRO rank r updates the r-th shard of every bucket of the flat buffers (shards.py), and keeps

    stage 1   only its shard of the optimizer state,
    stage 2   also only its shard of the gradients,
    stage 3   also only its shard of the parameters; those of a block are gathered just before it
              runs (units.py).

A step reduce-scatters gradients instead of an all-reduce, and gathers the updated parameters: as
many bytes as an all-reduce. Stage 3 gathers parameters twice, before forward and before backward:
half as much again. The results are those of one process, but for rounding.

Source: Rajbhandari et al. 2019, arXiv:1910.02054, section 5.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from tensorgrad.core.backend import Array
from tensorgrad.core.errors import ArgumentError
from tensorgrad.core.tensor import Tensor
from tensorgrad.nn import Module
from tensorgrad.optim import Optimizer
from tensorgrad.parallel.buckets import Buckets
from tensorgrad.parallel.comm.collectives import Comm
from tensorgrad.parallel.comm.handle import Handle
from tensorgrad.parallel.data import DataParallel, broadcast_parameters
from tensorgrad.parallel.shards import ShardedParameters
from tensorgrad.parallel.units import Units, find_units
from tensorgrad.train.strategy import Batch, Count, Loss, MakeOptimizer, count_targets

STAGES = (1, 2, 3)


class Zero(DataParallel):
    """Data parallelism with sharded optimizer state, gradients and parameters.

    Args:
        comm: the ranks.
        stage: 1, 2 or 3. Stages 2 and 3 need a model whose blocks are in a ModuleList, each used
            once in a forward pass.
        bucket_mb: for stage 1, as for DataParallel; the other stages reduce block by block.

    Raises:
        ArgumentError: the stage does not exist, or `bucket_mb` is not positive.

    Example:
        >>> model, strategy = tg.nn.Linear(2, 1), tg.parallel.Zero(tg.parallel.world(), 1)
        >>> optimizer = strategy.prepare(model, tg.optim.AdamW)
        >>> parts = [(np.ones((4, 2), "float32"),)]  # this rank's rows of the batch
        >>> total = strategy.compute_gradients(lambda x: model(x).mean(), parts)
        >>> optimizer.step()
        >>> strategy.after_step()  # all ranks get the updated parameters
        >>> strategy.stage, strategy.ranks
        (1, 1)
    """

    def __init__(self, comm: Comm, stage: int, *, bucket_mb: float | None = None) -> None:
        """Train on the ranks of `comm`."""
        super().__init__(comm, "overlap", bucket_mb=bucket_mb)
        if stage not in STAGES:
            raise ArgumentError(f"Zero: stage is {stage}, expected 1, 2 or 3")
        self.stage, self.by_block = stage, stage > 1
        self._units: Units  # in stages 2 and 3
        self._others: list[Array] = []

    def prepare(self, model: Module, make_optimizer: MakeOptimizer) -> Optimizer:
        """Shard the parameters of rank 0, and return the optimizer of this rank's shards.

        Raises:
            ArgumentError: stage 2 or 3 finds no blocks.
            CommError: the ranks have different models.
        """
        parameters = self._agreed_parameters(model, {"stage": self.stage})
        broadcast_parameters([t.data for t in model.state_dict().values()], self._comm)
        groups: Mapping[str, int | None] = self._assign_buckets(model, parameters)
        modules: list[Module] = []
        if self.stage > 1:
            modules, groups = find_units(model, parameters)
            model.captures = False  # Python decides when to gather parameters
        flat = ShardedParameters(
            parameters.items(), self.rank, self.ranks, self.stage, groups, self._comm
        )
        self._flat = flat
        if self.stage == 1:
            self._buckets = Buckets(flat.buckets, parameters, self._scatter)
        else:
            self._units = Units(flat, modules, parameters, self._comm)
        state = model.state_dict().items()
        self._others = [tensor.data for name, tensor in state if name not in flat.slots]
        optimizer = make_optimizer(flat)
        self.after_step()
        return optimizer

    def gather_parameters(self) -> dict[str, Tensor]:
        """Return the whole parameters by name, in new memory; all ranks call it.

        A derivative of the model's loss takes them, as stage 3 has them nowhere at once:

            tg.hvp(lambda p: tg.functional_call(model, p, x, y), (strategy.gather_parameters(),), v)

        Returns:
            Tensors in the shapes and the dtype of the parameters, with equal values on all ranks.
        """
        found: dict[str, Tensor] = {}
        for number, (bucket, shard) in enumerate(
            zip(self._flat.buckets, self._flat.shards, strict=True)
        ):
            whole = self._flat.gather(number, shard.data)
            for name in bucket.names:
                slot = self._flat.slots[name]
                place = slice(slot.span.start - bucket.begin, slot.span.stop - bucket.begin)
                found[name] = Tensor(whole[place].reshape(slot.shape))
        return found

    def begin(
        self, step: int, arrays: Sequence[Array], facts: Mapping[str, Any] | None = None
    ) -> None:
        """Check that all ranks are at this step; broadcast what is not sharded from rank 0.

        Raises:
            CommError: they are not.
        """
        super().begin(step, self._others, facts)
        self.after_step()  # the shards may come from a checkpoint

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context for every backward of a step but the last.

        Stages 2 and 3 cannot hold all gradients, so they reduce those of the blocks anyway.
        """
        return super().no_sync() if self.stage == 1 else self._each_backward()

    def reduce_gradients(self) -> None:
        """Leave the mean of each gradient in its shard, after the last backward of a step."""
        flat = self._prepared()
        if self.stage == 1:
            super().reduce_gradients()
            return
        self._units.end_backward()
        for number in range(len(flat.buckets)):
            if number not in flat.units:
                self._scatter(number).wait()
        self._share_untouched(flat)

    def reduce_norm(self, squares: Array) -> None:
        """Add the squares of the gradients in other ranks' shards."""
        self._comm.all_reduce(squares)

    def add_shards(self, array: Array) -> None:
        """Add, in place, what ranks with other shards of the gradients have in its place."""
        self._comm.all_reduce(array)

    def after_step(self) -> None:
        """Gather updated parameters; those of blocks in stage 3 only in the next forward."""
        flat = self._prepared()
        handles = [
            self._comm.all_gather(shard.data, whole, wait=False)
            for number, (shard, (whole, _)) in enumerate(
                zip(flat.shards, flat.storage, strict=True)
            )
            if self.stage < 3 or number not in flat.units
        ]
        if self.stage > 1:
            self._units.invalidate()
        for handle in handles:
            handle.wait()

    def add_losses(
        self, loss: Loss, batches: Iterable[Batch], count: Count = count_targets
    ) -> tuple[float, float]:
        """Return the sum over this rank's batches of mean loss * targets, and of the targets.

        In stage 3 ranks with fewer batches take part in gathering for the others.
        """
        if self.stage < 3:
            return super().add_losses(loss, batches, count)
        self._prepared()
        batches = list(batches)
        mine = [float(len(batches) * (rank == self.rank)) for rank in range(self.ranks)]
        counts = self.sum(mine)
        result = super().add_losses(loss, batches, count)
        for _ in range(int(max(counts)) - len(batches)):
            self._units.gather_all()
        return result

    def reset(self) -> None:
        """Forget a step that did not reach its end."""
        super().reset()
        if self.stage > 1 and self._flat is not None:
            self._units.reset()

    @contextmanager
    def _each_backward(self) -> Iterator[None]:
        yield
        self._prepared()
        self._units.end_backward()

    def _scatter(self, number: int) -> Handle:
        """Start reduce-scattering the gradients of a bucket."""
        flat: ShardedParameters = self._prepared()
        whole = flat.storage[number][1]
        return self._comm.reduce_scatter(whole, flat.part(whole), "mean", wait=False)
