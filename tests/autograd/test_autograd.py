"""The graph walk: values, order, memory, errors."""

from __future__ import annotations

import dis
import gc
import re
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tensorgrad
import tensorgrad as tg
from tensorgrad import Tensor, autograd
from tensorgrad.autograd import record
from tensorgrad.core.backward import gradients
from tensorgrad.core.gradient import Gradient, LeafGradient, accumulated
from tensorgrad.dtypes import as_dtype, bfloat16
from tensorgrad.errors import ArgumentError, DeviceError, DtypeError, GradError, ShapeError
from tests.gpu_array import on_gpu

Values = np.ndarray[Any, Any]


def leaf(*values: float) -> Tensor:
    return Tensor(np.array(values), requires_grad=True)


def ones(tensor: Tensor) -> Values:
    return np.ones(tensor.shape)


def test_diamond_adds_both_paths_once() -> None:
    x = leaf(3.0)
    y = x * x
    z = y * 2 + tg.exp(y) * 0
    z.backward()
    np.testing.assert_allclose(x.grad, [12.0])  # type: ignore[arg-type]


def test_uneven_paths_wait_for_the_last_user() -> None:
    x = leaf(0.5)
    shared = tg.exp(x)
    deep = shared
    for _ in range(10):
        deep = deep * 1.5
    (deep + shared).backward()
    np.testing.assert_allclose(x.grad, np.exp([0.5]) * (1.5**10 + 1))  # type: ignore[arg-type]


def test_grad_adds_up_over_backwards_and_keeps_its_buffer() -> None:
    x = leaf(1.0, 2.0)
    buffer = np.zeros(2)
    x.grad = buffer
    (x * 3).backward([1, 1])
    (x * 4).backward([1, 1])
    assert x.grad is buffer
    np.testing.assert_array_equal(buffer, [7, 7])


def test_sixteen_bit_leaf_adds_into_a_float32_gradient() -> None:
    x = Tensor(np.ones(4, bfloat16), requires_grad=True)
    x.grad = np.zeros(4, "float32")
    for _ in range(300):
        (x * 1.0).backward(np.ones(4))
    np.testing.assert_array_equal(x.grad, np.full(4, 300, "float32"))


def test_gradients_do_not_share_memory() -> None:
    x, y = leaf(1.0), leaf(2.0)
    dy = np.ones(1)
    (x + y).backward(dy)
    x.grad += 5  # type: ignore[operator]
    np.testing.assert_array_equal(y.grad, [1.0])
    np.testing.assert_array_equal(dy, [1.0])


def test_mixed_dtypes_give_each_leaf_its_own() -> None:
    x, y = Tensor(np.ones(2, "float32"), True), Tensor(np.ones(2, "float64"), True)
    (x * y).backward(np.ones(2))
    assert x.grad is not None
    assert y.grad is not None
    assert (x.grad.dtype, y.grad.dtype) == (np.float32, np.float64)


def test_broadcast_is_summed_down() -> None:
    x, y = Tensor(np.ones((1, 3)), True), Tensor(np.array(2.0), True)
    (x * y + Tensor(np.zeros((4, 2, 3)))).backward(np.ones((4, 2, 3)))
    np.testing.assert_array_equal(x.grad, np.full((1, 3), 16.0))
    assert y.grad is not None
    assert y.grad.shape == ()
    assert float(y.grad) == 24.0


def test_a_scalar_used_several_times_keeps_array_gradients() -> None:
    x = Tensor(np.array(2.0), requires_grad=True)
    square = x * x  # NumPy turns sums of 0-d arrays into scalars
    for _ in range(2):
        (square * square).backward(retain_graph=True)
    assert isinstance(x.grad, np.ndarray)
    assert x.grad == 64.0


def test_a_chain_of_100_000_ops() -> None:
    x = leaf(1.0)
    y = x
    for _ in range(100_000):
        y = y + 0.0
    y.backward()
    np.testing.assert_array_equal(x.grad, [1.0])


def test_a_long_graph_can_be_dropped_without_backward() -> None:
    y = leaf(1.0)
    for _ in range(100_000):
        y = y + 0.0
    del y
    gc.collect()


