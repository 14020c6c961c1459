"""Captured steps: equal bits, and errors instead of wrong results."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

import tensorgrad as tg
from tensorgrad import Tensor, graph, nn, optim, random
from tensorgrad.core import backend
from tensorgrad.core.modes import mode, replaced
from tensorgrad.errors import ArgumentError, DeviceError, GraphError
from tensorgrad.models.gpt2 import GPT2, GPT2Config
from tensorgrad.nn import evaluating
from tests.gpu_array import on_gpu

TINY = GPT2Config(vocab_size=97, context=32, layers=2, heads=2, width=64, dropout=0.1)


@pytest.mark.gpu
@pytest.mark.parametrize("whole", [True, False])
def test_a_captured_step_leaves_a_parameter_without_a_gradient(whole: bool) -> None:
    """Whether the graph has the whole step, or its backward alone."""
    used, unused = (
        Tensor(backend.to_device(np.ones((4, 4), np.float32), "cuda"), requires_grad=True)
        for _ in range(2)
    )
    optimizer = optim.AdamW([used, unused], 0.1, weight_decay=0.1)

    def backward(x: Any) -> Any:
        if whole:
            optimizer.zero_grad()
        loss = (used * Tensor(x)).sum()
        loss.backward()
        if whole:
            optimizer.step()
        return loss.data

    captured = graph.capture(backward)
    for _ in range(4):
        before = used.numpy()
        if not whole:
            optimizer.zero_grad()
        captured(np.ones((4, 4), np.float32))
        if not whole:
            optimizer.step()
        assert (used.numpy() != before).all()
    assert captured.graphs == 1
    assert (unused.numpy() == 1).all()


def batches(count: int, rows: int = 4, length: int = 32) -> list[tuple[Any, Any]]:
    rng = np.random.default_rng(rows * length)
    both = rng.integers(0, 97, (count, 2, rows, length)).astype(np.int32)
    return [(x, y) for x, y in both]


class Training:
    """A GPT-2 with dropout, accumulation, clipping, and a loss scale for float16."""

    def __init__(
        self,
        dtype: str = "float32",
        parts: int = 2,
        config: GPT2Config = TINY,
        grad_dtype: str | None = None,
    ) -> None:
        random.seed(3)
        with nn.init.on("cuda"):
            self.model = GPT2(config).to("cuda", "float32" if dtype == "float16" else dtype)
        flat = optim.FlatParameters(self.model.named_parameters(), grad_dtype=grad_dtype)
        self.optimizer = optim.AdamW(flat, 1e-2)
        self.scaler = optim.LossScaler(2.0**14, interval=4) if dtype == "float16" else None
        self.dtype, self.parts = dtype, parts

    def step(self, x: Any, y: Any) -> Any:
        self.optimizer.zero_grad()
        total = 0.0
        size = len(x) // self.parts
        for begin in range(0, len(x), size):
            part = slice(begin, begin + size)
            if self.dtype == "float16":
                with tg.autocast("float16"):
                    loss = self.model(Tensor(x[part]), Tensor(y[part]))
            else:
                loss = self.model(Tensor(x[part]), Tensor(y[part]))
            total = total + loss.data
            (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        return total, self.optimizer.step(1.0, self.scaler)

    def state(self) -> list[bytes]:
        arrays = [self.optimizer.flat.data, self.optimizer.hyper, *self.optimizer.state.values()]
        return [backend.to_numpy(each).tobytes() for each in arrays]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "grad_dtype"),
    [("float32", None), ("bfloat16", None), ("bfloat16", "bfloat16"), ("float16", None)],
)
@pytest.mark.parametrize("parts", [1, 2])
def test_replays_give_the_bits_of_eager_steps(
    dtype: str, grad_dtype: str | None, parts: int
) -> None:
    found = []
    for captured in (False, True):
        training = Training(dtype, parts, grad_dtype=grad_dtype)
        step: Any = graph.capture(training.step) if captured else training.step
        losses = []
        for number, (x, y) in enumerate(batches(12)):
            training.optimizer.lr = 1e-2 / (number + 1)
            if not captured:
                x, y = map(backend.cupy.asarray, (x, y))
            losses.append([float(each) for each in step(x, y)])
        if captured:
            assert step.graphs == 1
        found.append((losses, training.state(), random.get_state()))
    assert found[0] == found[1]


def muon_and_adamw(model: GPT2) -> list[optim.Optimizer]:
    """Return Muon for the matrices of the blocks, AdamW for the rest."""
    pairs = list(model.named_parameters())
    inside = {name for name, p in pairs if name.startswith("blocks.") and p.ndim == 2}
    return [
        optim.Muon([pair for pair in pairs if pair[0] in inside], 1e-2),
        optim.AdamW([pair for pair in pairs if pair[0] not in inside], 1e-2),
    ]


def grouped(make: Any) -> Callable[[GPT2], list[optim.Optimizer]]:
    """Return an optimizer of two groups, the second with options of its own."""

    def groups(model: GPT2) -> list[optim.Optimizer]:
        pairs = list(model.named_parameters())
        inside = [pair for pair in pairs if pair[0].startswith("blocks.")]
        rest = [pair for pair in pairs if not pair[0].startswith("blocks.")]
        second = {"params": rest, "lr": 1e-3, "weight_decay": 0.0}
        return [make([{"params": inside}, second], lr=1e-2, weight_decay=0.1)]

    return groups


OPTIMIZERS: dict[str, Callable[[GPT2], list[optim.Optimizer]]] = {
    "lion": lambda model: [optim.Lion(model.named_parameters(), 1e-3, weight_decay=0.1)],
    "adafactor": lambda model: [optim.Adafactor(model.named_parameters(), weight_decay=0.1)],
    "muon": muon_and_adamw,
    "adamw in groups": grouped(optim.AdamW),
    "lion in groups": grouped(optim.Lion),
    "adafactor in groups": grouped(optim.Adafactor),
}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_optimizers_schedules_and_averages_give_the_bits_of_eager_steps(
    kind: str, dtype: str
) -> None:
    """The average is updated in the captured step; schedules step between replays."""
    found = []
    for captured in (False, True):
        random.seed(3)
        with nn.init.on("cuda"):
            model = GPT2(TINY).to("cuda", dtype)
        optimizers = OPTIMIZERS[kind](model)
        schedulers = [
            optim.Scheduler(each, optim.schedule.cosine, steps=10, warmup=3) for each in optimizers
        ]
        averages = [optim.WeightAverage(each, 0.9) for each in optimizers]

        def take(
            x: Any, y: Any, model: Any = model, all_of: Any = optimizers, averages: Any = averages
        ) -> Any:
            for optimizer in all_of:
                optimizer.zero_grad()
            loss = model(Tensor(x), Tensor(y))
            loss.backward()
            norms = [optimizer.step(1.0) for optimizer in all_of]
            for average in averages:
                average.update()
            return loss.data, *norms

        step: Any = graph.capture(take) if captured else take
        results = []
        for x, y in batches(8):
            if not captured:
                x, y = map(backend.cupy.asarray, (x, y))
            results.append([float(each) for each in step(x, y)])
            for scheduler in schedulers:
                scheduler.step()
        if captured:
            assert step.graphs == 1
        assert all(optimizer.numbers()["step"] == 8 for optimizer in optimizers)
        arrays = [each for o in optimizers for each in (o.flat.data, o.hyper, *o.state.values())]
        arrays += [array for average in averages for array in average.state_dict().values()]
        bits = [backend.to_numpy(each).tobytes() for each in arrays]
        found.append((results, bits, random.get_state()))
    assert found[0] == found[1]


@pytest.mark.gpu
def test_the_generator_counts_on() -> None:
    """Others draw between replays, and the state is set back, as when a run resumes."""
    cupy = backend.cupy

    def noise(x: Any) -> Any:
        return tg.dropout(Tensor(x), 0.5, training=True) + tg.dropout(Tensor(x), 0.3, training=True)

    ones = cupy.ones(1000, "float32")
    found: list[list[bytes]] = []
    for function in (noise, graph.capture(noise)):
        random.seed(5)
        values = [function(ones).numpy().tobytes() for _ in range(4)]
        state = random.get_state()
        values.append(function(ones).numpy().tobytes())
        random.normal(size=3)
        values.append(function(ones).numpy().tobytes())
        random.set_state(state)
        values.append(function(ones).numpy().tobytes())
        assert values[4] == values[6] != values[5]
        found.append(values)
    assert found[0] == found[1]
    assert len(set(found[0])) == 6


@pytest.mark.gpu
def test_dropout_inside_a_layer_draws_new_numbers_at_each_replay() -> None:
    random.seed(0)
    layer = nn.SwiGLU(24, hidden=40, dropout=0.4).to("cuda")
    x = backend.cupy.ones((40, 24), "float32")

    def step(x: Any) -> tuple[Any, Any]:
        for parameter in layer.parameters():
            parameter.grad = None
        y = layer(Tensor(x))
        y.sum().backward()
        return y.data, layer.up.weight.grad

    found: list[list[bytes]] = []
    for function in (step, graph.capture(step)):
        random.seed(5)
        found.append([])
        for _ in range(4):
            found[-1] += [backend.to_numpy(each).tobytes() for each in function(x)]
    assert found[0] == found[1]
    assert len(set(found[0])) == 8


@pytest.mark.gpu
def test_one_graph_for_each_shape_up_to_a_number(caplog: pytest.LogCaptureFixture) -> None:
    step = graph.capture(lambda x, factor: Tensor(x) * factor, most=3)
    for _ in range(3):
        for length in (4, 5, 6, 7):
            x = np.arange(length, dtype="float32")
            for factor in (2.0, 2.0):
                np.testing.assert_array_equal(step(x, factor).numpy(), 2 * x)
    assert step.graphs == 3
    np.testing.assert_array_equal(step(np.ones(4, "float32"), 3.0).numpy(), 3)
    assert step.graphs == 3


@pytest.mark.gpu
def test_results_belong_to_the_caller() -> None:
    step = graph.capture(lambda x: {"y": (Tensor(x) + 1.0, x * 2), "none": None})
    found = [step(np.full(5, i, "float32")) for i in range(5)]
    for i, each in enumerate(found):
        assert each["none"] is None
        assert each["y"][0].numpy().tolist() == [i + 1] * 5
        assert each["y"][1].tolist() == [2 * i] * 5


@pytest.mark.gpu
def test_modes_and_replaced_arrays_get_graphs_of_their_own() -> None:
    random.seed(0)
    layer = nn.Linear(8, 8)
    model = nn.Sequential(layer, nn.Dropout(0.5)).to("cuda")
    step = graph.capture(model)
    x = Tensor(backend.cupy.ones((2, 8), "float32"))
    with tg.no_grad():
        for _ in range(3):
            with evaluating(model):
                expected = model(x).numpy()
                assert (step(x).numpy() == expected).all()
            assert (step(x).numpy() == 0).any(), "dropout"
    assert step.graphs == 2
    with evaluating(model), tg.no_grad():
        layer.weight.data = layer.weight.data * 2
        for _ in range(3):
            assert (step(x).numpy() == model(x).numpy()).all()
        layer.weight[...] = 0.5
        assert (step(x).numpy() == model(x).numpy()).all()
    assert step.graphs == 3
    weight = layer.weight  # lives on
    layer.weight = nn.Parameter(weight.data + 1)
    with evaluating(model), tg.no_grad():
        for _ in range(3):
            assert (step(x).numpy() == model(x).numpy()).all()
    model[0] = nn.Linear(8, 8).to("cuda")
    with evaluating(model), tg.no_grad():
        for _ in range(3):
            assert (step(x).numpy() == model(x).numpy()).all()
    assert step.graphs == 5


@pytest.mark.gpu
def test_the_mode_of_a_layer_inside_a_fused_op_counts() -> None:
    random.seed(0)
    block = nn.TransformerBlock(64, 1, dropout=0.5, attention_dropout=0.0).to("cuda")
    step = graph.capture(block)
    x = Tensor(backend.cupy.ones((2, 3, 64), "float32"))
    with tg.no_grad():
        for _ in range(3):
            assert (step(x).numpy() != step(x).numpy()).any()
        for each in block.modules():
            if isinstance(each, nn.Dropout):
                each.training = False
        for _ in range(3):
            assert (step(x).numpy() == block(x).numpy()).all()
    assert step.graphs == 2


def guards_of(model: nn.Module) -> Any:
    """Return the guards of a call, with those of gradients."""
    watch = graph._Watch()
    watch.layer(model, (Tensor(np.ones((1, 3, 8), "float32")),), {})
    for parameter in model.parameters():
        watch.guards.add(parameter, "grad", parameter.grad)
    return watch.guards


def replace_data(block: Any) -> None:
    block.attention.qkv.weight.data = block.attention.qkv.weight.data.copy()


def replace_by_setattr(block: Any) -> None:
    with replaced(block.norm1.weight, data=block.norm1.weight.data.copy()):
        pass
    setattr(block.norm1.weight, "data", block.norm1.weight.data.copy())  # noqa: B010


def replace_grad(block: Any) -> None:
    block.feed_forward.up.bias.grad = np.zeros(32, "float32")


def replace_buffer(block: Any) -> None:
    block.shift.data = block.shift.data.copy()


def convert(block: Any) -> None:
    block.to("float64")


def drop_layer(block: Any) -> None:
    block.norm2 = nn.LayerNorm(8)
    gc.collect()


old: list[Any] = []


def replace_parameter(block: Any) -> None:
    old.append(block.norm1.weight)  # which lives on
    block.norm1.weight = nn.Parameter(np.ones(8, "float32"))


def replace_layer(block: Any) -> None:
    old.append(block.norm2)
    block.norm2 = nn.LayerNorm(8)


def replace_by_another_buffer(block: Any) -> None:
    block.shift = Tensor(np.zeros(8, "float32"))


def remove_parameter(block: Any) -> None:
    block.norm1.bias = None


def evaluate(block: Any) -> None:
    block.eval()


def set_mode(block: Any) -> None:
    block.attention.training = False


def set_mode_of_fused_layer(block: Any) -> None:
    block.dropout.training = False


CHANGES = (
    replace_data, replace_by_setattr, replace_grad, replace_buffer, convert, drop_layer,
    replace_parameter, replace_layer, replace_by_another_buffer, remove_parameter, evaluate,
    set_mode, set_mode_of_fused_layer,
)  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_what_a_replay_needs_is_guarded(change: Callable[[Any], None]) -> None:
    block, other = (nn.TransformerBlock(8, 2, dropout=0.1) for _ in range(2))
    block.register_buffer("shift", Tensor(np.ones(8, "float32")))
    guards = guards_of(block)
    assert guards.hold()
    replace_data(other)
    other.eval()
    with evaluating(block):
        assert not guards.hold()
        assert not guards.hold()
    assert guards.hold()
    next(block.parameters()).data[...] = 2
    assert guards.hold()
    change(block)
    assert not guards.hold()
    assert not guards.hold()


def test_guards_are_compared_after_changes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the host's time of a replay does not grow with the model."""
    block = nn.TransformerBlock(8, 2)
    guards = guards_of(block)
    assert guards.hold()
    compared: list[int] = []

    def are_kept(attributes: Any) -> bool:
        compared.append(len(attributes))
        return True

    monkeypatch.setattr(graph, "_are_kept", are_kept)
    assert guards.hold()
    assert compared == [0]  # other tensors than parameters
    with evaluating(block):
        pass
    assert guards.hold()
    assert compared == [0, 0]
    replace_data(block)
    assert guards.hold()
    assert compared == [0, 0, 0, 2]


