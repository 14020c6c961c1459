"""Optimizer: the base class, with the step over flat buffers and the state by parameter name.

A step is one pass: each block of the buffers is scaled, decayed and updated while it is in the
cache. The scalars that change from step to step (learning rate, step count, gradient factor) are in
a small array on the device, so the GPU never waits for the host.
Tests: tests/optim/test_optimizer.py.
"""

from __future__ import annotations

import math
import sys
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tensorgrad.core import backend, instrument, modes, nodes
from tensorgrad.core.backend import Array, Shape
from tensorgrad.core.checks import check_function, check_range
from tensorgrad.core.dtypes import bfloat16, c_name, compute_dtype, float64, uint16
from tensorgrad.core.errors import ArgumentError, CheckpointError, GraphError
from tensorgrad.core.tensor import Tensor
from tensorgrad.io.display import call_text
from tensorgrad.kernels.optim import Update
from tensorgrad.optim import master
from tensorgrad.optim.clip import ReduceNorm, check_max_norm, clip_factor, total_of_squares
from tensorgrad.optim.flat import (
    Bucket,
    Decays,
    FlatParameters,
    FlatShard,
    ParameterShard,
    Slot,
    slots_of,
    zeros,
)
from tensorgrad.optim.groups import Parameters, read_groups
from tensorgrad.startup.interrupt import uninterrupted

if TYPE_CHECKING:
    from tensorgrad.optim.scaler import LossScaler

# Indices of `Optimizer.hyper`: first what the host sets, then what the device derives from it. A
# FACTOR of 0 skips the step. kernels/optim.cu has the same list.
LR, STEPS, FACTOR, SIZE, EPS, DECAY, GAIN, _END = range(8)

Kernels = tuple[str, tuple[float, ...], str, tuple[float, ...]]


def two_numbers(op: str, name: str, value: Any, member: str) -> tuple[Any, Any]:
    """Return the two numbers of an option such as betas; `member` names one of them."""
    try:
        first, second = value
    except (TypeError, ValueError) as error:
        expected = f"expected two numbers, {member}1 and {member}2"
        raise ArgumentError(f"{op}: {name} is {value!r}, {expected}") from error
    return first, second


class StateShard(NamedTuple):
    """This rank's part of the state of one parameter.

    Attributes:
        kind, name: of the state and of the parameter.
        shape: of the whole state of the parameter.
        values: the elements that this rank has, in C order.
        array: these elements, 1-D, a view of the state.
    """

    kind: str
    name: str
    shape: Shape
    values: slice
    array: Array


