"""Tables of the reference that only the site has, as they are long: ops, names, options.

A document has a block for each, which the site replaces by what a function of this module returns:

    <!-- site elementwise_values -->
    The site has the table here.
    <!-- /site -->

Needs no Sphinx. Tests: tests/test_reference.py.
"""

from __future__ import annotations

import inspect
import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import numpy as np
from cyclopts import App

import tensorgrad as tg
from tensorgrad.cli import app
from tensorgrad.compat import omitted
from tensorgrad.core.errors import TensorgradError
from tensorgrad.io.tables import to_markdown
from tensorgrad.nn import functional
from tensorgrad.ops import elementwise
from tensorgrad.ops.elementwise import activation
from tensorgrad.ops.elementwise.row import Row
from tensorgrad.train import config
from tensorgrad.train.tasks import TASKS, task_class

ROOT = Path(__file__).parents[2]
COVERAGE = ROOT / "docs" / "reference" / "coverage.md"
NAMES = ROOT / "tests" / "parity" / "names.json"
BLOCK = re.compile(r"<!-- site (\w+) -->.*?<!-- /site -->", re.DOTALL)


def rendered(text: str) -> str:
    """Return a document with its blocks replaced by tables."""
    return BLOCK.sub(lambda block: f"\n{TABLES[block[1]]()}\n", text)


def _code(text: str) -> str:
    return f"`{text}`" if text else ""


def _plain(text: str) -> str:
    """Return plain text as Markdown, with what stands between backquotes as it is."""
    parts = re.split("(`[^`]*`)", " ".join(text.split()))
    parts[::2] = [re.sub(r"([<*_])", r"\\\1", part) for part in parts[::2]]
    return re.sub(r"(?<![`\w-])--[\w-]+", r"`\g<0>`", "".join(parts))


def _codes(texts: Iterable[str]) -> str:
    return ", ".join(map(_code, texts))


# Elementwise functions.


@cache
def rows() -> dict[str, Row]:
    """Return the rows of the elementwise functions; `clip` has one for each set of bounds."""
    by_name: dict[str, Row] = {}
    for module in (elementwise, activation):
        for name in dir(module):
            value = getattr(module, name)
            inner = getattr(value, "__closure__", None) or ()
            for row in (value, *(cell.cell_contents for cell in inner)):
                if isinstance(row, Row):
                    by_name[name if isinstance(value, Row) else row.name] = row
    return dict(sorted(by_name.items(), key=lambda item: (item[1].name.lower(), item[0])))


def _linked_rows() -> Iterator[tuple[str, Row]]:
    """Yield each row with a link to its function, and its own name where a function has several."""
    several = Counter(row.name for row in rows().values())
    for name, row in rows().items():
        owners = ((tg, "tensorgrad"), (functional, "tensorgrad.nn.functional"))
        place = next((place for owner, place in owners if row.name in owner.__all__), "")
        link = f"{{py:obj}}`{row.name} <{place}.{row.name}>`" if place else _code(row.name)
        yield f"{link} {_code(name)}" if several[row.name] > 1 else link, row


def elementwise_values() -> str:
    """Return the value of each elementwise function, as an expression and as CUDA."""
    lines = []
    for link, row in _linked_rows():
        statements, (result,) = row._formula.cuda()
        cuda = " ".join([*statements, result])
        lines.append([link, _code(", ".join(row.operands)), _code(row.text), _code(cuda)])
    return to_markdown(("function", "operands", "value", "CUDA"), lines)


def elementwise_dtypes() -> str:
    """Return the dtype of each elementwise function's result, by that of its operands."""
    names = ("bool", "int8", "int32", "int64", "float16")
    lines = [[link, *(result_dtype(row, name) for name in names)] for link, row in _linked_rows()]
    return to_markdown(("function", *(f"of {name}" for name in names)), lines)


def result_dtype(row: Row, dtype: str) -> str:
    """Return the dtype of a function's result for operands of one dtype, or the error it raises."""
    operands = [np.ones(1, "bool" if name == "c" else dtype) for name in row.operands]
    several = sum(other.name == row.name for other in rows().values()) > 1
    if several or row is elementwise.WHERE:  # the function takes these operands in several ways
        return str(row(*operands).dtype)
    function = getattr(tg, row.name, None) or getattr(functional, row.name)
    kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    needed = [p for p in inspect.signature(function).parameters.values() if p.kind in kinds]
    required = sum(p.default is p.empty for p in needed)
    try:
        with np.errstate(all="ignore"):
            return str(function(*operands[:required]).dtype)
    except TensorgradError as error:
        return type(error).__name__