@pytest.mark.gpu
@pytest.mark.parametrize("inside", [True, False])
def test_gradients_of_leaves(inside: bool) -> None:
    """They are new arrays, or added to those that are there, as in eager steps."""
    w = Tensor(backend.cupy.arange(4, dtype="float32"), requires_grad=True)

    def gradient(x: Any) -> Any:
        if inside:
            w.grad = None
        (w * w * Tensor(x)).sum().backward()

    step = graph.capture(gradient)
    total = np.zeros(4, "float32")
    for i in range(8):
        x = np.full(4, i, "float32")
        if not inside and i % 4 == 0:
            w.grad = None
            total[:] = 0
        step(x)
        total = (0 if inside else total) + 2 * np.arange(4, dtype="float32") * i
        assert w.grad is not None
        assert w.grad.tolist() == total.tolist(), i
    assert step.graphs == (1 if inside else 2)


@pytest.mark.gpu
def test_autocast_around_a_step_casts_again() -> None:
    random.seed(0)
    layer = nn.Linear(16, 16).to("cuda")
    step = graph.capture(layer)
    x = Tensor(backend.cupy.ones((3, 16), "float32"))
    with tg.autocast("bfloat16"), tg.no_grad():
        for scale in (1.0, 2.0, 3.0, 4.0):
            layer.weight[...] = scale
            assert (step(x).numpy() == layer(x).numpy()).all()
    assert step.graphs == 1


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_graphs_of_several_shapes_share_memory(dtype: str) -> None:
    """Nothing that one graph leaves in it matters to another: it is overwritten in between."""
    cupy = backend.cupy
    shapes = [(4, 32), (8, 16), (2, 24), (6, 32), (4, 32)]
    order = [*range(5), *range(5), *np.random.default_rng(0).integers(0, 5, 20).tolist()]
    data = [batches(len(order), *shape) for shape in shapes]
    found = []
    for captured in (False, True):
        training = Training(dtype)
        step: Any = graph.capture(training.step) if captured else training.step
        losses = []
        for number, shape in enumerate(order):
            x, y = data[shape][number]
            if not captured:
                x, y = map(cupy.asarray, (x, y))
            losses.append([float(each) for each in step(x, y)])
            for memory in step._arena._memory if captured and step._arena else ():
                memory_of = cupy.cuda.MemoryPointer(memory, 0)
                memory_of.memset(0xFF, memory.size)  # NaN
        found.append((losses, training.state(), random.get_state()))
    assert found[0] == found[1]
    assert step.graphs == 4
    assert len({id(each.arena) for each in step._variants}) == 1
    alone = []
    for shape in shapes[:4]:
        training = Training(dtype)
        other: Any = graph.capture(training.step)
        for _ in range(3):
            other(*batches(1, *shape)[0])
        alone.append(other._arena.total_bytes())
    assert 0.9 * max(alone) <= step._arena.total_bytes() < 0.7 * sum(alone)


