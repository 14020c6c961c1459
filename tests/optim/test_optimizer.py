from __future__ import annotations

import math
import signal
import sys
import tracemalloc
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest

from tensorgrad import Tensor, dtypes
from tensorgrad.core import backend, nodes
from tensorgrad.errors import ArgumentError, CheckpointError, GradError
from tensorgrad.kernels import loader
from tensorgrad.kernels import optim as launches
from tensorgrad.nn import Linear, Sequential
from tensorgrad.optim import (
    SGD,
    Adafactor,
    Adam,
    AdamW,
    FlatParameters,
    Lion,
    LossScaler,
    Muon,
    Optimizer,
    decays_matrices,
)
from tensorgrad.optim.flat import Decays
from tensorgrad.parallel.shards import ShardedParameters
from tests.optim import toy

Make = Callable[..., Optimizer]
KINDS: dict[str, Make] = {
    "sgd": lambda p: SGD(p, lr=0.1, weight_decay=0.1),
    "momentum": lambda p: SGD(p, lr=0.1, momentum=0.9, dampening=0.5, weight_decay=0.1),
    "nesterov": lambda p: SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adam": lambda p: Adam(p, lr=0.1, weight_decay=0.1),
    "adamw": lambda p: AdamW(p, lr=0.1, weight_decay=0.1),
    "lion": lambda p: Lion(p, lr=0.1, weight_decay=0.1),
}
HALVES = [dtypes.float16, dtypes.bfloat16]


@pytest.fixture(params=list(KINDS.values()), ids=list(KINDS))
def make(request: pytest.FixtureRequest) -> Make:
    kind: Make = request.param
    return kind


def run(make: Make, steps: int, dtype: Any = np.float32, device: str = "cpu", **kwargs: Any) -> Any:
    tensors = toy.parameters(dtype, device)
    optimizer = make(tensors.items())
    proceed(optimizer, tensors, range(steps), **kwargs)
    return optimizer


def proceed(optimizer: Optimizer, tensors: dict[str, Tensor], steps: range, **kwargs: Any) -> None:
    for step in steps:
        toy.set_gradients(tensors, step)
        optimizer.step(**kwargs)


def everything(optimizer: Optimizer) -> list[Any]:
    return [optimizer.flat.data, *optimizer.state.values()]


ALL_KINDS = KINDS | {
    "muon": lambda p: Muon(p, lr=0.1, weight_decay=0.1),
    "adafactor": lambda p: Adafactor(p, lr=0.1, weight_decay=0.1),
}


def by_formula(kind: str, p: Any, g: Any, state: dict[str, Any], step: int) -> Any:
    """Return a parameter after a step, by the equations of the optimizers of KINDS."""
    if kind in ("adamw", "lion"):
        p = p * (1 - 0.1 * 0.1)
    else:
        g = g + 0.1 * p
    m = state.get("m", 0.0)
    if kind == "sgd":
        return p - 0.1 * g
    if kind in ("momentum", "nesterov"):
        dampening = 0.5 if kind == "momentum" and step > 1 else 0
        m = state["m"] = 0.9 * m + (1 - dampening) * g
        return p - 0.1 * (g + 0.9 * m if kind == "nesterov" else m)
    if kind == "lion":
        state["m"] = 0.99 * m + 0.01 * g
        return p - 0.1 * np.sign(0.9 * m + 0.1 * g)
    m = state["m"] = 0.9 * m + 0.1 * g
    v = state["v"] = 0.999 * state.get("v", 0.0) + 0.001 * g**2
    return p - 0.1 * m / (1 - 0.9**step) / (np.sqrt(v / (1 - 0.999**step)) + 1e-8)


@pytest.mark.parametrize("kind", KINDS)
def test_steps_follow_the_formula(kind: str, device: str) -> None:
    tensors = toy.parameters(np.float64, device)
    expected = toy.values(tensors)
    states: dict[str, dict[str, Any]] = {name: {} for name in tensors}
    optimizer = KINDS[kind](tensors.items())
    for step in range(3):
        toy.set_gradients(tensors, step)
        optimizer.step()
        for name, grad in toy.gradients(step=step).items():
            expected[name] = by_formula(kind, expected[name], grad, states[name], step + 1)
    for name, value in toy.values(tensors).items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-9, atol=1e-9, err_msg=name)


