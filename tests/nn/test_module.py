"""Modules: what belongs to them, under which name, and how it is saved, loaded and moved."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import numpy as np
import pytest

from tensorgrad import Tensor, autocast, nn, no_grad
from tensorgrad.dtypes import bfloat16, float16, float32, float64
from tensorgrad.errors import ArgumentError, CheckpointError, DeviceError, DtypeError
from tensorgrad.nn.module import add_branch, can_fuse
from tensorgrad.nn.rows import Rows


class Inner(nn.Module):
    def __init__(self, width: int) -> None:
        self.weight = nn.Parameter(np.arange(width, dtype="float32"))
        self.count = 3
        self.register_buffer("seen", Tensor(np.zeros(2, "int64")))
        self.register_buffer("scratch", Tensor(np.ones(1, "float32")), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Outer(nn.Module):
    """Has its own parameter last, two children that share a parameter, and one shared child."""

    def __init__(self) -> None:
        self.first = Inner(3)
        self.second = Inner(3)
        self.second.weight = self.first.weight
        self.again = self.first
        self.bias = nn.Parameter(np.zeros(1, "float32"))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(self.first(x)) + self.bias
        return y


NAMES = ["bias", "first.weight", "first.seen", "second.seen"]


def test_names_follow_the_attributes_and_shared_things_appear_once() -> None:
    model = Outer()
    assert [n for n, _ in model.named_modules()] == ["", "first", "second"]
    assert [n for n, _ in model.named_parameters()] == ["bias", "first.weight"]
    assert [n for n, _ in model.named_buffers()] == [
        "first.seen", "first.scratch", "second.seen", "second.scratch",
    ]  # fmt: skip
    assert len(list(model.modules())) == 3
    assert len(list(model.parameters())) == 2
    assert len(list(model.buffers())) == 4
    assert list(model.state_dict()) == NAMES


def test_a_shared_parameter_collects_both_gradients() -> None:
    model = Outer()
    model(Tensor(np.ones(3, "float32"))).backward(np.ones(3, "float32"))
    np.testing.assert_array_equal(model.first.weight.grad, [0, 2, 4])


def test_parameters_and_modules_can_be_replaced_set_to_none_and_deleted() -> None:
    model: Any = Outer()
    model.bias = None
    assert [n for n, _ in model.named_parameters()] == ["first.weight"]
    model.bias = nn.Parameter(np.ones(1))
    model.second = nn.Sequential()
    assert [n for n, _ in model.named_modules()] == ["", "first", "second"]
    del model.bias, model.second
    model.bias, model.second = 1, np.ones(2)
    assert [n for n, _ in model.named_parameters()] == ["first.weight"]
    layers: Any = nn.ModuleList([Inner(2)])
    layers[0] = Inner(3)
    assert layers[0].weight.size == 3


@pytest.mark.parametrize(
    "value", [np.ones(1), Tensor(np.ones(1), requires_grad=True), 1.0, Inner(1)], ids=str
)
def test_a_parameter_is_not_lost_to_another_value(value: Any) -> None:
    model: Any = Outer()
    bias = model.bias
    with pytest.raises(
        DtypeError,
        match=r"Outer: bias is set to a \w+, expected a Parameter or None; for values: bias\[",
    ):
        model.bias = value
    assert model.bias is bias
    with no_grad():
        model.bias[...] = np.ones(1)
        model.bias += 1
    assert model.bias is bias
    assert bias.tolist() == [2]


@pytest.mark.parametrize("value", [np.ones(1), nn.Parameter(np.ones(1)), abs], ids=str)
def test_a_module_is_not_lost_to_another_value(value: Any) -> None:
    model: Any = Outer()
    first = model.first
    with pytest.raises(
        DtypeError, match=r"Outer: first is set to a \w+, expected a Module or None$"
    ):
        model.first = value
    assert model.first is first
    layers: Any = nn.ModuleList([Inner(2)])
    with pytest.raises(DtypeError, match=r"ModuleList: (0 is set to|got) a"):
        layers[0] = value
    with pytest.raises(DtypeError, match="ModuleList: 0 is set to a"):
        setattr(layers, "0", value)


@pytest.mark.parametrize(
    "kind", [list, tuple, set, lambda x: dict(enumerate(x)), lambda x: [x], lambda x: {1: (3, x)}]
)
def test_modules_that_hide_in_a_list_are_an_error(kind: Any) -> None:
    model = nn.Module()
    model.layers = kind([Inner(2)])  # type: ignore[attr-defined]
    with pytest.raises(ArgumentError, match=r"Module: layers is a .* expected a ModuleList"):
        list(model.parameters())


def test_modules_may_refer_to_each_other_in_circles() -> None:
    parent = nn.Module()
    parent.child = Inner(2)  # type: ignore[attr-defined]
    parent.child.parent = parent  # type: ignore[attr-defined]
    assert [n for n, _ in parent.named_parameters()] == ["child.weight"]


def test_state_dict_shares_memory_and_has_no_graph() -> None:
    model = Outer()
    state = model.state_dict()
    assert not any(t.requires_grad for t in state.values())
    state["bias"].data[0] = 5
    assert model.bias.item() == 5


def test_load_copies_in_place_and_converts() -> None:
    model = Outer()
    held = model.first.weight.data
    state: dict[str, Any] = {name: t.numpy() + 1 for name, t in model.state_dict().items()}
    state["first.weight"] = Tensor(np.array([7, 8, 9], bfloat16))
    assert model.load_state_dict(state) == ([], [])
    np.testing.assert_array_equal(held, [7, 8, 9])
    assert model.first.weight.data is held
    np.testing.assert_array_equal(model.second.seen.numpy(), [1, 1])  # type: ignore[attr-defined]


def test_load_takes_any_name_of_a_shared_parameter() -> None:
    model = Outer()
    state: dict[str, Any] = dict(model.state_dict())
    state["second.weight"] = state.pop("first.weight").numpy() + 1
    assert model.load_state_dict(state) == ([], [])
    np.testing.assert_array_equal(model.first.weight.numpy(), [1, 2, 3])
    state["first.weight"] = state["second.weight"] + 1
    with pytest.raises(CheckpointError, match=r"first\.weight and second\.weight share one"):
        model.load_state_dict(state)


def test_load_lists_all_that_is_wrong_and_changes_nothing() -> None:
    model = Outer()
    before = {name: t.numpy().copy() for name, t in model.state_dict().items()}
    state = {
        "bias": np.ones(1, "float32"),
        "first.weight": np.ones(4, "float32"),
        "second.seen": np.ones(2, "float32"),
        "third.weight": np.ones(1),
    }
    with pytest.raises(CheckpointError) as error:
        model.load_state_dict(state)
    assert str(error.value) == (
        "load_state_dict: missing: first.seen; unexpected: third.weight; "
        "wrong: first.weight is float32[4], expected float32[3], "
        "second.seen is float32[2], expected int64[2]"
    )
    for name, tensor in model.state_dict().items():
        np.testing.assert_array_equal(tensor.numpy(), before[name])
    with pytest.raises(CheckpointError, match=r"^load_state_dict: wrong: first\.weight is"):
        model.load_state_dict(state, strict=False)


def test_load_not_strict_returns_what_did_not_match() -> None:
    model = Outer()
    state = {"bias": np.ones(1, "float32"), "other": np.ones(1)}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert missing == ["first.weight", "first.seen", "second.seen"]
    assert unexpected == ["other"]
    assert model.bias.item() == 1


def test_long_lists_of_names_are_cut() -> None:
    many = nn.Module()
    for i in range(50):
        setattr(many, f"b{i}", nn.Parameter(np.ones(1)))
    with pytest.raises(CheckpointError, match="b19 and 30 more; unexpected"):
        many.load_state_dict({"x": np.ones(1)})
    for i in range(20, 50):
        delattr(many, f"b{i}")
    with pytest.raises(CheckpointError, match="b19; unexpected"):
        many.load_state_dict({"x": np.ones(1)})


def test_buffers_need_a_free_name() -> None:
    module = Inner(2)
    for name in ("weight", "a.b", "forward", ""):
        with pytest.raises(ArgumentError, match=f"register_buffer: name is '{name}'"):
            module.register_buffer(name, Tensor(np.ones(1)))


def test_buffers_are_tensors_or_gone() -> None:
    module: Any = Inner(2)
    with pytest.raises(DtypeError, match="register_buffer: value is a ndarray, expected a Tensor"):
        module.register_buffer("mean", np.ones(2))
    module.register_buffer("mean", Tensor(np.ones(2)))
    assert "mean" in module.state_dict()
    module.mean = None
    assert "mean" not in module.to("float64").state_dict()
    del module.mean
    assert "mean" not in module.state_dict()
    for value in (Tensor(np.ones(2)), None):
        module.mean = value
        with pytest.raises(
            DtypeError, match="Inner: mean is set to a ndarray, expected a Tensor or"
        ):
            module.mean = np.ones(2)


@pytest.mark.parametrize(
    "wrapped",
    ["module.{}", "_orig_mod.{}", "module._orig_mod.{}", "_fsdp_wrapped_module._orig_mod.{}"],
)
def test_names_that_wrappers_of_pytorch_made_are_read(wrapped: str) -> None:
    source, module = Inner(2), Inner(2)
    source.weight.data += 3
    state = {wrapped.format(name): tensor for name, tensor in source.state_dict().items()}
    assert module.load_state_dict(state) == ([], [])
    assert module.weight.tolist() == source.weight.tolist()
    with pytest.raises(CheckpointError, match=rf"unexpected: {wrapped.format('weight')}"):
        module.load_state_dict({**state, "weight": source.weight})


def test_a_part_named_module_stays_in_names() -> None:
    outer: Any = Inner(2)
    outer.module = Inner(2)
    state = {name: tensor.numpy() + 1 for name, tensor in outer.state_dict().items()}
    assert {"weight", "module.weight"} <= state.keys()
    outer.load_state_dict(state)
    outer.load_state_dict({f"module._orig_mod.{name}": array for name, array in state.items()})
    for name, tensor in outer.state_dict().items():
        assert tensor.tolist() == state[name].tolist()


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (None, "state is a NoneType, expected arrays by name"),
        ([("weight", 1)], "state is a list, expected arrays by name"),
        ({3: np.ones(1)}, "unexpected: 3"),
        ({"weight": np.ones(2), "seen": np.ones(2, complex)}, "seen is complex128"),
        ({"weight": np.ones(2), "seen": np.array(["1", "2"])}, "seen is <U1"),
        ({"weight": np.ones(2), "seen": np.array([1, 2**63], "uint64")}, "seen is uint64"),
        ({"weight": [[1.0], [1.0, 2.0]], "seen": np.ones(2, int)}, "weight is object"),
    ],
)
def test_a_state_of_another_kind_changes_nothing(state: Any, message: str) -> None:
    module = Inner(2)
    before = {name: tensor.numpy().copy() for name, tensor in module.state_dict().items()}
    with pytest.raises(CheckpointError, match=message):
        module.load_state_dict(state)
    for name, tensor in module.state_dict().items():
        np.testing.assert_array_equal(tensor.numpy(), before[name])


@pytest.mark.parametrize("data", [[1.0, 2.0], None, 3.0])
def test_a_parameter_of_no_array_is_named(data: Any) -> None:
    with pytest.raises(DtypeError, match=r"Parameter: data is a .*, expected an array"):
        nn.Parameter(data)


@pytest.mark.parametrize("index", ["0", None, 0.0])
def test_an_index_of_a_list_that_is_none_is_named(index: Any) -> None:
    with pytest.raises(ArgumentError, match=r"ModuleList: index is .*, expected an integer"):
        nn.ModuleList([Inner(2)])[index]


def test_train_and_eval_reach_all_modules() -> None:
    model = Outer()
    assert model.training
    assert model.eval() is model
    assert not any(m.training for m in model.modules())
    assert model.train().second.training
    model.second.train(False)
    assert [module.training for module in model.modules()] == [True, True, False]


def test_evaluating_leaves_each_module_as_it_was() -> None:
    model = Outer()
    model.second.eval()
    before = [module.training for module in model.modules()]
    assert set(before) == {True, False}
    with nn.evaluating(model):
        assert not any(module.training for module in model.modules())
        assert not model(Tensor(np.ones((1, 3), "float32"))).requires_grad
    assert [module.training for module in model.modules()] == before
    with pytest.raises(ZeroDivisionError), nn.evaluating(model):
        raise ZeroDivisionError
    assert [module.training for module in model.modules()] == before


def test_zero_grad_keeps_the_arrays() -> None:
    model = Outer()
    grad = model.bias.grad = np.ones(1, "float32")
    model.zero_grad()
    assert model.bias.grad is grad
    assert grad[0] == 0
    assert model.first.weight.grad is None


@pytest.mark.parametrize("dtype", [float64, float16, bfloat16])
def test_to_converts_floats_and_keeps_the_parameters(dtype: Any) -> None:
    model = Outer()
    parameter = model.first.weight
    parameter.grad = np.ones(3, "float32")
    assert model.to(dtype=str(dtype)) is model
    assert model.first.weight is parameter
    assert parameter.dtype == dtype
    assert parameter.grad.dtype == dtype
    assert model.first.scratch.dtype == dtype  # type: ignore[attr-defined]
    assert model.first.seen.dtype == np.int64  # type: ignore[attr-defined]
    assert model.to("cpu", "float32").bias.dtype == float32
    memory = model.bias.data
    assert model.to("cpu", "float32").bias.data is memory
    assert model.to(dtype).bias.dtype == dtype


def test_to_names_what_it_cannot_do() -> None:
    with pytest.raises(DtypeError, match="to: dtype is int64, expected a float"):
        Outer().to("int64")
    with pytest.raises(DeviceError, match="expected"):
        Outer().to("cuda:99")


def test_apply_visits_children_first() -> None:
    seen: list[nn.Module] = []
    model = Outer()
    assert model.apply(seen.append) is model
    assert seen == [model.second, model.first, model]


def test_deepcopy_is_independent_and_keeps_what_is_shared() -> None:
    model = Outer()
    twin = copy.deepcopy(model)
    twin.first.weight.data[0] = 9
    assert model.first.weight.data[0] == 0
    assert twin.second.weight is twin.first.weight
    assert isinstance(twin.bias, nn.Parameter)


def test_a_branch_is_added_where_there_is_a_residual() -> None:
    x, residual = np.full((2, 3), 2.0), np.ones((2, 3))
    linear = nn.Linear(3, 3, bias=False).to(dtype="float64")  # takes a residual itself
    for layer in (nn.ReLU(), linear):
        y = layer(x).numpy()
        np.testing.assert_array_equal(add_branch(layer, x, None).numpy(), y)
        np.testing.assert_allclose(add_branch(layer, x, residual).numpy(), y + 1)
        for training in (True, False):
            none = nn.Dropout(1 - 1e-9).train(training)
            found = add_branch(layer, x, residual, none).numpy()
            np.testing.assert_allclose(found, residual if training else y + 1)


def test_repr_is_a_tree() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.LayerNorm(3), nn.Dropout(0.1)))
    assert repr(model) == (
        "Sequential(\n"
        "  (0): Linear(2, 3)\n"
        "  (1): Sequential(\n"
        "    (0): LayerNorm(3, eps=1e-05)\n"
        "    (1): Dropout(0.1)\n"
        "  )\n"
        ")"
    )


def test_parameter_wraps_arrays_and_tensors() -> None:
    data = np.ones(2, "float32")
    assert nn.Parameter(data).data is data
    assert nn.Parameter(Tensor(data)).data is data
    assert nn.Parameter(data).requires_grad
    assert not nn.Parameter(data, requires_grad=False).requires_grad
    with pytest.raises(DtypeError):
        nn.Parameter(np.ones(2, "int64"))


def test_layers_take_narrower_floats_and_name_wider_ones() -> None:
    layer, x = nn.Linear(2, 2), np.ones((1, 2))
    for dtype in ("float16", "bfloat16", "float32"):
        assert layer(Tensor(x).astype(dtype)).dtype == float32
    message = (
        r'Linear: x has dtype float64, expected float32 as the layer; convert it, x.astype\("float3'
        r'2"\), or the layer, .to\("float64"\)'
    )
    with pytest.raises(DtypeError, match=message):
        layer(x)
    layer.to("float16")
    with pytest.raises(DtypeError, match="x has dtype float32, expected float16"):
        layer(x.astype("float32"))
    with pytest.raises(DtypeError, match="residual has dtype float64, expected float16"):
        layer(x.astype("float16"), x)
    with autocast("bfloat16"):
        assert layer.to("bfloat16")(x.astype("float32")).dtype == bfloat16
        with pytest.raises(DtypeError, match="x has dtype float64, expected bfloat16"):
            layer(x)


def test_layers_offer_what_they_define_beside_their_forward() -> None:
    class Same(nn.Linear):
        pass

    class Own(nn.Linear):
        def forward(self, x: Any, residual: Any = None) -> Any:
            return x

    assert can_fuse(nn.Linear(1, 1), "affine")
    assert can_fuse(Same(1, 1), "affine")
    assert not can_fuse(Own(1, 1), "affine")
    assert not can_fuse(nn.ReLU(), "affine")
    layer = nn.Linear(1, 1)
    layer.register_forward_hook(lambda module, args, y: None)
    assert not can_fuse(layer, "affine")


def test_a_model_saves_the_bytes_of_its_layers() -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2), nn.Dropout(0.1))
    assert model.saved_bytes(Rows(inside=7, outside=7, item=2, wide=4)) == 7 * 2 * (3 + 5)


def test_a_summary_and_a_graph_neither_train_nor_record() -> None:
    class Seen(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            self.seen = self.training, (x * factor).requires_grad
            return x

    model: Any = Seen()
    factor = Tensor(np.ones(3), requires_grad=True)
    assert model.summary(np.ones(3)).layers[0].shape == (3,)
    assert model.seen == (False, False)
    del model.seen
    assert model.graph(np.ones(3)).dot.startswith("digraph {")
    assert model.seen == (False, False)
    assert model.training


@pytest.mark.gpu
def test_to_moves_everything() -> None:
    model = Outer().to("cuda")
    assert {t.device for t in (*model.parameters(), *model.buffers())} == {"cuda:0"}
    state = {name: t.numpy() for name, t in model.state_dict().items()}
    state["bias"] = state["bias"] + 1
    model.load_state_dict(state)
    assert model.bias.item() == 1
    assert model.to("cpu").bias.device == "cpu"


# Options that PyTorch's class has at the same place; others are given by keyword.
BY_POSITION = {
    "ELU": ["alpha"],
    "GELU": ["approximate"],
    "BCEWithLogitsLoss": ["weight"],
    "CrossEntropyLoss": ["weight"],
    "Dropout": ["p"],
    "FeedForward": ["hidden"],
    "Flatten": ["start_axis", "end_axis"],
    "GroupNorm": ["eps", "affine"],
    "HuberLoss": ["reduction", "delta"],
    "LayerNorm": ["eps", "elementwise_affine", "bias"],
    "LeakyReLU": ["negative_slope"],
    "Linear": ["bias"],
    "ModuleDict": ["modules"],
    "ModuleList": ["modules"],
    "NLLLoss": ["weight"],
    "RMSNorm": ["eps", "elementwise_affine"],
    "Softmax": ["axis"],
    "SwiGLU": ["hidden"],
}


def test_options_by_position_are_those_of_pytorch() -> None:
    found = {}
    for name in nn.__all__:
        kind = getattr(nn, name)
        if isinstance(kind, type) and issubclass(kind, nn.Module):
            parameters = inspect.signature(kind).parameters.values()
            options = [p for p in parameters if p.default is not p.empty]
            found[name] = [p.name for p in options if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert {name: names for name, names in found.items() if names} == BY_POSITION