@pytest.mark.gpu
def test_a_graph_that_leaves_arrays_keeps_its_memory() -> None:
    """A gradient stays as it is while other graphs run, and tables of warm-ups stay anyway."""
    cupy = backend.cupy
    w = Tensor(cupy.arange(4, dtype="float32"), requires_grad=True)
    tables: dict[int, Any] = {}

    def gradient(x: Any) -> Any:
        if len(x) not in tables:
            tables[len(x)] = cupy.full(len(x) << 12, len(x), "float32")
        scratch = Tensor(tables[len(x)]) * Tensor(x).sum() * 2.0 + 1.0
        if len(x) % 2:
            return scratch.sum()
        w.grad = None
        (w * w * Tensor(x).sum()).sum().backward()
        return scratch.sum()

    step = graph.capture(gradient)
    rng = np.random.default_rng(0)
    kept: list[tuple[int, Any, list[float]]] = []
    for number in range(40):
        length = (3, 4, 5, 6, 7)[number % 5 if number < 15 else rng.integers(0, 5)]
        x = np.full(length, number, "float32")
        y = float(step(x))
        assert y == pytest.approx((length << 12) * (2.0 * length * length * number + 1), rel=1e-5)
        for before, grad, expected in kept[-1:]:
            assert before == length or grad.tolist() == expected
        if length % 2 == 0:
            assert w.grad is not None
            assert w.grad.tolist() == [2.0 * i * length * number for i in range(4)]
            kept.append((length, w.grad, w.grad.tolist()))
    assert step.graphs == 5
    of = {len(each._arguments[0]): each.arena for each in step._variants}
    assert of[3] is of[5] is of[7]
    assert len({id(arena) for arena in of.values()}) == 3


