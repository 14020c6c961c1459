"""The work that `tensorgrad bench kernels` measures, by family, beside the peers of each.

A family yields its jobs without making anything: arrays and PyTorch's functions come with `make`.
Numbers of rows are divided by a scale, for CPUs. Tests: tests/bench/test_kernels.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import product
from typing import Any

import numpy as np

from tensorgrad import nn, optim
from tensorgrad.amp import autocast
from tensorgrad.autograd.functions import jvp, vjp
from tensorgrad.bench.naive import naive_matmul
from tensorgrad.bench.timing import Call, random_array, to_torch
from tensorgrad.core import backend
from tensorgrad.core.dtypes import as_dtype, bfloat16, float32
from tensorgrad.core.record import no_grad
from tensorgrad.core.tensor import Tensor
from tensorgrad.kernels import matmul as matmul_cuda
from tensorgrad.kernels.matmul.problem import MatmulProblem, problem
from tensorgrad.ops import creation, elementwise, reduce
from tensorgrad.ops.attention import attention, attention_varlen
from tensorgrad.ops.attention_unfused import attention_unfused
from tensorgrad.ops.cross_entropy import cross_entropy
from tensorgrad.ops.decode import attend
from tensorgrad.ops.dropout import dropout, dropout_add, swiglu_dropout
from tensorgrad.ops.elementwise import activation
from tensorgrad.ops.embedding import embedding
from tensorgrad.ops.indexing import add_rows
from tensorgrad.ops.linear import linear, linear_gelu
from tensorgrad.ops.linear_cross_entropy import linear_cross_entropy
from tensorgrad.ops.matmul import matmul
from tensorgrad.ops.norm import layer_norm, rms_norm
from tensorgrad.ops.softmax import softmax

COMPILED = "compiled"
Shape = tuple[int, ...]
Shape4 = tuple[int, int, int, int]
_NARROW, _WIDE = "bfloat16", "float32"
_BOTH = {"forward": 2, "backward": 3}  # arrays that a function of one array moves


@dataclass
class Calls:
    """A measurement.

    Attributes:
        ours: our implementation.
        peers: of PEERS -> another one.
        first_order: value and backward alone, where ours computes their tangents too.
    """

    ours: Call
    peers: dict[str, Call] = field(default_factory=dict)
    first_order: Call | None = None


@dataclass(frozen=True)
class Job:
    """Work of a known amount.

    Attributes:
        name: of the work.
        size: of its operands.
        dtype: of its operands.
        amount: bytes that must at least move, or floating-point operations.
        make: returns the calls, given a device and PyTorch or None; raises NotImplementedError
            where the device has no such kernel.
        unit: "GB/s" or "TFLOP/s".
        memory: whether its peak memory is measured.
    """

    name: str
    size: str
    dtype: str
    amount: float
    make: Callable[[str, Any], Calls]
    unit: str = "GB/s"
    memory: bool = False


Jobs = Iterator[Job]
Family = Callable[[str, int], Iterable[Job]]  # takes a device and what divides numbers of rows


def _eager(torch: Any, function: Any) -> dict[str, Any]:
    return {"eager": function}


def _eager_and_compiled(torch: Any, function: Any) -> dict[str, Any]:
    """Return both; compilation begins with the first call, as not all are measured."""
    compiled = cache(lambda: torch.compile(function))
    return {"eager": function, COMPILED: lambda *operands: compiled()(*operands)}


@dataclass(frozen=True)
class TimedFunction:
    """A function whose forward and backward are jobs, and PyTorch's of the same formula.

    Attributes:
        name: of the jobs, without the direction.
        shapes: of its inputs, of which those like the first have fewer rows for a CPU.
        ours: takes tensors.
        moved: arrays like the first input, or operations, by direction: "forward", "backward" or
            "both".
        theirs: takes PyTorch and returns the function of its tensors; None: no peer.
        dtype: of its inputs.
        about: more words of the size than the first shape.
        variants: returns the peers by name, given PyTorch and that function.
        trained: whether each input has a gradient; default: all.
        recorded: whether forward keeps what backward needs.
        sets: of first inputs, so that none is found in the L2 cache.
        unit: "GB/s", or "TFLOP/s" where operations are given.
        fixed: returns arrays that follow the inputs, given the first shape and a device.
        unfused: the same of our own ops, a peer with the whole of `Tensor.backward`; None: none.
        shown: dtype of the rows, if not that of the inputs.
    """

    name: str
    shapes: tuple[Shape, ...]
    ours: Callable[..., Tensor]
    moved: Mapping[str, float]
    theirs: Callable[[Any], Callable[..., Any]] | None = None
    dtype: str = _NARROW
    about: str = ""
    variants: Callable[[Any, Any], dict[str, Any]] = _eager_and_compiled
    trained: tuple[bool, ...] = ()
    recorded: bool = True
    sets: int = 1
    unit: str = "GB/s"
    fixed: Callable[[Shape, str], list[Any]] = lambda shape, device: []
    unfused: Callable[..., Tensor] | None = None
    shown: str = ""

    def jobs(self, scale: int) -> Jobs:
        """Yield a job for each direction."""
        full, *_ = self.shapes
        first = _fewer(full, scale)
        shapes = tuple(first if shape == full else shape for shape in self.shapes)
        small, size = replace(self, shapes=shapes), f"{_size(*first)} {self.about}".strip()
        unit = _bytes(first, self.dtype) if self.unit == "GB/s" else 1
        for direction, amount in self.moved.items():
            make = partial(small._make, direction)
            name, dtype = f"{self.name} {direction}", self.shown or self.dtype
            yield Job(name, size, dtype, unit * amount, make, self.unit)

    def _inputs(self, device: str, leaf: Callable[[Any, bool], Any]) -> list[list[Any]]:
        """Return the inputs of each set; all but the first are shared."""
        arrays = [random_array(s, self.dtype, i, device) for i, s in enumerate(self.shapes)]
        firsts = [random_array(self.shapes[0], self.dtype, 100 + i, device)
                  for i in range(1, self.sets)]  # fmt: skip
        needs = self.trained or (True,) * len(arrays)
        fixed = [leaf(array, False) for array in self.fixed(self.shapes[0], device)]
        others = [leaf(a, n) for a, n in zip(arrays[1:], needs[1:], strict=True)] + fixed
        return [[leaf(first, needs[0]), *others] for first in (arrays[0], *firsts)]

    def _make(self, direction: str, device: str, torch: Any) -> Calls:
        sets = self._inputs(device, lambda a, need: Tensor(a, requires_grad=need))
        dys: list[Any] = []
        if direction != "forward":
            y = self.ours(*sets[0])
            dys = [
                random_array(y.shape, y.dtype, 200 + i, device)
                if y.ndim
                else creation.ones_like(y).data  # a loss, as in training
                for i in range(self.sets)
            ]

        def gradients(y: Any, leaves: list[Any], dy: Any) -> Any:
            needs = [edge is not None for edge in y.node.edges]
            return y.node.backward(dy, y.node.saved or (), needs)

        recording = nullcontext if self.recorded else no_grad
        calls = Calls(_call(direction, self.ours, sets, dys, recording, gradients))
        if torch is not None and self.theirs is not None:
            dtype, retain = getattr(torch, self.dtype), direction == "backward"

            def leaf(array: Any, need: bool) -> Any:
                tensor = to_torch(torch, array)
                floating = tensor.is_floating_point()
                return (tensor.to(dtype) if floating else tensor).requires_grad_(need)

            def torch_gradients(y: Any, leaves: list[Any], dy: Any) -> Any:
                wanted = [tensor for tensor in leaves if tensor.requires_grad]
                weight = to_torch(torch, dy).to(y.dtype)
                return torch.autograd.grad(y, wanted, weight, retain_graph=retain)

            both = self._inputs(device, leaf), dys
            record = partial(torch.set_grad_enabled, self.recorded)
            for name, function in self.variants(torch, self.theirs(torch)).items():
                calls.peers[name] = _call(direction, function, *both, record, torch_gradients)
        if (unfused := self.unfused) is not None:
            calls.peers["unfused"] = lambda _: unfused(*sets[0])
            if dys:
                theirs = unfused(*sets[0])
                calls.peers["unfused"] = lambda _: whole_backward(sets[0], dys[0], theirs)
        calls.peers = _supported(calls.peers)
        return calls


def _call(
    direction: str, function: Any, sets: list[Any], dys: list[Any], recording: Any, gradients: Any
) -> Call:
    """Return a call of a function on its sets of inputs, or of its gradients."""

    def forward(i: int) -> Any:
        with recording():
            return function(*sets[i % len(sets)])

    result = (cache if direction == "backward" else lambda f: f)(lambda n: function(*sets[n]))

    def backward(i: int) -> Any:
        place = i % len(sets)
        return gradients(result(place), sets[place], dys[place])

    return forward if direction == "forward" else backward


def whole_backward(leaves: list[Tensor], dy: Any, y: Tensor) -> None:
    """Compute the gradients of all leaves, as new arrays; the graph of y stays."""
    for leaf in leaves:
        leaf.grad = None
    y.backward(dy, retain_graph=True)


def operations(shape: Shape4, causal: bool) -> float:
    """Return the usual count of floating-point operations forward; backward has 2.5 times that.

    4 B H T^2 D, and half of it for a causal mask

    Args:
        shape: (B, H, T, D).
        causal: whether there is a causal mask.
    """
    batch, heads, length, width = shape
    return 4 * batch * heads * length**2 * width * (0.5 if causal else 1)


def _supported(peers: dict[str, Call]) -> dict[str, Call]:
    """Return the peers without kernels of attention that do not support an operand."""
    for name in {"flash-2", "cudnn", "efficient"} & peers.keys():
        try:
            peers[name](0)
        except RuntimeError:
            del peers[name]
    return peers


def _size(*shape: int) -> str:
    return " x ".join(map(str, shape))


def _fewer(shape: Shape, scale: int) -> Shape:
    """Return a shape with fewer rows, for a CPU."""
    return (max(1, shape[0] // scale), *shape[1:])


def _bytes(shape: Shape, dtype: str = _NARROW) -> int:
    return math.prod(shape) * as_dtype(dtype).itemsize


def _torch_function(name: str, **options: Any) -> Callable[[Any], Callable[..., Any]]:
    return lambda torch: partial(getattr(torch.nn.functional, name), **options)


def softmaxes() -> Iterator[TimedFunction]:
    """Yield softmax of the last axis."""
    for shape in ((32, 12, 1024, 1024), (8192, 50304), (8192, 50257)):
        theirs = _torch_function("softmax", dim=-1)
        yield TimedFunction("softmax", (shape,), softmax, _BOTH, theirs, variants=_eager)


def norms() -> Iterator[TimedFunction]:
    """Yield layer_norm of three widths, and rms_norm."""
    for width in (768, 1600, 4096):
        yield TimedFunction(
            "layer_norm", ((32768, width), (width,), (width,)), layer_norm, _BOTH,
            lambda torch: lambda x, w, b: torch.nn.functional.layer_norm(x, w.shape, w, b),
            sets=max(1, 2**29 // _bytes((32768, width))),  # together larger than the L2 cache
        )  # fmt: skip
    yield TimedFunction(
        "rms_norm", ((32768, 768), (768,)), rms_norm, {"forward": 2},
        lambda torch: lambda x, w: torch.nn.functional.rms_norm(x, w.shape, w, 1e-6),
    )  # fmt: skip


def elementwise_functions() -> Iterator[TimedFunction]:
    """Yield maps, zips and fused functions of 64M elements."""
    shape, gelu, tanh = (16384, 4096), activation.gelu, {"approximate": "tanh"}
    rows: Any = (  # name, ours, shapes, PyTorch's
        ("add", elementwise.add, (shape, shape), lambda torch: torch.add),
        ("gelu", partial(gelu, **tanh), (shape,), _torch_function("gelu", **tanh)),
        ("gelu erf", gelu, (shape,), _torch_function("gelu")),
        ("silu", activation.silu, (shape,), _torch_function("silu")),
        ("swiglu", activation.swiglu, (shape, shape),
         lambda torch: lambda x, y: torch.nn.functional.silu(x) * y),
        ("bias_gelu", activation.bias_gelu, (shape, shape[1:]),
         lambda torch: lambda x, b: torch.nn.functional.gelu(x + b, **tanh)),
    )  # fmt: skip
    for dtype, (name, ours, shapes, theirs) in product((_NARROW, _WIDE), rows):
        large = shapes.count(shape)
        moved = {"forward": large + 1, "backward": 2 * large + 1}
        if name == "add":
            del moved["backward"]
        yield TimedFunction(name, shapes, ours, moved, theirs, dtype, recorded=False)


def dropouts() -> Iterator[TimedFunction]:
    """Yield dropout alone, with a residual, with a bias too, and of SwiGLU."""
    shape, p = (16384, 4096), 0.1

    def theirs(torch: Any) -> Any:
        def function(x: Any, residual: Any = None, bias: Any = None) -> Any:
            dropped = torch.nn.functional.dropout(x if bias is None else x + bias, p)
            return dropped if residual is None else residual + dropped

        return function

    rows: Any = (  # name, ours, number of inputs, arrays moved, PyTorch's
        ("dropout", lambda x: dropout(x, p), 1, {"forward": 2}, theirs),
        ("dropout", lambda x, residual: dropout_add(x, residual, p=p), 2, {"backward": 2}, None),
        ("dropout + residual", lambda x, r: dropout_add(x, r, p=p), 2, {"forward": 3}, theirs),
        ("bias + dropout + residual", lambda x, r, bias: dropout_add(x, r, p=p, bias=bias), 3,
         {"forward": 3}, theirs),
        ("swiglu + dropout", lambda gate, up: swiglu_dropout(gate, up, p), 2,
         {"forward": 3, "backward": 5}, None),
    )  # fmt: skip
    for dtype, (name, ours, count, moved, peer) in product((_NARROW, _WIDE), rows):
        shapes, trained = (shape, shape, shape[1:]), (True, name.startswith("swiglu"), False)
        yield TimedFunction(
            name, shapes[:count], ours, moved, peer, dtype, trained=trained[:count], recorded=False
        )


def reductions() -> Iterator[TimedFunction]:
    """Yield reductions of 1 GB."""
    rows: Any = (  # 0: the length that makes 1 GB
        *(("sum", None, (0,)), ("sum", -1, (0, 1024)), ("sum", -1, (0, 50257))),
        *(("sum", -1, (0, 33)), ("sum", 0, (0, 1024)), ("sum", 0, (0, 1000))),
        *(("sum", 1, (0, 512, 1024)), ("sum", 1, (0, 512, 33)), ("mean", -1, (0, 1024))),
        *(("max", -1, (0, 1024)), ("max", None, (0,)), ("argmax", -1, (0, 1024))),
        *(("argmax", None, (0,)), ("argmax", 0, (0, 1024)), ("var", -1, (0, 1024))),
        *(("var", None, (0,)), ("var", 0, (0, 1024)), ("norm", None, (0,))),
        ("logsumexp", -1, (0, 1024)),
    )
    for dtype, (name, axis, (_, *lengths)) in product((_WIDE, _NARROW), rows):
        shape = 2**30 // _bytes(tuple(lengths), dtype), *lengths
        yield TimedFunction(
            name, (shape,), partial(getattr(reduce, name), axis=axis), {"forward": 1},
            partial(_torch_reduction, name=name, axis=axis), dtype, f"axis {axis}", _eager,
            (False,),
        )  # fmt: skip


def _torch_reduction(torch: Any, name: str, axis: int | None) -> Any:
    function = {"max": torch.amax, "norm": torch.linalg.vector_norm}.get(name)
    function = function or getattr(torch, name)
    return function if axis is None else partial(function, dim=axis)


def fused_functions() -> Iterator[TimedFunction]:
    """Yield fused ops beside the same formulas of our own ops."""
    exp, maximum, total, mean = elementwise.exp, reduce.max, reduce.sum, reduce.mean

    def unfused_softmax(x: Tensor) -> Tensor:
        powers = exp(x - maximum(x, -1, keepdims=True))
        return powers / total(powers, -1, keepdims=True)

    @cache
    def seen(size: int, device: str) -> Tensor:
        return creation.tril(creation.ones((size, size), "bool", device=device))

    def unfused_scores(x: Tensor) -> Tensor:
        mask = seen(x.shape[-1], x.device)
        return unfused_softmax(elementwise.where(mask, x * 0.125, float("-inf")))

    def unfused_layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        centred = x - mean(x, -1, keepdims=True)
        variance = mean(centred * centred, -1, keepdims=True)
        return centred / elementwise.sqrt(variance + 1e-5) * weight + bias

    scores = partial(softmax, scale=0.125, causal=True)
    rows: Any = (  # name, fused, unfused, shapes
        ("softmax", softmax, unfused_softmax, ((2**18, 1024),)),
        ("softmax", softmax, unfused_softmax, ((2048, 256),)),
        ("attention softmax", scores, unfused_scores, ((256, 1024, 1024),)),
        ("attention softmax", scores, unfused_scores, ((64, 128, 128),)),
        ("layer_norm", layer_norm, unfused_layer_norm, ((2**17, 768), (768,), (768,))),
        ("layer_norm", layer_norm, unfused_layer_norm, ((2048, 256), (256,), (256,))),
    )
    for dtype, (name, fused, unfused, shapes) in product((_WIDE, _NARROW), rows):
        yield TimedFunction(name, shapes, fused, _BOTH, dtype=dtype, unfused=unfused)


def cross_entropies() -> Iterator[TimedFunction]:
    """Yield the loss with its gradient, and the loss alone, for GPT-2's vocabulary."""
    for columns in (50304, 50257):  # padded and not
        for moved, theirs in (
            ({"both": 2}, _torch_function("cross_entropy")), ({"forward": 1}, None),
        ):  # fmt: skip
            yield TimedFunction(
                "cross_entropy", ((8192, columns),), cross_entropy, moved, theirs, recorded=False,
                fixed=_targets,
            )  # fmt: skip