def elementwise_gradients() -> str:
    """Return the gradients of each elementwise function that has some, and what backward saves."""
    lines = []
    for link, row in _linked_rows():
        pairs = zip(row.operands, row.gradients, strict=False)
        gradients = "; ".join(f"d{name} = `{text}`" for name, text in pairs if text)
        if gradients:
            lines.append([link, gradients, _codes(row._saved) or "nothing"])
    return to_markdown(("function", "gradients", "saved for backward"), lines)


# Names of other libraries.


def _listed(names: Iterable[str]) -> str:
    return _codes(sorted(names, key=str.lower)) or "none"


def numpy_spaces() -> dict[str, tuple[Any, Any]]:
    """Return NumPy's namespaces and ours by NumPy's name."""
    return {
        "numpy": (np, tg), "numpy.linalg": (np.linalg, tg.linalg),
        "numpy.fft": (np.fft, tg.fft), "numpy.random": (np.random, tg.random),
    }  # fmt: skip


def numpy_names() -> str:
    """Return the public names of NumPy that the library serves, and which others there are."""
    parts = []
    for space, (theirs, ours) in numpy_spaces().items():
        names = {n for n in theirs.__all__ if not n.startswith("__")}
        served = names & set(ours.__all__)
        parts.append(_namespace(space, len(names), served))
        if space != "numpy":  # another page has the reasons for those
            parts.append(f"Not here: {_listed(names - served)}.\n")
    return "\n".join(parts)


def _namespace(space: str, count: int, served: Collection[str]) -> str:
    """Return the heading of a namespace, and its names that the library has too."""
    said = f"Of {count} names, {len(served)} are the same here:"
    return f"### `{space}`\n\n{said}\n\n{_listed(served)}.\n"


@cache
def explained() -> set[str]:
    """Return the names of NumPy that the page gives a reason for."""
    text = COVERAGE.read_text(encoding="utf-8").partition("| reason | names |")[2]
    rows = text.partition("\n\n")[0].splitlines()[2:]
    return {name for row in rows for name in re.findall(r"`(\w+)`", row.split(" | ")[1])}


def numpy_instead() -> str:
    """Return what to write in place of names of NumPy's smaller namespaces."""
    lines = []
    for name, (theirs, ours) in numpy_spaces().items():
        for missing in sorted(set(theirs.__all__) - set(ours.__all__), key=str.lower):
            kind, instead = answer(missing, ours.__name__)
            known = kind in ("name", "expression") and missing not in explained()
            if name != "numpy" and known:
                lines.append([_code(f"{name}.{missing}"), instead])
    return to_markdown(("NumPy", "here"), lines)


def array_api_names() -> str:
    """Return the names of the array API standard that the library serves."""
    parts = []
    for extension, names in _names()["array_api"]["names"].items():
        owner = getattr(tg, extension) if extension else tg
        served = [name for name in names if hasattr(owner, name)]
        parts.append(_namespace(extension or "main namespace", len(names), served))
    return "\n".join(parts)


def torch_spaces() -> dict[str, Any]:
    """Return our namespaces by those of PyTorch that they stand for."""
    return {
        "torch": tg, "torch.linalg": tg.linalg, "torch.nn": tg.nn,
        "torch.nn.functional": functional, "torch.optim": tg.optim,
        "torch.optim.lr_scheduler": tg.optim.lr_scheduler,
    }  # fmt: skip