def test_arenas_are_shared_until_a_graph_leaves_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    class Arena:
        used = False

        def is_used(self) -> bool:
            return self.used

    class Variant:
        def __init__(self, leaves: bool) -> None:
            self.leaves, self.arena = leaves, None

        def capture(self, function: Any, stream: Any, arena: Any) -> None:
            self.arena, arena.used = arena, self.leaves

        def drop(self) -> None:
            self.arena = None

    monkeypatch.setattr(graph, "_Arena", Arena)
    step: Any = graph.capture(lambda: None, "cpu")
    step._stream = None
    step._variants = one, two, keeps, three = [Variant(each == 2) for each in range(4)]
    step._capture(one)
    step._capture(two)
    assert one.arena is two.arena is not None
    step._capture(keeps)
    assert (one.arena, two.arena, step._arena) == (None, None, None)
    step._capture(three)
    step._capture(one)
    assert one.arena is three.arena is not keeps.arena
    assert two.arena is None


@pytest.mark.gpu
def test_a_step_in_tf32_is_captured_to_the_same_bits() -> None:
    random.seed(0)
    layer = nn.TransformerBlock(64, 1).to("cuda")
    optimizer = optim.SGD(layer.named_parameters(), 0.1)

    def step(x: Tensor) -> Any:
        optimizer.zero_grad()
        with tg.autocast("tf32"):
            loss = (layer(x) ** 2).mean()
        loss.backward()
        return loss, *(Tensor(parameter.grad) for parameter in layer.parameters())

    captured = graph.capture(step)
    for seed in range(4):
        values = np.random.default_rng(seed).standard_normal((2, 65, 64)).astype("float32")
        x = Tensor(backend.cupy.asarray(values))
        found, again = ([each.numpy().tobytes() for each in run(x)] for run in (captured, step))
        assert found == again
    assert captured.graphs == 1


