"""Tables of the pages of the reference: dtypes, errors, kernels; tests/figures.py hands them on.

Tests: tests/test_results.py, which renders them, and tests/test_reference.py.
"""

from __future__ import annotations

import ast
import inspect
import logging
import math
import re
import warnings
from collections.abc import Callable, Mapping
from contextlib import chdir
from logging.handlers import BufferingHandler
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

import tensorgrad as tg
from tensorgrad import data, dtypes, errors, fft, nn, optim
from tensorgrad.cli import main
from tensorgrad.io.readers import read_json
from tensorgrad.io.tables import to_markdown
from tensorgrad.nn import functional as F
from tests.source_tree import ROOT, library

# Dtypes.

NAMES = (
    *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
)
assert {*NAMES} == {str(dtype) for dtype in (*dtypes.ALL, *dtypes.COMPLEX)}


def dtype_of(call: Callable[[], Any]) -> str:
    """Return the dtype of a result, or the error that the call raises."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", errors.WideningWarning)
        try:
            return str(call().dtype)
        except errors.TensorgradError as error:
            return type(error).__name__


def promotion() -> str:
    """Return the dtype of the product of each pair of dtypes; * where `result_type` has none."""
    rows = []
    for a in NAMES:
        cells = []
        for b in NAMES:
            product = dtype_of(lambda a=a, b=b: tg.ones(1, a) * tg.ones(1, b))  # type: ignore[misc]
            try:
                assert product == str(tg.result_type(a, b))
            except errors.DtypeError:
                product += " \\*"
            cells.append(product)
        rows.append([f"`{a}`", *cells])
    return to_markdown(("", *(f"`{name}`" for name in NAMES)), rows)


def python_numbers() -> str:
    """Return the dtype of the product of an array and a Python number."""
    numbers = (True, 2, 0.5, 1j)
    rows = []
    for name in NAMES:
        x = tg.ones(1, name)
        cells = [dtype_of(lambda n=number, x=x: x * n) for number in numbers]  # type: ignore[misc]
        rows.append([f"`{name}`", *cells])
    return to_markdown(("array", *(f"times `{number}`" for number in numbers)), rows)


OPS: dict[str, tuple[Callable[[Any], Any], ...]] = {
    "`x + x`, `x * x`": (lambda x: x + x, lambda x: x * x),
    "`x - x`, `-x`": (lambda x: x - x, lambda x: -x),
    "`x / x`": (lambda x: x / x,),
    "`x // x`, `x % x`": (lambda x: x // x, lambda x: x % x),
    "`x ** 2`": (lambda x: x**2,),
    "`square`": (tg.square,),
    "`abs`, `floor`, `ceil`, `trunc`": (tg.abs, tg.floor, tg.ceil, tg.trunc),
    "`exp`, `log`, `sqrt`, `sin`, `tanh`": (tg.exp, tg.log, tg.sqrt, tg.sin, tg.tanh),
    "`sigmoid`, `gelu`, `silu`": (tg.sigmoid, tg.gelu, tg.silu),
    "`relu`": (tg.relu,),
    "`x == x`, `x < x`, `isnan`": (lambda x: x == tg.ones(1), lambda x: x < x, tg.isnan),
    "`sum`, `prod`, `cumsum`": (tg.sum, tg.prod, tg.cumsum),
    "`mean`, `var`, `std`, `median`": (tg.mean, tg.var, tg.std, tg.median),
    "`logsumexp`, `norm`": (tg.logsumexp, tg.norm),
    "`max`, `min`, `sort`": (tg.max, tg.min, tg.sort),
    "`argmax`, `argsort`": (tg.argmax, tg.argsort),
    "`x @ x`": (lambda x: x @ x,),
    "`softmax`, `layer_norm`, `rms_norm`": (tg.softmax, tg.layer_norm, tg.rms_norm),
}


def op_dtypes() -> str:
    """Return the dtype of the result of typical ops for operands of each dtype."""
    head = ("bool", "uint8", "int32", "int64", "float16", "bfloat16", "float32", "float64")
    rows = []
    for names, ops in OPS.items():
        cells: list[str] = []
        for dtype in head:
            x = tg.ones((2, 2), dtype)
            found = {dtype_of(lambda op=op, x=x: op(x)) for op in ops}  # type: ignore[misc]
            assert len(found) == 1, (names, dtype, found)
            cells += found
        rows.append([names, *cells])
    return to_markdown(("", *(f"`{name}`" for name in head)), rows)


# Errors.


def error_classes() -> str:
    """Return the exceptions, their bases, and when they are raised."""
    rows = []
    for name in errors.__all__:
        kind = getattr(errors, name)
        bases = ", ".join(f"`{base.__name__}`" for base in kind.__bases__)
        rows.append([f"`{name}`", bases, (inspect.getdoc(kind) or "").partition("\n\n")[0]])
    return to_markdown(("class", "bases", "raised when"), rows)


def _leaf() -> tg.Tensor:
    return tg.ones(2, requires_grad=True)


def _twice() -> None:
    loss = (_leaf() * 2).sum()
    loss.backward()
    loss.backward()


def _changed() -> None:
    hidden = _leaf() * 2
    loss = tg.square(hidden).sum()
    with tg.no_grad():
        hidden[...] = 1
    loss.backward()


def _assigned() -> None:
    _leaf()[0] = 1.0


def _cube(x: tg.Tensor) -> tg.Tensor:
    return (x * x * x).sum()


def _odd(x: tg.Tensor) -> tg.Tensor:
    return tg.autograd.record("odd", x.data * 2, [x], lambda dy, saved, needs: [2 * dy], ())


def _bare_kernel() -> None:
    source = "__global__ void twice(T* y, const T* x, long long n) {}"
    tg.cuda_kernel(source, "twice", lambda x: 2 * x)(_leaf())


DIM: Any = {"dim": 0}  # an argument that type checkers refuse
# Calls that go wrong, and what to do.
MESSAGES: tuple[tuple[Callable[[], Any], str], ...] = (
    (lambda: tg.zeros((2, 3)) + tg.zeros(4), "compare the last axes; add an axis, `b[:, None]`"),
    (lambda: tg.zeros((2, 3)) @ tg.zeros((2, 3)), "transpose one, `b.T` or `b.mT`"),
    (lambda: tg.zeros(6).reshape(4, 2), "give one length as -1"),
    (lambda: nn.Linear(4, 2)(tg.ones((3, 5))), "the layer was made for another width"),
    (lambda: tg.tensor([[1.0], [1.0, 2.0]]), "pad the rows to one length"),
    (lambda: tg.zeros((2, 3)).sum(**DIM), "write NumPy's name of the argument"),
    (lambda: tg.zeros(3).sum(axis=1), "count the axes from 0, or from -1 at the end"),
    (lambda: nn.Embedding(4, 2)(np.array([0, 9])), "the tokenizer has more tokens than the model"),
    (lambda: F.cross_entropy(tg.zeros((2, 3)), np.array([0, 3])), "as above; -100 is ignored"),
    (lambda: F.embedding(np.array([0, 1]), tg.ones((4, 2))), "the weight comes first"),
    (lambda: tg.tensor([1, 2], requires_grad=True), "write `[1.0, 2.0]`, or `dtype='float32'`"),
    (lambda: tg.concatenate([tg.ones(1, "float16"), tg.ones(1, "bfloat16")]), "convert one"),
    (lambda: _leaf().exp().backward(), "reduce to a scalar, `y.sum()`, or pass `dy`"),
    (lambda: tg.ones(2).sum().backward(), "set `requires_grad`; look for `detach`, `no_grad`"),
    (_twice, "call forward again, or follow the message"),
    (_changed, "follow the message"),
    (_assigned, "follow the message; an optimizer assigns to `data`"),
    (lambda: tg.grad(tg.grad(_cube))(tg.ones(2)), "write `tg.hessian(f)`, or `tg.hvp`"),
    (lambda: tg.jvp(_odd, (tg.ones(2),), (tg.ones(2),)),
     "give the op a rule, see [own ops](../guides/derivatives.md#own-ops)"),
    (lambda: tg.jvp(_cube, (tg.ones(2),), (tg.ones(3),)), "a tangent has the shape of its primal"),
    (lambda: fft.fft(_leaf()), "write `x.detach()`"),
    (_bare_kernel, "follow the message"),
    (lambda: optim.SGD([_leaf()], lr=-1), "give a number in the range"),
    (lambda: F.dropout(tg.ones(2), 1.5), "give the probability to drop, below 1"),
    (lambda: nn.Linear(2, 3).load_state_dict({"weight": tg.zeros((3, 2))}),
     "make the model with the settings of the checkpoint"),
    (lambda: tg.train.load_checkpoint("lost"), "name the folder `step-...` below `checkpoints`"),
    (lambda: tg.load("lost.safetensors"), "check the path"),
    (lambda: data.Tokenizer.train([], 260), "check what the source of the text yields"),
    (lambda: tg.zeros(2, "float8"), "use one of the dtypes of the message"),
    (lambda: tg.zeros(2, device="tpu"), "`tensorgrad info` lists the devices"),
    (lambda: tg.cat, "write the name in the message"),  # type: ignore[attr-defined]
)  # fmt: skip


def error_messages() -> str:
    """Return common messages, the class of each, and what to do."""
    rows = []
    for call, advice in MESSAGES:
        try:
            call()
        except (errors.TensorgradError, AttributeError) as error:
            rows.append([f"`{type(error).__name__}`", f"`{error}`", advice])
    assert len(rows) == len(MESSAGES)
    return to_markdown(("class", "message", "what to do"), rows)


# Command lines that go wrong, and what to do. There is a short text.txt, and a run in `run`.
COMMAND_LINES = (
    ("train --learning-rate 1", "use the name in the message; `--help` lists all"),
    ("train --heads 5", "choose a `--width` that `--heads` divides"),
    ("train --data lost.txt", "check the path"),
    ("train --data text.txt --device cpu", "take more text, or a smaller `--context`"),
    ("train --data text.txt --out run", "choose another `--out`, or `--resume`"),
    ("train --resume run --lr 1", "start a new run with `--init-from`, or omit the option"),
    ("train --parallel zero1", "start the command as the message says"),
    ("prepare text.txt --vocab 100", "a vocabulary has 256 bytes and the end of a document"),
    ("plan --preset gpt2", "use a name in the message"),
    ("plan --memory 80", "give the unit"),
    ("generate lost a", "give the folder of a run, or `--download` with a name on the Hub"),
    ("report text.txt", "give the folder of a run"),
)


def command_messages() -> str:
    """Return messages of the command line, each with the command, and what to do."""
    handler = BufferingHandler(1000)
    handler.setLevel(logging.ERROR)
    log = logging.getLogger("tensorgrad")
    log.addHandler(handler)
    log.propagate = False
    try:
        with TemporaryDirectory() as folder, chdir(folder):
            Path("text.txt").write_text("hello\n")
            Path("run").mkdir()
            Path("run", "config.json").write_text('{"steps": 10}')
            for line, _ in COMMAND_LINES:
                assert main(line.split()) == 1
    finally:
        log.removeHandler(handler)
        log.propagate = True
    rows = [
        [f"`{line}`", f"`{record.getMessage()}`", advice]
        for (line, advice), record in zip(COMMAND_LINES, handler.buffer, strict=True)
    ]
    return to_markdown(("after `tensorgrad`", "message", "what to do"), rows)


# Kernels.

KERNELS = ROOT / "tensorgrad" / "kernels"
# The bytes or operations of an element, by source file; S is the size of the dtype in bytes.
COSTS = {
    "attention/backward_ordered_sm90.cu": "10 D operations a pair of query and key",
    "attention/backward_sm80.cu": "14 D operations a pair, counted as 10 D",
    "attention/backward_sm90.cu": "14 D operations a pair, counted as 10 D",
    "attention/decode.cu": "2 D S bytes a key",
    "attention/forward_sm80.cu": "4 D operations a pair of query and key",
    "attention/forward_sm90.cu": "4 D operations a pair of query and key",
    "attention/key_mask.cu": "4 bytes a key",
    "attention/short.cu": "4 D S bytes a step, 7 D S backward",
    "attention/simple.cu": "4 D operations a pair, 14 D backward",
    "attention/tangent_backward_sm80.cu": "36 D operations a pair, 42 D for D > 64; 26 D count",
    "attention/tangent_forward_sm80.cu": "10 D operations a pair of query and key",
    "attention/tangent_sm90.cu": "10 D operations a pair, 36 D backward, 42 D for D > 64",
    "cross_entropy.cu": "2 S bytes a logit; the loss alone S",
    "dropout.cu": "2 S bytes, S more with a residual",
    "embedding.cu": "2 S bytes and the id",
    "indexing.cu": "S bytes read, 8 for each row that is touched",
    "matmul/skinny.cu": "S bytes a weight",
    "matmul/skinny_cluster_sm90.cu": "S bytes a weight",
    "matmul/skinny_sm90.cu": "S bytes a weight",
    "matmul/sm80.cu": "2 K operations a result",
    "matmul/sm90.cu": "2 K operations a result",
    "matmul/tiled.cu": "2 K operations a result",
    "norm_backward.cu": "3 S bytes, S more with the gradient of a sum",
    "norm_tangent.cu": "3 S bytes; its gradients 5 S, those of the parameters 3 S more",
    "norm_forward.cu": "2 S bytes, 4 S with a residual",
    "optim.cu": "28 bytes a parameter for AdamW in float32, 20 for Lion",
    "peer_copies.cu": "n S bytes read and S written, of an n-th of the array",
    "random.cu": "S bytes written",
    "reduce.cu": "S bytes read",
    "rotary.cu": "2 S bytes",
    "sampling.cu": "4 bytes a logit, read from caches several times",
    "softmax.cu": "2 S bytes, 3 S backward",
    "swiglu_dropout.cu": "3 S bytes, 5 S backward",
}
GENERATED = "elementwise.py"
_KERNEL = re.compile(r"__global__[^(]*?(?:__\w+__\([^)]*\)[^(]*?)*\b(\w+)\(")


def tangent_rules() -> str:
    """Return the ops with a tangent rule, and the rule: its expression, or its number of lines."""
    rows = []
    for source in library():
        for rule in source.tree.body:
            found = _registered(rule)
            if found and isinstance(rule, ast.FunctionDef):
                ops = sorted(_recorded(source.tree, found)) or [_words(source.path.stem, rule.name)]
                names = ", ".join(f"`{op}`" for op in ops)
                link = f"[{source}](../../{source})"
                rows.append([names, link, _shown(rule)])
    return to_markdown(("op", "source", "tangent"), rows)


def _registered(rule: ast.stmt) -> set[str]:
    """Return the backward functions whose tangent a function is."""
    if not isinstance(rule, ast.FunctionDef):
        return set()
    calls = [d for d in rule.decorator_list if isinstance(d, ast.Call)]
    return {
        ast.unparse(argument)
        for call in calls
        if ast.unparse(call.func) == "tangent_of"
        for argument in call.args
    }


def _recorded(tree: ast.Module, backward: set[str]) -> set[str]:
    """Return the names of the ops that a module records with some backward functions."""
    return {
        str(call.args[0].value)
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "record" and len(call.args) > 3
        if isinstance(call.args[0], ast.Constant) and ast.unparse(call.args[3]) in backward
    }


def _words(module: str, rule: str) -> str:
    """Return what a rule is of: `_put_tangent` of put, `_tangent_packed` of attention packed."""
    words = [word for word in rule.strip("_").split("_") if word != "tangent"]
    if "second" in words:
        return f"tangent of {module}"
    return " ".join(words if rule.endswith("_tangent") and words else [module, *words])


def _shown(rule: ast.FunctionDef) -> str:
    body = [line for line in rule.body if not isinstance(line, ast.Expr)]
    last = body[-1]
    if len(body) <= 2 and isinstance(last, ast.Return) and last.value is not None:
        text = ast.unparse(last.value)
        if len(text) <= 60:
            return f"`{text}`"
    return f"{(rule.end_lineno or 0) - rule.lineno} lines"


def kernel_files() -> str:
    """Return what each CUDA source computes, its kernels, and the work of an element."""
    rows = []
    for path in sorted(KERNELS.rglob("*.cu")):
        name = path.relative_to(KERNELS).as_posix()
        text = path.read_text(encoding="utf-8")
        comment = text.partition("\n//\n")[0].replace("\n// ", " ").removeprefix("// ")
        first = re.split(r"(?<=\.)\s+(?=[A-Z])", comment)[0].rstrip(".")
        parts = re.split("(`[^`]*`)", first)
        parts[::2] = [re.sub(r"([*_<])", r"\\\1", part) for part in parts[::2]]
        first = "".join(parts)
        kernels = ", ".join(f"`{kernel}`" for kernel in dict.fromkeys(_KERNEL.findall(text)))
        link = f"[{name}](../../tensorgrad/kernels/{name})"
        rows.append([link, first, kernels, COSTS[name]])
    return to_markdown(("source", "computes", "kernels", "work of an element"), rows)


def source_of(row: Mapping[str, Any]) -> str:
    """Return the source of the kernel that a row of the results measures; "" for none of ours."""
    family, name, dtype = row["family"], row["name"], row["dtype"]
    direction = "backward" if name.endswith("backward") else "forward"
    if "norm " in name and family in ("norm", "fused"):
        return f"norm_{direction}.cu"
    if family == "matmul":
        tiled = "matmul/tiled.cu" if dtype == "float32" else "matmul/sm80.cu"
        of_kernel = {"matmul wgmma": "matmul/sm90.cu", "matmul tiled": tiled}
        gelu = "matmul/sm90.cu" if dtype == "bfloat16" and name.startswith("gelu") else ""
        return of_kernel.get(name, gelu)
    if family == "attention":
        sizes = [int(word) for word in row["size"].split() if word.isdigit()]
        if dtype == "tf32":
            return f"attention/{direction}_sm80.cu"
        if sizes[2] <= 64:
            return "attention/short.cu"
        ordered = "_ordered" * (direction == "backward" and 64 <= sizes[3] <= 128)
        return f"attention/{direction}{ordered}_sm90.cu"
    return {
        "softmax": "softmax.cu", "fused": "softmax.cu", "reduce": "reduce.cu",
        "cross_entropy": "cross_entropy.cu", "linear_cross_entropy": "", "elementwise": GENERATED,
        "optimizers": "reduce.cu" if name.startswith("norm") else "optim.cu",
        "dropout": "swiglu_dropout.cu" if name.startswith("swiglu") else "dropout.cu",
        "embedding": {"embedding backward": "indexing.cu", "embedding + positions": "embedding.cu"}
        .get(name, "rotary.cu"),
        "decode": "attention/decode.cu",
    }.get(family, "")  # fmt: skip


def measured() -> list[tuple[str, Mapping[str, Any]]]:
    """Return the source and the result of the largest case of each kernel and dtype."""
    largest: dict[tuple[str, str, str], Mapping[str, Any]] = {}
    for row in read_json(ROOT / "docs" / "results" / "kernels" / "kernels.json")["rows"]:
        key = source_of(row), row["name"], row["dtype"]
        if key[0] and row["ms"] and row["amount"] > largest.get(key, {"amount": 0})["amount"]:
            largest[key] = row
    return sorted(((key[0], row) for key, row in largest.items()), key=lambda pair: pair[0])


def elements(size: str) -> int:
    """Return the number of elements that a size names, 0 where it names none."""
    words = [word for word in size.split(" axis")[0].split() if word != "x"]
    return math.prod(map(int, words)) if all(word.isdigit() for word in words) else 0


def kernel_results() -> str:
    """Return the floor and the time of each kernel in its largest case."""
    rows = []
    for source, row in measured():
        count = elements(row["size"])
        work = f"{row['amount'] / 1e9:,.2f} {'GB' if row['unit'] == 'GB/s' else 'GFLOP'}"
        if row["unit"] == "GB/s" and count and row["amount"] % count == 0:
            work += f", {row['amount'] // count} bytes an element"
        numbers = [f"{row['floor_ms']:.3f}", f"{row['ms']:.3f}", f"{row['of_floor']:.0f} %"]
        rate = f"{row['rate']:,.0f} {row['unit']}"
        rows.append([source, row["name"], row["size"], row["dtype"], work, *numbers, rate])
    head = (
        "source",
        "work",
        "size",
        "dtype",
        "amount",
        "floor, ms",
        "time, ms",
        "of the floor",
        "rate",
    )
    return to_markdown(head, rows)
