"""ZeRO stages 2 and 3: gathering parameters and reduce-scattering gradients, block by block.

Forward goes through the units of a model in order, backward the other way. Two slots, allocated
once, hold two neighbouring units: unit u occupies slot u % 2.

- Before unit u runs forward, its parameters are gathered into its slot. Gathering those of unit
  u + 1 into the other slot starts. What ops save for backward are views of the slot.
- Before unit u runs backward, its parameters are gathered again, to the same place. Gathering those
  of unit u - 1 starts. An identity op at the end of the unit marks this moment.
- By then backward has left the units after u. Their gradients are reduce-scattered while backward
  continues. Then their slot is set to zero, for unit u - 1.

A step allocates nothing. In stage 2 parameters stay whole, and only the last point applies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import update_wrapper
from typing import Any

from tensorgrad.autograd.tangents import Op, tangent_of
from tensorgrad.core.arrays import add_into
from tensorgrad.core.backend import Array
from tensorgrad.core.errors import ArgumentError, GradError
from tensorgrad.core.gradient import Needs, Saved
from tensorgrad.core.record import on_grad_ready, record
from tensorgrad.core.tensor import Tensor
from tensorgrad.nn import Module, ModuleList, Parameter
from tensorgrad.nn.module import for_copies
from tensorgrad.parallel.comm.collectives import Comm
from tensorgrad.parallel.comm.handle import Handle
from tensorgrad.parallel.shards import SLOTS, ShardedParameters


def find_units(
    model: Module, parameters: Mapping[str, Tensor]
) -> tuple[list[Module], dict[str, int | None]]:
    """Return the members of the model's ModuleLists, and the unit of each parameter.

    Args:
        model: for instance a language model, whose `blocks` are a ModuleList.
        parameters: the trained ones, by name. One that is used in no unit, or also outside its
            unit, has None.
    Returns:
        The units that have parameters, in order, and for each name the index in this list.
    Raises:
        ArgumentError: there are none.
    """
    units: list[Module] = []
    inside: set[int] = set()
    for module in model.modules():
        if isinstance(module, ModuleList) and id(module) not in inside:
            units += module
            inside.update(id(below) for below in module.modules())
    homes: dict[int, set[int | None]] = {}
    for module in model.modules():
        if id(module) not in inside:
            for value in vars(module).values():
                if isinstance(value, Parameter):
                    homes.setdefault(id(value), set()).add(None)
    for number, unit in enumerate(units):
        for parameter in unit.parameters():
            homes.setdefault(id(parameter), set()).add(number)
    found: dict[str, int | None] = {}
    for name, trained in parameters.items():
        first, *others = homes.get(id(trained), {None})
        found[name] = None if others else first
    used = [number for number in range(len(units)) if number in found.values()]
    if not used:
        raise ArgumentError(
            f"Zero: {type(model).__name__} has no parameters in a ModuleList, expected its blocks "
            "there; stage 1 needs none"
        )
    index: dict[int | None, int] = {number: place for place, number in enumerate(used)}
    places_of = {name: index.get(number) for name, number in found.items()}
    return [units[number] for number in used], places_of


class Units:
    """Gathers parameters and scatters gradients of the units, as forward and backward reach them.

    Args:
        flat: of stage 2 or 3; its units are those modules.
        modules: each returns one tensor, its parameters' only path to the loss.
        parameters: all of the flat ones by name.
        comm: the ranks.
    """

    def __init__(
        self,
        flat: ShardedParameters,
        modules: Sequence[Module],
        parameters: Mapping[str, Tensor],
        comm: Comm,
    ) -> None:
        self._flat, self._comm = flat, comm
        self._count = len(modules)
        self._unit_in_slot: list[int | None] = [None] * SLOTS
        self._gathers: dict[int, Handle] = {}  # in flight, by slot
        self._scatters: dict[int, Handle] = {}  # in flight, by unit
        self._last = self._count - 1  # the last unit whose gradients are not yet scattered
        for unit, (module, bucket) in enumerate(zip(modules, flat.units, strict=True)):
            module.forward = _UnitForward(self, unit, module)
            for name in flat.buckets[bucket].names:
                on_grad_ready(parameters[name], self._guard(unit, name))

    def gather_all(self) -> None:
        """Gather as forward does, on a rank without a batch while other ranks run forward."""
        for unit in range(self._count):
            self._begin_forward(unit)

    def end_backward(self) -> None:
        """Scatter the remaining gradients, and wait for all of them."""
        while self._last >= 0:
            self._scatter_last()
        for unit in sorted(self._scatters, reverse=True):
            self._accumulate(unit)
        self._last = self._count - 1

    def invalidate(self) -> None:
        """Gather again from now on: the parameters have changed. Nothing is in flight then."""
        for slot in range(SLOTS):
            self._wait_for_gather(slot)
        self._unit_in_slot = [None] * SLOTS

    def reset(self) -> None:
        """Begin again: forward or backward did not reach the end."""
        for handle in (*self._gathers.values(), *self._scatters.values()):
            handle.abandon()
        self._gathers.clear()
        self._scatters.clear()
        self._unit_in_slot = [None] * SLOTS
        self._last = self._count - 1

    def run(
        self, unit: int, module: Module, forward: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Return what the forward of a unit returns, once its parameters are there."""
        self._begin_forward(unit)
        y = forward(*args, **kwargs)
        if not isinstance(y, Tensor):
            raise ArgumentError(
                f"Zero: {type(module).__name__} returned a {type(y).__name__}, expected one "
                "tensor from each block"
            )
        return record("end of a unit", y.data, (y,), self._backward_of_end, (unit,))

    @property
    def stage(self) -> int:
        """2 or 3."""
        return self._flat.stage

    def _backward_of_end(self, dy: Array, saved: Saved, needs: Needs) -> list[Array]:
        self._begin_backward(saved[0])
        return [dy]

    def _begin_forward(self, unit: int) -> None:
        self._wait_for_parameters(unit)
        self._start_gather(unit + 1)

    def _begin_backward(self, unit: int) -> None:
        while self._last > unit:
            self._scatter_last()
        self._accumulate(unit + SLOTS)
        self._wait_for_parameters(unit)
        self._start_gather(unit - 1)

    def _guard(self, unit: int, name: str) -> Callable[[Tensor], None]:
        def check(_: Tensor) -> None:
            if unit > self._last:
                raise GradError(
                    f"backward: a gradient of {name} came after those of its block were sent, "
                    "expected a block that is used once, whose parameters act through its result "
                    "alone, and no_sync() around each backward of a step but the last"
                )

        return check

    def _wait_for_parameters(self, unit: int) -> None:
        """Wait for the unit's parameters."""
        self._start_gather(unit)
        if self._flat.stage == 3:
            self._wait_for_gather(unit % SLOTS)

    def _start_gather(self, unit: int) -> None:
        """Start gathering the unit's parameters, unless it is in its slot or does not exist."""
        slot = unit % SLOTS
        if self._flat.stage < 3 or not 0 <= unit < self._count or self._unit_in_slot[slot] == unit:
            return
        self._wait_for_gather(slot)  # a unit that was not run has not waited
        bucket = self._flat.units[unit]
        part, whole = self._flat.shards[bucket].data, self._flat.storage[bucket][0]
        self._gathers[slot] = self._comm.all_gather(part, whole, wait=False)
        self._unit_in_slot[slot] = unit

    def _wait_for_gather(self, slot: int) -> None:
        handle = self._gathers.pop(slot, None)
        if handle is not None:
            handle.wait()

    def _scatter_last(self) -> None:
        """Start reduce-scattering the gradients of the last unit that remains."""
        unit = self._last
        self._accumulate(unit + SLOTS)
        whole = self._flat.storage[self._flat.units[unit]][1]
        part = self._flat.part(whole)
        self._scatters[unit] = self._comm.reduce_scatter(whole, part, "mean", wait=False)
        self._last -= 1

    def _accumulate(self, unit: int) -> None:
        """Add this rank's reduced gradients of a unit to its shard, and clear the slot."""
        handle = self._scatters.pop(unit, None)
        if handle is None:
            return
        handle.wait()
        bucket = self._flat.units[unit]
        whole = self._flat.storage[bucket][1]
        add_into(self._flat.shards[bucket].grad, self._flat.part(whole))
        whole.fill(0)


@tangent_of(Units._backward_of_end)
def _tangent_of_end(op: Op, t: Tensor) -> Tensor:
    return t


class _UnitForward:
    """The forward of a unit, which gathers its parameters first."""

    def __init__(self, units: Units, unit: int, module: Module) -> None:
        self._units, self._unit, self._module, self._own = units, unit, module, module.forward
        update_wrapper(self, module.forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._units.run(self._unit, self._module, self._own, *args, **kwargs)

    def for_copies(self, copies: Mapping[int, Any]) -> Any:
        """Return the forward of a copy with other parameters, of which nothing is gathered."""
        if self._units.stage == 3:
            for name, p in self._module.named_parameters():
                if id(p) not in copies or copies[id(p)].data is p.data:
                    raise ArgumentError(
                        f"{type(self._module).__name__}: {name} is in shards in ZeRO 3, expected "
                        "functional_call with the strategy's gather_parameters()"
                    )
        return for_copies(self._own, copies)
