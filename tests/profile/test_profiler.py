from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import tensorgrad as tg
from tensorgrad import Tensor, nn, no_grad
from tensorgrad.core import instrument, nodes
from tensorgrad.dtypes import is_float
from tensorgrad.errors import ArgumentError, DeviceError, ShapeError
from tensorgrad.profile import Profiler
from tensorgrad.profile import profiler as profiler_module
from tensorgrad.profile.nvtx import Nvtx
from tensorgrad.profile.recording import Range
from tensorgrad.testing import Case, _draw
from tests.ops.test_coverage import ALL_CASES
from tests.profile.steps import Step
from tests.train.tiny_run import make_trainer


def of(found: Profiler, kind: str, name: str = "") -> list[Range]:
    return [r for r in found.recording.ranges if r.kind == kind and name in ("", r.name)]


def test_a_step_has_phases_layers_and_ops_inside_each_other() -> None:
    found = Step().recorded(2)
    by_number = {each.number: each for each in found.recording.ranges}
    phases = Counter(each.name for each in of(found, "phase"))
    assert phases == {
        **dict.fromkeys(("step", "zero gradients", "forward", "backward", "optimizer"), 2)
    }
    for each in found.recording.ranges:
        assert each.start <= each.end
        if each.parent != -1:
            around = by_number[each.parent]
            assert around.start <= each.start
            assert each.end <= around.end
    attention = of(found, "op", "attention_packed")
    assert [each.layer for each in attention[:2]] == ["blocks.0.attention", "blocks.1.attention"]
    assert attention[0].shapes == ((2, 8, 48),)
    assert attention[0].dtype == "float32"
    assert {each.phase for each in attention} == {"forward"}
    assert not any(
        r.flops or r.nbytes or r.dtype for r in (*of(found, "phase"), *of(found, "layer"))
    )
    assert {each.thread for each in found.recording.ranges} == {0}
    layer = by_number[attention[0].parent]
    assert (layer.kind, layer.name) == ("layer", "blocks.0.attention")
    assert found.recording.steps == 2


def test_memory_has_a_sample_of_each_op_and_phase() -> None:
    found = Step().recorded(memory=True)
    assert found.memory is not None
    ranges = [r for r in found.recording.ranges if r.is_op or r.kind == "phase"]
    expected = [
        (f"{r.name} backward" if r.kind == "backward" else r.name, r.phase, r.layer)
        if r.is_op
        else (r.name, r.name, r.layer)
        for r in ranges
        if r.name != "step"
    ]
    samples = [(sample.op, sample.phase, sample.layer) for sample in found.memory.samples]
    assert samples == expected
    assert found.memory.device == "cpu"
    lines = {sample.op: sample.line for sample in found.memory.samples}
    assert lines["embedding backward"] == lines["embedding"]
    assert "models/gpt2.py:" in lines["embedding"]


def test_all_outputs_of_an_op_count() -> None:
    x = Tensor(np.ones((4, 6), "float32"), requires_grad=True)
    norm: Any = nn.LayerNorm(6)
    for memory in (False, True):
        with Profiler(memory=memory) as found:
            total, normed = norm.add(x, x)
        [op] = of(found, "op")
        arrays = (x, norm.weight, norm.bias, total, normed)  # x once
        assert op.nbytes == sum(each.data.nbytes for each in arrays)
    assert found.memory is not None
    followed = [each.nbytes for each in found.memory.allocations if each.kind == "activations"]
    assert followed.count(96) >= 2


def test_a_collective_lasts_until_it_is_done() -> None:
    with Profiler(rank=2) as found:
        done = found.transfer("all_reduce", 8)
        found.transfer("never done", 8)
        done()
    [transfer] = found.recording.transfers
    assert (transfer.call, transfer.nbytes) == ("all_reduce", 8)
    window = found.recording.window
    assert window[0] <= transfer.start < transfer.end <= window[1]
    assert (found.recording.rank, found.recording.device) == (2, "cpu")
    assert found.recording.source == "host"


def test_a_layer_that_is_made_in_forward_is_named_by_the_layer_around_it() -> None:
    class Net(nn.Module):
        def forward(self, x: Any) -> Any:
            return nn.Linear(2, 2)(x)

    net = Net()
    with Profiler(net) as found:
        net(Tensor(np.ones((1, 2), "float32")))
    assert [each.layer for each in of(found, "op", "linear")] == ["Net.Linear"]


def test_backward_has_the_layer_in_which_the_op_was_recorded() -> None:
    found = Step().recorded()
    forward = Counter((each.name, each.layer) for each in of(found, "op"))
    backward = Counter((each.name, each.layer) for each in of(found, "backward"))
    assert backward == forward
    assert {each.phase for each in of(found, "backward")} == {"backward"}
    assert all(each.nbytes for each in of(found, "backward") if "cross" not in each.name)