def test_saved_arrays_are_freed_during_the_walk() -> None:
    """When the walk reaches the first op, no later op's saved array is alive."""
    alive: list[weakref.ref[Values]] = []
    at_the_start: list[int] = []

    def first(dy: Values, saved: Any, needs: Any) -> tuple[Values]:
        at_the_start.append(sum(ref() is not None for ref in alive))
        return (dy,)

    x = leaf(1.0)
    y = record("first", x.data.copy(), (x,), first, ())
    for _ in range(20):
        y = tg.exp(y * 0.1)
        alive.append(weakref.ref(y.data))
    y.backward()
    assert at_the_start == [1]  # only y's own, which the variable still holds


def test_intermediates_that_nothing_saved_are_freed_at_once() -> None:
    x = leaf(1.0)
    middle = x + 1.0
    ref = weakref.ref(middle.data)
    y = middle + 1.0
    del middle
    assert ref() is None
    y.backward()
    np.testing.assert_array_equal(x.grad, [1.0])


def test_no_grad_records_nothing_and_is_per_thread() -> None:
    x = leaf(1.0)
    inside: list[bool] = []
    with tensorgrad.no_grad():
        assert not (x * 2).requires_grad
        thread = threading.Thread(target=lambda: inside.append((x * 2).requires_grad))
        thread.start()
        thread.join()
    assert inside == [True]
    assert (x * 2).requires_grad


def test_detach_cuts_the_graph() -> None:
    x = leaf(2.0)
    y = x * 3
    (y.detach() * x).backward()
    np.testing.assert_array_equal(x.grad, [6.0])


def test_second_backward_needs_retain_graph() -> None:
    x = leaf(2.0)
    y = x * x
    y.backward(retain_graph=True)
    y.backward()
    np.testing.assert_array_equal(x.grad, [8.0])
    with pytest.raises(GradError, match="graph of multiply was freed"):
        y.backward()


def test_backward_names_what_is_wrong() -> None:
    x = leaf(1.0, 2.0)
    with pytest.raises(GradError, match=r"dy is missing; only a scalar starts at 1, got \(2,\)"):
        (x * 2).backward()
    with pytest.raises(ShapeError, match=r"dy has shape \(3,\), expected \(2,\)"):
        (x * 2).backward(np.ones(3))
    with pytest.raises(GradError, match="does not depend on anything"):
        Tensor(np.ones(1)).backward()
    with pytest.raises(DtypeError, match="got dtype int64 with requires_grad, expected a float"):
        Tensor(np.arange(3), requires_grad=True)


def test_hooks_run_once_the_gradient_is_complete() -> None:
    x, y = leaf(1.0), leaf(2.0)
    seen: list[tuple[str, float]] = []
    tensorgrad.on_grad_ready(x, lambda t: seen.append(("x", float(t.grad[0]))))  # type: ignore[index]
    remove = tensorgrad.on_grad_ready(y, lambda t: seen.append(("y", float(t.grad[0]))))  # type: ignore[index]
    (x * y + x * 2 + y * 0.5).backward()
    assert sorted(seen) == [("x", 4.0), ("y", 1.5)]
    remove()
    (x * y).backward()
    assert len(seen) == 3
    with pytest.raises(GradError, match="not a leaf"):
        tensorgrad.on_grad_ready(x * 2, print)


def test_a_hook_that_is_there_twice_is_removed_once() -> None:
    x, seen = leaf(1.0), list[Tensor]()
    hook = seen.append
    removes = [tensorgrad.on_grad_ready(x, hook) for _ in range(2)]
    for expected in (2, 3, 3):  # with two, one and none
        (x * 2).backward()
        assert len(seen) == expected
        if removes:
            removes.pop()()


@pytest.mark.parametrize("weight_first", [False, True])
def test_hooks_come_as_early_as_the_graph_allows(weight_first: bool) -> None:
    """The gradient of the last layer's weight is announced before the first layer is visited."""
    order: list[str] = []

    def note(dy: Values, saved: Any, needs: Any) -> tuple[Values]:
        order.append("first layer")
        return (dy,)

    x, w = leaf(1.0), leaf(2.0)
    tensorgrad.on_grad_ready(w, lambda t: order.append("w"))
    first = record("first", x.data, (x,), note, ())
    (w * first if weight_first else first * w).backward()
    assert order == ["w", "first layer"]