@pytest.mark.gpu
def test_the_memory_of_a_graph_is_its_own() -> None:
    cupy = backend.cupy
    training = Training()
    step: Any = graph.capture(training.step)
    data = batches(6)
    for x, y in data[:3]:
        step(x, y)
    arena = step._arena
    assert backend.memory_bytes()[1] >= arena.total_bytes() > 0
    other = Training()
    for x, y in data[:3]:
        other.step(*map(cupy.asarray, (x, y)))
    for x, y in data[3:]:
        cupy.get_default_memory_pool().free_all_blocks()
        arena.pool.free_all_blocks()
        rubbish = [cupy.full(1 << 20, np.nan, "float32") for _ in range(20)]
        step(x, y)
        del rubbish
        other.step(*map(cupy.asarray, (x, y)))
    # the generators of both took turns: the parameters differ by dropout alone
    assert all(np.isfinite(np.frombuffer(each, "float32")).all() for each in training.state()[:1])


@pytest.mark.gpu
def test_a_step_of_steps() -> None:
    inner = graph.capture(lambda x: Tensor(x) * 2.0)
    outer = graph.capture(lambda x: inner(x) + 1.0)
    for i in range(4):
        assert outer(np.full(3, i, "float32")).numpy().tolist() == [2 * i + 1] * 3
    assert (inner.graphs, outer.graphs) == (0, 1)