@pytest.mark.parametrize("kind", ALL_KINDS)
@pytest.mark.parametrize("dtype", [np.float32, dtypes.bfloat16])
def test_a_parameter_without_a_gradient_does_not_move(kind: str, dtype: Any, device: str) -> None:
    """Neither by weight decay nor by momentum; the others move as they would have."""
    shapes = {"first": (3, 5), "middle": (70, 2), "last": (4, 33)}

    def train(*steps: Sequence[str]) -> tuple[Optimizer, dict[str, dict[str, bytes]]]:
        rng = np.random.default_rng(0)
        tensors = {
            name: Tensor(backend.to_device(rng.standard_normal(shape).astype(dtype), device), True)
            for name, shape in shapes.items()
        }
        optimizer = ALL_KINDS[kind](tensors.items())
        for names in steps:
            optimizer.zero_grad()
            for name in names:
                (tensors[name] * tensors[name]).sum().backward()
            optimizer.step()
        bits: dict[str, dict[str, bytes]] = {
            name: {"data": tensor.numpy().tobytes()} for name, tensor in tensors.items()
        }
        for key, value in optimizer.state_dict().items():
            if "/" in key:
                state, name = key.split("/")
                bits[name][state] = backend.to_numpy(value).tobytes()
        return optimizer, bits

    once, twice = train([*shapes])[1], train([*shapes], [*shapes])[1]
    optimizer, found = train([*shapes], ["first", "last"])
    assert found == {**twice, "middle": once["middle"]}
    assert once["middle"]["data"] != twice["middle"]["data"]
    assert optimizer.flat.without_gradient() == {"middle"}
    optimizer.zero_grad()
    assert optimizer.flat.without_gradient() == set(shapes)


def test_a_parameter_that_backward_never_reached_does_not_move(device: str) -> None:
    used, unused, brought = (
        Tensor(backend.to_device(np.ones((2, 2), np.float32), device), requires_grad=True)
        for _ in range(3)
    )
    (brought * 2).sum().backward()
    optimizer = SGD([used, unused, brought], 0.5, weight_decay=0.1)
    (used * used).sum().backward()
    optimizer.step()
    assert unused.numpy().tolist() == [[1, 1], [1, 1]]
    assert (used.numpy() < 1).all()
    assert (brought.numpy() < 0.1).all()


def test_a_gradient_that_was_written_counts() -> None:
    x = Tensor(np.ones(3, np.float32), requires_grad=True)
    optimizer = SGD([x], 0.5)
    optimizer.zero_grad()
    optimizer.flat.grad[1] = 1
    optimizer.step()
    assert x.numpy().tolist() == [1, 0.5, 1]
    assert not optimizer.flat.untouched()  # no step asks the host again before `zero_grad`


def test_equal_runs_give_equal_bits(make: Make, device: str) -> None:
    one, two = (run(make, 4, device=device, max_norm=1.0) for _ in range(2))
    assert toy.same_bits(everything(one), everything(two))


