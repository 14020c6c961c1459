"""Compile a template of a .cu file to a `cupy.RawKernel`.

A kernel is named by its file and one instantiation of a template, `load("reduce.cu",
"reduce_rows_warp<Sum<float>>")`. It is compiled alone, on first use, by `cupy.RawModule` with
NVRTC; CuPy keeps the machine code on disk. Comments at the start of a line say how a file is
compiled:

    // options: -fmad=false                  further compiler options
    // arch: sm_90a                          the only GPU that the file is for; any GPU without it
    // where: FLOAT = float | double         a name for a choice
    // instantiate: name<{FLOAT}, {4 | 8}>   what may be loaded, here four kernels

A line that begins with `//` and two spaces or more continues the one above.

`python -m tensorgrad.kernels.compile` checks every listed instantiation without a GPU.
"""

from __future__ import annotations

import logging
import os
import re
import stat
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from tensorgrad import backend
from tensorgrad.errors import KernelError
from tensorgrad.kernels.device import capability, shared_memory_per_block
from tensorgrad.kernels.structs import static_asserts

_log = logging.getLogger(__name__)

FOLDER = Path(__file__).parent
OPTIONS = ("-std=c++17", "-DNDEBUG")  # with assert on, ptxas serializes wgmma
_INCLUDE = re.compile(r'^\s*#include "([^"]+)"\s*$')
_DIRECTIVE = re.compile(r"^// (options|arch|where|instantiate): (.+(?:\n//  .+)*)", re.MULTILINE)

Kernel = Any  # cupy.RawKernel: kernel(grid, block, args, shared_mem=0)
_kernels: dict[tuple[str, str, int], Kernel] = {}


class Source(NamedTuple):
    """A .cu file, ready to compile."""

    name: str
    text: str
    options: tuple[str, ...]
    arch: str | None
    kernels: tuple[str, ...]


def load(file: str, kernel: str) -> Kernel:
    """Return one instantiation of a template of a .cu file, for the current GPU.

    Args:
        file: path in this folder, such as "reduce.cu" or "matmul/sm90.cu".
        kernel: instantiation as the file lists it, such as "reduce_rows_warp<Sum<float>>".

    Returns:
        A compiled `cupy.RawKernel`: a callable (grid, block, arguments, shared_mem=0) that launches
        on the current stream. Up to the chip's limit of shared memory is allowed.

    Raises:
        KernelError: the file does not list the kernel, it does not compile (the message has file,
            line and the compiler's log), or it is for another GPU.
    """
    device = backend.cupy.cuda.runtime.getDevice()
    try:
        return _kernels[file, kernel, device]
    except KeyError:
        source = _source(file, kernel, f"sm_{capability(device)}")
        options = (
            source.options if source.arch is None else (*source.options, f"-arch={source.arch}")
        )
        with _compiling(file, kernel):
            module = backend.cupy.RawModule(
                code=source.text, options=options, backend="nvrtc", name_expressions=(kernel,)
            )
            loaded = _kernels[file, kernel, device] = _with_shared_memory(
                module.get_function(kernel)
            )
        return loaded


def load_text(name: str, text: str) -> Kernel:
    """Return the kernel `name`, which is not a template, of a source given as text.

    The caller keeps it: only the machine code is remembered here, on disk.

    Raises:
        KernelError: it does not compile.
    """
    with _compiling(f"{name}.cu", name):
        return _with_shared_memory(backend.cupy.RawKernel(text, name, OPTIONS))


