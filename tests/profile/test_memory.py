from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest

import tensorgrad as tg
from tensorgrad import Tensor, nn, no_grad
from tensorgrad.profile import Profiler
from tensorgrad.profile.memory import (
    KINDS,
    Allocation,
    Allocator,
    GpuAllocator,
    MemoryRecording,
    MemoryTracker,
    Sample,
)
from tests.profile.steps import Step

MB = 1 << 20


def recorded(f: Any, **options: Any) -> MemoryRecording:
    with Profiler(memory=True, **options) as found:
        f()
    assert found.memory is not None
    return found.memory


def leaf(megabytes: int) -> Tensor:
    return Tensor(np.ones(megabytes * MB // 4, "float32"), requires_grad=True)


def kinds(recording: MemoryRecording, place: int) -> dict[str, int]:
    """Return MB by kind after a sample; workspace depends on the number of threads."""
    sizes = zip(KINDS, recording.samples[place].kinds, strict=True)
    return {
        kind: round(size / MB) for kind, size in sizes if size > MB // 2 and kind != "workspace"
    }


def test_a_chain_of_two_ops_by_hand() -> None:
    x = leaf(4)
    recording = recorded(lambda: tg.tanh(tg.exp(x)).sum().backward())
    names = [sample.op for sample in recording.samples]
    assert names == [
        *("exp", "tanh", "sum", "sum backward", "tanh backward", "exp backward", "backward")
    ]
    assert kinds(recording, 0) == {"parameters": 4, "activations": 4}
    assert kinds(recording, 1) == {"parameters": 4, "activations": 8}
    in_backward = kinds(recording, 4)
    assert (in_backward["activations"], in_backward["activation gradients"]) == (8, 4)
    assert recording.samples[5].used < 17 * MB
    assert kinds(recording, 6)["gradients"] == 4
    assert "activations" not in kinds(recording, 6)  # freed
    peak = recording.peak
    assert peak is not None
    assert 16 * MB <= peak.used < 17 * MB


def test_gradients_that_a_loss_computes_in_forward_are_activations() -> None:
    x, weight = (Tensor(np.ones((1024, 256), "float32"), requires_grad=True) for _ in "xw")
    targets = np.zeros(1024, "int64")
    recording = recorded(lambda: tg.linear_cross_entropy(x, weight, targets))
    assert kinds(recording, -1) == {"parameters": 2, "activations": 2}


def test_kinds_sum_up_to_the_peak_and_nothing_is_negative() -> None:
    step = Step()
    with Profiler(step.model, step.optimizer, memory=True) as found:
        step()
        step()
    memory = found.memory
    assert memory is not None
    for sample in memory.samples:
        assert sum(sample.kinds) == sample.peak >= sample.used
        assert min(sample.kinds) >= 0
    sizes = dict(zip(KINDS, memory.samples[-1].kinds, strict=True))
    flat = step.optimizer.flat
    assert sizes["parameters"] == sum(piece.data.nbytes for piece in flat.shards)
    assert sizes["gradients"] == sum(piece.grad.nbytes for piece in flat.shards)
    state = [*step.optimizer.state.values(), step.optimizer.hyper]
    assert sizes["optimizer"] == sum(array.nbytes for array in state)


def test_gradients_of_a_model_without_an_optimizer_are_known() -> None:
    model = nn.Linear(512, 512, bias=False)
    x = np.ones((1, 512), "float32")
    for expected in ({"parameters": 1}, {"parameters": 1, "gradients": 1}):
        with Profiler(model, memory=True) as found:
            model(x)
        assert found.memory is not None
        assert kinds(found.memory, 0) == expected
        model(x).sum().backward()


def test_what_an_op_needs_while_it_runs_is_workspace() -> None:
    def twice(x: Tensor) -> Tensor:
        wide = np.ones(3 * MB, "uint8")
        y = tg.exp(x)
        del wide
        return y

    # Allocated outside of ops, and freed before the next sample.
    recording = recorded(lambda: (twice(leaf(1)), tg.sum(leaf(1))))
    assert kinds(recording, 0)["other"] >= 3
    x = leaf(2)
    half = recorded(lambda: tg.softmax(x.reshape(2, -1).astype("float16")))
    assert half.samples[-1].kinds[KINDS.index("workspace")] >= MB  # float32 in between


def test_the_line_is_that_of_the_user() -> None:
    x = leaf(1)

    def forward() -> Tensor:
        return tg.exp(x) * 2  # the line

    recording = recorded(lambda: forward().sum().backward())
    lines = {sample.op: sample.line for sample in recording.samples}
    number = forward.__code__.co_firstlineno + 1
    assert lines["exp"] == lines["exp backward"] == f"tests/profile/test_memory.py:{number}"
    by_line = dict(recording.peak_by_line())
    assert by_line[lines["exp"]] >= MB
    assert by_line["parameters"] == MB
    peak = recording.peak
    assert peak is not None
    assert sum(by_line.values()) == peak.peak


def test_ops_that_run_again_in_backward_have_a_line_of_the_user() -> None:
    x = leaf(1)
    recording = recorded(lambda: tg.checkpoint(lambda x: tg.exp(x))(x).sum().backward())
    lines = [sample.line for sample in recording.samples if sample.op == "exp"]
    assert len(lines) == 2
    assert all(line.startswith("tests/profile/test_memory.py:") for line in lines)


def test_a_model_of_the_library_counts_as_user_code() -> None:
    step = Step()
    recording = recorded(step, model=step.model)
    lines = {sample.line for sample in recording.samples if sample.op == "embedding"}
    assert all("models/gpt2.py:" in line for line in lines)


def test_the_largest_arrays_with_their_shapes_and_lives() -> None:
    x = leaf(1)

    def work() -> None:
        y = tg.exp(tg.broadcast_to(x, (3, MB // 4)))
        y.sum()

    recording = recorded(work)
    largest = recording.largest(1)[0]
    assert (largest.nbytes, largest.op, largest.kind) == (3 * MB, "exp", "activations")
    assert largest.shape == (3, MB // 4)
    assert largest.died is not None
    parameter = next(each for each in recording.allocations if each.kind == "parameters")
    assert (parameter.born, parameter.died) == (-1, None)


def test_views_and_batches_are_not_counted_twice() -> None:
    batch = Tensor(np.ones(2 * MB, "uint8").astype("float32"))
    recording = recorded(lambda: tg.exp(batch.reshape(2, -1)))
    assert kinds(recording, len(recording.samples) - 1) == {"activations": 8}


def test_forward_without_gradients_keeps_no_activations() -> None:
    x = leaf(4)

    def work() -> None:
        with no_grad():
            tg.tanh(tg.tanh(tg.tanh(tg.tanh(x))))

    assert max(sample.used for sample in recorded(work).samples) < 13 * MB


def by_hand(*allocations: Allocation) -> MemoryRecording:
    facts = "exp", "forward", "net"
    samples = [
        Sample(0, *facts, "a.py:1", 300, 400, (100, 0, 0, 200, 0, 0, 100)),
        Sample(1, *facts, "a.py:2", 600, 900, (100, 0, 0, 450, 0, 50, 300)),
        Sample(2, *facts, "", 100, 500, (100, 0, 0, 0, 0, 0, 400)),
    ]
    return MemoryRecording(samples, allocations)


def allocation(nbytes: int, line: str, born: int, died: int | None, kind: str) -> Allocation:
    return Allocation(nbytes, kind, "exp", "forward", "net", line, (nbytes,), "int8", born, died)


def test_arrays_at_the_peak_by_line() -> None:
    weight = allocation(100, "", -1, None, "parameters")
    first, second, late = (
        allocation(size, f"a.py:{line}", born, died, "activations")
        for line, (size, born, died) in enumerate(((200, 0, 2), (250, 1, 3), (600, 2, None)), 1)
    )
    freed = allocation(150, "a.py:1", 0, 1, "activations")
    recording = by_hand(weight, first, second, late, freed)
    before, peak, after = recording.samples
    assert recording.peak is peak
    assert recording.alive_at(before) == [first, freed, weight]
    assert recording.alive_at(peak) == [second, first, weight]
    assert recording.alive_at(after) == [late, second, weight]
    assert recording.peak_by_line() == [
        ("a.py:2", 250 + 300), ("a.py:1", 200), ("parameters", 100), ("other", 50)
    ]  # fmt: skip
    assert recording.largest(2) == [late, second]
    assert len(recording.largest()) == 5


class Scripted(Allocator):
    """Readings of an allocator, in order."""

    def __init__(self, *reads: tuple[int, int]) -> None:
        self.reads = iter(reads)

    def start(self) -> None:
        """Do nothing."""

    stop = start

    def read(self) -> tuple[int, int]:
        return next(self.reads)


def test_samples_have_what_is_followed_and_what_the_allocator_says() -> None:
    tracker = MemoryTracker(Scripted((400, 900), (1100, 1100), (600, 1100)))
    x = Tensor(np.ones(250, "float32"), requires_grad=True)
    tracker.start(None, None)
    y, z = np.ones(400, "int8"), np.ones(600, "int8")
    tracker.op(("exp", "forward", "a"), "f.py:1", y, [x], ())
    tracker.op(("tanh", "forward", "a"), "f.py:2", z, [Tensor(y)], (y,))
    del y
    tracker.phase("forward", "b")
    recording = tracker.stop("cpu")
    assert [(sample.used, sample.peak, sample.kinds) for sample in recording.samples] == [
        (1400, 1900, (1000, 0, 0, 400, 0, 0, 500)),  # 1000 are from before
        (2100, 2100, (1000, 0, 0, 1000, 0, 100, 0)),
        (1600, 2100, (1000, 0, 0, 600, 0, 0, 500)),
    ]
    assert [(sample.op, sample.phase, sample.layer) for sample in recording.samples] == [
        ("exp", "forward", "a"), ("tanh", "forward", "a"), ("forward", "forward", "b")
    ]  # fmt: skip
    lives = [(each.nbytes, each.born, each.died) for each in recording.allocations]
    assert lives == [(1000, -1, None), (400, 0, 2), (600, 1, None)]
    assert recording.device == "cpu"
    del z


def test_gradients_that_are_new_after_backward_are_followed() -> None:
    tracker = MemoryTracker(Scripted(*[(0, 0)] * 3))
    x, other = (Tensor(np.ones(3, "float32"), requires_grad=True) for _ in range(2))
    tracker.op(("add", "forward", ""), "f.py:1", np.ones(3), [x, other], ())
    x.grad = np.ones(3, "float32")
    for phase in ("forward", "backward"):
        tracker.phase(phase, "")
    allocations = tracker.stop("cpu").allocations
    found = [(each.op, each.born) for each in allocations if each.kind == "gradients"]
    assert found == [("backward", 2)]


def test_the_allocator_of_numpy_counts_from_its_start() -> None:
    tracemalloc.start()
    try:
        before = np.ones(3 * MB, "int8")
        allocator = Allocator()
        allocator.start()
        first = np.ones(MB, "int8")
        del first
        second = np.ones(MB // 2, "int8")
        for used, peak in ((0.5, 1), (0.5, 0.5)):
            assert np.divide(allocator.read(), MB) == pytest.approx((used, peak), abs=0.1)
        del before, second
        assert allocator.read()[0] == pytest.approx(-3 * MB, rel=0.1)
    finally:
        tracemalloc.stop()


def test_nothing_recorded() -> None:
    recording = recorded(lambda: None)
    assert recording.peak is None
    assert recording.peak_by_line() == []
    assert recording.largest() == []


@pytest.mark.parametrize("before", [False, True])
def test_a_trace_of_memory_that_runs_already_stays(before: bool) -> None:
    if before:
        tracemalloc.start()
    try:
        recorded(lambda: tg.exp(leaf(1)))
        assert tracemalloc.is_tracing() is before
    finally:
        tracemalloc.stop()


def test_the_memory_hook_counts_what_the_pool_gives() -> None:
    class Hook:
        entered = exited = 0

        def __enter__(self) -> None:
            self.entered += 1

        def __exit__(self, *_: object) -> None:
            self.exited += 1

    class Cuda:
        MemoryHook = Hook

    allocator = GpuAllocator(Cuda)
    allocator.start()
    hook: Any = allocator._hook
    facts = {"device_id": 0, "size": 100, "mem_ptr": 1, "pmem_id": 1}
    hook.malloc_postprocess(mem_size=512, **facts)
    hook.malloc_postprocess(mem_size=1024, **facts)
    hook.free_postprocess(mem_size=512, **facts)
    assert allocator.read() == (1024, 1536)
    hook.free_postprocess(mem_size=1024, **facts)
    assert allocator.read() == (0, 1024)
    assert allocator.read() == (0, 0)
    allocator.stop()
    assert (hook.entered, hook.exited) == (1, 1)