def test_an_op_begins_where_it_is_called_and_not_where_the_last_one_ended() -> None:
    x = Tensor(np.ones((64, 64)), requires_grad=True)
    with Profiler() as found:
        tg.exp(x)
        x @ x
    first, second = of(found, "op")
    assert (first.name, second.name) == ("exp", "matmul")
    assert first.end <= second.start
    assert all(each.end > each.start for each in (first, second))


class Entered:
    """An observer that notes ops that are recorded and did not begin before."""

    def __init__(self) -> None:
        self.begun: set[str] = set()
        self.late: set[str] = set()
        self.recorded: set[str] = set()

    def enter(self, op: str) -> None:
        self.begun.add(op)

    def op(self, name: str, *_: Any) -> None:
        self.recorded.add(name)
        if name not in self.begun:
            self.late.add(name)
        self.begun.discard(name)

    def further_outputs(self, outputs: Any) -> None:
        """Do nothing."""


def test_every_op_tells_when_it_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise its range would be empty, and its kernels would belong to the layer."""
    found, rng = Entered(), np.random.default_rng(0)
    monkeypatch.setattr(instrument, "observer", found)
    cases = {case.function: case for case in ALL_CASES if isinstance(case, Case)}
    for case in cases.values():
        inputs = [_draw(case, spec, rng) for spec in case.inputs]
        learns = case.gradient  # some ops refuse what requires a gradient
        case.function(*(Tensor(array, learns and is_float(array.dtype)) for array in inputs))
    assert len(found.recorded) > 70
    assert found.late == set()


def test_ops_without_layers_and_without_gradients_are_recorded() -> None:
    with Profiler() as found, no_grad():
        tg.softmax(Tensor(np.ones((2, 3))))
    (op,) = of(found, "op")
    assert (op.name, op.phase, op.layer, op.shapes) == ("softmax", "", "", ((2, 3),))
    assert found.recording.steps == 1


def test_a_layer_of_the_user_is_named_by_its_class_and_path() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            self.layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])

        def forward(self, x: Any) -> Any:
            for layer in self.layers:
                x = tg.tanh(layer(x))
            return x

    with Profiler() as found:
        Net()(Tensor(np.ones((1, 2), "float32")))
    assert [each.layer for each in of(found, "op", "linear")] == ["layers.0", "layers.1"]
    assert [each.layer for each in of(found, "op", "tanh")] == ["Net", "Net"]
    assert [each.name for each in of(found, "phase")] == ["forward"]


def test_ops_that_fail_or_are_never_recorded_leave_nothing_behind() -> None:
    x = Tensor(np.ones((2, 3)), requires_grad=True)
    with Profiler() as found:
        for _ in range(3):
            with pytest.raises(ShapeError):
                x @ x
            x > 0  # noqa: B015  its result has no gradient: it is not recorded
        (x * 2).sum().backward()
    assert [each.name for each in of(found, "op")] == ["multiply", "sum"]
    assert all(each.parent == -1 for each in of(found, "op"))
    numbers = {each.number for each in found.recording.ranges} | {-1}
    assert {each.parent for each in found.recording.ranges} <= numbers


def test_an_op_inside_another_is_its_child() -> None:
    a, x = (Tensor(np.ones((4, 4)), requires_grad=True) for _ in range(2))
    f = tg.checkpoint(lambda x: tg.exp(x @ a))
    with Profiler() as found:
        f(x).sum().backward()
    again = [each for each in of(found, "op", "exp") if each.phase == "backward"]
    (around,) = [each for each in of(found, "backward") if each.name.startswith("checkpoint")]
    assert [each.parent for each in again] == [around.number]


def test_threads_have_ranges_of_their_own() -> None:
    def work() -> None:
        x = Tensor(np.ones(8), requires_grad=True)
        tg.exp(x).sum().backward()

    with Profiler() as found:
        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        work()
    assert Counter(each.name for each in of(found, "op")) == {"exp": 4, "sum": 4}
    assert {each.thread for each in of(found, "op")} == {0, 1, 2, 3}


def test_a_trainer_has_steps_data_and_evaluation(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path / "run", steps=4, warmup=1, evaluate_every=2, micro_batches=2)
    with Profiler(trainer.model) as found:
        trainer.run()
    phases = Counter(each.name for each in of(found, "phase"))
    assert phases["step"] == phases["data"] == phases["optimizer"] == phases["all-reduce"] == 4
    assert phases["backward"] == 2 * 4
    assert phases["evaluation"] == 3
    by_number = {each.number: each for each in found.recording.ranges}
    assert {by_number[each.parent].name for each in of(found, "phase", "data")} == {"step"}
    attention = {each.layer for each in of(found, "op", "attention_packed")}
    assert attention == {"blocks.0.attention"}  # the loss calls model.forward
    assert found.recording.steps == 4


def test_results_are_the_same_with_and_without() -> None:
    plain, profiled = Step(), Step()
    for each, other in zip(plain.model.parameters(), profiled.model.parameters(), strict=True):
        other.data[...] = each.data
    plain()
    profiled.recorded()
    for each, other in zip(plain.model.parameters(), profiled.model.parameters(), strict=True):
        np.testing.assert_array_equal(each.numpy(), other.numpy())


def fail(profiler: Profiler, error: type[BaseException]) -> None:
    with profiler, profiler.step():
        assert instrument.observer is profiler
        tg.exp(Tensor(np.ones(2)))
        raise error


def test_nothing_is_left_after_the_block() -> None:
    call, slots = vars(nn.Module)["__call__"], dict(vars(nodes.Node))
    with pytest.raises(ZeroDivisionError):
        fail(Profiler(), ZeroDivisionError)
    assert instrument.observer is None
    assert vars(nn.Module)["__call__"] is call
    assert dict(vars(nodes.Node)) == slots


def test_an_interrupted_step_is_recorded_up_to_there() -> None:
    profiler = Profiler()
    with pytest.raises(KeyboardInterrupt):
        fail(profiler, KeyboardInterrupt)
    assert [each.name for each in profiler.recording.ranges] == ["exp", "step"]


def test_one_profiler_at_a_time() -> None:
    with Profiler() as outer:
        with pytest.raises(ArgumentError, match="another one is active"), Profiler():
            pass
        assert instrument.observer is outer


def test_sources_that_are_not_there() -> None:
    with pytest.raises(ArgumentError, match="source is 'clock', expected 'cupti', 'events'"):
        Profiler(source="clock")
    if not tg.backend.gpu_count():
        with pytest.raises(DeviceError, match="source is 'cupti', but no GPU was found"):
            Profiler(source="cupti")


def test_nvtx_ranges_are_balanced(monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []
    depth = [0]

    def push(name: str) -> None:
        names.append(name)
        depth.append(depth[-1] + 1)

    fake = Nvtx(push, lambda: depth.append(depth[-1] - 1))
    monkeypatch.setattr(profiler_module, "nvtx_functions", lambda: fake)
    Step().recorded(nvtx=True)
    ops = {"feed_forward", "feed_forward backward"}
    assert {"step", "backward", "blocks.1.attention", *ops} <= set(names)
    assert min(depth) == 0
    assert depth[-1] == 0


def test_without_nvtx_an_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tg.backend, "cupy", None)
    monkeypatch.setitem(sys.modules, "nvtx", None)
    with pytest.raises(ArgumentError, match="pip install nvtx"):
        Profiler(nvtx=True)


def executed(f: Callable[[], object], marked: Callable[[str, int | None], bool]) -> int:
    """Return how many bytecodes run on marked lines of the library."""
    count = 0

    def trace(frame: Any, event: str, arg: Any) -> Any:
        nonlocal count
        if "tensorgrad" not in frame.f_code.co_filename:
            return None
        frame.f_trace_opcodes = True
        count += event == "opcode" and marked(frame.f_code.co_filename, frame.f_lineno)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        f()
    finally:
        sys.settrace(before)
    return count


def test_without_a_profiler_an_op_costs_a_load_and_a_branch_at_each_place() -> None:
    """The bytecodes that run on the lines that test the switch, counted."""
    lines: dict[str, list[str]] = {}

    def marked(path: str, line: int | None) -> bool:
        if path not in lines:
            lines[path] = Path(path).read_text(encoding="utf-8").splitlines()
        text = lines[path][line - 1] if line else ""
        return "observer is not None" in text

    layer = nn.Linear(2, 2)
    x = Tensor(np.ones((1, 2), "float32"), requires_grad=True)

    def chain(length: int) -> Tensor:
        y = x
        for _ in range(length):
            y = tg.tanh(y)
        return y

    executed(lambda: chain(1).backward(np.ones((1, 2))), marked)  # a first traced call sees less
    forward = [executed(lambda n=n: chain(n), marked) for n in (10, 20)]  # type: ignore[misc]
    results = [chain(10), chain(20)]
    backward = [executed(lambda y=y: y.backward(np.ones((1, 2))), marked) for y in results]  # type: ignore[misc]
    assert (forward[1] - forward[0]) / 10 == 2 * 3  # entry and record: load, attribute, branch
    assert (backward[1] - backward[0]) / 10 == 2  # load, branch
    assert executed(lambda: layer(x), marked) <= 3 * (1 + 1 + 4)  # call, record, four operands


def test_an_observer_that_notes_nothing_runs_what_it_is_given() -> None:
    class Silent(instrument.Observer):
        pass

    silent = Silent()
    with silent.phase("backward"):
        silent.enter("exp")
    layer = nn.Linear(2, 3)
    x = tg.ones((4, 2))
    np.testing.assert_array_equal(silent.layer(layer, (x,), {}).numpy(), layer(x).numpy())
    silent.op("exp", x.data, (x,), None, ())
    node: Any = SimpleNamespace(backward=lambda *given: given)
    assert silent.backward(node, 1, (2,), (True,)) == (1, (2,), (True,))
    silent.transfer("all_reduce", 8)()