def _targets(shape: Shape, device: str) -> list[Any]:
    rows, columns = shape
    return [backend.to_device(np.random.default_rng(0).integers(0, columns, rows), device)]


def linear_cross_entropy_jobs(device: str, scale: int) -> Jobs:
    """Yield head and loss of a GPT-2, forward and backward, with peak memory."""
    sizes = max(1, 32 * 1024 // scale), 768, max(2, 50304 // scale)
    yield Job("head and loss", _size(*sizes), _NARROW, 6 * math.prod(sizes),
              partial(_head_and_loss, sizes), "TFLOP/s", True)  # fmt: skip


def _head_and_loss(sizes: tuple[int, int, int], device: str, torch: Any) -> Calls:
    rows, width, columns = sizes
    table = 0.02 * random_array((columns, width), _WIDE, 1, device)
    arrays = random_array((rows, width), _NARROW, 0, device), table.astype(bfloat16)
    x, weight = (Tensor(array, requires_grad=True) for array in arrays)
    [targets] = _targets((rows, columns), device)
    for leaf in (x, weight):
        leaf.grad = backend.namespace(leaf.data).zeros(leaf.shape, float32)
    calls = Calls(lambda _: linear_cross_entropy(x, weight, targets).backward())
    calls.peers["unfused"] = lambda _: cross_entropy(linear(x, weight), targets).backward()
    if torch is not None:
        a, b, y = (to_torch(torch, array) for array in (*arrays, targets))
        leaves = a.clone().requires_grad_(True), b.clone().requires_grad_(True)

        def loss(x: Any, weight: Any) -> Any:
            return torch.nn.functional.cross_entropy(x @ weight.T, y)

        for name, function in _eager_and_compiled(torch, loss).items():
            calls.peers[name] = partial(lambda f, _: f(*leaves).backward(), function)
    return calls


def optimizer_jobs(device: str, scale: int) -> Jobs:
    """Yield optimizer steps of 120M parameters, and the global norm of their gradients.

    The least bytes for a parameter: AdamW in float32 reads p, m, v and the gradient and writes p, m
    and v, 4 bytes each: 28. With bfloat16 parameters too, as p is in two halves of 2 bytes. SGD has
    no m and v: 12; momentum adds one: 20. Clipping reads the gradient once more, for its norm: 4.
    """
    count = max(1, 114 // scale)
    size = f"{count * _SIDE**2 / 1e6:.0f}M"
    for name, dtype, moved in (
        ("AdamW", _WIDE, 28), ("AdamW", _NARROW, 28), ("SGD", _WIDE, 12),
        ("SGD, Nesterov", _WIDE, 20),
    ):  # fmt: skip
        kinds = ("", ", clipped", ", clipped, scaled") if name == "AdamW" else ("",)
        for kind in kinds:
            make = partial(_optimizer, name, count, dtype, kind)
            amount = (moved + 4 * bool(kind)) * count * _SIDE**2
            yield Job(f"{name}{kind}", size, dtype, amount, make)
    make = partial(_optimizer, "SGD", count, _WIDE, "norm")
    yield Job("norm of gradients", size, _WIDE, 4 * count * _SIDE**2, make)


_SIDE = 1024  # rows and columns of the matrices that are optimized
_OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {  # the names in both libraries
    "AdamW": ("AdamW", {}),
    "SGD": ("SGD", {"lr": 1e-3}),
    "SGD, Nesterov": ("SGD", {"lr": 1e-3, "momentum": 0.9, "nesterov": True}),
}


def _optimizer(name: str, count: int, dtype: str, kind: str, device: str, torch: Any) -> Calls:
    tensors = [
        Tensor(random_array((_SIDE, _SIDE), dtype, i, device), requires_grad=True)
        for i in range(count)
    ]
    stem, options = _OPTIMIZERS[name]
    optimizer = getattr(optim, stem)([(f"weight{i}", t) for i, t in enumerate(tensors)], **options)
    optimizer.flat.grad[...] = random_array((count * _SIDE**2,), device=device)
    if kind == "norm":
        return Calls(lambda _: optim.grad_norm(optimizer.flat))
    given: dict[str, Any] = {"max_norm": 1.0} if kind else {}
    if "scaled" in kind:
        given["scaler"] = optim.LossScaler(1.0)

    def ours(_: int) -> None:
        optimizer.step(**given)

    if torch is None or dtype != _WIDE or "scaled" in kind:
        return Calls(ours)
    parameters = [torch.nn.Parameter(torch.randn(_SIDE, _SIDE, device=device)) for _ in tensors]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    peer = getattr(torch.optim, stem)(parameters, fused=True, **options)

    def theirs(_: int) -> None:
        if kind:
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        peer.step()

    return Calls(ours, {"fused": theirs})


_SETS = 4  # sets of ids, so that none is found in the L2 cache


def embedding_jobs(device: str, scale: int) -> Jobs:
    """Yield token and position embeddings of GPT-2, and rotary positions.

    Ids have Zipf's distribution, as words have; and one id is frequent.
    """
    batch, steps, width, heads = max(1, 32 // scale), max(2, 1024 // scale), 768, 12
    words = max(16, 50304 // scale)
    size = 2 * batch * steps * width
    for name, often in (("words", False), ("one id 20,000 times", True)):
        different = np.unique(_ids(words, batch, steps, often)[0]).size * width
        for direction, amount in (("forward", 2 * size), ("backward", size + 8 * different)):
            make = partial(_embedding, words, (batch, steps, width), often, direction == "backward")
            title = "embedding + positions" if direction == "forward" else "embedding backward"
            yield Job(title, name, _NARROW, amount, make)

    shape = (batch, steps, 3 * heads, width // heads)

    def rotary(x: Tensor) -> Any:
        return nn.RotaryEmbedding(width // heads)(x, 0, 2 * heads)

    function = TimedFunction(
        "rotary, q and k of q, k, v", (shape,), rotary, {"forward": 2}, trained=(False,), sets=_SETS
    )
    yield from function.jobs(1)


@cache
def _ids(words: int, batch: int, steps: int, often: bool) -> Any:
    frequency = 1 / np.arange(1, words + 1) ** 1.05
    shape = _SETS, batch, steps
    ids = np.random.default_rng(0).choice(words, shape, p=frequency / frequency.sum())
    if often:
        ids = np.where(np.random.default_rng(1).random(shape) < 20000 / (32 * 1024), 7, ids)
    return ids


def _embedding(words: int, sizes: Shape, often: bool, back: bool, device: str, torch: Any) -> Calls:
    batch, steps, width = sizes
    weight, positions = (Tensor(random_array((n, width), _NARROW, i, device), requires_grad=True)
                         for i, n in enumerate((words, steps)))  # fmt: skip
    dys = [random_array(sizes, _NARROW, 2 + i, device) for i in range(_SETS)]
    ids = backend.to_device(_ids(words, batch, steps, often), device)
    sums = random_array((words, width), device=device)

    def forward(i: int) -> Tensor:
        with no_grad():
            return embedding(weight, ids[i % _SETS], positions)

    def backward(i: int) -> None:
        add_rows(sums, ids[i % _SETS].reshape(-1), dys[i % _SETS].reshape(-1, width))

    if torch is None:
        return Calls(backward if back else forward)
    table, rows, tokens = (to_torch(torch, a) for a in (weight.data, positions.data, ids))
    look_up = torch.nn.functional.embedding
    if not back:
        functions = _eager_and_compiled(torch, lambda ids, w, p: look_up(ids, w) + p)
        call = lambda f, i: f(tokens[i % _SETS], table, rows)  # noqa: E731
        return Calls(forward, {name: partial(call, f) for name, f in functions.items()})
    leaf = table.clone().requires_grad_(True)
    outputs = [look_up(tokens[i], leaf) for i in range(_SETS)]
    dy = to_torch(torch, dys[0])
    return Calls(backward, {
        "eager": lambda i: torch.autograd.grad(outputs[i % _SETS], leaf, dy, retain_graph=True)
    })  # fmt: skip


_PRODUCTS = (  # rows, columns, terms of each sum
    *((8192, 8192, 8192), (32768, 2304, 768), (32768, 768, 768), (32768, 3072, 768)),
    *((32768, 768, 3072), (32768, 50304, 768), (16384, 6400, 1600)),
)


def matmul_jobs(device: str, scale: int) -> Jobs:
    """Yield matrix products x W^T of GPT-2's sizes, by every kernel of a GPU.

    The naive kernel does the first as x W, so that its threads read neighbours. In TF32 "chosen" is
    what `autocast("tf32")` takes; PyTorch may use TF32 there. On a CPU there is NumPy's product
    alone.
    """
    ways: tuple[tuple[str, bool, tuple[str, ...]], ...] = ((_WIDE, False, ("chosen",)),)
    if device != "cpu":
        ways = (
            (_NARROW, False, ("wgmma", "tiled", "cublas")),
            (_WIDE, True, ("chosen", "tiled")),  # the choice of autocast, and mma.sync
            (_WIDE, False, ("tiled", "cublas")),
        )
        rows, columns, terms = _PRODUCTS[0]
        shape = max(1, rows // scale), columns, terms
        yield _product_job("matmul naive", shape, _WIDE, partial(_naive_matmul, shape))
    for (dtype, tf32, kernels), (rows, columns, terms) in product(ways, _PRODUCTS):
        shape = max(1, rows // scale), columns, terms
        for kernel in kernels:
            make = partial(_matmul, shape, dtype, tf32, kernel)
            yield _product_job(f"matmul {kernel}", shape, "tf32" if tf32 else dtype, make)
    for back in (False, True) if device != "cpu" else ():
        for rows, dtype, calls in (
            (32768, _NARROW, _kept_derivative), (16384, "tf32", _tf32_gelu)
        ):  # fmt: skip
            name = f"gelu, {'backward' if back else 'forward'}"
            yield _product_job(name, (rows, 3072, 768), dtype, partial(calls, back))


def _product_job(name: str, shape: Shape, dtype: str, make: Any) -> Job:
    return Job(name, _size(*shape), dtype, 2 * math.prod(shape), make, "TFLOP/s")


def _product(p: MatmulProblem, kernel: str | None) -> Call:
    return lambda _: matmul_cuda.run(p, kernel)


def _matmul(shape: Shape, dtype: str, tf32: bool, kernel: str, device: str, torch: Any) -> Calls:
    rows, columns, terms = shape
    x, w = (random_array((n, terms), dtype, i, device) for i, n in enumerate((rows, columns)))
    if device == "cpu":
        left, right = Tensor(x), Tensor(w.T)
        calls = Calls(lambda _: matmul(left, right))
        y = np.empty((rows, columns), x.dtype)
    else:
        y = backend.empty((rows, columns), as_dtype(dtype), x)
        p = problem(x, w.T, y, tf32=tf32)
        refusal = None if kernel == "chosen" else matmul_cuda.KERNELS[kernel].refusal(p)
        if refusal is not None:
            raise NotImplementedError(f"{kernel}: {refusal}")
        calls = Calls(_product(p, None if kernel == "chosen" else kernel))
    if torch is not None:
        a, b, out = (to_torch(torch, array) for array in (x, w, y))

        def eager(_: int) -> None:
            torch.backends.cuda.matmul.allow_tf32 = tf32
            torch.mm(a, b.T, out=out)

        calls.peers["eager"] = eager
    return calls


def _naive_matmul(shape: Shape, device: str, torch: Any) -> Calls:
    rows, columns, terms = shape
    x, w = (
        random_array(size, _WIDE, i, device)
        for i, size in enumerate(((rows, terms), (terms, columns)))
    )
    calls = Calls(lambda _: naive_matmul(x, w))
    if torch is not None:
        a, b = (to_torch(torch, array) for array in (x, w))

        def eager(_: int) -> None:
            torch.backends.cuda.matmul.allow_tf32 = False
            torch.mm(a, b)

        calls.peers["eager"] = eager
    return calls


def _tf32_gelu(back: bool, device: str, torch: Any) -> Calls:
    """Return a product of a feed-forward block that ends with GELU, and with GELU as an op."""
    rows, hidden, width = 16384, 3072, 768
    x, up, bias, before = (
        Tensor(random_array(shape, _WIDE, i, device), requires_grad=True)
        for i, shape in enumerate(((rows, width), (hidden, width), (hidden,), (rows, hidden)))
    )

    def forward(fused: bool) -> Tensor:
        with autocast("tf32"):
            if fused:
                return linear_gelu(x, up, bias)
            return activation.gelu(linear(x, up, bias), approximate="tanh")

    if not back:
        return Calls(lambda _: forward(True), {"unfused": lambda _: forward(False)})
    node = activation.gelu(before, approximate="tanh").node
    assert node is not None
    saved, dx = node.saved or (), backend.empty((rows, hidden), float32, x.data)
    p = problem(x.data, backend.contiguous(up.data.T), dx)

    def separate(_: int) -> None:
        matmul_cuda.run(p, "tf32")
        node.backward(dx, saved, (True,))

    return Calls(_product(p._replace(gelu_of=before.data), "tf32"), {"unfused": separate})


def _kept_derivative(back: bool, device: str, torch: Any) -> Calls:
    """Return a product that ends with GELU and keeps its derivative, or with that derivative."""
    rows, hidden, width = 32768, 3072, 768
    x, up, bias, down = (
        random_array(shape, _NARROW, i, device)
        for i, shape in enumerate(((rows, width), (hidden, width), (hidden,), (width, hidden)))
    )
    p = problem(x, up.T, backend.empty((rows, hidden), bfloat16, x), bias=bias, gelu=True)
    kept = matmul_cuda.derivative_for(p)
    if kept is None:
        raise NotImplementedError("this GPU keeps the operand of GELU, not its derivative")
    forward = _product(p._replace(derivative=kept), None)
    forward(0)
    return Calls(lambda _: matmul_cuda.times_derivative(x, down, kept)) if back else Calls(forward)


def attention_jobs(device: str, scale: int) -> Jobs:
    """Yield forward and backward of attention over (B, H, S, D), options, and unfused attention.

    Peers are FlashAttention-2 and cuDNN's of PyTorch, in TF32 and with a mask its
    memory-efficient kernels.
    """
    plain = (
        *((1, 12, 8192, 64), (1, 12, 16384, 64), (32, 12, 1024, 64), (8, 16, 4096, 128)),
        *((2, 16, 16384, 128), (8, 16, 4096, 32), (8, 16, 4096, 96), (4, 8, 4096, 256)),
    )
    short = ((682, 8, 24, 64), (256, 8, 64, 64))
    wide = ((16, 12, 1024, 64), (4, 16, 4096, 64), (4, 16, 4096, 128))
    groups = (
        (plain, ("causal", "full"), _NARROW), (short, ("causal", "full", "mask"), _NARROW),
        (wide, ("causal", "full"), "tf32" if device != "cpu" else _WIDE),
    )  # fmt: skip

    def smaller(shape: Shape) -> Shape4:
        """Return a shape with fewer sequences and then shorter ones, for a CPU."""
        batch, heads, length, width = shape
        return max(1, batch // scale), heads, max(8, length // scale), width

    for shapes, kinds, dtype in groups:
        for full, kind in product(shapes, kinds):
            beside = kind == "causal" and full in plain[:3]
            yield from _attention(smaller(full), kind, dtype, beside)
    shape = smaller((4, 16, 4096, 128))
    batch, heads, length, width = shape
    causal, rows = partial(attention, causal=True), (batch * length, heads, width)
    options: Any = (  # name, function, shape of an input, what follows the inputs
        ("plain", causal, shape, lambda xp: []),
        ("window 512", partial(causal, window=512), shape, lambda xp: []),
        ("padding mask", causal, shape,
         lambda xp: [xp.arange(length)[None, None, None] < 0.98 * length]),
        ("dropout", partial(causal, dropout=0.1), shape, lambda xp: []),
        ("varlen", partial(attention_varlen, max_length=length, causal=True), rows,
         lambda xp: [xp.arange(0, batch * length + 1, length, dtype="int32")]),
    )  # fmt: skip
    for option, function, operand, extra in options:
        for job in TimedFunction(
            f"attention {option}", (operand,) * 3, function, {"forward": operations(shape, True)},
            trained=(False,) * 3, unit="TFLOP/s", fixed=partial(_with_namespace, extra),
        ).jobs(1):  # fmt: skip
            yield replace(job, size=f"{_size(*shape)} causal")


def _with_namespace(function: Callable[[Any], list[Any]], shape: Shape, device: str) -> list[Any]:
    return function(backend.namespace_on(device))


def _attention(shape: Shape4, kind: str, dtype: str, beside: bool) -> Jobs:
    """Yield forward and backward, with `beside` next to ops that store the matrix of weights.

    A "mask" hides half of the keys, others in each sequence.
    """
    causal, tf32 = kind == "causal", dtype == "tf32"

    def mask(shape: Shape, device: str) -> list[Any]:
        if kind != "mask":
            return []
        batch, _, length, _ = shape
        scores = random_array((batch, 1, length, length), _WIDE, 4, device)
        hidden = backend.namespace_on(device).where(scores > 0, 0, -math.inf).astype("float32")
        hidden[..., 0] = 0
        return [hidden]

    def ours(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        with autocast("tf32", enabled=tf32):
            return attention(q, k, v, mask, causal=causal)

    def theirs(torch: Any) -> Any:
        if tf32:
            torch.backends.cuda.matmul.allow_tf32 = True
        attend_torch = torch.nn.functional.scaled_dot_product_attention
        return lambda q, k, v, mask=None: attend_torch(q, k, v, mask, is_causal=causal)

    def variants(torch: Any, function: Any) -> dict[str, Any]:
        if not torch.cuda.is_available():
            return {"eager": function}
        kinds = torch.nn.attention.SDPBackend
        names = {"flash-2": kinds.FLASH_ATTENTION, "cudnn": kinds.CUDNN_ATTENTION}
        if tf32 or kind == "mask":  # FlashAttention takes no mask
            names = {"efficient": kinds.EFFICIENT_ATTENTION, "cudnn": kinds.CUDNN_ATTENTION}
        if tf32:
            del names["cudnn"]

        def by(backend: Any, *operands: Any) -> Any:
            with torch.nn.attention.sdpa_kernel(backend):
                return function(*operands)

        return {name: partial(by, function) for name, function in names.items()}

    amount = operations(shape, causal)
    yield from TimedFunction(
        "attention", (shape,) * 3, ours, {"forward": amount, "backward": 2.5 * amount}, theirs,
        _WIDE if tf32 else dtype, kind, variants, unit="TFLOP/s", fixed=mask, shown=dtype,
        unfused=partial(attention_unfused, causal=True) if beside else None,
    ).jobs(1)  # fmt: skip


def second_order_jobs(device: str, scale: int) -> Jobs:
    """Yield value, tangent and the backward of both, as in a Hessian-vector product.

    PyTorch computes as much by reverse over reverse: value, gradient and the gradients of that; of
    attention with the math backend, which alone it differentiates twice, where memory allows.
    """
    attend = partial(attention, causal=True)
    for shape in ((4, 16, 4096, 64), (4, 16, 4096, 128), (1, 16, 16384, 64), (1, 16, 16384, 128)):
        batch, heads, length, width = shape
        small = max(1, batch // scale), heads, max(8, length // scale), width
        amount = (2 + 5 + 5 + 13) / 4 * operations(small, True)  # products of the four kernels
        theirs = _math_attention if length == 4096 else None
        make = partial(_second_order, attend, (small,) * 3, theirs)
        yield Job("attention", _size(*small), _NARROW, amount, make, "TFLOP/s")
    rows, width, hidden, columns = max(1, 16384 // scale), 768, 3072, max(2, 50304 // scale)
    sizes, wide = (rows, width), _size(rows, width)
    arrays = 2 + 3 + 5  # read x, write y; read x and its tangent, write; read both and their dy
    for name, norm, count, peer in (
        ("layer_norm", layer_norm, 2, lambda torch: lambda x, w, b: torch.nn.functional.layer_norm(
            x, w.shape, w, b)),
        ("rms_norm", rms_norm, 1, lambda torch: lambda x, w: torch.nn.functional.rms_norm(
            x, w.shape, w, 1e-6)),
    ):  # fmt: skip
        make = partial(_second_order, norm, (sizes,) + ((width,),) * count, peer)
        yield Job(name, wide, _NARROW, arrays * _bytes(sizes), make)
    products = 2 * (1 + 2 + 2 + 2 + 2 + 2)  # forward, its tangent, both gradients of each
    make = partial(
        _second_order, linear_gelu, (sizes, (hidden, width), (hidden,)),
        lambda torch: lambda x, w, b: torch.nn.functional.gelu(
            torch.nn.functional.linear(x, w, b), approximate="tanh"),
    )  # fmt: skip
    amount = products * rows * width * hidden
    yield Job("linear_gelu", f"{wide} x {hidden}", _NARROW, amount, make, "TFLOP/s")

    def loss(x: Tensor, weight: Tensor) -> Tensor:
        [targets] = _targets((x.shape[0], weight.shape[0]), device)
        return linear_cross_entropy(x, weight, targets)

    def torch_loss(torch: Any) -> Any:
        [targets] = _targets((rows, columns), device)
        cross = torch.nn.functional.cross_entropy
        return lambda x, weight: cross(x @ weight.T, to_torch(torch, targets))

    make = partial(_second_order, loss, (sizes, (columns, width)), torch_loss)
    amount = products * rows * width * columns
    yield Job("head and loss", f"{wide} x {columns}", _NARROW, amount, make, "TFLOP/s")


def _math_attention(torch: Any) -> Callable[..., Any]:
    def function(q: Any, k: Any, v: Any) -> Any:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    return function


def _second_order(
    function: Callable[..., Tensor], shapes: Sequence[Shape],
    theirs: Callable[[Any], Callable[..., Any]] | None, device: str, torch: Any,
) -> Calls:  # fmt: skip
    """Return value, tangent and the backward of both."""

    def new(shape: Shape, seed: int) -> Any:
        return random_array(shape, _NARROW, seed, device)

    inputs, tangents = (
        tuple(Tensor(new(shape, seed + i)) for i, shape in enumerate(shapes)) for seed in (0, 10)
    )
    y = function(*inputs)
    dy, dtangent = (Tensor(random_array(y.shape, y.dtype, seed, device)) for seed in (20, 21))

    def first_order(_: int) -> None:
        _y, pullback = vjp(function, *inputs)
        pullback(dy)

    def ours(_: int) -> None:
        _pair, pullback = vjp(lambda *x: jvp(function, x, tangents), *inputs)
        pullback((dy, dtangent))

    calls = Calls(ours, first_order=first_order)
    if torch is None or theirs is None:
        return calls
    leaves, others = ([to_torch(torch, t.data) for t in each] for each in (inputs, tangents))
    weight = to_torch(torch, dy.data)
    for leaf in (*leaves, weight):
        leaf.requires_grad_(True)

    def eager(_: int) -> None:
        gradients = torch.autograd.grad(theirs(torch)(*leaves), leaves, weight, create_graph=True)
        torch.autograd.grad(gradients, (*leaves, weight), others, allow_unused=True)  # a bias

    calls.peers["eager"] = eager
    return calls


def decode_jobs(device: str, scale: int) -> Jobs:
    """Yield attention of one token of each sequence against a cache of keys and values."""
    for batch, heads, kv_heads, steps, width in (
        (1, 12, 12, 1024, 64), (1, 12, 12, 32768, 64), (32, 12, 12, 1024, 64),
        (32, 12, 12, 8192, 64), (1, 32, 8, 32768, 128), (16, 32, 8, 8192, 128),
    ):  # fmt: skip
        shape = max(1, batch // scale), heads, kv_heads, max(2, steps // scale), width
        moved = 4 * shape[0] * kv_heads * shape[3] * width
        yield Job("attention to a cache", _size(*shape), _NARROW, moved, partial(_decode, shape))


def _decode(shape: tuple[int, int, int, int, int], device: str, torch: Any) -> Calls:
    batch, heads, kv_heads, steps, width = shape
    qkv = random_array((batch, (heads + 2 * kv_heads) * width), _NARROW, 0, device)
    sets = max(1, int(2e8 // (4 * batch * kv_heads * steps * width)))  # more than the L2 cache
    sets = 1 if device == "cpu" else sets
    keys, values = (random_array((sets, batch, kv_heads, steps, width), _NARROW, seed, device)
                    for seed in (1, 2))  # fmt: skip
    lengths = backend.to_device(np.full(batch, steps - 1, np.int32), device)
    counters = backend.to_device(np.zeros(batch * heads, np.uint32), device)

    def ours(i: int) -> None:
        attend(qkv, keys[i % sets], values[i % sets], lengths, counters=counters)

    if torch is None:
        return Calls(ours)
    q, k, v = (to_torch(torch, a) for a in (qkv[:, : heads * width], keys, values))
    q = q.reshape(batch, heads, 1, width)
    function, grouped = torch.nn.functional.scaled_dot_product_attention, heads != kv_heads
    theirs: Call = lambda i: function(q, k[i % sets], v[i % sets], enable_gqa=grouped)  # noqa: E731
    return Calls(ours, {"eager": theirs})


def _scaled(functions: Callable[[], Iterator[TimedFunction]], device: str, scale: int) -> Jobs:
    """Yield the jobs of functions, with fewer rows."""
    for function in functions():
        yield from function.jobs(scale)


FAMILIES: dict[str, Family] = {
    "norm": partial(_scaled, norms), "softmax": partial(_scaled, softmaxes),
    "reduce": partial(_scaled, reductions), "fused": partial(_scaled, fused_functions),
    "cross_entropy": partial(_scaled, cross_entropies),
    "linear_cross_entropy": linear_cross_entropy_jobs, "optimizers": optimizer_jobs,
    "elementwise": partial(_scaled, elementwise_functions), "dropout": partial(_scaled, dropouts),
    "embedding": embedding_jobs, "matmul": matmul_jobs, "attention": attention_jobs,
    "decode": decode_jobs, "second_order": second_order_jobs,
}  # fmt: skip