@pytest.mark.gpu
def test_replays_run_on_the_current_stream() -> None:
    cupy = backend.cupy
    step = graph.capture(lambda x: Tensor(x).sum())
    x = cupy.ones(1 << 24, "float32")
    cupy.cuda.Device().synchronize()  # the streams below do not wait for the default one
    for i in range(5):
        with cupy.cuda.Stream(non_blocking=True) as stream:
            x[...] = i
            y = step(x)
            x[...] = -1
            stream.synchronize()
        assert float(y) == i << 24


@pytest.mark.gpu
def test_threads() -> None:
    step = graph.capture(lambda x: Tensor(x) + 1.0)
    wrong = []

    def run(number: int) -> None:
        for i in range(20):
            y = step(np.full(7, number * 100 + i, "float32")).numpy()
            if y.tolist() != [number * 100 + i + 1] * 7:
                wrong.append((number, i))

    threads = [threading.Thread(target=run, args=(number,)) for number in range(3)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not wrong


def reads(x: Any) -> Any:
    y = Tensor(x).sum()
    if float(y) > 0:
        y = y * 2.0
    return y


def copies(x: Any) -> Any:
    return Tensor(x) + Tensor(backend.cupy.asarray(np.ones(3, "float32")))


def multiplies_by_cupy(x: Any) -> Any:
    return backend.cupy.ones((64, 64), "float32") @ backend.cupy.ones((64, 64), "float32")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("function", "message"),
    [
        (reads, r"Tensor\.__float__ at tests/test_graph\.py:\d+ cannot be captured into a CUDA g"),
        (copies, r"at tests/test_graph\.py:\d+ cannot be captured .* copies between host and GPU"),
        (multiplies_by_cupy, r"it calls cuBLAS through CuPy, expected an op of this library"),
    ],
)
def test_what_cannot_be_captured_is_named(function: Any, message: str) -> None:
    random.seed(1)
    step = graph.capture(function)
    step(np.ones(3, "float32"))
    for _ in range(2):
        with pytest.raises(GraphError, match=message):
            step(np.ones(3, "float32"))
    assert random.get_state()["draw"] == 0
    assert float(Tensor(backend.cupy.ones(3)).sum()) == 3, "the GPU works on"
    other = graph.capture(lambda x: Tensor(x) + 1.0)
    assert [float(other(np.ones((), "float32"))) for _ in range(4)] == [2] * 4


