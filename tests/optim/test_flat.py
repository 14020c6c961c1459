from __future__ import annotations

import copy
import pickle
import platform
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tensorgrad as tg
from tensorgrad import Tensor, dtypes
from tensorgrad.core import backend
from tensorgrad.errors import ArgumentError, DeviceError, DtypeError
from tensorgrad.optim import SGD, AdamW, FlatParameters, decays_matrices, in_blocks
from tensorgrad.optim.flat import ALIGNMENT, Boxes, FlatShard, Slot, slots_of
from tests.optim import toy


@pytest.mark.parametrize("dtype", dtypes.FLOATS, ids=str)
def test_values_survive_and_become_views(dtype: Any, device: str) -> None:
    tensors = toy.parameters(dtype, device)
    before = toy.values(tensors)
    flat = FlatParameters(tensors.items())
    assert (flat.data.dtype, flat.grad.dtype) == (dtype, dtypes.compute_dtype(dtype))
    flat.data[:] = flat.data + flat.data.dtype.type(1)
    flat.grad += flat.grad.dtype.type(2)
    for name, tensor in tensors.items():
        assert tensor.shape == toy.SHAPES[name]
        expected = before[name] + before[name].dtype.type(1)
        np.testing.assert_array_equal(tensor.numpy(), expected)
        assert tensor.grad is not None
        assert (backend.to_numpy(tensor.grad) == 2).all()
    flat.zero_grad()
    assert not backend.to_numpy(flat.grad).any()


def test_the_layout_is_aligned_and_grouped_by_decay() -> None:
    flat = FlatParameters(toy.parameters().items(), multiple=96)
    assert flat.size % ALIGNMENT == 0
    assert flat.size % 96 == 0
    assert flat.size == flat.data.size == flat.grad.size
    (bucket,) = flat.buckets
    assert (bucket.begin, bucket.end) == (0, flat.size)
    taken = np.zeros(flat.size, int)
    for name, slot in flat.slots.items():
        assert slot.offset % ALIGNMENT == 0
        assert slot.shape == toy.SHAPES[name]
        taken[slot.span] += 1
        decays = len(slot.shape) >= 2
        assert (slot.span.stop <= bucket.decayed) if decays else (slot.offset >= bucket.decayed)
    assert taken.max() == 1
    assert not flat.data[taken == 0].any(), "the gaps hold something"
    assert list(flat.slots)[:2] == ["wte", "h.0.weight"]
    cut = flat.views(np.arange(flat.size))
    assert cut["h.0.bias"].tolist() == list(range(flat.size))[flat.slots["h.0.bias"].span]


def test_segments_by_group_lie_one_after_the_other() -> None:
    groups = {"wte": "rest", "scale": "rest", "empty": "none", "norm": "rest"}
    flat = FlatParameters(
        toy.parameters().items(), multiple=96, groups=lambda name: groups.get(name, "block")
    )
    assert [bucket.names for bucket in flat.buckets] == [
        ("wte", "scale", "norm"),
        ("h.0.weight", "h.0.bias"),
        ("empty",),
    ]
    end = 0
    for bucket, shard in zip(flat.buckets, flat.shards, strict=True):
        assert bucket.begin == shard.begin == shard.offset == end
        assert bucket.size % 192 == 0
        assert shard.data.size == shard.grad.size == bucket.size
        for name in bucket.names:
            slot = flat.slots[name]
            assert bucket.begin <= slot.offset <= slot.span.stop <= bucket.end
            decays = len(slot.shape) >= 2
            assert decays == (slot.offset < bucket.decayed) or slot.shape == (0, 4)
        assert shard.decayed == bucket.decayed - bucket.begin
        end = bucket.end
    assert end == flat.size
    assert flat.whole
    for name, values, state, data in flat.parameter_shards():
        assert state == flat.slots[name].span
        assert (values.start, values.stop) == (0, data.size)
        assert np.shares_memory(data, flat.data[state])