def test_threads_and_blocks_change_no_bit(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run(make, 3, max_norm=1.0)
    monkeypatch.setattr(backend, "BLOCK", 1000)
    for threads in (1, 3):
        monkeypatch.setattr(backend, "threads", lambda threads=threads: threads)
        assert toy.same_bits(everything(whole), everything(run(make, 3, max_norm=1.0)))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", dtypes.FLOATS, ids=str)
def test_both_devices_agree(make: Make, dtype: Any) -> None:
    cpu, gpu = (run(make, 5, dtype, device, max_norm=1.0) for device in ("cpu", "cuda"))
    names = [name for name in cpu.state if name not in ("master", "low_bits")]
    pairs = [(cpu.state[name], gpu.state[name]) for name in names]
    pairs.append((toy.weights(cpu), toy.weights(gpu)))
    tolerance = 1e-12 if dtype.itemsize == 8 else 1e-4  # Adam divides small by small
    for one, two in pairs:
        np.testing.assert_allclose(backend.to_numpy(two), one, rtol=tolerance, atol=tolerance)


def test_gaps_stay_zero(make: Make, device: str) -> None:
    optimizer = run(make, 3, device=device)
    gaps = np.ones(optimizer.flat.size, bool)
    for slot in optimizer.flat.slots.values():
        gaps[slot.span] = False
    assert gaps.any()
    for buffer in everything(optimizer):
        assert not backend.to_numpy(buffer)[gaps].any()


RULES: list[tuple[Decays | None, set[str]]] = [
    (None, {"wte", "scale", "h.0.weight", "h.0.bias", "norm"}),
    (decays_matrices, {"wte", "h.0.weight"}),
    (lambda name, _: name == "norm", {"norm"}),
    (lambda *_: False, set()),
]


def decayed(make: Callable[[Any], Optimizer], device: str = "cpu") -> set[str]:
    """Return the parameters that a step with gradients of 0 changes."""
    tensors = toy.parameters(device=device)
    before = toy.values(tensors)
    optimizer = make(tensors)
    toy.total(*[t * 0 for t in tensors.values()]).backward()
    optimizer.step()
    return {name for name, t in tensors.items() if (t.numpy() != before[name]).any()}


@pytest.mark.parametrize(("rule", "names"), RULES, ids=["all", "matrices", "one", "none"])
def test_weight_decay_of_flat_parameters(
    make: Make, rule: Decays | None, names: set[str], device: str
) -> None:
    assert decayed(lambda t: make(FlatParameters(t.items(), decay=rule)), device) == names


@pytest.mark.parametrize(("rule", "names"), RULES, ids=["all", "matrices", "one", "none"])
@pytest.mark.parametrize("kind", [SGD, Adam, AdamW, Lion, Adafactor])
def test_weight_decay_of_a_rule(kind: Any, rule: Decays | None, names: set[str]) -> None:
    def groups(tensors: dict[str, Tensor]) -> list[dict[str, Any]]:
        body = [pair for pair in tensors.items() if pair[0] != "norm"]
        return [{"params": body}, {"params": [tensors["norm"]], "weight_decay": 0.2}]

    make = partial(kind, lr=0.1, weight_decay=0.1, decay=rule)
    assert decayed(lambda t: make(t.items())) == names
    assert decayed(lambda t: make(groups(t))) == names | {"norm"}
    if names != {"norm"}:  # matrices lie first, as ranks lay parameters out
        assert decayed(lambda t: make(FlatParameters(t.items()))) == names
        assert decayed(lambda t: make(FlatParameters(t.items(), groups=lambda n: n))) == names


def test_a_rule_against_the_layout_is_an_error() -> None:
    flat = FlatParameters(toy.parameters().items())
    with pytest.raises(ArgumentError, match="SGD: decay is False for wte, expected True, as the"):
        SGD(flat, decay=lambda name, _: name == "h.0.bias")
    with pytest.raises(ArgumentError, match="SGD: decay: f is a float, expected a function"):
        SGD(flat, decay=0.1)  # type: ignore[arg-type]


@pytest.mark.parametrize("rule", [None, decays_matrices])
def test_shards_decay_as_the_whole(rule: Decays | None) -> None:
    whole = toy.parameters()
    AdamW(whole.items(), 0.1, weight_decay=0.1, decay=rule).step()
    groups = dict.fromkeys(toy.SHAPES)
    found = {name: np.empty(tensor.size, np.float32) for name, tensor in whole.items()}
    for rank in range(3):
        flat = ShardedParameters(toy.parameters().items(), rank, 3, 1, groups)
        optimizer = AdamW(flat, 0.1, weight_decay=0.1, decay=rule)
        optimizer.step()
        for part in flat.parameter_shards():
            found[part.name][part.values] = part.data
    assert toy.same_bits(list(found.values()), [t.numpy().reshape(-1) for t in whole.values()])


def test_clipping_in_the_step_equals_smaller_gradients(make: Make, device: str) -> None:
    tensors = toy.parameters(np.float64, device)
    clipped = make(tensors.items())
    toy.set_gradients(tensors, 0)
    gradients = clipped.flat.grad.copy()
    norm = clipped.step(max_norm=0.5)
    assert toy.same_bits([gradients], [clipped.flat.grad])
    others = toy.parameters(np.float64, device)
    scaled = make(others.items())
    toy.set_gradients(others, 0)
    expected = math.sqrt(sum((g**2).sum() for g in toy.gradients().values()))
    assert norm is not None
    assert norm.shape == ()
    assert float(norm) == pytest.approx(expected, rel=1e-12)
    scaled.flat.grad *= 0.5 / (expected + 1e-6)
    assert scaled.step() is None
    for name in tensors:
        np.testing.assert_allclose(
            tensors[name].numpy(), others[name].numpy(), rtol=1e-11, atol=1e-12
        )


def test_a_norm_within_the_limit_changes_nothing(make: Make) -> None:
    free, measured = run(make, 2), run(make, 2, max_norm=math.inf)
    assert toy.same_bits(everything(free), everything(measured))


def test_squares_too_large_for_float32_are_clipped(make: Make, device: str) -> None:
    tensors = toy.parameters(device=device)
    optimizer = make(tensors.items())
    optimizer.flat.grad[5] = 1e30
    norm = optimizer.step(max_norm=1.0)
    assert norm is not None
    assert float(norm) == pytest.approx(1e30, rel=1e-6)
    assert optimizer.state_dict()["step"] == 1
    assert all(np.isfinite(backend.to_numpy(a)).all() for a in everything(optimizer))


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_a_step_without_finite_norm_is_skipped(make: Make, bad: float, device: str) -> None:
    tensors = toy.parameters(device=device)
    optimizer = make(tensors.items())
    proceed(optimizer, tensors, range(1), max_norm=1.0)
    before = [a.copy() for a in everything(optimizer)]
    optimizer.flat.grad[5] = bad
    norm = optimizer.step(max_norm=1.0)
    assert norm is not None
    assert not np.isfinite(float(norm))
    assert toy.same_bits(before, everything(optimizer))
    assert optimizer.state_dict()["step"] == 1


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_master_weights_collect_what_16_bits_would_lose(dtype: Any, device: str) -> None:
    tensor = Tensor(backend.to_device(np.ones((3, 5), dtype), device), requires_grad=True)
    optimizer = SGD([("w", tensor)], lr=1e-5)
    optimizer.flat.grad.fill(1)
    for _ in range(2000):  # 1 - 1e-5 is 1 in 16 bits
        optimizer.step()
    assert tensor.dtype == dtype
    np.testing.assert_allclose(tensor.numpy().astype(float), 0.98, rtol=2.0**-8)
    np.testing.assert_allclose(toy.weights(optimizer)[:15], 0.98, rtol=1e-4)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_16_bit_parameters_are_the_rounded_master(make: Make, dtype: Any, device: str) -> None:
    optimizer = run(make, 3, dtype, device)
    master = toy.weights(optimizer)
    assert toy.same_bits([toy.rounded(master, dtype)], [optimizer.flat.data])
    exact = run(make, 3, np.float32, device)
    off = np.abs(master - backend.to_numpy(exact.flat.data)) > 0.05
    assert off.mean() < 1e-3  # Adam makes a whole step of a tiny change of a tiny gradient


@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_bfloat16_gradients_are_updated_with_like_float32_ones_of_equal_values(
    make: Make, max_norm: float | None, device: str
) -> None:
    narrow, wide = (
        make(FlatParameters(toy.parameters(dtypes.bfloat16, device).items(), grad_dtype=dtype))
        for dtype in ("bfloat16", "float32")
    )
    assert narrow.flat.grad.dtype == dtypes.bfloat16
    for step in range(3):
        rounded = toy.gradients(step=step)
        for optimizer in (narrow, wide):
            for name, tensor in optimizer.flat.parameters.items():
                assert tensor.grad is not None
                values = rounded[name].astype(dtypes.bfloat16)
                tensor.grad[...] = backend.asarray_like(values, tensor.data)
        norms = [optimizer.step(max_norm) for optimizer in (narrow, wide)]
        if max_norm is not None:
            one, two = (float(backend.to_numpy(norm)) for norm in norms)
            np.testing.assert_allclose(one, two, rtol=1e-6)
    if max_norm is not None:  # norms are summed in another order
        for one, two in zip(everything(narrow), everything(wide), strict=True):
            a, b = (backend.to_numpy(each).astype(float) for each in (one, two))
            if one.dtype != dtypes.uint16:
                np.testing.assert_allclose(a, b, rtol=2.0**-7, atol=1e-6)
    else:
        assert toy.same_bits(everything(narrow), everything(wide))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_16_bit_parameters_that_were_assigned_to_are_taken_over(dtype: Any, device: str) -> None:
    tensors = toy.parameters(dtype, device)
    optimizer = SGD(tensors.items(), lr=1.0)
    proceed(optimizer, tensors, range(1))
    tensors["h.0.bias"].data[:] = 7
    optimizer.zero_grad()
    optimizer.step()
    assert (tensors["h.0.bias"].numpy() == 7).all()
    views = optimizer.flat.views(toy.weights(optimizer))
    half_a_unit = 0.0 if dtype == dtypes.float16 else 2.0**-6
    assert (np.abs(views["h.0.bias"] - 7) <= half_a_unit).all()
    rest = views["wte"]
    assert (rest != rest.astype(dtype).astype(np.float32)).any(), "the rest lost precision"


def test_a_graph_from_before_the_step_is_not_used_after_it() -> None:
    tensor = Tensor(np.ones((2, 2)), requires_grad=True)
    optimizer = SGD([("w", tensor)])
    loss = toy.total(tensor * tensor)
    optimizer.step()
    with pytest.raises(GradError, match="assigned to after"):
        loss.backward()
    for _ in range(50):
        optimizer.step()
        toy.total(tensor * tensor).backward()
    assert len(nodes.versions.log) < 40, "steps pile up in the log"


def test_a_step_replaces_what_was_noted_of_each_parameter() -> None:
    """Otherwise each later step would search what loading a model has noted."""
    model = Sequential(*(Linear(2, 2) for _ in range(20)))
    optimizer = SGD(model.named_parameters())
    model.load_state_dict({name: tensor.data.copy() for name, tensor in model.state_dict().items()})
    before = len(nodes.versions.log)
    y = model(Tensor(np.ones((1, 2), "float32")))
    optimizer.step()
    assert len(nodes.versions.log) <= before - 39
    with pytest.raises(GradError, match="assigned to after"):
        toy.total(y).backward()


@pytest.mark.parametrize("dtype", [np.float32, *HALVES], ids=str)
def test_a_saved_state_continues_to_the_same_bits(make: Make, dtype: Any, device: str) -> None:
    whole = run(make, 6, dtype, device, max_norm=1.0)
    half = run(make, 3, dtype, device, max_norm=1.0)
    saved = {
        name: backend.to_numpy(value).copy() if backend.is_array(value) else value
        for name, value in half.state_dict().items()
    }
    tensors = toy.parameters(dtype, device, seed=5)
    resumed = make(tensors.items())
    for name, view in half.flat.views(half.flat.data).items():
        tensors[name].data[...] = view
    resumed.load_state_dict(saved)
    proceed(resumed, tensors, range(3, 6), max_norm=1.0)
    assert toy.same_bits(everything(whole), everything(resumed))


def test_a_saved_state_does_not_depend_on_the_layout(make: Make, device: str) -> None:
    one = run(make, 3, device=device)
    tensors = toy.parameters(device=device, seed=5)
    other = make(FlatParameters(reversed(tensors.items()), multiple=1024))
    for name, view in one.flat.views(one.flat.data).items():
        tensors[name].data[...] = view
    other.load_state_dict(one.state_dict())
    assert other.flat.slots != one.flat.slots
    proceed(other, tensors, range(3, 5))
    whole = run(make, 5, device=device)
    for name, view in whole.flat.views(whole.flat.data).items():
        assert toy.same_bits([view], [tensors[name].data])


@pytest.mark.parametrize("dtype", [np.float32, dtypes.bfloat16], ids=str)
def test_segments_change_no_bit(make: Make, dtype: Any, device: str) -> None:
    one, other = toy.parameters(dtype, device), toy.parameters(dtype, device)
    whole = make(one.items())
    cut = make(FlatParameters(other.items(), groups=lambda name: name))
    for optimizer, tensors in ((whole, one), (cut, other)):
        proceed(optimizer, tensors, range(3))
    assert len(cut.flat.shards) == len(toy.SHAPES)
    assert toy.same_bits([one[n].data for n in one], [other[n].data for n in one])
    before, after = whole.state_dict(), cut.state_dict()
    arrays = [name for name in before if "/" in name]
    assert toy.same_bits([before[n] for n in arrays], [after[n] for n in arrays])
    norms = [float(o.step(max_norm=1.0) or 0) for o in (whole, cut)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)


def test_the_state_is_named_by_parameter() -> None:
    tensors = toy.parameters(dtypes.bfloat16)
    state = AdamW(tensors.items(), lr=0.25).state_dict()
    arrays = {f"{kind}/{name}" for kind in ("low_bits", "m", "v") for name in toy.SHAPES}
    assert set(state) == {"step", "lr"} | arrays
    assert (state["step"], state["lr"]) == (0, 0.25)
    assert state["v/wte"].shape == (37, 11)
    assert (state["v/wte"].dtype, state["low_bits/wte"].dtype) == (np.float32, np.uint16)


def test_a_former_state_with_master_weights_of_bfloat16_is_loaded(make: Make, device: str) -> None:
    saved = run(make, 3, dtypes.bfloat16, device)
    state = {name: value for name, value in saved.state_dict().items() if "low_bits" not in name}
    master = toy.weights(saved)
    tie = saved.flat.slots["wte"].offset
    master[tie : tie + 2] = np.array([0x3F808000, 0x3F818000], "uint32").view("float32")
    for name, view in saved.flat.views(master).items():
        state[f"master/{name}"] = backend.to_device(view, device)
    tensors = toy.parameters(dtypes.bfloat16, device, seed=5)
    resumed = make(tensors.items())
    resumed.load_state_dict(state)
    resumed.flat.data[...] = backend.to_device(master.astype(dtypes.bfloat16), device)
    off = toy.weights(resumed).view("uint32") - master.view("uint32")
    down = master.view("uint32") & 0x1FFFF == 0x8000  # halfway and rounded to even
    assert down[tie]
    assert not down[tie + 1]
    assert (off.view("int32") == np.where(down, -1, 0)).all()
    del state["master/wte"]
    with pytest.raises(CheckpointError, match=r"lacks low_bits/wte \(1 missing, 0 unknown\)"):
        resumed.load_state_dict(state)


BAD_STATES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "missing": (lambda s: s.pop("m/wte"), r"state lacks m/wte \(1 missing, 0 unknown\)"),
    "unknown": (lambda s: s.update(other=1), "has an unknown other"),
    "shape": (lambda s: s.update({"v/norm": np.ones(2, "f")}), r"v/norm has shape \(2,\)"),
    "dtype": (lambda s: s.update({"v/norm": np.ones(1)}), "dtype float64, expected .* float32"),
    "no array": (lambda s: s.update({"v/norm": 3}), "v/norm has shape None and dtype int"),
    "huge step": (lambda s: s.update(step=10**400), "step is 10000"),
    "huge lr": (lambda s: s.update(lr=10**400), "lr is 10000"),
    "step": (lambda s: s.update(step=-1), "step is -1"),
    "lr": (lambda s: s.update(lr=math.nan), "lr is nan"),
    "largest step": (lambda s: s.update(step=2**53), "step is 9007199254740992, expected a whole"),
    "infinite lr": (lambda s: s.update(lr=math.inf), "lr is inf, expected a finite number from 0"),
    "negative lr": (lambda s: s.update(lr=-0.1), "lr is -0.1"),
    "step of no number": (lambda s: s.update(step=1.0), "step is 1.0"),
    "lr of no number": (lambda s: s.update(lr="1"), "lr is '1'"),
}


