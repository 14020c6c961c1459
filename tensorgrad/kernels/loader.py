"""Compile a template of a .cu file to a `cupy.RawKernel`.

A kernel is named by its file and one instantiation of a template, `load("reduce.cu",
"reduce_rows_warp<Sum<float>>")`. It is compiled alone, on first use, by NVRTC. The machine code
is kept on disk and loaded by `cupy.RawModule`, which could compile too, but always with
`-ftz=true`: subnormal float32 would count as zero, unlike in NumPy. Comments at the start of a line
say how a file is compiled:

    // options: -fmad=false                  further compiler options
    // arch: sm_90a                          the only GPU that the file is for; any GPU without it
    // where: FLOAT = float | double         a name for a choice
    // instantiate: name<{FLOAT}, {4 | 8}>   what may be loaded, here four kernels

A line that begins with `//` and two spaces or more continues the one above.

`python -m tensorgrad.kernels.compile` checks every listed instantiation without a GPU.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import stat
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from tensorgrad.core import backend
from tensorgrad.core.errors import KernelError
from tensorgrad.kernels.device import capability, shared_memory_per_block
from tensorgrad.kernels.structs import static_asserts
from tensorgrad.startup.distribution import cuda_extra, install

_log = logging.getLogger(__name__)

FOLDER = Path(__file__).parent
OPTIONS = ("-std=c++17", "-DNDEBUG")  # with assert on, ptxas serializes wgmma
_INCLUDE = re.compile(r'^\s*#include "([^"]+)"\s*$')
_DIRECTIVE = re.compile(r"^// (options|arch|where|instantiate): (.+(?:\n//  .+)*)", re.MULTILINE)

RawKernel = Any  # cupy.RawKernel
Kernel = Any  # RawKernel.kernel: kernel(grid, block, args, shared_mem=0)
_kernels: dict[tuple[str, str, int], Kernel] = {}


class Source(NamedTuple):
    """A .cu file, ready to compile."""

    name: str
    text: str
    options: tuple[str, ...]
    arch: str | None
    kernels: tuple[str, ...]


class Binary(NamedTuple):
    """Machine code, the linker name of each kernel in it, and what the compiler said."""

    image: bytes
    symbols: dict[str, str]
    log: str


def load(file: str, kernel: str) -> Kernel:
    """Return one instantiation of a template of a .cu file, for the current GPU.

    Args:
        file: path in this folder, such as "reduce.cu" or "matmul/sm90.cu".
        kernel: instantiation as the file lists it, such as "reduce_rows_warp<Sum<float>>".

    Returns:
        A callable (grid, block, arguments, bytes of dynamic shared memory = 0) that launches on
        the current stream: `RawKernel.kernel`, which `RawKernel.__call__` would look up and call
        with keywords each time, 0.3 to 0.8 us. Up to the chip's limit of shared memory is allowed.

    Raises:
        KernelError: the file does not list the kernel, it does not compile (the message has file,
            line and the compiler's log), or it is for another GPU.
    """
    device = backend.cupy.cuda.runtime.getDevice()
    try:
        return _kernels[file, kernel, device]
    except KeyError:
        loaded = _kernels[file, kernel, device] = raw_kernel(file, kernel).kernel
        return loaded


def raw_kernel(file: str, kernel: str) -> RawKernel:
    """Return one instantiation of a template as a `cupy.RawKernel`; see `load`."""
    return _raw_kernel(file, kernel, _binary(file, kernel, _gpu_target()))


def load_text(name: str, text: str, instance: str = "") -> RawKernel:
    """Return the kernel `name`, or an instance of that template, of a source given as text.

    The caller keeps it: only the machine code is remembered here, on disk.

    Raises:
        KernelError: it does not compile.
    """
    kernel = instance or name
    source = Source(f"{name}.cu", text, OPTIONS, None, (kernel,))
    return _raw_kernel(source.name, kernel, _cached(source, kernel, _gpu_target()))


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


def build(
    source: Source, kernels: Sequence[str], target: str, options: Sequence[str] = ()
) -> Binary:
    """Compile instantiations for a target such as "sm_90". Needs NVRTC, but no GPU.

    Raises:
        KernelError: NVRTC is missing, or the source does not compile.
    """
    compiler = nvrtc()
    # NVRTC takes generic lambdas for host functions unless told that there are none.
    arguments = ["-default-device", *source.options, *options, f"-arch={target}", *_headers()]
    program = compiler.createProgram(source.text, source.name, [], [])
    try:
        for kernel in kernels:
            compiler.addNameExpression(program, kernel)
        try:
            compiler.compileProgram(program, arguments)
        except compiler.NVRTCError as error:
            log = compiler.getProgramLog(program).strip("\0\n")
            names = ", ".join(kernels)
            raise KernelError(
                f"{source.name}: {names} for {target} got {error}, expected to compile:\n{log}"
            ) from error
        image = (compiler.getCUBIN if target.startswith("sm_") else compiler.getPTX)(program)
        symbols = {kernel: compiler.getLoweredName(program, kernel) for kernel in kernels}
        return Binary(image, symbols, compiler.getProgramLog(program).strip("\0\n"))
    finally:
        compiler.destroyProgram(program)


def _raw_kernel(file: str, kernel: str, binary: Binary) -> RawKernel:
    """Load machine code into the current GPU; the kernel may have all shared memory of a block."""
    cupy = backend.cupy
    device = cupy.cuda.runtime.getDevice()
    try:
        with tempfile.TemporaryDirectory() as folder:
            # CuPy remembers modules by path: equal paths have equal contents
            path = Path(folder, hashlib.sha256(binary.image).hexdigest())
            path.write_bytes(binary.image)
            raw = cupy.RawModule(path=str(path)).get_function(binary.symbols[kernel])
    except cupy.cuda.driver.CUDADriverError as error:
        raise KernelError(
            f"{file}: {kernel} got {error}, expected to load on GPU {device}"
        ) from error
    raw.max_dynamic_shared_size_bytes = shared_memory_per_block(device) - raw.shared_size_bytes
    return raw


def _binary(file: str, kernel: str, target: str) -> Binary:
    """Return the machine code of a kernel that a file lists."""
    source = _read(file)
    if _canonical(kernel) not in source.kernels:
        raise KernelError(
            f"{file}: got kernel {kernel!r}, expected one that an `// instantiate:` line lists"
        )
    if source.arch is not None:
        if source.arch.removesuffix("a") != target:
            raise KernelError(f"{file}: the GPU is {target}, expected {source.arch}")
        target = source.arch
    return _cached(source, kernel, target)


def _cached(source: Source, kernel: str, target: str) -> Binary:
    """Return what the disk cache has, or compile."""
    key = repr((source.text, source.options, kernel, target, nvrtc().getVersion()))
    folder = _cache_folder()
    name = hashlib.sha256(key.encode()).hexdigest()[:32]
    path = None if folder is None else folder / name
    binary = None if path is None else _read_cache(path, kernel)
    if binary is None:
        binary = build(source, (kernel,), target)
        if path is not None:
            _write_cache(path, binary.symbols[kernel], binary.image)
    return binary


@cache
def _read(file: str) -> Source:
    """Read a file of this folder once a process."""
    return read(FOLDER / file)


def _read_cache(path: Path, kernel: str) -> Binary | None:
    """Return what `_write_cache` wrote; None where it is missing or damaged."""
    try:
        digest, symbol, image = path.read_bytes().split(b"\n", 2)
    except (OSError, ValueError):
        return None
    if hashlib.sha256(symbol + image).hexdigest().encode() != digest:
        return None
    return Binary(image, {kernel: symbol.decode()}, "")


def _write_cache(path: Path, symbol: str, image: bytes) -> None:
    """Keep machine code on disk. Several processes and threads may write one file at once."""
    digest = hashlib.sha256(symbol.encode() + image).hexdigest()
    own = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}")
    try:
        own.write_bytes(f"{digest}\n{symbol}\n".encode() + image)
        own.replace(path)
    except OSError:  # a full or read-only disk costs a compilation next time, nothing else
        with suppress(OSError):
            own.unlink()


@cache
def _cache_folder() -> Path | None:
    """Return the folder of the disk cache, in `~/.cache` unless XDG says otherwise, if any.

    This process runs what is in it, so nobody else can write to it, nor could before.
    """
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = folder / "tensorgrad/kernels"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        state = folder.stat()
        if sys.platform == "win32":  # where a profile is its user's alone
            return folder
        if state.st_uid != os.geteuid():
            _log.warning("kernels: %s belongs to another user: not used", folder)
            return None
        if state.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            _log.warning("kernels: others could write to %s: closed and emptied", folder)
            folder.chmod(0o700)
            for path in folder.iterdir():
                path.unlink()
    except (OSError, RuntimeError):  # it cannot be made; a user without a home, as in containers
        return None
    return folder


def _gpu_target() -> str:
    """Return what to compile for: machine code of the current GPU, or PTX if it is too new."""
    device = capability(backend.cupy.cuda.runtime.getDevice())
    supported = nvrtc().getSupportedArchs()
    if device in supported:
        return f"sm_{device}"
    return f"compute_{max((arch for arch in supported if arch < device), default=min(supported))}"


@cache
def nvrtc() -> Any:
    """Return CuPy's binding of NVRTC once it is known to work."""
    if backend.cupy is None:
        raise KernelError(f"kernels: CuPy is missing; {install(cuda_extra())}")
    nvrtc = backend.cupy.cuda.nvrtc
    try:
        nvrtc.getVersion()
    except RuntimeError as error:  # the library is loaded by the first call
        raise KernelError(
            f"kernels: NVRTC is missing; {install(cuda_extra())}, or a CUDA toolkit"
        ) from error
    return nvrtc


@cache
def _headers() -> tuple[str, ...]:
    """Return the options that name the folders of CUDA's headers, as CuPy's own kernels have."""
    from cupy._core.core import assemble_cupy_compiler_options

    return tuple(assemble_cupy_compiler_options(()))


def _canonical(kernel: str) -> str:
    """Return the name with one space after each comma."""
    return re.sub(r"\s*,\s*", ", ", kernel.strip())