@pytest.mark.gpu
def test_what_a_replay_would_repeat_is_an_error() -> None:
    w = Tensor(backend.cupy.ones(4, "float32"), requires_grad=True)
    optimizer = optim.SGD([("w", w)], 0.1)
    generator = random.Generator(1)

    def rate(x: Any) -> None:
        optimizer.lr = 0.5

    def seeds(x: Any) -> None:
        random.seed(3)

    def own(x: Any) -> Any:
        return generator.normal(size=3, device="cuda")

    for function, message in (
        (rate, "SGD: lr is set in a captured step"),
        (seeds, "random.seed: called in a captured step"),
        (own, "draws from a generator of its own"),
    ):
        random.seed(3)
        step = graph.capture(function)
        step(np.ones(3, "float32"))
        with pytest.raises(GraphError, match=message):
            step(np.ones(3, "float32"))
    with pytest.raises(GraphError, match="the function returned a float, expected arrays"):
        graph.capture(lambda x: 0.5)(np.ones(3, "float32"))
    with pytest.raises(GraphError, match=r"add at .*test_graph\.py:\d+ computes on the CPU"):
        graph.capture(lambda x: Tensor(np.ones(3)) + 1.0)(np.ones(3, "float32"))


@pytest.mark.gpu
def test_an_error_of_the_function_passes_and_leaves_everything_as_it_was() -> None:
    w = Tensor(backend.cupy.ones(4, "float32"), requires_grad=True)
    failing = [True]

    def fails(x: Any) -> None:
        random.next_key()
        w.grad = None
        (w * Tensor(x)).sum().backward()
        if failing and mode.capture is not None:
            raise KeyError("from the function")

    step = graph.capture(fails)
    step(np.ones(4, "float32"))
    before, state = w.grad, random.get_state()
    for _ in range(2):
        with pytest.raises(KeyError, match="from the function"):
            step(np.ones(4, "float32"))
    failing.clear()
    assert w.grad is before
    assert random.get_state() == state
    for i in range(4):
        step(np.full(4, i, "float32"))
        assert w.grad is not None
        assert w.grad.tolist() == [i] * 4
    assert step.graphs == 1


def test_on_the_cpu_the_function_runs_as_it_is() -> None:
    calls: list[None] = []

    @graph.capture
    def step(x: Any) -> Any:
        calls.append(None)
        return (Tensor(x) * 2.0, x) if not backend.gpu_count() else None

    if not backend.gpu_count():
        for _ in range(3):
            y, _ = step(np.ones(2, "float32"))
            assert y.numpy().tolist() == [2, 2]
        assert (len(calls), step.graphs) == (3, 0)
    alone = graph.capture(lambda x: Tensor(x) * 2.0, device="cpu")
    assert alone(np.ones(2)).numpy().tolist() == [2, 2]


def test_results_are_detached_everywhere() -> None:
    w = Tensor(np.ones(2), requires_grad=True)
    y = graph.capture(lambda: w * 2.0, device="cpu")()
    assert not y.requires_grad
    with pytest.raises(GraphError, match="the function returned a int"):
        graph.capture(lambda: (w, 3), device="cpu")()


class Pair(NamedTuple):
    first: Any
    second: Any