class Optimizer:
    """Base of SGD, Adam, AdamW, Lion, Muon and Adafactor.

    A subclass names its state buffers and defines `_prepare_numpy`, `_update_numpy` and `_kernels`,
    for updates element by element, or `_update_all`. State of other shapes than the parameters' is
    added by `_add_state`.

    Args:
        parameters: flat parameters, or what to build them from: `model.parameters()`,
            `model.named_parameters()`, or a mapping for each group, with "params" and, where they
            differ, "lr" and "weight_decay".
        lr: learning rate.
        weight_decay: at least 0; for all parameters, unless `decay` is given.
        states: names of the state buffers. 16-bit parameters have float32 master weights, which
            are updated; the parameters are their rounded values. float16 parameters add "master",
            these weights, and bfloat16 parameters "low_bits", their low 16 bits (see
            optim/master.py).
        decay: (name, tensor) -> whether weight decay applies; None: the rule of flat parameters
            that have one, or to all, as in PyTorch. `decays_matrices` is the rule of GPT-2.

    Attributes:
        flat: the parameters and their gradients.
        state: name -> buffer, with `flat.shards` one after the other, of parameters that lack the
            state nothing; those in `slots` differ.
        slots: name -> (parameter -> place in the buffer), of states with shapes of their own. Ranks
            that have parts of parameters have all of such a state, the same on all of them.
        groups: the parameter groups.
        hyper: the scalars of a step of each group, float64, on the device of the parameters.

    Raises:
        ArgumentError: `lr` or `weight_decay` is negative or not finite, or `decay` selects other
            parameters than those that flat parameters have first; see also FlatParameters.

    Example:
        >>> w = tg.tensor([1.0, -2.0], requires_grad=True)
        >>> optimizer: tg.optim.Optimizer = tg.optim.SGD([w], lr=0.1)
        >>> (w * w).sum().backward()
        >>> float(optimizer.step(max_norm=1.0))  # the norm of [2, -4], clipped to 1
        4.47213595499958
        >>> w.data.round(3)
        array([ 0.955, -1.911], dtype=float32)
    """

    _decoupled = False  # weight decay scales the parameters; otherwise it adds to the gradient

    def __init__(
        self,
        parameters: FlatParameters | Parameters,
        lr: float,
        weight_decay: float,
        states: tuple[str, ...],
        decay: Decays | None = None,
    ) -> None:
        name = type(self).__name__
        check_range(name, "weight_decay", weight_decay)
        check_range(name, "lr", lr)
        if decay is not None:
            check_function(f"{name}: decay", decay)
        flat, self.groups = read_groups(name, parameters, lr, decay)
        rule = decay if decay is not None and flat is parameters else flat.decay
        self.flat = parameters = flat
        self._decays = {
            name: rule is None or bool(rule(name, parameter))
            for name, parameter in parameters.parameters.items()
        }
        self._shards = self._shards_to_update()
        like = parameters.shards[0].data
        wide = compute_dtype(parameters.dtype)
        self.hyper: Array = zeros(_END * len(self.groups), float64, like)
        self._updates = [Update() for _ in self.groups]
        self.lr, self.weight_decay = lr, weight_decay
        length = sum(shard.data.size for shard in parameters.shards)
        self._idle: frozenset[str] = frozenset()  # the parameters without a gradient in this step
        self._apart: frozenset[str] = frozenset()  # not updated element by element
        self.state: dict[str, Array] = {}
        self.slots: dict[str, Mapping[str, Slot]] = {}
        self._lacking: dict[str, frozenset[str]] = {}  # by state, see `_add_partial_state`
        self._shifts: dict[str, list[tuple[int, int]]] = {}
        if parameters.dtype == bfloat16:
            self.state["low_bits"] = zeros(length, uint16, like)
        elif parameters.dtype != wide:
            self.state["master"] = backend.empty((length,), wide, like)
            for shard in parameters.shards:
                self.state["master"][shard.state] = shard.data
        for name in states:
            self.state[name] = self._zeros(length)

    def __repr__(self) -> str:
        tensors = self.flat.parameters.values()
        sizes = {"parameters": len(tensors), "elements": sum(tensor.size for tensor in tensors)}
        if len(self.groups) > 1:
            sizes["groups"] = len(self.groups)
        options = {
            name: value
            for name, value in vars(self).items()
            if not name.startswith("_") and isinstance(value, bool | int | float | tuple | None)
        }
        return call_text(self, **sizes, lr=self.lr, **options)

    @property
    def lr(self) -> float:
        """The learning rate of the next step; those of groups keep their proportion to it."""
        return self._lr

    @lr.setter
    def lr(self, value: float) -> None:
        """Set the learning rate, without waiting for the device.

        Raises:
            GraphError: in a captured step, whose replays would set the same rate again.
        """
        check_range(type(self).__name__, "lr", value)
        if modes.mode.capture is not None:
            raise GraphError(
                f"{type(self).__name__}: lr is set in a captured step, whose replays would set the "
                "same again; expected it before the step"
            )
        self._lr = float(value)
        for number, group in enumerate(self.groups):
            self.hyper[number * _END + LR :][:1].fill(self._lr * group.rate)

    def zero_grad(self) -> None:
        """Set all gradients to 0."""
        with instrument.phase("zero gradients"):
            self.flat.zero_grad()

    def step(
        self,
        max_norm: float | None = None,
        scaler: LossScaler | None = None,
        reduce_norm: ReduceNorm | None = None,
    ) -> np.ndarray[Any, Any] | None:
        """Update the parameters by their gradients.

        A parameter without a gradient does not move, and its state stays: one that backward has not
        reached since `zero_grad`, on no rank.

        With `max_norm` or `scaler` the gradient norm is computed first. If it is not finite, the
        step is skipped: parameters, state and step count do not change.

        A step is atomic: Ctrl-C and other signals are handled after it, and memory is allocated
        before anything changes.

        Args:
            max_norm: clip the gradient norm to this during the update; the gradient buffer does
                not change. inf only computes the norm.
            scaler: the scaler of the loss; gradients are unscaled during the update, and the scale
                is adapted.
            reduce_norm: adds other ranks' squares to the sum of the squares of the gradients, a
                0-d float64 array on the device, in place.

        Returns:
            The norm before clipping, a 0-d float64 array on the device; None if not computed.

        Raises:
            ArgumentError: `max_norm` is not above 0, or a parameter was frozen, or its data or
                grad was replaced.
        """
        name = type(self).__name__
        self.flat.check(f"{name}.step")
        if modes.mode.capture is not None:
            modes.mode.capture.settle()
        self._idle = self.flat.without_gradient()
        with instrument.phase("optimizer"):
            norm = None
            if max_norm is None and scaler is None:
                self._set(FACTOR, 1.0)
            else:
                limit = math.inf if max_norm is None else max_norm
                check_max_norm(f"{name}.step", limit)
                scale = None if scaler is None else scaler.scale_on(self.hyper)
                squares = total_of_squares(self.flat, reduce_norm)
                norm, factor = clip_factor(squares, limit, scale)
                self.hyper[FACTOR::_END] = factor
            with uninterrupted():
                self._update_all()
                if scaler is not None:
                    scaler.update(self.hyper[FACTOR : FACTOR + 1])
                for array in self.flat.memory:
                    nodes.mark_assigned(array)
        return norm

    def state_dict(self) -> dict[str, Any]:
        """Return the state by parameter name, for a checkpoint.

        Returns:
            "<state>/<parameter>" -> array, a view of the state, with the shape of the parameter
            unless the optimizer says otherwise; "step" (the number of steps not skipped) and "lr"
            as Python numbers.

        Raises:
            ArgumentError: the state is sharded.
        """
        if not self.flat.whole:
            raise ArgumentError(
                f"{type(self).__name__}.state_dict: the state is sharded, expected a whole one; "
                "save a sharded checkpoint instead"
            )
        found: dict[str, Any] = self.numbers()
        for kind, buffer in self.state.items():
            for name, slot in self.entries(kind).items():
                values = buffer[slot.span] if kind in self.slots else self._of(kind, slot.span)
                found[f"{kind}/{name}"] = values.reshape(slot.shape)
        return found

    def entries(self, kind: str) -> Mapping[str, Slot]:
        """Return the shapes of a state by parameter, of those parameters that have it."""
        if kind in self.slots:
            return self.slots[kind]
        without = self._lacking.get(kind, ())
        return {name: slot for name, slot in self.flat.slots.items() if name not in without}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state from `state_dict`, of arrays or tensors; nothing changes on an error.

        A state of bfloat16 parameters may have float32 "master" instead of "low_bits", as former
        versions wrote it.

        Raises:
            CheckpointError: an entry is missing, unknown, or of another shape or dtype.
        """
        op = f"{type(self).__name__}.load_state_dict"
        if not isinstance(state, Mapping):
            raise CheckpointError(f"{op}: state is a {type(state).__name__}, expected a mapping")
        state = {
            name: value.data if isinstance(value, Tensor) else value
            for name, value in state.items()
        }
        if "low_bits" in self.state:
            state = master.converted(state, self.flat.slots)
        kinds = {
            f"{kind}/{name}": (slot.shape, buffer.dtype)
            for kind, buffer in self.state.items()
            for name, slot in self.entries(kind).items()
        }
        missing = [name for name in ("step", "lr", *kinds) if name not in state]
        unknown = [name for name in state if name not in kinds and name not in ("step", "lr")]
        if missing or unknown:
            problem = f"lacks {missing[0]}" if missing else f"has an unknown {unknown[0]}"
            raise CheckpointError(
                f"{op}: state {problem} ({len(missing)} missing, {len(unknown)} unknown), "
                f"expected the {len(kinds) + 2} entries of this optimizer"
            )
        for name, expected in kinds.items():
            array = state[name]
            got = (getattr(array, "shape", None), getattr(array, "dtype", type(array).__name__))
            if got != expected:
                raise CheckpointError(
                    f"{op}: {name} has shape {got[0]} and dtype {got[1]}, expected {expected[0]} "
                    f"and {expected[1]}"
                )
        self.load_numbers(state)
        for held in self.state_shards():
            values = state[f"{held.kind}/{held.name}"].reshape(-1)[held.values]
            held.array[...] = backend.asarray_like(values, held.array)

    def state_shards(self) -> Iterator[StateShard]:
        """Yield what this rank has of the state of each parameter that has elements."""
        for kind, buffer in self.state.items():
            if kind in self.slots:
                for name, slot in self.slots[kind].items():
                    whole = slice(0, slot.span.stop - slot.offset)
                    yield StateShard(kind, name, slot.shape, whole, buffer[slot.span])
                continue
            entries = self.entries(kind)
            for part in self.flat.parameter_shards():
                if part.name in entries:
                    shape = entries[part.name].shape
                    yield StateShard(
                        kind, part.name, shape, part.values, self._of(kind, part.state)
                    )

    def numbers(self) -> dict[str, Any]:
        """Return the numbers of the state: "step" and "lr", as in `state_dict`."""
        return {"step": int(self.hyper[STEPS]), "lr": self.lr}

    def load_numbers(self, state: Mapping[str, Any]) -> None:
        """Load the result of `numbers`; nothing changes on an error.

        Raises:
            CheckpointError: a number is missing or outside its range.
        """
        op = f"{type(self).__name__}.load_state_dict"
        if not isinstance(state, Mapping):
            raise CheckpointError(f"{op}: state is a {type(state).__name__}, expected a mapping")
        step, lr = state.get("step"), state.get("lr")
        if not isinstance(step, int) or not 0 <= step < 2**53:
            raise CheckpointError(f"{op}: step is {step!r:.80}, expected a whole number from 0")
        if not isinstance(lr, int | float) or not 0 <= lr <= sys.float_info.max:
            raise CheckpointError(f"{op}: lr is {lr!r:.80}, expected a finite number from 0")
        self.lr = lr
        self._set(STEPS, float(step))

    def _set(self, place: int, value: float) -> None:
        """Write one scalar of all groups without waiting for the device."""
        self.hyper[place::_END].fill(value)

    def _parts(self) -> Iterator[tuple[Array, float, Sequence[FlatShard]]]:
        """Yield the scalars, the weight decay and the shards of each group."""
        for number, group in enumerate(self.groups):
            shards = self._shards if len(self.groups) == 1 else self._shards[number:][:1]
            decay = self.weight_decay if group.weight_decay is None else group.weight_decay
            yield self.hyper[number * _END : (number + 1) * _END], decay, shards

    def _shards_to_update(self) -> list[FlatShard]:
        """Return the shards of the layout, of which weight decay applies to the first elements."""
        shards = []
        for bucket, shard in zip(self.flat.buckets, self.flat.shards, strict=True):
            names = [n for n in bucket.names if math.prod(self.flat.slots[n].shape)]
            decays = [self._decays[n] for n in names]
            first = [self.flat.slots[n].offset < bucket.decayed for n in names]
            if all(decays):
                shard = shard._replace(decayed=shard.data.size)
            elif not any(decays):
                shard = shard._replace(decayed=0)
            elif decays != first:
                wrong = next(i for i in range(len(names)) if decays[i] != first[i])
                raise ArgumentError(
                    f"{type(self).__name__}: decay is {decays[wrong]} for {names[wrong]}, expected "
                    f"{first[wrong]}, as the flat parameters are laid out; give the rule to "
                    "FlatParameters(..., decay=...)"
                )
            shards.append(shard)
        return shards

    def _buckets(self) -> Iterator[tuple[Array, float, int, Bucket, FlatShard]]:
        """Yield the scalars, the weight decay, the number, names and shard of each bucket."""
        number = 0
        for hyper, decay, shards in self._parts():
            for shard in shards:
                yield hyper, decay, number, self.flat.buckets[number], shard
                number += 1

    def _add_state(self, kind: str, shapes: Mapping[str, Shape]) -> None:
        """Add a state of zeros with the shapes given by the name of the parameter, if there are."""
        if shapes:
            self.slots[kind] = slots = slots_of(shapes)
            self.state[kind] = self._zeros(max(slot.span.stop for slot in slots.values()))

    def _add_partial_state(self, kind: str, without: frozenset[str]) -> None:
        """Add a state of zeros that some parameters lack, if others have it."""
        length, shifts = 0, []
        for shard in self.flat.shards:
            for run in self.flat.runs(shard, without):
                shifts.append((run.offset, length - run.offset))
                length += int(run.data.size)
        if length:
            self._lacking[kind], self._shifts[kind] = without, shifts
            self.state[kind] = self._zeros(length)

    def _zeros(self, length: int) -> Array:
        return zeros(length, compute_dtype(self.flat.dtype), self.flat.shards[0].data)

    def _of(self, kind: str, place: slice) -> Array:
        """Return the elements of a state that a slice of a buffer of all parameters means."""
        if kind not in self._shifts:
            return self.state[kind][place]
        shifts = self._shifts[kind]
        shift = shifts[max(0, bisect_right(shifts, (place.start, sys.maxsize)) - 1)][1]
        return self.state[kind][place.start + shift : place.stop + shift]

    def _states(self, shard: FlatShard) -> dict[str, Array]:
        """Return the states of a shard, all of whose parameters have them."""
        return {kind: self._of(kind, shard.state) for kind in self.state}

    def values(self, part: ParameterShard | FlatShard) -> Array:
        """Return parameters in the dtype that they are updated in: of 16 bits the master weights.

        A float16 parameter that is not the rounded master weight was assigned to: it counts.
        """
        if "low_bits" in self.state:
            return master.joined(part.data, self.state["low_bits"][part.state])
        if "master" not in self.state:
            return part.data
        wide = self.state["master"][part.state]
        return backend.namespace(wide).where(
            wide.astype(part.data.dtype) == part.data, wide, part.data.astype(wide.dtype)
        )

    def _scaled(self, hyper: Array, grad: Array) -> Array:
        """Return a gradient times the step's factor, 0 where the factor skips the step."""
        wide, factor = compute_dtype(self.flat.dtype), hyper[FACTOR]  # read on the device
        return backend.namespace(grad).where(factor != 0, grad * factor.astype(wide), 0)

    def _subtract(self, hyper: Array, part: ParameterShard, values: Array, change: Array) -> None:
        """Subtract a change from the values of a part, which decay first, in a step that counts."""
        if self._decays[part.name]:
            values = values * hyper[DECAY].astype(change.dtype)
        self._assign(part, values - change, hyper[FACTOR] != 0)

    def _assign(self, part: ParameterShard, values: Array, taken: Any) -> None:
        """Write parameters and their master weights, unless `taken`, on the device, is false."""
        if "low_bits" in self.state:
            data, kept = master.halves(values)
            written = [(part.data, data), (self.state["low_bits"][part.state], kept)]
        else:
            written = [(part.data, values.astype(part.data.dtype, copy=False))]
            if "master" in self.state:
                written.append((self.state["master"][part.state], values))
        for array, new in written:
            array[...] = backend.namespace(array).where(taken, new, array)

    def _update_all(self) -> None:
        """Update all parameters by their gradients times FACTOR, unless that is 0."""
        if backend.is_numpy(self.hyper):
            self._step_numpy()
            return
        for update, (hyper, decay, shards) in zip(self._updates, self._parts(), strict=True):
            active = self._active(shards)
            update(active, self.state, self._states, hyper, *self._kernels(decay))

    def _active(self, shards: Sequence[FlatShard]) -> Sequence[FlatShard]:
        """Return the parts of shards that this step updates element by element."""
        without = self._idle | self._apart
        if not without:
            return shards
        return [run for shard in shards for run in self.flat.runs(shard, without)]

    @np.errstate(all="ignore")  # inf and NaN reach the parameters, as on the GPU
    def _step_numpy(self) -> None:
        if self.hyper[FACTOR] == 0:
            return
        workspaces = self._workspaces()  # before anything changes: the allocation may fail
        for hyper, decay, shards in self._parts():
            hyper[STEPS] += 1
            self._prepare_numpy(hyper, decay)
            for shard in self._active(shards):
                for begin, end, decays in (
                    (0, shard.decayed, decay),
                    (shard.decayed, shard.data.size, 0.0),
                ):
                    update = partial(self._update_block, workspaces, shard, begin, hyper, decays)
                    backend.parallel_blocks(update, end - begin, backend.BLOCK)

    def _workspaces(self) -> list[Array]:
        """Return arrays of the length of a block for each thread: 2, or 3 with joined halves."""
        longest = max(shard.data.size for shard in self.flat.shards)
        blocks = -(-longest // backend.BLOCK)
        shape = 3 if "low_bits" in self.state else 2, min(longest, backend.BLOCK)
        wide = compute_dtype(self.flat.dtype)
        return [np.empty(shape, wide) for _ in range(min(blocks, backend.threads()))]

    def _update_block(
        self,
        workspaces: list[Array],
        shard: FlatShard,
        begin: int,
        hyper: Array,
        decay: float,
        block: slice,
    ) -> None:
        """Update a block, counted from `begin` of a shard, with weight decay `decay`."""
        part = slice(begin + block.start, begin + block.stop)
        workspace = workspaces.pop()
        t, u, *others = workspace[:, : block.stop - block.start]
        states = {name: array[part] for name, array in self._states(shard).items()}
        data, g, factor = shard.data[part], shard.grad[part], float(hyper[FACTOR])
        p, low = states.pop("master", data), states.pop("low_bits", None)
        mask = u.view(bool)[: data.size]
        if low is not None:
            p = others[0]
            master.join(data, low, p, t, mask)
        elif p is not data:
            master.take_over(data, p, t, mask)
        if g.dtype != u.dtype:
            u[...] = g
            g = u
        if factor != 1:
            g = np.multiply(g, factor, out=u)
        if decay > 0 and self._decoupled:
            p *= float(hyper[DECAY])
        elif decay > 0:
            g = np.add(g, np.multiply(p, decay, out=t), out=u)
        self._update_numpy(hyper, p, g, *states.values(), t=t, u=u)
        if low is not None:
            master.split(p, data, low, t, mask)
        elif p is not data:
            data[...] = p
        workspaces.append(workspace)

    def _prepare_numpy(self, hyper: Array, weight_decay: float) -> None:
        """Derive the other scalars of this step of a group in `hyper`."""
        raise NotImplementedError

    def _update_numpy(
        self, hyper: Array, p: Array, g: Array, *states: Array, t: Array, u: Array
    ) -> None:
        """Update one block in place, without weight decay; leave `g` as it is, unless it is `u`.

        `t` and `u` are the only memory for intermediate results: an allocation may fail.
        """
        raise NotImplementedError

    def _types(self) -> str:
        """Return the C++ types of parameters and gradients, the first arguments of the kernels."""
        return f"{c_name(self.flat.dtype)}, {c_name(self.flat.grad_dtype)}"

    def _kernels(self, weight_decay: float) -> Kernels:
        """Return the kernels of optim.cu that prepare `hyper` and update, each with its scalars."""
        raise NotImplementedError