def test_numbers_at_their_bounds_and_states_of_no_mapping() -> None:
    optimizer = SGD(toy.parameters().items())
    for step, lr in ((0, 0), (2**53 - 1, sys.float_info.max)):
        optimizer.load_numbers({"step": step, "lr": lr})
        assert optimizer.numbers() == {"step": step, "lr": lr}
    state: Any = [1]
    for load in (optimizer.load_state_dict, optimizer.load_numbers):
        with pytest.raises(
            CheckpointError, match=r"SGD\.load_state_dict: state is a list, expected"
        ):
            load(state)
    for name in optimizer.state_dict().keys() - {"lr"}:
        with pytest.raises(CheckpointError, match=f"state lacks {name} .* the 2 entries of this"):
            optimizer.load_state_dict({"lr": 1.0})


def test_options_are_shown_with_their_defaults() -> None:
    sizes = "parameters=2, elements=8"
    for make_one, expected in (
        (SGD, "lr=0.001, weight_decay=0.0, momentum=0.0, dampening=0.0, nesterov=False"),
        (Adam, "lr=0.001, weight_decay=0.0, betas=(0.9, 0.999), eps=1e-08"),
        (AdamW, "lr=0.001, weight_decay=0.01, betas=(0.9, 0.999), eps=1e-08"),
        (Lion, "lr=0.0001, weight_decay=0.0, betas=(0.9, 0.99)"),
    ):
        layer = Linear(3, 2)
        assert repr(make_one(layer.parameters())) == f"{make_one.__name__}({sizes}, {expected})"
        groups: list[Any] = [{"params": [layer.weight]}, {"params": [layer.bias]}]
        name = make_one.__name__
        assert repr(make_one(groups)) == f"{name}({sizes}, groups=2, {expected})"