def test_grad_and_value_and_grad() -> None:
    def f(x: Tensor, y: Tensor) -> Tensor:
        return x * x * y

    x, y = Tensor(np.array([3.0])), Tensor(np.array([2.0]))
    value, (dx, dy) = tensorgrad.value_and_grad(f, argnums=(0, 1))(x, y)
    assert (value.item(), dx.item(), dy.item()) == (18.0, 12.0, 9.0)
    assert tensorgrad.grad(f)(x, y).item() == 12.0
    assert tensorgrad.grad(lambda x, y: y * 1.0 + x * 0.0)(x, y).item() == 0.0
    assert tensorgrad.grad(lambda x, y: y)(x, y).item() == 0.0
    with tensorgrad.no_grad():
        assert tensorgrad.grad(f)(x, y).item() == 12.0
    assert x.grad is None
    assert not x.requires_grad


@pytest.mark.parametrize("name", ["grad", "value_and_grad", "checkpoint", "fuse"])
def test_what_takes_a_function_refuses_a_tensor(name: str) -> None:
    takes_function: Any = getattr(tensorgrad, name)
    loss = leaf(2.0) * 3
    hint = "call its backward()" if "grad" in name else f"{name}(f)(x)"
    with pytest.raises(ArgumentError, match=f"{name}: f is a Tensor, expected a function; .*"
                       f"{re.escape(hint)}"):  # fmt: skip
        takes_function(loss)
    with pytest.raises(ArgumentError, match=f"{name}: f is a float, expected a function$"):
        takes_function(1.0)


def test_indices_of_arguments() -> None:
    def f(x: Tensor, y: Tensor) -> Tensor:
        return x * x * y

    x, y = Tensor(np.array([3.0])), np.array([2.0])
    assert tensorgrad.grad(f, -1)(x, y).item() == 9.0
    assert tensorgrad.grad(f, -2)(x, y).item() == 12.0
    assert tensorgrad.grad(f, np.int64(1))(x, y).item() == 9.0
    assert [g.item() for g in tensorgrad.grad(f, (-1, 0, 1))(x, y)] == [9.0, 12.0, 9.0]
    for index in (2, -3, "x"):
        with pytest.raises(ArgumentError, match=f"argnums has {index!r}, expected indices of"):
            tensorgrad.grad(f, index)(x, y)  # type: ignore[arg-type]
    with pytest.raises(DtypeError, match="grad: argument 0 is a str, expected a tensor"):
        tensorgrad.grad(f)("x", y)


def test_functional_gradients_leave_other_leaves_alone() -> None:
    w = leaf(5.0)
    assert tensorgrad.grad(lambda x: x * w)(Tensor(np.array([1.0]))).item() == 5.0
    assert w.grad is None


def test_a_first_gradient_that_does_not_fit_is_named() -> None:
    y = leaf(1.0) * 2
    with pytest.raises(ShapeError, match=r"backward: dy is \[\[1\], \[1, 2\]\], expected"):
        y.backward([[1], [1, 2]])
    with pytest.raises(DtypeError, match="backward: dy has dtype complex128, expected real"):
        y.backward(np.full(y.shape, 1j))
    with pytest.raises(DeviceError, match="backward: dy is on cuda:0, expected cpu like"):
        y.backward(Tensor(on_gpu(np.ones(y.shape))))


def test_functions_without_a_scalar_result_say_so() -> None:
    x = Tensor(np.array([1.0]))
    with pytest.raises(GradError, match=r"returned shape \(2,\), expected a scalar"):
        tensorgrad.grad(lambda x: x)(Tensor(np.ones(2)))
    with pytest.raises(GradError, match="the function returned float, expected a scalar tensor"):
        tensorgrad.grad(lambda x: 1.0)(x)  # type: ignore[arg-type, return-value]
    narrow = tensorgrad.grad(lambda x: (x.astype("float32") * 2).sum())(np.ones(2, "float16"))
    assert (narrow.tolist(), str(narrow.dtype)) == ([2, 2], "float16")


def test_assignment_to_what_the_graph_needs() -> None:
    x, w = Tensor(np.ones(3)), leaf(1.0, 2.0, 3.0)
    with pytest.raises(GradError, match="requires a gradient; assign to a copy"):
        w[0] = 5.0
    y = x * w
    with pytest.raises(GradError, match="is the result of an op"):
        y[0] = 5.0
    x[1] = 7.0
    with pytest.raises(GradError, match=r"multiply needs an array of shape \(3,\) that was"):
        y.backward(np.ones(3))


def test_assignment_through_a_view_is_seen() -> None:
    base = np.ones(6)
    x, view, w = Tensor(base), Tensor(base[2:4]), Tensor(np.ones(6), True)
    y = x * w
    view[0] = 3.0
    with pytest.raises(GradError, match="was assigned to"):
        y.backward(np.ones(6))