def test_results_of_any_structure_are_mapped() -> None:
    w = Tensor(np.ones(2), requires_grad=True)
    result = {"a": Pair(w * 2, [w, None]), "b": (w.data,)}
    found = graph.capture(lambda: result, device="cpu")()
    assert list(found) == ["a", "b"]
    assert type(found["a"]) is Pair
    assert type(found["a"].second) is list
    assert type(found["b"]) is tuple
    assert found["b"][0] is w.data
    assert found["a"].second[1] is None
    for one in (found["a"].first, found["a"].second[0]):
        assert not one.requires_grad
    assert found["a"].second[0].data is w.data
    copied = graph._mapped(graph._copy, found)
    assert not np.shares_memory(copied["a"].second[0].data, w.data)
    assert copied["a"].second[0].tolist() == copied["b"][0].tolist() == [1, 1]
    for wrong, kind in (({"a": [1]}, "int"), ((w, "text"), "str")):
        with pytest.raises(GraphError, match=f"the function returned a {kind}, expected arrays"):
            graph.capture(lambda wrong=wrong: wrong, device="cpu")()


def test_a_watch_notes_what_a_step_uses() -> None:
    w, y = Tensor(np.ones(2), requires_grad=True), on_gpu(np.ones(2))
    first = graph._Watch()
    first.op("multiply", y, (w, 3.0, None, w * 2, w.detach()), None, ())
    assert (first.used, first.leaves, first.kept) == ({id(w): w}, {}, {})
    first.op("multiply", y, (w,), object(), ())
    assert first.leaves == {id(w): (w, None)}
    graph._Watch(first).op("multiply", y, (w,), object(), ())
    w.grad = np.zeros(2)
    first.op("multiply", y, (w,), object(), ())  # noted already
    with pytest.raises(graph._UnlikeWarmUp):
        graph._Watch(first).op("multiply", y, (w,), object(), ())
    with pytest.raises(GraphError, match=r"graph.capture: exp at .* computes on the CPU, expected"):
        first.op("exp", np.ones(2), (), None, ())
    thread = threading.Thread(target=first.op, args=("exp", np.ones(2), (), None, ()))
    thread.start()
    thread.join()
    own, outside, saved = (on_gpu(np.ones(2)) for _ in range(3))
    arena: Any = SimpleNamespace(owns=lambda array: array is own)
    within = graph._Watch(None, arena)
    within.op("add", y, (Tensor(own), Tensor(outside), Tensor(np.ones(2))), None, (saved, "tanh"))
    assert {id(each) for each in within.kept.values()} == {id(outside), id(saved)}
    first.enter("sum")
    assert first.running == "sum"
    node = SimpleNamespace(name="tanh", backward=lambda *given: given)
    assert first.backward(node, 1, (2,), (True,)) == (1, (2,), (True,))
    assert first.running == "backward of tanh"
    first.transfer("all_reduce", 8)()
    assert first.running == "all_reduce"


def test_an_arena_owns_what_lies_in_its_memory() -> None:
    memory = [SimpleNamespace(ptr=100, size=10), SimpleNamespace(ptr=300, size=1)]
    arena: Any = SimpleNamespace(_memory=memory)
    for pointer, owned in ((99, False), (100, True), (109, True), (110, False), (300, True)):
        array = SimpleNamespace(data=SimpleNamespace(ptr=pointer))
        assert graph._Arena.owns(arena, array) == owned
    assert graph._Arena.total_bytes(arena) == 11


def test_a_watch_guards_the_modules_of_a_step() -> None:
    block = nn.TransformerBlock(8, 2)
    watch = graph._Watch()
    x = tg.ones((1, 3, 8))
    np.testing.assert_array_equal(watch.layer(block, (x,), {}).numpy(), block(x).numpy())
    assert watch.guards.hold()
    count = len(watch.guards._modules)
    assert count == len(list(block.modules()))
    watch.layer(block, (x,), {})
    assert len(watch.guards._modules) == count
    next(iter(block.children())).eval()
    assert not watch.guards.hold()
    block.train()
    assert watch.guards.hold()
    del block
    gc.collect()
    assert not watch.guards.hold()


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ArgumentError, match="most is 0, expected"):
        graph.capture(lambda: None, most=0)
    with pytest.raises(DeviceError, match="got 'gpu', expected 'cpu'"):
        graph.capture(lambda: None, device="gpu")


@pytest.mark.gpu
def test_bad_arguments_of_a_step_are_named() -> None:
    step = graph.capture(lambda *values: None)
    with pytest.raises(ArgumentError, match="argument 1 is a list, expected an array, a tensor"):
        step(1, [2])
    with pytest.raises(ArgumentError, match="argument 0 requires a gradient"):
        step(Tensor(np.ones(2), requires_grad=True))