def test_a_sharded_state_is_not_whole() -> None:
    flat = ShardedParameters(toy.parameters().items(), 1, 3, 1, dict.fromkeys(toy.SHAPES))
    optimizer = AdamW(flat)
    with pytest.raises(ArgumentError, match=r"AdamW\.state_dict: the state is sharded, expected a"):
        optimizer.state_dict()
    held = {(one.kind, one.name): one for one in optimizer.state_shards()}
    assert {one.shape for one in held.values()} <= set(toy.SHAPES.values())
    for part in flat.parameter_shards():
        one = held["v", part.name]
        assert one.values == part.values
        assert one.shape == toy.SHAPES[part.name]
        assert np.shares_memory(one.array, optimizer.state["v"][part.state])


def test_states_of_other_shapes_are_held_whole() -> None:
    optimizer = Adafactor(toy.parameters().items())
    held = {(one.kind, one.name): one for one in optimizer.state_shards()}
    assert held["row", "wte"].shape == (37,)
    assert held["row", "wte"].values == slice(0, 37)
    assert held["column", "wte"].array.shape == (11,)
    optimizer.state_dict()["column/wte"][3] = 5
    assert held["column", "wte"].array.tolist() == [0, 0, 0, 5, *[0] * 7]


def test_a_state_that_some_parameters_lack_is_packed() -> None:
    shapes = {"a": (2, 2), "b": (70, 2), "c": (3, 3), "d": (5, 5), "e": (2,)}
    tensors = toy.parameters(shapes=shapes)
    optimizer = Muon(tensors.items(), matrices=lambda name, _: name in "bd")
    optimizer.state["v"][:] = np.arange(optimizer.state["v"].size)
    optimizer.state["m"][:] = np.arange(optimizer.state["m"].size)
    state = optimizer.state_dict()
    first = {name: int(view.flat[0]) for name, view in state.items() if "/" in name}
    assert first == {
        "m/a": 0, "m/b": 64, "m/c": 256, "m/d": 320, "m/e": 384, "v/a": 0, "v/c": 64, "v/e": 128,
    }  # fmt: skip
    assert state["v/c"].tolist() == np.arange(64, 73).reshape(3, 3).tolist()