def test_assignment_elsewhere_or_before_is_fine() -> None:
    base = np.ones(6)
    x, other = Tensor(base[:3]), Tensor(base[3:])
    w = Tensor(np.ones(3), True)
    x[0] = 2.0
    y = x * w
    other[0] = 9.0
    y.backward(np.ones(3))
    np.testing.assert_array_equal(w.grad, [2.0, 1.0, 1.0])
    with tensorgrad.no_grad():
        w[0] = 4.0
    assert w.data[0] == 4.0


def test_walk_is_deterministic() -> None:
    def run() -> bytes:
        x = Tensor(np.linspace(-1, 1, 1000, dtype="float32"), True)
        y = tg.exp(x) * x + tg.tanh(x) * 3 + x
        (y * x + y).backward(np.linspace(0, 1, 1000, dtype="float32"))
        assert x.grad is not None
        return bytes(x.grad.tobytes())

    assert run() == run()


# Markers for tools, which do nothing; Python 3.14 has one behind each condition.
MARKERS = {dis.opmap[name] for name in ("NOP", "NOT_TAKEN") if name in dis.opmap}


def count_opcodes(f: Callable[[], object]) -> int:
    """Return how many bytecodes of the library run in f()."""
    count = 0

    def trace(frame: Any, event: str, arg: Any) -> Any:
        nonlocal count
        if "tensorgrad" not in frame.f_code.co_filename:
            return None
        frame.f_trace_opcodes = True
        count += event == "opcode" and frame.f_code.co_code[frame.f_lasti] not in MARKERS
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        f()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize(
    ("f", "forward", "backward"),
    [
        (lambda x, y: tg.add(x, y), 260, 360),
        (lambda x, y: tg.multiply(x, y), 260, 360),
        (lambda x, y: tg.tanh(x), 220, 250),
    ],
)
def test_framework_cost_of_one_op_stays_small(
    f: Callable[[Tensor, Tensor], Tensor], forward: int, backward: int
) -> None:
    """At some 5 ns a bytecode 360 are below 2 us; `tensorgrad bench overhead` takes the time."""

    def chain(length: int) -> Tensor:
        x, weight = leaf(0.0), leaf(1.0)
        for _ in range(length):
            x = f(x, weight)
        return x

    count_opcodes(lambda: chain(1).backward())  # the first traced call reports too little
    results = [chain(10), chain(20)]
    forwards = [count_opcodes(lambda n=n: chain(n)) for n in (10, 20)]  # type: ignore[misc]
    backwards = [count_opcodes(lambda y=y: y.backward()) for y in results]  # type: ignore[misc]
    assert (forwards[1] - forwards[0]) / 10 <= forward
    assert (backwards[1] - backwards[0]) / 10 <= backward


@pytest.mark.parametrize("size", [3, 100_000])  # in one piece, and in blocks on several threads
def test_gradients_that_overflow_are_infinite_without_a_warning(size: int) -> None:
    x = Tensor(np.ones(size, np.float16), requires_grad=True)
    ((x * 100.0) * 100.0).backward(np.full(size, 300, np.float16))
    assert x.grad is not None
    assert np.isinf(x.grad).all()


def own_gradient(kind: str) -> tuple[Tensor, list[np.ndarray[Any, Any]]]:
    """Return a leaf after backward, and the arrays that its gradient came from."""
    x, y = (Tensor(np.ones(2), requires_grad=True) for _ in range(2))
    made: list[np.ndarray[Any, Any]] = []

    def backward(dy: Any, saved: Any, needs: Any) -> Any:
        made.append({"new": dy * 2, "given": dy, "saved": saved[0], "view": (dy * 2)[:]}[kind])
        return made[0], None

    autograd.record("test", x.data * 2, (x, y), backward, (np.ones(2),)).sum().backward()
    return x, made


def test_a_leaf_keeps_the_array_that_an_op_made_for_it() -> None:
    x, made = own_gradient("new")
    assert x.grad is made[0]


@pytest.mark.parametrize("kind", ["given", "saved", "view"])
def test_a_leaf_copies_what_others_hold(kind: str) -> None:
    x, made = own_gradient(kind)
    assert not np.shares_memory(x.grad, made[0])


