"""The switch of the profiler: what observes phases, layers and ops, or None.

The places that a profiler needs to see read `observer` each time: the entry and the record of an op
(operands.py, record.py), its backward (backward.py), the call of a module (nn/module.py), phases
of a step and collectives. So without a profiler each of them costs a load and a branch, and
nothing is wrapped. CPython switches threads neither between the load and the branch nor before the
second load, so another thread may clear it at any time. `tensorgrad.profile.Profiler` sets it.
Tests: tests/profile/test_profiler.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol


class Observer(Protocol):
    """The events that the library tells a profiler. Several threads may call it at once.

    A subclass inherits methods that note nothing and run what they are given.
    """

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Return a context for a phase of a step, such as "backward" or "optimizer"."""
        return nullcontext()

    def layer(self, module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return `module.forward(*args, **kwargs)`."""
        return module.forward(*args, **kwargs)

    def enter(self, op: str) -> None:
        """Note that an op begins; it may call this for each operand, or fail later."""
        return

    def op(
        self, name: str, output: Any, inputs: Sequence[Any], node: Any, saved: tuple[Any, ...]
    ) -> None:
        """Note that an op has computed its output, an array.

        Args:
            name: of the op.
            output: the array, the first of several: `further_outputs` gets the others.
            inputs: the tensors (or None) that it depends on.
            node: what the graph records of it; None where no gradient is wanted.
            saved: what backward needs.
        """
        return

    def further_outputs(self, outputs: Sequence[Any]) -> None:
        """Note the other arrays that the op noted last has computed."""
        return

    def backward(self, node: Any, dy: Any, saved: tuple[Any, ...], needs: Sequence[Any]) -> Any:
        """Return `node.backward(dy, saved, needs)`."""
        return node.backward(dy, saved, needs)

    def transfer(self, call: str, nbytes: int) -> Callable[[], None]:
        """Note that a collective begins; return what to call once it is done."""
        return lambda: None


observer: Observer | None = None
_OFF = nullcontext()


def phase(name: str) -> AbstractContextManager[None]:
    """Return a context that a profiler, if there is one, shows as a phase of the step."""
    return _OFF if observer is None else observer.phase(name)