def answer(name: str, module: str) -> tuple[str, str]:
    """Return the kind of the library's answer to a name that it lacks, and the name to use.

    The kinds are "name", "expression", "in place", "omitted" (with the reason) and "".
    """
    message = omitted.missing(module, name).args[0]
    text = message.partition(f"has no attribute {name!r}")[2].lstrip(":; ")
    if match := re.match(r"it is named as in NumPy, (.+)|here it is (?:a \w+, )?(.+)", text):
        full = match[1] or match[2]
        return "name", _code(
            full if full.startswith(("tensorgrad", "x.")) else f"tensorgrad.{full}"
        )
    if match := re.match(r"it is the dtype '(\w+)'", text):
        return "name", _code(f"tensorgrad.{match[1]}")
    if match := re.match(r"write (.+)", text):
        return "expression", _code(match[1])
    if text.startswith("a tensor changes by assignment"):
        return "in place", "a tensor changes by assignment, `x[...] = y`"
    if match := re.match(r"(.+) (?:are|is) omitted on purpose", text):
        return "omitted", match[1].replace("this function of NumPy", "omitted functions of NumPy")
    return "", ""


# Why the library has nothing for a name of PyTorch, by patterns of names; `omitted` and the page of
# what is not supported have the other reasons.
_REASONS = {
    "PyTorch's compiler, types and dispatch": r"""
        Script\w+ Sym\w+ sym_\w+ parse_\w+ unify_\w+ merge_type\w+ import_ir\w+ fork wait vmap Tag
        AggregationType DispatchKey while_loop boolean_dispatch \w*torch_function\w* factory_kwargs
        Uninitialized\w+ Lazy\w+ compiled_with\w+ hash_tensor ScalingType SwizzleType
        AcceleratorError""",
    "dtypes that no kernel here computes with": r"""
        bits?\w* float[48]_\w+ u?int[1-7] complex32 chalf qu?int\w+ scaled_\w*mm grouped_mm""",
    "layouts of memory: views are those of NumPy": r"""
        \w+_copy as_strided\w* empty_strided empty_permuted resolve_\w+ is_conj conj_physical
        view_as_\w+ native_\w+ is_storage from_file""",
    "global settings: dtype and device are arguments, seeds those of `tensorgrad.random`": r"""
        (get|set)_\w+ (is|are)_\w+_enabled use_deterministic\w+ init\w*_\w+ is_inference Stream
        Event thread_safe_generator is_deterministic\w+ OutOfMemoryError enable_grad Buffer""",
    "images and signals": r"""
        \w+_window i?stft \w+Pad\d?d? [Ff]old Unfold \w*[cC]hannel_?[sS]huffle affine_grid
        interpolate \w*[dD]ropout[123]d Upsampling\w+ LocalResponseNorm local_response_norm
        Softmax2d""",
    "decompositions and special functions that no model here needs": r"""
        lu(_\w+)? ldl_\w+ orgqr cholesky_\w+ geqrf ormqr lobpcg householder\w+ matrix_exp
        \w+_lowrank \w+_ex \w*gammac? erfinv""",
    "losses of other tasks": r"""
        \w*(CTC|ctc|Multi(Label|Margin)|multi_margin|multilabel|LinearCross|Adaptive)\w*
        \w*_with_distance_\w* \w+WithDistance\w+""",
    "optimizers that no program here uses: `optim.Optimizer` is the base of your own": r"""
        ASGD Ada\w+ LBFGS [NR]Adam R\w*prop swap_in\w+""",
    "a schedule is a function of the step, which `optim.lr_scheduler.LambdaLR` takes": r"""
        \w+LR \w+Scheduler \w+WarmRestarts ReduceLROnPlateau""",
}


def _reason(name: str) -> str:
    for reason, patterns in _REASONS.items():
        if any(re.fullmatch(pattern, name) for pattern in patterns.split()):
            return reason
    return "no model here needs it"


def torch_names() -> str:
    """Return each name of PyTorch's namespaces by whether and how the library serves it."""
    parts = []
    for space, names in _names()["torch"]["names"].items():
        ours = torch_spaces()[space]
        served, renamed = [], []
        others: dict[str, list[str]] = {}
        for name in names:
            kind, instead = answer(name, ours.__name__)
            if hasattr(ours, name):
                served.append(name)
            elif kind in ("name", "expression"):
                renamed.append([_code(name), instead])
            else:
                others.setdefault(instead or _reason(name), []).append(name)
        parts.append(_namespace(space, len(names), served))
        if renamed:
            parts += ["Served under another name, or written as an expression:\n"]
            parts += [to_markdown(("PyTorch", "here"), renamed)]
        if others:
            table = [[reason, _listed(found)] for reason, found in sorted(others.items())]
            parts += ["Not served:\n", to_markdown(("why", "names"), table)]
    return "\n".join(parts)


