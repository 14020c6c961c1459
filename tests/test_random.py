"""Random tensors: exact values, distributions, states and errors. All seeds are fixed."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest

import tensorgrad
import tensorgrad as tg
from tensorgrad import Tensor, random
from tensorgrad.core import backend
from tensorgrad.core.modes import mode, replaced
from tensorgrad.dtypes import FLOATS, INTEGERS, bfloat16, bool_, float16, float32, float64, uint64
from tensorgrad.errors import ArgumentError, DtypeError, GraphError, ShapeError
from tensorgrad.kernels.random import Key
from tensorgrad.ops import philox
from tensorgrad.random import Generator

Array = np.ndarray[Any, Any]
MANY = 200_000
BITS = {float64: 53, float32: 24, float16: 11, bfloat16: 8}

# The same on every device and in every version: checkpoints and published results depend on them.
NORMAL = [0.3755659303684786, 0.7529752205897742, 0.7941167416429906]
NORMAL_32 = [-0.554313600063324, -1.2478785514831543, -0.3022022843360901]
UNIFORM = [0.9340569376945496, 0.5050360560417175, 0.6948240995407104]
INTEGERS_FOUND = [386, 709, 733, 308]
BERNOULLI = [False, True, False, False, False, True, True, False]
PERMUTATION = [2, 0, 7, 4, 6, 1, 3, 5]
CATEGORICAL = [0, 2, 4, 1, 3, 2]
KEEP = "0111111110100111"


def share_above(values: Array, expected: Callable[[float], float], points: Any) -> float:
    """Return the largest distance between the distribution of the values and the expected one."""
    ordered = np.sort(values.astype(float64).reshape(-1))
    found = np.searchsorted(ordered, points, side="right") / ordered.size
    return float(np.abs(found - [expected(p) for p in points]).max())


def test_exact_values() -> None:
    draws = Generator(12345)
    assert draws.normal(size=3, dtype="float64").tolist() == NORMAL
    assert draws.normal(size=3).tolist() == NORMAL_32
    assert draws.uniform(size=3).tolist() == UNIFORM
    assert draws.integers(-5, 1000, 4).tolist() == INTEGERS_FOUND
    assert draws.bernoulli(0.5, 8).tolist() == BERNOULLI
    assert draws.permutation(8).tolist() == PERMUTATION
    assert draws.categorical(Tensor(np.zeros((6, 5)))).tolist() == CATEGORICAL
    keep = np.empty(16, bool_)
    philox.fill_keep(keep, draws.next_key(), 0.75)
    assert "".join(map(str, keep.astype(int))) == KEEP


def test_bits_are_numpys_philox() -> None:
    words = np.empty(1001, uint64)
    philox.fill_words(words, Key(seed=7, draw=3, stream=11))
    numpys = np.random.Philox(key=np.array([7, 0], uint64), counter=np.array([0, 3, 11, 0], uint64))
    np.testing.assert_array_equal(words, numpys.random_raw(1001))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_normal_distribution(dtype: Any) -> None:
    z = Generator(1).normal(size=MANY, dtype=dtype).numpy().astype(float64)
    assert abs(z.mean()) < 4 / math.sqrt(MANY)
    assert abs(z.var() - 1) < 4 * math.sqrt(2 / MANY)
    assert abs((z**3).mean()) < 4 * math.sqrt(15 / MANY)
    assert abs((z**4).mean() - 3) < 4 * math.sqrt(96 / MANY)
    points = np.linspace(-3, 3, 25) + 0.001  # off the grid of the short types
    assert share_above(z, NormalDist().cdf, points) < 2 / math.sqrt(MANY) + 2.0 ** -BITS[dtype]


def test_normal_is_the_exact_inverse() -> None:
    words = np.arange(1, 5000, dtype=uint64) * uint64.type(0x9E3779B97F4A7C15)
    extremes = [0, 1 << 12, 2**63, 2**63 - 1, 2**64 - 1, 1 << 30, 2**64 - (1 << 40)]
    words = np.concatenate([words, np.array(extremes, uint64)])
    q = philox._centered(words.copy())
    assert np.abs(q).max() < 0.5
    exact = [NormalDist().inv_cdf(p) for p in (q + 0.5).tolist()]
    inside = (q + 0.5 < 1) & (np.abs(q) < 0.4999)  # near 1 the reference loses digits
    z = philox._normal_quantile(q)
    np.testing.assert_allclose(z[inside], np.array(exact)[inside], rtol=1e-14, atol=1e-16)
    np.testing.assert_array_equal(philox._normal_quantile(-q), -z)
    assert 8.2 < z.max() < 8.3
    far = np.sort(2.0 ** -np.arange(9.0, 53) * np.array([[1], [1.5]]), None)  # down to 2^-52
    exact = [NormalDist().inv_cdf(p) for p in far.tolist()]
    np.testing.assert_allclose(philox._normal_quantile(far - 0.5), exact, rtol=1e-14)


def test_logarithm() -> None:
    x = np.concatenate([2.0 ** np.arange(-53.0, 10), 1 - 2.0 ** -np.arange(2.0, 54),
                        np.random.default_rng(0).uniform(0, 3, 10_000)])  # fmt: skip
    np.testing.assert_allclose(philox._log(x), np.log(x), rtol=5e-16, atol=1e-300)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_uniform_distribution(dtype: Any) -> None:
    u = Generator(2).uniform(-1, 3, size=MANY, dtype=dtype).numpy().astype(float64)
    assert u.min() >= -1
    assert u.max() < 3
    assert abs(u.mean() - 1) < 4 * 4 / math.sqrt(12 * MANY) + 4 * 2.0 ** -BITS[dtype]
    points = np.linspace(-0.9, 2.9, 20)
    distance = share_above(u, lambda p: (p + 1) / 4, points)
    assert distance < 2 / math.sqrt(MANY) + 2.0 ** -BITS[dtype] * 4


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_uniform_stays_below_its_upper_bound(dtype: Any) -> None:
    for low, high in ((0.0, 1.0), (-2.0, -1.0), (1000.0, 1001.0), (0.1, 0.3)):
        u = Generator(3).uniform(low, high, size=MANY, dtype=dtype).numpy().astype(float64)
        assert u.max() < high
        assert u.min() >= np.array(low).astype(dtype).astype(float64)
    next_one = 1 + 2.0 ** (1 - BITS[dtype])
    u = Generator(3).uniform(1, next_one, size=1000, dtype=dtype).numpy().astype(float64)
    assert (u == 1).all()
    u = Generator(3).uniform(1, 1 + 1e-12, size=10, dtype=dtype).numpy()  # nothing lies between
    assert dtype == float64 or (u == 1).all()


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_integers_cover_their_range(dtype: Any) -> None:
    x = Generator(4).integers(0, 7, MANY, dtype=dtype)
    assert x.dtype == dtype
    counts = np.bincount(x.numpy().astype(np.int64), minlength=7)
    assert ((counts - MANY / 7) ** 2 / (MANY / 7)).sum() < 25  # chi squared, 6 degrees of freedom
    limits = np.iinfo(dtype)
    full = Generator(4).integers(limits.min, int(limits.max) + 1, MANY, dtype=dtype).numpy()
    assert abs(float((full > limits.max // 2).mean()) - (0.25 if limits.min else 0.5)) < 0.01
    assert (
        Generator(4).integers(limits.max, int(limits.max) + 1, 3, dtype).tolist()
        == [limits.max] * 3
    )


def test_multiply_high() -> None:
    rng = np.random.default_rng(5)
    a = rng.integers(0, 2**64, 1000, dtype=uint64)
    for b in (1, 1000, 2**32 - 1, 2**32, 2**63 + 12345, 2**64 - 1):
        exact = [int(x) * b >> 64 for x in a]
        assert philox._multiply_high(a, np.uint64(b)).tolist() == exact


@pytest.mark.parametrize("probability", [0.0, 1e-3, 0.1, 0.5, 0.9, 1.0])
def test_bernoulli_and_dropout_masks(probability: float) -> None:
    deviation = 4 * math.sqrt(probability * (1 - probability) / MANY)
    found = Generator(6).bernoulli(probability, MANY).numpy()
    assert found.dtype == bool_
    assert abs(found.mean() - probability) <= deviation
    for fill in (philox.fill_keep, philox.fill_attention_keep):
        keep = np.empty((1, 1, 100, MANY // 100), bool_)
        fill(keep, Key(6, 0), probability)
        assert abs(keep.mean() - probability) <= deviation + 2.0**-17


def test_keep_mask_of_attention() -> None:
    """Masks of parts of a shape are parts of its mask; a block is compared bit by bit."""
    words = philox._philox32(0, np.zeros(1, uint64), 0)
    assert [int(word[0]) for word in words] == [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48]
    shapes = (2, 3, 33, 31), (2, 3, 40, 17)  # equal numbers of blocks
    masks = [np.empty(shape, bool_) for shape in shapes]
    for mask in masks:
        philox.fill_attention_keep(mask, Key(6, 1), 0.7)
    one, two = (mask[:, :, :33, :17] for mask in masks)
    np.testing.assert_array_equal(one, two)
    # keys 0 to 15 of queries 18 and 26 of head (1, 0): a head has 3 times 2 of 16 by 16
    block = np.array([((3 * 3 + 1) * 8 + 2) * 2], uint64)
    key = int(philox._words(Key(6, 1), 0, 1)[0])
    bits = [int(word[0]) for draw in range(4) for word in philox._philox32(key, block, draw)]
    numbers = [sum((word >> i & 1) << b for b, word in enumerate(bits)) for i in range(32)]
    keep = [2**16 - 1 - number < round(0.7 * 2**16) for number in numbers]
    np.testing.assert_array_equal(masks[0][1, 0, [18, 26], :16].ravel(), keep)


def test_permutation() -> None:
    draws = Generator(7)
    order = draws.permutation(1000).numpy()
    assert sorted(order.tolist()) == list(range(1000))
    assert abs(np.corrcoef(order, np.arange(1000))[0, 1]) < 0.1
    first = np.bincount([draws.permutation(4).tolist()[0] for _ in range(2000)], minlength=4)
    assert ((first - 500) ** 2 / 500).sum() < 20
    assert draws.permutation(0).shape == (0,)
    x = Tensor(np.arange(12.0).reshape(6, 2), requires_grad=True)
    shuffled = draws.permutation(x)
    assert sorted(shuffled.tolist()) == x.tolist()
    assert shuffled.tolist() != x.tolist()
    shuffled.sum().backward()
    np.testing.assert_array_equal(x.grad, np.ones((6, 2)))


def test_permutation_shuffles_along_an_axis() -> None:
    x = np.arange(24).reshape(2, 3, 4)
    order = Generator(5).permutation(3).numpy()
    for axis in (1, -2):
        np.testing.assert_array_equal(Generator(5).permutation(x, axis).numpy(), x[:, order])
    np.testing.assert_array_equal(Generator(5).permutation(np.arange(3)).numpy(), order)


@pytest.mark.parametrize("name", ["normal", "uniform", "integers", "permutation"])
def test_names_and_order_of_arguments_are_numpys(name: str) -> None:
    numpys = inspect.signature(getattr(np.random.Generator, name)).parameters
    ours = inspect.signature(getattr(Generator, name)).parameters
    names = [each for each in numpys if each != "endpoint"]
    assert list(ours)[: len(names)] == names
    for each in names:
        if each != "dtype":
            assert ours[each].default == numpys[each].default


def test_parameters_come_before_the_shape() -> None:
    assert Generator(1).normal(3, 4).shape == ()
    assert Generator(1).normal(100, 1e-3, 5).numpy() == pytest.approx(100, abs=0.1)
    assert Generator(1).uniform(7, 8, (2, 2)).numpy() == pytest.approx(7.5, abs=0.5)
    assert Generator(1).integers(3, 4, (2, 2)).tolist() == [[3, 3], [3, 3]]


@pytest.mark.parametrize("axis", [0, -1])
def test_categorical(axis: int) -> None:
    probabilities = np.array([0.5, 0.3, 0.0, 0.2])
    with np.errstate(divide="ignore"):
        logits = np.broadcast_to(np.log(probabilities) + 5, (MANY, 4)).astype(float32)
    found = Generator(8).categorical(Tensor(logits if axis else logits.T), axis=axis)
    assert found.shape == (MANY,)
    counts = np.bincount(found.numpy(), minlength=4)
    assert counts[2] == 0
    np.testing.assert_allclose(counts / MANY, probabilities, atol=4 * 0.5 / math.sqrt(MANY))


def test_draws_streams_and_seeds_are_independent() -> None:
    def numbers(seed: int, draw: int, stream: int = 0) -> Array:
        y = np.empty(MANY, float64)
        philox.fill_normal(y, Key(seed, draw, stream), 0, 1)
        return y

    base = numbers(1, 0)
    for other in (numbers(1, 1), numbers(2, 0), numbers(1, 0, 1), numbers(0, 1), np.roll(base, 1)):
        assert abs((base * other).mean()) < 4 / math.sqrt(MANY)
        assert abs((base**2 * other**2).mean() - 1) < 4 * 8 / math.sqrt(MANY)


def test_each_call_takes_one_draw() -> None:
    one, two = Generator(9), Generator(9)
    one.normal(size=(100, 100)), one.uniform(size=0), one.permutation(5)
    for _ in range(3):
        two.bernoulli(0.5)
    assert one.get_state() == two.get_state() == {"seed": 9, "draw": 3, "stream": 0}
    assert one.normal(size=4).tolist() == two.normal(size=4).tolist()


def test_a_part_does_not_depend_on_the_size_or_the_threads(monkeypatch: Any) -> None:
    whole = Generator(10).normal(size=300_001).numpy()
    np.testing.assert_array_equal(Generator(10).normal(size=1000).numpy(), whole[:1000])
    np.testing.assert_array_equal(Generator(10).normal(size=(3, 11)).numpy().ravel(), whole[:33])
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    np.testing.assert_array_equal(Generator(10).normal(size=300_001).numpy(), whole)


def test_shorter_types_are_rounded() -> None:
    exact = Generator(11).normal(0.5, 2, size=1000, dtype=float64).numpy()
    for dtype in (float32, float16, bfloat16):
        found = Generator(11).normal(0.5, 2, size=1000, dtype=dtype).numpy()
        np.testing.assert_array_equal(found, exact.astype(float32).astype(dtype))


def test_state_goes_through_json_and_back() -> None:
    draws = Generator(2**64 - 1, stream=5)
    draws.normal(size=3)
    state = json.loads(json.dumps(draws.get_state()))
    expected = draws.normal(size=3).tolist()
    other = Generator()
    other.set_state(state)
    assert other.normal(size=3).tolist() == expected


def test_the_default_generator() -> None:
    before = random.get_state()
    try:
        tensorgrad.random.seed(3)
        first = (random.normal(size=2).tolist(), random.uniform(size=2).tolist())
        state = random.get_state()
        next_one = random.integers(100, size=5).tolist()
        random.seed(3)
        assert (random.normal(size=2).tolist(), random.uniform(size=2).tolist()) == first
        random.set_state(state)
        assert random.integers(100, size=5).tolist() == next_one
        random.seed(4)
        assert random.normal(size=2).tolist() != first[0]
    finally:
        random.set_state(before)


def test_shapes_and_empty_arrays() -> None:
    draws = Generator(0)
    assert draws.normal().shape == ()
    assert draws.uniform(size=3).shape == (3,)
    assert draws.normal(size=(0, 3)).shape == (0, 3)
    assert draws.integers(5, size=(2, 3)).shape == (2, 3)
    assert draws.categorical(Tensor(np.zeros((0, 3)))).shape == (0,)


def test_dropout_and_checkpoint_draw_from_the_default_generator() -> None:
    x = Tensor(np.ones((64, 64), "float32"), requires_grad=True)
    before = random.get_state()
    try:
        random.seed(1)
        first = tg.dropout(x, 0.25)
        random.seed(1)
        np.testing.assert_array_equal(first.numpy(), tg.dropout(x, 0.25).numpy())
        assert abs((first.numpy() != 0).mean() - 0.75) < 0.03
        random.seed(1)
        y = tensorgrad.checkpoint(lambda t: tg.dropout(t, 0.25))(x)
        tg.dropout(x, 0.5)
        after = random.get_state()
        y.sum().backward()
        assert random.get_state() == after
        np.testing.assert_array_equal(x.grad != 0, first.numpy() != 0)
    finally:
        random.set_state(before)


def test_bad_arguments() -> None:
    draws = Generator(0)
    with pytest.raises(ArgumentError, match=r"normal: loc is 0\.0 and scale -1, expected finite"):
        draws.normal(scale=-1)
    with pytest.raises(ArgumentError, match="normal: loc is nan"):
        draws.normal(math.nan)
    with pytest.raises(DtypeError, match="normal: dtype is int64, expected a float dtype"):
        draws.normal(size=3, dtype="int64")
    with pytest.raises(ArgumentError, match="uniform: low is 1 and high 1, expected finite low <"):
        draws.uniform(1, 1)
    with pytest.raises(ArgumentError, match="uniform: low is 0 and high inf"):
        draws.uniform(0, math.inf)
    with pytest.raises(DtypeError, match="uniform: dtype is bool, expected a float dtype"):
        draws.uniform(size=3, dtype="bool")
    with pytest.raises(ArgumentError, match="integers: low is 3 and high 3, expected -9223372036"):
        draws.integers(3, 3)
    with pytest.raises(
        ArgumentError, match=r"integers: low is 0 and high 300, .* <= 256 for uint8"
    ):
        draws.integers(300, dtype="uint8")
    with pytest.raises(DtypeError, match="integers: dtype is float32, expected an integer dtype"):
        draws.integers(3, dtype="float32")
    with pytest.raises(ArgumentError, match="uniform: low is 2 and high 1, expected finite low <"):
        draws.uniform(2, 1)
    for scale in (math.inf, math.nan):
        with pytest.raises(ArgumentError, match=rf"normal: loc is 0\.0 and scale {scale}"):
            draws.normal(0.0, scale)
    with pytest.raises(ArgumentError, match="integers: low is -1 and high 3, expected 0 <= low"):
        draws.integers(-1, 3, dtype="uint8")
    with pytest.raises(
        ArgumentError, match=r"integers: low is 0 and high 257, .* <= 256 for uint8"
    ):
        draws.integers(0, 257, dtype="uint8")
    with pytest.raises(ArgumentError, match=r"integers: high is 1\.5, expected an integer"):
        draws.integers(0, 1.5)  # type: ignore[arg-type]
    shapes: list[tuple[Callable[..., Any], tuple[int, ...]]] = [
        (draws.random, (2,)), (draws.standard_normal, (2,)), (draws.integers, (0, 9, 2)),
    ]  # fmt: skip
    for method, given in shapes:
        message = f"{method.__name__}: dtype is 3, .* such as size="
        with pytest.raises(ArgumentError, match=message):
            method(*given, 3)
    for method in (draws.normal, draws.uniform):  # NumPy's have no dtype
        with pytest.raises(TypeError, match="positional arguments"):
            method(0, 1, 2, "float32")  # type: ignore[call-arg]
    for probability in (-0.1, 1.1, math.nan):
        with pytest.raises(ArgumentError, match=r"bernoulli: probability is .*, expected 0 to 1"):
            draws.bernoulli(probability)
    with pytest.raises(ArgumentError, match="permutation: x is -1, expected 0 or more"):
        draws.permutation(-1)
    with pytest.raises(ArgumentError, match="permutation: x has no axes"):
        draws.permutation(Tensor(np.array(1.0)))
    with pytest.raises(DtypeError, match="categorical: logits has dtype int64, expected a float"):
        draws.categorical(Tensor(np.arange(3)))
    with pytest.raises(ArgumentError, match="categorical: axis is 1, expected -1 to 0"):
        draws.categorical(Tensor(np.ones(3)), axis=1)
    with pytest.raises(ArgumentError, match="permutation: axis is 1, expected -1 to 0"):
        draws.permutation(np.arange(3), 1)
    with pytest.raises(DtypeError, match="permutation: x is a float, expected an integer, tensor"):
        draws.permutation(3.5)
    with pytest.raises(ArgumentError, match=r"integers: low is 1\.5, expected an integer"):
        draws.integers(1.5)  # type: ignore[arg-type]
    for draw in (draws.normal, draws.uniform):
        with pytest.raises(ShapeError, match=r"size is .*-1.*, expected 0 or more"):
            draw(size=-1)
        with pytest.raises(ArgumentError, match=r"is \(2, 3\), expected a number; .* as size="):
            draw((2, 3))  # type: ignore[arg-type]
    for seed in (-1, 2**64, 0.5):
        with pytest.raises(ArgumentError, match=r"random: seed is .*, expected an integer from 0"):
            Generator(seed)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="random: draw is None, expected an integer"):
        draws.set_state({"seed": 1})
    assert draws.get_state() == {"seed": 0, "draw": 0, "stream": 0}  # errors take no draw


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (1023,), (70001,), (0, 3)], ids=str)
def test_devices_agree_in_every_bit(shape: Any) -> None:
    def results(device: str) -> list[Tensor]:
        draws = Generator(2**63 + 5, stream=2)
        found = [draws.normal(0.3, 1.7, shape, dtype=dtype, device=device) for dtype in FLOATS]
        found += [draws.uniform(-0.3, 1.1, shape, dtype=dtype, device=device) for dtype in FLOATS]
        for dtype in INTEGERS:
            limits = np.iinfo(dtype)
            found += [draws.integers(limits.min, int(limits.max) + 1, shape, dtype, device=device),
                      draws.integers(3, 77, shape, dtype, device=device)]  # fmt: skip
        found += [draws.bernoulli(p, shape, device=device) for p in (0.0, 0.3, 1.0)]
        found += [draws.permutation(math.prod(shape), device=device)]
        if shape:
            logits = np.random.default_rng(0).standard_normal(shape)
            for kind in FLOATS:
                array = backend.to_device(logits.astype(kind), device)
                found.append(draws.categorical(Tensor(array)))
        keep = backend.to_device(np.empty(shape, bool_), device)
        philox.fill_keep(keep, draws.next_key(), 0.9)
        return [*found, Tensor(keep)]

    for one, two in zip(results("cpu"), results("cuda"), strict=True):
        assert two.device == "cuda:0"
        assert one.dtype == two.dtype
        assert one.numpy().tobytes() == two.numpy().tobytes()


@pytest.mark.gpu
def test_the_tails_agree_too() -> None:
    found = Generator(1).normal(size=2**26, dtype=float64, device="cuda")
    z = found.numpy()
    assert np.abs(z).max() > 5.2
    np.testing.assert_array_equal(Generator(1).normal(size=2**26, dtype=float64).numpy(), z)


@pytest.mark.gpu
def test_a_draw_number_on_the_device_counts_too() -> None:
    cupy = backend.cupy
    y, z = cupy.empty(1000, "float32"), np.empty(1000, "float32")
    philox.fill_normal(y, Key(5, 2, offset=cupy.array([40], uint64)), 0, 1)
    philox.fill_normal(z, Key(5, 42), 0, 1)
    np.testing.assert_array_equal(cupy.asnumpy(y), z)


def test_the_count_of_draws_starts_again_after_the_largest() -> None:
    generator = random.Generator(seed=3)
    first = generator.normal(size=4).numpy()
    generator.set_state({"seed": 3, "draw": 2**64 - 1})
    last = generator.normal(size=4).numpy()
    assert generator.get_state()["draw"] == 0
    np.testing.assert_array_equal(generator.normal(size=4).numpy(), first)
    assert (first != last).all()


def test_default_rng_has_a_state_of_its_own() -> None:
    before = random.get_state()
    rng = random.default_rng(5)
    first = rng.standard_normal((2, 3)).numpy()
    np.testing.assert_array_equal(first, Generator(5).normal(size=(2, 3)).numpy())
    np.testing.assert_array_equal(
        Generator(5).random(7, "float64").numpy(), Generator(5).uniform(size=7, dtype="float64")
    )
    assert random.get_state() == before
    with pytest.raises(ArgumentError, match=r"random: seed is -1, expected an integer from 0"):
        random.default_rng(-1)


def test_a_captured_step_draws_from_the_default_generator_alone() -> None:
    with replaced(mode, capture=object()):
        for call, message in (
            (Generator(1).normal, "random: a captured step draws from a generator of its own"),
            (lambda: random.seed(1), r"random\.seed: called in a captured step, expected it bef"),
        ):
            with pytest.raises(GraphError, match=message):
                call()
        counted: Any = Generator(1)
        counted.offset = object()
        assert counted.next_key().offset is counted.offset


def test_probabilities_at_the_ends() -> None:
    assert not Generator(1).bernoulli(0, 50).numpy().any()
    assert Generator(1).bernoulli(1, 50).numpy().all()
    assert Generator(1).normal(2.5, 0, 3).tolist() == [2.5] * 3
    assert Generator(1).permutation(0).shape == (0,)
    assert sorted(Generator(1).permutation(np.int64(4)).tolist()) == [0, 1, 2, 3]
    assert Generator(1).permutation(4).dtype == np.int64
    assert sorted(Generator(1).choice(3, 3, replace=False).tolist()) == [0, 1, 2]
    assert sorted(Generator(1).choice(np.int64(2), 2, False, [1.0, 1.0]).tolist()) == [0, 1]
    assert Generator(1).choice(1).item() == 0
    assert Generator(1).choice(5, 9).shape == (9,)  # with replacement unless asked for
    assert random.default_rng().get_state() == {"seed": 0, "draw": 0, "stream": 0}
    with pytest.raises(AttributeError, match=r"tensorgrad\.random"):
        getattr(random, "nothing")  # noqa: B009


def test_permuted_moves_the_elements_of_each_row_on_their_own() -> None:
    x = np.arange(3000.0).reshape(3, 1000)
    y = Generator(3).permuted(x.T, axis=0).numpy().T
    np.testing.assert_array_equal(np.sort(y, 1), x)
    assert (np.argsort(y[0]) != np.argsort(y[1])).any()
    anywhere = Generator(3).permuted(x).numpy()
    np.testing.assert_array_equal(np.sort(anywhere, None), x.ravel())
    assert (np.sort(anywhere, 1) != x).any()
    assert Generator(3).permuted(np.empty((0, 3)), axis=1).shape == (0, 3)
    leaf = Tensor(x, requires_grad=True)
    Generator(3).permuted(leaf, axis=1).sum().backward()
    np.testing.assert_array_equal(leaf.grad, np.ones_like(x))
    with pytest.raises(ArgumentError, match="permuted: x has no axes"):
        Generator(3).permuted(np.array(1.0))
    with pytest.raises(ArgumentError, match="permuted: axis is 2, expected -2 to 1"):
        Generator(3).permuted(x, axis=2)


def test_choices(device: str) -> None:
    index = Generator(1).choice(5, (100, 20), device=device).numpy()
    assert index.dtype == np.int64
    assert set(index.ravel()) == set(range(5))
    once = Generator(1).choice(9, (3, 2), replace=False, device=device).numpy()
    assert once.shape == (3, 2)
    assert len(set(once.ravel())) == 6
    x = Tensor(backend.to_device(np.arange(12.0).reshape(3, 4), device))
    rows = Generator(2).choice(x, 5).numpy()
    assert rows.shape == (5, 4)
    assert {row[0] for row in rows} <= {0, 4, 8}
    columns = Generator(2).choice(x, (2, 2), axis=1).numpy()
    assert columns.shape == (3, 2, 2)
    assert Generator(2).choice(3, device=device).shape == ()
    assert Generator(2).choice(0, 0, device=device).shape == (0,)


def test_choices_by_probability(device: str) -> None:
    p = np.array([1.0, 0, 3, 6])
    index = Generator(1).choice(4, 40000, p=p, device=device).numpy()
    np.testing.assert_allclose(np.bincount(index, minlength=4) / 40000, p / 10, atol=0.01)
    orders = [Generator(n).choice(4, 2, False, p, device=device).numpy() for n in range(2000)]
    assert all(a != b and 1 not in (a, b) for a, b in orders)
    first = np.bincount([order[0] for order in orders], minlength=4) / 2000
    np.testing.assert_allclose(first, p / 10, atol=0.04)


def test_choices_that_are_refused() -> None:
    generator = Generator(1)
    calls: list[tuple[Any, Any, str]] = [
        (lambda: generator.choice(0), ArgumentError, "choice: a has 0 slices, expected at least"),
        (lambda: generator.choice(3, 4, replace=False), ArgumentError, "size is 4 without replace"),
        (lambda: generator.choice(3, p=[0.5, 0.5]), ShapeError, r"p has shape \(2,\), expected"),
        (lambda: generator.choice(2, p=[-1.0, 2]), ArgumentError, "expected numbers >= 0 of a fin"),
        (lambda: generator.choice(2, p=[0.0, 0]), ArgumentError, "choice: p sums to 0.0, expected"),
        (lambda: generator.choice(2, 2, False, [1.0, 0]), ArgumentError, "p has 1 numbers above 0"),
        (lambda: generator.choice("ab"), DtypeError, "choice: a is a str, expected an integer"),
        (lambda: generator.choice(np.array(3)), ArgumentError, "choice: a has no axes, expected"),
    ]
    for call, error, message in calls:
        with pytest.raises(error, match=message):
            call()