def inline(path: Path, seen: set[Path] | None = None) -> str:
    """Return the text of `path` with every quoted #include replaced by that file, once each.

    Includes are relative to this folder.

    The text is then a complete key of the disk cache, and #line lets the compiler's messages name
    the files that a human edits.
    """
    seen = set() if seen is None else seen
    if path in seen:
        return ""
    seen.add(path)
    name = _name(path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise KernelError(
            f"kernels: got file {name!r}, expected one in {FOLDER}: {error}"
        ) from error
    lines = [f'#line 1 "{name}"']
    for number, line in enumerate(text.splitlines(), 1):
        if match := _INCLUDE.match(line):
            lines += [inline(FOLDER / match[1], seen), f'#line {number + 1} "{name}"']
        else:
            lines.append("" if line == "#pragma once" else line)  # inlining has done that
    return "\n".join([*lines, *static_asserts(name)])


def _name(path: Path) -> str:
    """Return the path of a file in this folder, as `load` and #include take it."""
    return path.relative_to(FOLDER).as_posix() if path.is_relative_to(FOLDER) else path.name


def read(path: Path) -> Source:
    """Return a .cu file with its includes inlined and its directives parsed."""
    text = inline(path)
    options: list[str] = []
    arch: str | None = None
    choices: dict[str, list[str]] = {}
    kernels: list[str] = []
    for kind, value in _DIRECTIVE.findall(path.read_text(encoding="utf-8")):
        value = " ".join(value.replace("\n//", " ").split())
        if kind == "options":
            options += value.split()
        elif kind == "arch":
            arch = value
        elif kind == "where":
            name, _, choice = value.partition(" = ")
            choices[name] = expand("{" + choice + "}", choices)
        else:
            kernels += expand(value, choices)
    return Source(_name(path), text, (*OPTIONS, *options), arch, tuple(kernels))


def expand(pattern: str, choices: Mapping[str, Sequence[str]] | None = None) -> list[str]:
    """Return what a pattern stands for: "f<{a | b}, 4>" is "f<a, 4>" and "f<b, 4>"."""
    before, brace, rest = pattern.partition("{")
    if not brace:
        return [_canonical(pattern)]
    options, depth, start = [], 0, 0
    for position, letter in enumerate(rest):
        if depth == 0 and letter in "|}":
            options.append(rest[start:position].strip())
            start = position + 1
        depth += (letter == "{") - (letter == "}")
        if depth < 0:
            break
    named = (choices or {}).get(options[0]) if len(options) == 1 else None
    middles = named or [found for option in options for found in expand(option, choices)]
    return [
        _canonical(before + middle + after)
        for middle in middles
        for after in expand(rest[start:], choices)
    ]


def _source(file: str, kernel: str, target: str) -> Source:
    """Return a file that lists the kernel and is for the target, such as "sm_90"."""
    source = _read(file)
    if _canonical(kernel) not in source.kernels:
        raise KernelError(
            f"{file}: got kernel {kernel!r}, expected one that an `// instantiate:` line lists"
        )
    if source.arch is not None and source.arch.removesuffix("a") != target:
        raise KernelError(f"{file}: the GPU is {target}, expected {source.arch}")
    return source


@contextmanager
def _compiling(file: str, kernel: str) -> Iterator[None]:
    """Turn what CuPy, NVRTC and the driver raise into a KernelError that names the kernel."""
    _check_cache()
    cupy = backend.cupy
    try:
        yield
    except cupy.cuda.compiler.CompileException as error:
        raise KernelError(
            f"{file}: {kernel} got errors from NVRTC, expected to compile:\n{error}"
        ) from error
    except (RuntimeError, OSError) as error:  # NVRTC is missing, the driver too old, the disk full
        device = cupy.cuda.runtime.getDevice()
        raise KernelError(
            f"{file}: {kernel} got {error}, expected to load on GPU {device}"
        ) from error


def _with_shared_memory(kernel: Kernel) -> Kernel:
    """Compile a kernel for the current GPU, and let it ask for all shared memory of a block."""
    limit = shared_memory_per_block(backend.cupy.cuda.runtime.getDevice())
    kernel.max_dynamic_shared_size_bytes = limit - kernel.shared_size_bytes
    return kernel


@cache
def _read(file: str) -> Source:
    """Read a file of this folder once a process."""
    return read(FOLDER / file)


@cache
def _check_cache() -> None:
    """Make CuPy's cache of machine code private: this process runs what is in it.

    Raises:
        KernelError: the folder belongs to another user.
    """
    default = os.path.expanduser("~/.cupy/kernel_cache")
    folder = Path(os.environ.get("CUPY_CACHE_DIR", default))
    if sys.platform == "win32" or not folder.exists():  # there a profile is its user's alone
        return
    owners = (os.geteuid(), 0)
    state = folder.stat()
    if state.st_uid not in owners:
        raise KernelError(
            f"kernels: {folder}, where CuPy keeps compiled kernels, belongs to another user, "
            "expected a folder of your own: set CUPY_CACHE_DIR to one"
        )
    if state.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        _log.warning("kernels: others could write to %s: closed, their files removed", folder)
        folder.chmod(stat.S_IRWXU)
        for path in folder.iterdir():
            if path.lstat().st_uid not in owners:
                path.unlink()


def _canonical(kernel: str) -> str:
    """Return the name with one space after each comma."""
    return re.sub(r"\s*,\s*", ", ", kernel.strip())