def torch_answers() -> Iterator[tuple[str, str]]:
    """Yield each name of PyTorch that the library lacks, and the name that it has instead."""
    for space, names in _names()["torch"]["names"].items():
        ours = torch_spaces()[space]
        for name in names:
            kind, instead = answer(name, ours.__name__)
            if kind == "name" and not hasattr(ours, name):
                yield f"{space}.{name}", instead.strip("`")


def _names() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(NAMES.read_text(encoding="utf-8"))
    return found


# The command line.

_KINDS = {int: "integer", float: "number", str: "text", bool: "flag", Path: "path"}


def _kind(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return " or ".join(map(_code, get_args(hint)))
    members = [member for member in get_args(hint) if member not in (type(None), ...)]
    if get_origin(hint) is tuple:
        return f"several of: {_kind(members[0])}"
    if members:
        return " or ".join(map(_kind, members))
    return _KINDS.get(hint, getattr(hint, "__name__", str(hint)))


def _default(argument: Any) -> str:
    default, shown = argument.field_info.default, argument.parameter.show_default
    if argument.required:
        return "required"
    if callable(shown):
        return str(shown(default) or "")
    if shown is False or default in (None, "", (), inspect.Parameter.empty):
        return ""
    if isinstance(default, bool):
        return "on" if default else "off"
    return _codes(map(str, default if isinstance(default, tuple) else (default,)))


def options(program: App) -> dict[str, tuple[str, str, str]]:
    """Return the kind, the default and the help of a command's arguments by their names."""
    found = {}
    for argument in program.assemble_argument_collection(parse_docstring=True):
        if argument.show and argument.name != "*":
            names = [name for name in argument.names if not name.startswith("--empty-")]
            meaning = _plain((argument.parameter.help or "").rstrip("."))
            found[" ".join(map(_code, names))] = _kind(argument.hint), _default(argument), meaning
    return found


def commands(program: App = app, words: str = "tensorgrad") -> Iterator[tuple[str, App]]:
    """Yield the words and the program of each command, those with commands of their own first."""
    if program.default_command is not None and program is not app:
        yield words, program
    for name in program:
        if not name.startswith("-"):
            yield from commands(program[name], f"{words} {name}")


_HEAD = ("option", "value", "default", "meaning")


def command_line() -> str:
    """Return the options of every command but those that train, which have tables of their own."""
    parts = []
    for words, program in commands():
        if not words.startswith("tensorgrad train"):
            parts += [f"### `{words}`\n", f"{_help(program)}\n"]
            if lines := [[name, *about] for name, about in options(program).items()]:
                parts.append(to_markdown(_HEAD, lines))
    return "\n".join(parts)


def _help(program: App) -> str:
    text = program.help or inspect.getdoc(program.default_command) or ""
    return _plain(text.partition("\n\n")[0])


def training_options() -> str:
    """Return the options of the training commands, with the keys of config.json."""
    found = dict(commands())
    tables: dict[str, dict[str, tuple[str, ...]]] = {}
    for task in TASKS:
        saved = {
            _code(config.flag(f)): _code(f.name) if f.metadata["saved"] else ""
            for f in fields(task_class(task).Settings)
        }
        own = options(found[f"tensorgrad train {task}"])
        tables[task] = {
            name: (*about, saved.get(name.split()[0], "")) for name, about in own.items()
        }
    first, *others = tables.values()
    shared = {name for name in first if all(first[name] == other.get(name) for other in others)}
    parts = []
    for title, about in {"Options of every task": first, **tables}.items():
        common = title not in tables
        lines = [[name, *row] for name, row in about.items() if (name in shared) == common]
        heading = title if common else f"`tensorgrad train {title}`"
        parts += [f"### {heading}\n", to_markdown((*_HEAD, "saved as"), lines)]
    return "\n".join(parts)


TABLES: Mapping[str, Callable[[], str]] = {
    function.__name__: function
    for function in (
        elementwise_values, elementwise_dtypes, elementwise_gradients, numpy_names, numpy_instead,
        array_api_names, torch_names, command_line, training_options,
    )
}  # fmt: skip