def test_leaves_share_no_gradient() -> None:
    x, y = (Tensor(np.ones(2), requires_grad=True) for _ in range(2))
    shared = np.ones(2)
    autograd.record("test", x.data, (x, y), lambda *_: (shared, shared), ()).sum().backward()
    assert x.grad is not None
    assert y.grad is not None
    assert not np.shares_memory(x.grad, y.grad)
    x.grad += 1
    assert shared.tolist() == y.grad.tolist() == [1.0, 1.0]


def sum_and_difference(a: Tensor, b: Tensor | None) -> tuple[Tensor, Tensor]:
    """An op of two outputs and an optional input."""

    def backward(dys: Any, saved: Any, needs: Any) -> Any:
        dsum, ddifference = [np.zeros(a.shape) if dy is None else dy for dy in dys]
        return dsum + ddifference, (dsum - ddifference) if needs[1] else None

    other = 0 if b is None else b.data
    plus, minus = record("both", (a.data + other, a.data - other), (a, b), backward, ())
    return plus, minus


def test_an_op_may_have_several_outputs() -> None:
    a, b = leaf(2.0), leaf(3.0)
    plus, minus = sum_and_difference(a, b)
    (plus * 10 + minus * plus).backward(retain_graph=True)  # 10 (a + b) + a^2 - b^2
    assert a.grad == 14.0
    assert b.grad == 4.0
    minus.backward()
    assert a.grad == 15.0
    assert b.grad == 3.0


def test_gradients_of_outputs_are_not_rounded_before_they_are_added_up() -> None:
    seen: list[Any] = []

    def backward(dys: Any, saved: Any, needs: Any) -> Any:
        seen.extend(dys)
        return (dys[0],)

    x = Tensor(np.ones(2, "float16"), requires_grad=True)
    y, _ = record("two", (x.data * 1, x.data * 2), (x,), backward, ())
    third = np.full(2, 1 / 3, "float32")
    record("wide", y.data * 1, (y,), lambda dy, saved, needs: (third,), ()).sum().backward()
    assert (seen[0].dtype, seen[1]) == (np.float32, None)
    assert seen[0][0] == third[0]


def test_an_output_that_nothing_depends_on_has_no_gradient() -> None:
    a, b = leaf(2.0), leaf(3.0)
    _, minus = sum_and_difference(a, b)
    (minus * 2).backward()
    assert a.grad == 2.0
    assert b.grad == -2.0


def test_an_input_may_be_missing() -> None:
    a = leaf(2.0)
    plus, minus = sum_and_difference(a, None)
    (plus * minus).backward()
    assert a.grad == 4.0
    plus, minus = sum_and_difference(Tensor(np.ones(())), None)
    assert not plus.requires_grad
    assert plus.node is None


def test_several_outputs_survive_recomputation_and_functional_gradients() -> None:
    def f(a: Tensor, b: Tensor) -> Tensor:
        plus, minus = sum_and_difference(a * b, b)
        inner = tensorgrad.checkpoint(lambda p, m: p * m * p)
        return inner(plus, minus)

    found = tensorgrad.grad(f, (0, 1))(Tensor(np.array(2.0)), Tensor(np.array(3.0)))
    # p = ab + b is 9 and m = ab - b is 3; p^2 m has the derivative 2 p m dp + p^2 dm
    assert [g.item() for g in found] == [2 * 9 * 3 * 3 + 81 * 3, 2 * 9 * 3 * 3 + 81 * 1]


def test_a_wrong_number_of_gradients_is_an_error_that_names_the_op() -> None:
    x = leaf(1.0)
    y = record("odd", x.data * 2, (x, x), lambda dy, saved, needs: (dy,), ())
    with pytest.raises(GradError, match=r"odd returned 1 gradients, expected .* 2 inputs"):
        y.backward()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("uses", [1, 2])
@pytest.mark.parametrize("given", [False, True])
def test_a_need_holds_the_gradient_so_far_where_it_is_rounded_once(
    dtype: str, uses: int, given: bool
) -> None:
    """Not one of 16 bits with several uses: their sum is rounded once."""
    seen: list[Any] = []

    def backward(dy: Any, saved: Any, needs: Any) -> Any:
        seen.extend(needs)
        if not isinstance(needs[0], Gradient):
            return (dy,)
        needs[0].array += dy
        return (None,)

    x = Tensor(np.ones(2, as_dtype(dtype)), requires_grad=True)
    x.grad = grad = np.full_like(x.data, 5) if given else None
    y = record("own", x.data, (x,), backward, ())
    (y if uses == 1 else y + record("own", x.data, (x,), backward, ())).sum().backward()
    into_leaf = given and (uses == 1 or dtype in ("float32", "float64"))
    assert len(seen) == uses
    assert all(bool(need) for need in seen)
    assert (type(seen[0]) is LeafGradient) == into_leaf
    if type(seen[0]) is LeafGradient:
        assert seen[0].array is grad
    assert x.grad is not None
    assert x.grad.dtype == dtype
    assert x.grad.tolist() == [uses + 5 * given] * 2
    assert not given or x.grad is grad


