"""Sharded flat parameters for ZeRO: each rank updates its shard of every bucket.

The layout is that of optim/flat.py. Every bucket is divided into equal shards, one for each rank.
These are the shards that the rank's optimizer updates. What else a rank holds depends on the ZeRO
stage:

    stage   parameters                            gradients
    1       all                                   all
    2       all                                   its shards, and slots for two units
    3       its shards, and slots for two units   its shards, and slots for two units

A unit is a bucket that is whole only while it is used: the parameters of one block of a model (in
FSDP: an FSDP unit). Unit u then occupies slot u % 2. Parameters in no unit are the root, which
stays whole in all stages.
"""

from __future__ import annotations

from collections.abc import Mapping

from tensorgrad.core import backend
from tensorgrad.core.backend import Array
from tensorgrad.core.dtypes import Dtype, compute_dtype
from tensorgrad.core.errors import ArgumentError
from tensorgrad.optim import FlatParameters
from tensorgrad.optim.flat import ALIGNMENT, FlatShard, NamedParameters, zeros
from tensorgrad.parallel.comm.collectives import Comm

SLOTS = 2


class ShardedParameters(FlatParameters):
    """Flat parameters of which this rank updates a shard of every bucket.

    Args:
        named_parameters: as for FlatParameters.
        rank, ranks: which shard, and the number of ranks.
        stage: what is sharded: 1 optimizer state, 2 also gradients, 3 also parameters.
        groups: the bucket of each parameter. For stages 2 and 3: its unit, a number from 0, or
            None for the root.
        comm: the ranks, for optimizers that gather or add what is sharded; None: there is none.

    Attributes:
        units: for each unit its bucket; empty in stage 1.
        storage: for each bucket the arrays of its whole parameters and whole gradients.
        gradient_memory: the arrays in which gradients lie.
    """

    def __init__(
        self,
        named_parameters: NamedParameters,
        rank: int,
        ranks: int,
        stage: int,
        groups: Mapping[str, int | None],
        comm: Comm | None = None,
    ) -> None:
        self._comm = comm
        self.rank, self.ranks, self.stage = rank, ranks, stage
        self._groups = groups
        self.units: list[int] = []
        self.storage: list[tuple[Array, Array]] = []
        self.gradient_memory: list[Array] = []
        super().__init__(named_parameters, multiple=ALIGNMENT * ranks, groups=groups.__getitem__)

    def part(self, whole: Array) -> Array:
        """Return this rank's shard of a whole bucket."""
        size = whole.size // self.ranks
        return whole[self.rank * size : (self.rank + 1) * size]

    def gather(self, number: int, part: Array) -> Array:
        """Return what ranks have of a bucket as one array, 1-D, from the shard of each."""
        whole = backend.empty((self.buckets[number].size,), part.dtype, like=part)
        self._ranks().all_gather(part, whole)
        return whole

    def add_shards(self, array: Array) -> None:
        """Add, in place, the arrays of ranks that update other shards."""
        self._ranks().all_reduce(array)

    def _ranks(self) -> Comm:
        if self._comm is None:
            raise ArgumentError("ShardedParameters: comm is None, expected the ranks to gather")
        return self._comm

    def _clear_gradients(self) -> None:
        """Set all gradients to 0, except in slots, which are 0 whenever they are free."""
        if self.stage == 1:
            self.grad.fill(0)
            return
        for grad in self.grads:
            grad.fill(0)
        for number in range(len(self.buckets)):
            if number not in self.units:
                self.storage[number][1].fill(0)

    def _is_written(self, name: str) -> bool:
        return False  # ranks could disagree, each with its shard

    def _allocate(self, like: Array) -> list[tuple[Array, Array]]:
        if self.stage > 1:
            numbers = {self._groups[s.names[0]]: i for i, s in enumerate(self.buckets)}
            self.units = [numbers[unit] for unit in sorted(u for u in numbers if u is not None)]
        self._move_to_host(like)
        wide = compute_dtype(self.dtype)
        data_rooms, data_parts, self.memory = self._buffers(self.dtype, like, self.stage == 3)
        storage, parts, self.gradient_memory = self._buffers(wide, like, self.stage >= 2)
        if self.stage < 3:
            self.data = self.memory[0]
        if self.stage == 1:
            self.grad = self.gradient_memory[0]
        offset = 0
        for bucket, data, grad in zip(self.buckets, data_parts, parts, strict=True):
            begin = bucket.begin + self.rank * data.size
            decayed = min(max(bucket.decayed - begin, 0), data.size)
            self.shards.append(FlatShard(begin, offset, decayed, data, grad))
            offset += data.size
        shards = [] if self.stage == 1 else self.gradient_memory[:1]  # the shards of all units
        self.grads = shards + [part for i, part in enumerate(parts) if i not in self.units]
        self.storage = list(zip(data_rooms, storage, strict=True))
        return self.storage

    def _move_to_host(self, like: Array) -> None:
        """Move the parameters to the host until the buffers exist: a GPU may not hold both."""
        if backend.is_numpy(like):
            return
        for parameter in self.parameters.values():
            parameter.data = backend.to_numpy(parameter.data)
        backend.cupy.get_default_memory_pool().free_all_blocks()

    def _buffers(
        self, dtype: Dtype, like: Array, sharded: bool
    ) -> tuple[list[Array], list[Array], list[Array]]:
        """Return the whole buckets, this rank's shards of them, and the memory of both."""
        if not sharded:
            whole = zeros(self.size, dtype, like)
            storage = [whole[bucket.begin : bucket.end] for bucket in self.buckets]
            return storage, [self.part(array) for array in storage], [whole]
        sizes = [self.buckets[number].size for number in self.units]
        slots = [zeros(max(sizes[i::SLOTS]), dtype, like) for i in range(min(SLOTS, len(sizes)))]
        shards = zeros(sum(sizes) // self.ranks, dtype, like)
        memory = [shards, *slots]
        storage, parts = [], []
        offset = 0
        for number, bucket in enumerate(self.buckets):
            if number in self.units:
                storage.append(slots[self.units.index(number) % SLOTS][: bucket.size])
                end = offset + bucket.size // self.ranks
                parts.append(shards[offset:end])
                offset = end
            else:
                storage.append(zeros(bucket.size, dtype, like))
                parts.append(self.part(storage[-1]))
                memory.append(storage[-1])
        return storage, parts, memory

    def _moved(self, number: int) -> None:
        """Keep this rank's shard, and free the slots for the next bucket."""
        if number not in self.units:
            return
        data, grad = self.storage[number]
        if self.stage == 3:
            self.shards[number].data[...] = self.part(data)
            data.fill(0)
        grad.fill(0)
