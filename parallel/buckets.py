"""Gradient buckets: all-reduce of gradients that overlaps with backward.

A bucket is a slice of the flat gradient buffer (optim/flat.py), of consecutive parameters.
Backward reaches the last parameters first, so buckets are sent from the last to the first, each as
soon as all its gradients are complete. The order is the same on every rank, whatever the order in
which gradients become ready.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import groupby, takewhile

from tensorgrad.core.dtypes import compute_dtype
from tensorgrad.core.errors import ArgumentError, GradError
from tensorgrad.core.modes import replaced
from tensorgrad.core.record import on_grad_ready
from tensorgrad.core.tensor import Tensor
from tensorgrad.nn import Embedding, Module
from tensorgrad.optim.flat import Bucket
from tensorgrad.parallel.bucket_size import default_bucket_bytes
from tensorgrad.parallel.comm.handle import Handle


def assign_buckets(
    parameters: Mapping[str, Tensor], megabytes: float | None, at_end: Collection[str] = ()
) -> dict[str, int]:
    """Return the number of each parameter's bucket; the last parameters are in bucket 0.

    Going backwards, a bucket takes whole modules up to its size; a larger module has a bucket to
    itself. Modules are not divided because their gradients become ready together: a bias in the
    bucket before its weight's would delay that bucket. So would a position embedding, whose
    gradient is ready only when backward ends, in the bucket of the first block.

    Args:
        parameters: by name, in the order in which forward uses them.
        megabytes: size of a bucket of gradients (10^6 bytes; float32 for 16-bit parameters). None:
            a size that suits the number of gradients; see bucket_size.py.
        at_end: names of parameters whose gradients become ready together when backward ends. They
            are in the last bucket alone, whatever its size.
    Raises:
        ArgumentError: `megabytes` is not positive.
    """

    def gradient_bytes(name: str) -> int:
        parameter = parameters[name]
        return parameter.size * compute_dtype(parameter.dtype).itemsize

    if megabytes is None:
        megabytes = default_bucket_bytes(sum(map(gradient_bytes, parameters))) / 1e6
    if not megabytes > 0:
        raise ArgumentError(f"assign_buckets: megabytes is {megabytes}, expected a number above 0")
    bucket, filled = 0, 0.0
    found: dict[str, int] = {}
    during = [name for name in parameters if name not in at_end]
    for _, names in groupby(reversed(during), lambda name: name.rpartition(".")[0] or name):
        own = list(names)
        size = sum(map(gradient_bytes, own))
        if filled and filled + size > megabytes * 1e6:
            bucket, filled = bucket + 1, 0.0
        found.update(dict.fromkeys(own, bucket))
        filled += size
    return found | dict.fromkeys(at_end, bucket + 1)


def leading_embeddings(model: Module, parameters: Mapping[str, Tensor]) -> list[str]:
    """Return the embeddings that the parameters begin with: their gradients are ready last."""
    tables = {id(module.weight) for module in model.modules() if isinstance(module, Embedding)}
    return list(takewhile(lambda name: id(parameters[name]) in tables, parameters))


class Buckets:
    """Sends each bucket once, when the gradients of all its parameters are complete.

    Args:
        buckets: of the flat gradients.
        parameters: all parameters of the buckets, by name.
        send: starts sending the bucket with a number.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        parameters: Mapping[str, Tensor],
        send: Callable[[int], Handle],
    ) -> None:
        self._names = [bucket.names for bucket in buckets]
        self._send = send
        self._holds = False
        self._handles: list[Handle] = []
        self._missing: list[set[str]] = [set() for _ in buckets]
        self._begin()
        for missing, names in zip(self._missing, self._names, strict=True):
            for name in names:
                on_grad_ready(parameters[name], self._hook(missing, name))

    def hold(self) -> AbstractContextManager[None]:
        """Send nothing in this context, because more gradients will be added."""
        return replaced(self, _holds=True)

    def finish(self) -> None:
        """Send the buckets with missing gradients too, and wait for all of them."""
        for missing in self._missing:
            missing.clear()
        self._send_complete()
        for handle in self._handles:
            handle.wait()
        self._handles = []
        self._begin()

    def reset(self) -> None:
        """Begin again: backward did not reach the end."""
        for handle in self._handles:
            handle.abandon()
        self._handles = []
        self._begin()

    def _begin(self) -> None:
        self._next = len(self._names) - 1
        for missing, names in zip(self._missing, self._names, strict=True):
            missing.update(names)

    def _hook(self, missing: set[str], name: str) -> Callable[[Tensor], None]:
        """Return the hook of a parameter, which sends the bucket after its last gradient."""

        def ready(_: Tensor) -> None:
            if self._holds:
                return
            if name not in missing:
                raise GradError(
                    f"backward: the gradient of {name} is already on its way to the other ranks, "
                    "expected no_sync() around each backward of a step but the last"
                )
            missing.remove(name)
            if not missing:
                self._send_complete()

        return ready

    def _send_complete(self) -> None:
        """Send the next buckets whose gradients are complete."""
        while self._next >= 0 and not self._missing[self._next]:
            self._handles.append(self._send(self._next))
            self._next -= 1