def test_a_shared_gradient_is_never_added_to() -> None:
    """The first contribution to a sum may be dy, which others get too."""
    x = leaf(1.0, 2.0, 3.0)
    y = x * 1
    parts = y + y[:] + y[0:3] + y[1:2].sum()
    (parts + y).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [4.0, 7.0, 4.0]


@pytest.mark.parametrize("kind", ["new", "given", "saved", "view"])
@pytest.mark.parametrize("place", [0, 1, 2, 3])
def test_a_gradient_that_an_op_holds_is_never_added_to(kind: str, place: int) -> None:
    held = np.full(2, 5.0)
    made: list[Any] = []

    def backward(dy: Any, saved: Any, needs: Any) -> Any:
        made.append({"new": dy * 5, "given": dy, "saved": saved[0], "view": saved[0][:]}[kind])
        return (made[0],)

    x = leaf(1.0, 1.0)
    y = x * 1
    terms = [y * 2, y * 3, y * 4]
    terms.insert(place, record("test", y.data * 1, (y,), backward, (held,)))
    total = terms[0] + terms[1] + terms[2] + terms[3]
    total.backward(np.ones(2))
    own = 1 if kind == "given" else 5
    assert x.grad is not None
    assert x.grad.tolist() == [9 + own] * 2
    assert held.tolist() == [5, 5]
    assert kind == "new" or made[0].tolist() == [own] * 2


def test_a_wider_gradient_is_not_rounded_by_a_narrow_sum() -> None:
    x = Tensor(np.ones((1, 1), "float16"), requires_grad=True)
    third = np.full((1, 1), 1 / 3, "float32")

    def backward(dy: Any, saved: Any, needs: Any) -> Any:
        return (accumulated(third, needs[0]),)

    y = record("wide", x.data * 1, (x,), backward, ())
    (found,) = gradients((y + (x * 1 + x * 1)).sum(), np.ones((), "float16"), [x])
    assert found is not None
    assert found.dtype == np.float32
    assert found[0, 0] == third[0, 0] + np.float32(2)


def calls_of(f: Callable[[], object]) -> list[tuple[str, str]]:
    """Return the file and the name of every Python function that runs in f()."""
    calls: list[tuple[str, str]] = []

    def note(frame: Any, event: str, arg: Any) -> None:
        if event == "call" and frame.f_code is not getattr(f, "__code__", None):
            calls.append((frame.f_code.co_filename, frame.f_code.co_name))

    sys.setprofile(note)
    try:
        f()
    finally:
        sys.setprofile(None)
    return calls


def test_one_op_calls_few_functions() -> None:
    x, weight, bias = (Tensor(np.ones((4, 8)[i > 0 :], "float32"), True) for i in range(3))
    ys = [tg.tanh(x) for _ in range(3)]
    dy = np.ones((4, 8), "float32")
    ys.pop().backward(dy)  # the first call prepares the kernels of the row
    calls = calls_of(lambda: ys.pop().backward(dy))
    assert len(calls) <= 14, calls
    assert len({file for file, _ in calls}) <= 5, calls
    for _ in range(20):
        tg.layer_norm(x, weight, bias)  # often enough that its check is compiled
    calls = calls_of(lambda: tg.layer_norm(x, weight, bias))
    assert len(calls) <= 18, calls


def test_a_gradient_that_two_edges_hold_is_copied() -> None:
    x, z = Tensor(np.ones(3), True), Tensor(np.ones(3), True)
    both = (x.data + 1, x.data + 2)
    y, _ = autograd.record("pair", both, (x,), lambda dys, saved, needs: (dys[0],), ())
    later = z * 1.0
    autograd.on_grad_ready(x, lambda leaf: leaf.grad.fill(7))  # type: ignore[union-attr]
    (later + y).sum().backward()
    np.testing.assert_array_equal(z.grad, 1)