def test_a_rule_chooses_what_decays() -> None:
    flat = FlatParameters(toy.parameters().items(), decay=lambda name, _: name == "h.0.bias")
    assert next(iter(flat.slots)) == "h.0.bias"
    assert flat.buckets[0].decayed == -(-257 // ALIGNMENT) * ALIGNMENT


def test_rules_by_name_and_shape() -> None:
    matrix, vector, cube = (Tensor(np.ones((2,) * axes)) for axes in (2, 1, 3))
    assert in_blocks("blocks.3.attention.qkv.weight", matrix)
    assert in_blocks("a.0.b", matrix)
    assert not in_blocks("blocks.3.norm.weight", vector)
    assert not in_blocks("blocks.3.norm.weight", cube)
    for name in ("0.weight", "blocks.weight", "blocks.0", "weight"):
        assert not in_blocks(name, matrix)
    found = [decays_matrices("x", each) for each in (matrix, vector, cube)]
    assert found == [True, False, True]


def test_slots_follow_each_other_aligned() -> None:
    found = slots_of({"a": (3, 30), "b": (), "c": (64,), "d": (0,), "e": (2,)})
    assert found == {
        "a": Slot(0, (3, 30)), "b": Slot(128, ()), "c": Slot(192, (64,)), "d": Slot(256, (0,)),
        "e": Slot(256, (2,)),
    }  # fmt: skip
    assert found["a"].span == slice(0, 90)


def test_one_rank_has_all_of_each_parameter() -> None:
    boxes, array = Boxes(), np.ones(3)
    assert boxes.shape("a", (1, 2)) == (1, 2)
    assert boxes.join("a", array) is boxes.cut("a", array) is array
    boxes.add("a", array)
    flat = FlatParameters([ones()])
    assert flat.gather(0, array) is array
    flat.add_shards(array)
    assert array.tolist() == [1, 1, 1]


def test_runs_are_what_lies_between_parameters() -> None:
    shapes = {"a": (70, 2), "b": (64,), "c": (3, 5), "d": (2,)}
    flat = FlatParameters(toy.parameters(shapes=shapes).items())  # a: 0, c: 192, b: 256, d: 320
    assert {name: slot.offset for name, slot in flat.slots.items()} == {
        "a": 0, "c": 192, "b": 256, "d": 320,
    }  # fmt: skip
    (shard,) = flat.shards
    assert (shard.decayed, flat.size) == (256, 384)

    def runs(*without: str, shard: FlatShard = shard) -> list[tuple[int, ...]]:
        found = flat.runs(shard, without)
        for run in found:
            assert run.data.size == run.grad.size
            assert np.shares_memory(run.data[:1], flat.data[run.begin : run.begin + 1])
            last = run.begin + run.data.size - 1
            assert np.shares_memory(run.grad[-1:], flat.grad[last : last + 1])
        return [(run.begin, run.offset, run.decayed, run.data.size) for run in found]

    assert runs() == [(0, 0, 256, 384)]
    assert runs("a") == [(192, 192, 64, 192)]
    assert runs("d", "c") == [(0, 0, 192, 192), (256, 256, 0, 64)]
    assert runs("b") == [(0, 0, 256, 256), (320, 320, 0, 64)]
    assert runs("c", "a") == [(256, 256, 0, 128)]
    assert runs(*shapes) == []
    part = flat.parameter_shard("c", shard)
    assert (part.values, part.state) == (slice(0, 15), slice(192, 207))
    flat.grad[:] = np.arange(384)
    assert shard.grad_of(part).tolist() == list(range(192, 207))
    half = shard._replace(begin=64, offset=0, data=flat.data[64:200], grad=flat.grad[64:200])
    half = half._replace(decayed=130)
    assert runs(shard=half) == [(64, 0, 130, 136)]
    assert runs("a", shard=half) == [(192, 128, 2, 8)]
    assert runs("c", shard=half) == [(64, 0, 128, 128)]
    assert runs("b", shard=half) == [(64, 0, 130, 136)]
    assert (half.state, flat.parameter_shard("d", half).data.size) == (slice(0, 136), 0)
    part = flat.parameter_shard("a", half)
    assert (part.values, part.state) == (slice(64, 140), slice(0, 76))
    assert half.grad_of(part).tolist() == list(range(64, 140))
    part = flat.parameter_shard("c", half)
    assert (part.values, part.state) == (slice(0, 8), slice(128, 136))
    assert not flat.parameter_shard("b", half).data.size


def test_parameters_without_a_gradient() -> None:
    tensors = toy.parameters(shapes={"a": (2,), "b": (3,), "none": (0,)})
    flat = FlatParameters(tensors.items())
    assert flat.untouched() == ["a", "b", "none"]
    assert flat.without_gradient() == {"a", "b"}
    (tensors["a"] * 2).sum().backward()
    assert flat.untouched() == ["b"]
    assert flat.without_gradient() == {"b"}
    flat.grad[flat.slots["b"].span.start] = 1
    assert flat.without_gradient() == set()
    flat.grad[flat.slots["b"].span.start] = 0  # written ones count until zero_grad
    assert flat.without_gradient() == set()
    flat.zero_grad()
    assert flat.without_gradient() == {"a", "b"}
    flat.touched_elsewhere = frozenset({"a"})
    assert flat.without_gradient() == {"b"}
    tensors["b"].grad = None
    assert "b" in flat.untouched()
    flat.zero_grad()


def test_backward_adds_into_the_buffer(device: str) -> None:
    tensors = toy.parameters(dtypes.bfloat16, device)
    flat = FlatParameters(tensors.items())
    for _ in range(300):  # in bfloat16, 256 + 1 is 256
        toy.total(*tensors.values()).backward()
    used = sum(t.size for t in tensors.values())
    assert float(flat.grad.sum()) == 300 * used
    flat.check("test")


def test_a_gradient_that_is_there_already_is_kept() -> None:
    tensors = toy.parameters()
    tensors["wte"].grad = np.full((37, 11), 3.0, np.float32)
    flat = FlatParameters(tensors.items())
    assert flat.grad.sum() == 3 * 37 * 11


def test_tied_parameters_are_taken_once() -> None:
    tensors = toy.parameters()
    flat = FlatParameters([*tensors.items(), ("lm_head.weight", tensors["wte"])])
    assert flat.slots == FlatParameters(toy.parameters().items()).slots


def test_frozen_parameters_are_left_alone() -> None:
    tensors = toy.parameters()
    tensors["wte"].requires_grad = False
    data = tensors["wte"].data
    flat = FlatParameters(tensors.items())
    assert "wte" not in flat.slots
    assert tensors["wte"].data is data


def ones(dtype: Any = np.float32) -> Tensor:
    return Tensor(np.ones(3, dtype), requires_grad=True)


def integers() -> Tensor:
    tensor = ones()
    tensor.data = np.ones(3, int)
    return tensor


def twins() -> list[tuple[str, Tensor]]:
    array = np.ones(3, np.float32)
    return [("a", Tensor(array, True)), ("b", Tensor(array, True))]


@pytest.mark.parametrize(
    ("pairs", "error", "message"),
    [
        (lambda: [], ArgumentError, "got no parameter that requires a gradient"),
        (lambda: [("a", ones().detach())], ArgumentError, "got no parameter"),
        (lambda: 3, ArgumentError, "named_parameters is a int, expected pairs"),
        (lambda: [ones().data], ArgumentError, r"has a ndarray, expected pairs \(name, tensor\)"),
        (lambda: [("a", np.ones(3))], ArgumentError, "expected pairs"),
        (lambda: [("a", ones() * 2)], ArgumentError, "a is the result of an op"),
        (lambda: [("a", ones()), ("a", ones())], ArgumentError, "a names two parameters"),
        (twins, ArgumentError, "b shares its memory with a"),
        (lambda: ones(), ArgumentError, "named_parameters is a Tensor, expected pairs"),
        (lambda: [("a", ones(), 1)], ArgumentError, "named_parameters has a tuple, expected"),
        (lambda: [("a", integers())], DtypeError, "a has dtype int64, expected a float"),
        (
            lambda: [("a", ones()), ("b", ones(np.float64))],
            DtypeError,
            "b has dtype float64, expected float32 like a",
        ),
    ],
)
def test_wrong_parameters_are_named(pairs: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        FlatParameters(pairs())


@pytest.mark.gpu
def test_parameters_of_two_devices_are_refused() -> None:
    pairs = [("a", ones()), ("b", Tensor(backend.to_device(np.ones(3, "f"), "cuda"), True))]
    with pytest.raises(DeviceError, match="b is on cuda:0, expected cpu like a"):
        FlatParameters(pairs)


def test_a_wrong_multiple_is_refused() -> None:
    with pytest.raises(ArgumentError, match="multiple is 0"):
        FlatParameters(toy.parameters().items(), multiple=0)
    with pytest.raises(ArgumentError, match=r"multiple is 64\.0, expected an integer"):
        FlatParameters(toy.parameters().items(), multiple=64.0)  # type: ignore[arg-type]


def test_a_replaced_array_is_noticed_at_the_next_step() -> None:
    tensors = toy.parameters()
    optimizer = SGD(tensors.items())
    optimizer.step()
    view = tensors["norm"].data
    tensors["norm"].data = view.copy()
    with pytest.raises(ArgumentError, match="the data of norm was replaced"):
        optimizer.step()
    tensors["norm"].data = view
    optimizer.step()
    tensors["wte"].grad = None
    with pytest.raises(ArgumentError, match="the grad of wte was replaced"):
        optimizer.step()


def test_a_parameter_that_was_frozen_is_noticed_at_the_next_step() -> None:
    tensors = toy.parameters()
    optimizer = AdamW(tensors.items())
    tensors["norm"].requires_grad = False
    with pytest.raises(ArgumentError, match="norm was frozen after the optimizer took it"):
        optimizer.step()
    tensors["norm"].requires_grad = True
    optimizer.step()


def test_a_second_optimizer_takes_the_parameters_from_the_first() -> None:
    tensors = toy.parameters()
    first = SGD(tensors.items())
    second = AdamW(tensors.items())
    second.step()
    with pytest.raises(ArgumentError, match="was replaced"):
        first.step()


@pytest.mark.parametrize("twin", [copy.deepcopy, copy.copy, pickle.dumps])
def test_a_copy_that_would_train_nothing_is_refused(twin: Callable[[Any], Any]) -> None:
    optimizer = AdamW(toy.parameters().items())
    with pytest.raises(ArgumentError, match="an optimizer cannot be copied or pickled"):
        twin(optimizer.flat)
    if twin is not copy.copy:
        with pytest.raises(ArgumentError, match="an optimizer cannot be copied or pickled"):
            twin((toy.parameters(), optimizer))


def _tied(x: Any, w: Any, b: Any, table: Any, ids: Any) -> Tensor:
    return tg.linear_cross_entropy(tg.embedding(table, ids) * b, table, ids, chunk=16)


# x: (40, 16) bfloat16, no parameter; w: (16, 16), b: (16,), table: (24, 16); ids: (40,)
ONE_PASS: dict[str, Callable[[Any, Any, Any, Any, Any], Tensor]] = {
    "linear": lambda x, w, b, table, ids: tg.linear(x, w, b),
    "linear after a norm": lambda x, w, b, table, ids: tg.linear(tg.rms_norm(x, b), w),
    "rms_norm": lambda x, w, b, table, ids: tg.rms_norm(x, b),
    "layer_norm": lambda x, w, b, table, ids: tg.layer_norm(x, b, w[3]),
    "feed_forward": lambda x, w, b, table, ids: tg.feed_forward(x, table, None, table.T, b),
    "matmul": lambda x, w, b, table, ids: x @ w,
    "elementwise": lambda x, w, b, table, ids: x * b + tg.exp(w).sum(0),
    "embedding": lambda x, w, b, table, ids: tg.embedding(table, ids),
    "positions": lambda x, w, b, table, ids: tg.embedding(table, ids.reshape(4, 10), w, start=5),
    "positions from starts": lambda x, w, b, table, ids: tg.embedding(
        table, ids.reshape(4, 10), w, start=ids[:4] % 6
    ),
    "view": lambda x, w, b, table, ids: table[3:19:2, 1:],
    "one element": lambda x, w, b, table, ids: w[2, 3],
    "rows": lambda x, w, b, table, ids: table[ids],
    "elements": lambda x, w, b, table, ids: table[ids, ids % 16],
    "two views": lambda x, w, b, table, ids: table[:5] * table[5:10],
    "untied head": lambda x, w, b, table, ids: tg.linear_cross_entropy(x * b, table, ids, chunk=16),
    "tied head": _tied,
    "recomputed": lambda x, w, b, table, ids: tg.checkpoint(
        lambda x: tg.linear(tg.linear(x, w, b), w)
    )(x),
    "used twice": lambda x, w, b, table, ids: tg.linear(tg.linear(x, w, b), w, b),
}


@pytest.mark.parametrize("case", ONE_PASS)
def test_bfloat16_gradients_are_rounded_once(case: str, device: str) -> None:
    """They are the rounded float32 ones, where one op uses a parameter and where several do."""
    rng = np.random.default_rng(3)
    x = backend.to_device(rng.standard_normal((40, 16)).astype(dtypes.bfloat16), device)
    ids = backend.to_device(rng.integers(0, 24, 40), device)

    def gradients(grad_dtype: str, passes: int) -> dict[str, Any]:
        tensors = toy.parameters(
            dtypes.bfloat16, device, shapes={"w": (16, 16), "b": (16,), "table": (24, 16)}
        )
        flat = FlatParameters(tensors.items(), grad_dtype=grad_dtype)
        assert flat.grad_dtype == grad_dtype
        w, b, table = tensors.values()
        for _ in range(passes):
            y = ONE_PASS[case](Tensor(x), w, b, table, ids)
            (y * y).sum().backward()
        return {name: backend.to_numpy(view) for name, view in flat.views(flat.grad).items()}

    wide, narrow, twice = (
        gradients("float32", 1),
        gradients("bfloat16", 1),
        gradients("bfloat16", 2),
    )
    for name, expected in wide.items():
        assert narrow[name].dtype == dtypes.bfloat16
        np.testing.assert_array_equal(narrow[name], expected.astype(dtypes.bfloat16), name)
        sums = twice[name].astype("float32")
        np.testing.assert_allclose(sums, 2 * expected, rtol=2.0**-7, err_msg=name)
    assert any(gradient.any() for gradient in wide.values())


def test_bfloat16_gradients_of_two_passes_add_up(device: str) -> None:
    tensors = toy.parameters(dtypes.bfloat16, device, shapes={"w": (8, 8)})
    flat = FlatParameters(tensors.items(), grad_dtype=dtypes.bfloat16)
    x = Tensor(backend.to_device(np.ones((4, 8), dtypes.bfloat16), device))
    for passes in (1, 2, 3):
        tg.linear(x, tensors["w"]).sum().backward()
        assert (backend.to_numpy(flat.views(flat.grad)["w"]) == 4 * passes).all()
    flat.zero_grad()
    assert not backend.to_numpy(flat.grad).any()


@pytest.mark.parametrize(
    ("dtype", "grad_dtype", "expected"),
    [
        ("float32", "bfloat16", "expected float32 as the parameters are float32"),
        ("float16", "float16", "expected float32 as the parameters are float16"),
        ("bfloat16", "float64", "expected float32 or bfloat16 as the parameters are bfloat16"),
    ],
)
def test_a_wrong_dtype_of_gradients_is_refused(dtype: str, grad_dtype: str, expected: str) -> None:
    tensors = toy.parameters(dtypes.as_dtype(dtype))
    with pytest.raises(DtypeError, match=f"grad_dtype is {grad_dtype}, {expected}"):
        FlatParameters(tensors.items(), grad_dtype=grad_dtype)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs the malloc of glibc")
def test_training_keeps_the_memory_of_freed_arrays() -> None:
    import resource

    def faults() -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        arrays = [np.ones(700_000, np.float32) for _ in range(8)]  # 22 MB
        del arrays
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    AdamW([tg.ones((2, 2), requires_grad=True)], 1e-3)
    faults()
    assert faults() < 1000  # otherwise 5,500 pages