def test_types_of_kernels_follow_those_of_arrays() -> None:
    assert AdamW(toy.parameters().items())._types() == "float, float"
    assert SGD(toy.parameters(dtypes.bfloat16).items())._types() == "__nv_bfloat16, float"


@pytest.mark.parametrize(("damage", "message"), BAD_STATES.values(), ids=BAD_STATES)
def test_a_state_that_does_not_fit_changes_nothing(
    damage: Callable[[dict[str, Any]], Any], message: str, device: str
) -> None:
    optimizer = run(KINDS["adamw"], 2, device=device)
    state = run(KINDS["adamw"], 4, device=device).state_dict()
    damage(state)
    before = [a.copy() for a in (optimizer.hyper, *optimizer.state.values())]
    with pytest.raises(CheckpointError, match=message):
        optimizer.load_state_dict(state)
    assert toy.same_bits(before, [optimizer.hyper, *optimizer.state.values()])


TEXT: Any = "x"
NONE: Any = None
ONE: Any = (0.9,)
THREE: Any = (0.9, 0.9, 0.9)
NUMBER: Any = 0.9


@pytest.mark.parametrize(
    ("make_wrong", "message"),
    [
        (lambda p: SGD(p, lr=-1.0), "SGD: lr is -1.0"),
        (lambda p: AdamW(p, lr=math.nan), "AdamW: lr is nan"),
        (lambda p: AdamW(p, betas=(1.0, 0.9)), "AdamW: beta1 is 1.0, expected 0 <= beta. < 1"),
        (lambda p: Adam(p, betas=(0.9, -0.1)), "Adam: beta2 is -0.1"),
        (lambda p: Adam(p, eps=-1e-8), "Adam: eps is -1e-08"),
        (lambda p: AdamW(p, weight_decay=-0.1), "weight_decay is -0.1"),
        (lambda p: SGD(p, momentum=-0.1), "momentum is -0.1"),
        (lambda p: SGD(p, nesterov=True), "nesterov with momentum 0.0"),
        (lambda p: SGD(p).step(max_norm=0.0), r"SGD\.step: max_norm is 0.0"),
        (lambda p: SGD(p).step(max_norm=math.nan), r"SGD\.step: max_norm is nan"),
        (lambda p: setattr(SGD(p), "lr", math.inf), "lr is inf"),
        (lambda p: setattr(SGD(p), "lr", "x"), "SGD: lr is 'x', expected a number"),
        (lambda p: AdamW(p, betas=ONE), r"AdamW: betas is \(0.9,\), expected two numbers"),
        (lambda p: Adam(p, betas=THREE), "Adam: betas is .*, expected two numbers"),
        (lambda p: Adam(p, betas=NUMBER), "Adam: betas is 0.9, expected two numbers"),
        (lambda p: Adam(p, betas=(TEXT, 0.9)), "Adam: beta1 is 'x', expected a number"),
        (lambda p: Adam(p, eps=TEXT), "Adam: eps is 'x', expected a number"),
        (lambda p: AdamW(p, weight_decay=NONE), "weight_decay is None, expected a number"),
        (lambda p: SGD(p, momentum=TEXT), "momentum is 'x', expected a number"),
        (lambda p: SGD(p, dampening=-0.1), "dampening is -0.1"),
        (lambda p: SGD(p).step(max_norm=TEXT), r"SGD\.step: max_norm is 'x', expected a number"),
        (lambda p: SGD(p, momentum=0.9, dampening=0.1, nesterov=True), "and dampening 0.1, expec"),
        (lambda p: Lion(p, betas=(1.0, 0.9)), "Lion: beta1 is 1.0, expected 0 <= beta. < 1"),
        (lambda p: Lion(p, betas=(0.9, 1.0)), "Lion: beta2 is 1.0, expected 0 <= beta. < 1"),
        (lambda p: Lion(p, betas=ONE), r"Lion: betas is \(0.9,\), expected two numbers"),
    ],
)
def test_wrong_options_are_named(make_wrong: Make, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        make_wrong(toy.parameters().items())


@pytest.mark.parametrize("dtype", [np.float32, *HALVES])
def test_ctrl_c_in_a_step_waits_until_all_of_it_is_done(
    make: Make, dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a user's own loop, which then continues."""
    monkeypatch.setattr(backend, "BLOCK", 1000)
    monkeypatch.setattr(backend, "threads", lambda: 1)
    scalers = LossScaler(4.0, interval=2), LossScaler(4.0, interval=2)
    expected = run(make, 3, dtype, max_norm=1.0, scaler=scalers[0])
    tensors = toy.parameters(dtype)
    optimizer = make(tensors.items())
    update, calls = optimizer._update_numpy, list[int]()

    def interrupted(*arrays: Any, **options: Any) -> None:
        calls.append(len(calls))
        if len(calls) in (2, 5):  # 2 of some forty blocks
            signal.raise_signal(signal.SIGINT)
        update(*arrays, **options)

    monkeypatch.setattr(optimizer, "_update_numpy", interrupted)
    version = nodes.latest_version()
    toy.set_gradients(tensors, 0)
    with pytest.raises(KeyboardInterrupt):
        optimizer.step(max_norm=1.0, scaler=scalers[1])
    assert len(calls) > 10
    assert nodes.latest_version() > version
    proceed(optimizer, tensors, range(1, 3), max_norm=1.0, scaler=scalers[1])
    assert toy.same_bits(everything(expected), everything(optimizer))
    assert optimizer.numbers() == expected.numbers()
    assert scalers[0].state_dict() == scalers[1].state_dict()


@pytest.mark.gpu
def test_ctrl_c_between_the_kernels_of_a_step_waits(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = run(make, 1, device="cuda:0")
    tensors = toy.parameters(device="cuda:0")
    optimizer = make(tensors.items())
    launched = []

    def load(file: str, name: str) -> Any:
        kernel = loader.load(file, name)

        def interrupted(*arguments: Any) -> None:
            launched.append(name)
            signal.raise_signal(signal.SIGINT)
            kernel(*arguments)

        return interrupted

    monkeypatch.setattr(launches, "load", load)
    toy.set_gradients(tensors, 0)
    assert not optimizer.flat.without_gradient()  # a launch each, once
    launched.clear()
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    assert len(launched) == 2
    assert toy.same_bits(everything(expected), everything(optimizer))
    assert optimizer.numbers() == expected.numbers()


@pytest.mark.parametrize("dtype", [np.float32, *HALVES])
def test_a_step_allocates_nothing_once_it_changes_arrays(
    make: Make, dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So it cannot fail halfway for lack of memory."""
    monkeypatch.setattr(backend, "threads", lambda: 1)
    optimizer = run(make, 1, dtype)
    workspaces, largest = optimizer._workspaces, list[int]()

    def measured() -> list[Any]:
        found: list[Any] = workspaces()
        largest.append(max(array[0].nbytes for array in found))
        tracemalloc.reset_peak()
        largest.append(tracemalloc.get_traced_memory()[0])
        return found

    monkeypatch.setattr(optimizer, "_workspaces", measured)
    tracemalloc.start()
    try:
        optimizer.step(max_norm=1e-3)
        block, before = largest
        assert tracemalloc.get_traced_memory()[1] - before < block / 4
    finally:
        tracemalloc.stop()


def test_a_step_without_memory_changes_nothing(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = run(make, 2)
    before = [array.copy() for array in everything(optimizer)], optimizer.numbers()

    def refuse(*_: Any, **__: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(optimizer, "_workspaces", refuse)
    with pytest.raises(MemoryError):
        optimizer.step()
    assert toy.same_bits(before[0], everything(optimizer))
    assert optimizer.numbers() == before[1]


def test_numpy_s_errors_do_not_stop_a_step_halfway(make: Make) -> None:
    """Inf and NaN reach the parameters, as on a GPU."""
    tensors = toy.parameters()
    optimizer = make(tensors.items())
    toy.set_gradients(tensors, 0)
    optimizer.flat.grad[-64:] = 1e30
    with np.errstate(all="raise"):
        optimizer.step()
    assert optimizer.numbers()["step"] == 1
