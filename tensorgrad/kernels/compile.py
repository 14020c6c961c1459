"""Compile every kernel without a GPU: `python -m tensorgrad.kernels.compile --arch sm_80 sm_90a`.

With names of .cu files, anywhere on the command line, only these. Prints registers, shared memory
and spills of each instantiation that a .cu file lists, and exits with 1 where a kernel does not
compile, spills registers to memory, or has its wgmma serialized.
Uses NVRTC, as the library does, or nvcc where there is no NVRTC.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from tensorgrad.core import backend
from tensorgrad.core.errors import KernelError
from tensorgrad.io.command import command
from tensorgrad.kernels import loader

_ENTRY = re.compile(
    r"Compiling entry function '(\w+)' for '\w+'(.*?)(?=ptxas info\s*: Compiling entry|\Z)",
    re.DOTALL,
)
_SERIALIZED = re.compile(r"^.*(?:C7508|C751[0-9]).*$", re.MULTILINE)
_BATCH = 64  # instantiations of one file compiled together: headers are read once for all of them


# (source, kernels, target) -> the compiler's log, and the kernel behind each linker name
Compiler = Callable[[loader.Source, Sequence[str], str], tuple[str, dict[str, str]]]


class Usage(NamedTuple):
    """The report of ptxas on one kernel, in registers and bytes."""

    registers: int
    shared: int
    spills: int


class Report(NamedTuple):
    """The report of the compiler on a batch of instantiations of one file."""

    file: str
    target: str
    usage: dict[str, Usage]
    errors: list[str]


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Check the kernels named on the command line and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tensorgrad.kernels.compile", description=__doc__
    )
    parser.add_argument("files", nargs="*", help="names of .cu files; all by default")
    parser.add_argument(
        "--arch", nargs="+", action="extend", default=[], help="such as sm_80 sm_90a"
    )
    parser.add_argument(
        "--without", metavar="TYPE", help="skip kernels of this C++ type, such as __half"
    )
    parser.add_argument(
        "--most", type=int, help="compile about this number of kernels of each file, evenly spread"
    )
    parser.add_argument(
        "--quiet", action="store_true", help="print only errors and one summary line"
    )
    options = parser.parse_args(arguments)
    paths, archs = _chosen(options.files, options.arch)
    reports = check(paths, archs, options.without, options.most)
    for report in reports:
        for kernel, usage in () if options.quiet else report.usage.items():
            print(
                f"{report.target:8} {usage.registers:4} registers {usage.shared:6} B shared "
                f"{usage.spills:5} B spilled  {report.file}: {kernel}"
            )
    errors = [error for report in reports for error in report.errors]
    print(f"{sum(len(report.usage) for report in reports)} kernels compiled, {len(errors)} errors")
    for line in errors:
        print(line, file=sys.stderr)
    return 1 if errors else 0


def _chosen(files: Sequence[str], archs: Sequence[str]) -> tuple[list[Path], list[str]]:
    """Return the files and architectures; `--arch` may have taken files that follow it."""
    names = [*files, *(name for name in archs if name.endswith(".cu"))]
    archs = [name for name in archs if not name.endswith(".cu")] or ["sm_80", "sm_90a"]
    for arch in archs:
        if not re.fullmatch(r"sm_\d+a?", arch):
            raise KernelError(
                f"compile: --arch is {arch!r}, expected names such as sm_80 or sm_90a"
            )
    known = sorted(loader.FOLDER.rglob("*.cu"))
    for name in names:
        if not (loader.FOLDER / name).is_file():
            expected = ", ".join(path.relative_to(loader.FOLDER).as_posix() for path in known)
            raise KernelError(f"compile: got file {name!r}, expected one of {expected}")
    return [loader.FOLDER / name for name in names] or known, archs


def check(
    paths: Sequence[Path], archs: Sequence[str], without: str | None = None, most: int | None = None
) -> list[Report]:
    """Compile the instantiations of the files for each architecture they are for.

    Args:
        paths: of .cu files.
        archs: such as "sm_90a".
        without: a C++ type; instantiations that name it are skipped.
        most: of a file with more instantiations, about this number is compiled, evenly spread.
    Raises:
        KernelError: there is neither NVRTC nor nvcc, no kernel names the type, or `most` is less
            than 1.
    """
    if most is not None and most < 1:
        raise KernelError(f"compile: --most is {most}, expected 1 or more")
    compiler = _compiler()
    tasks = []
    sources = [loader.read(path) for path in paths]
    if without and not any(
        _names(kernel, without) for source in sources for kernel in source.kernels
    ):
        raise KernelError(f"compile: --without is {without!r}, expected a type that kernels name")
    for source in sources:
        kernels = [kernel for kernel in source.kernels if not _names(kernel, without)]
        if most is not None:
            kernels = kernels[:: max(1, -(-len(kernels) // most))]
        for arch in archs:
            if source.arch not in (None, arch):
                continue
            target = source.arch or arch.removesuffix("a")
            tasks += [
                (source, kernels[i : i + _BATCH], target) for i in range(0, len(kernels), _BATCH)
            ]
    # The kernels of files with few take long; short ones last keep all cores busy.
    tasks.sort(key=lambda task: len(task[0].kernels))
    with ThreadPoolExecutor(backend.threads()) as pool:
        reports = list(pool.map(lambda task: _report(compiler, *task), tasks))
    return sorted(reports, key=lambda report: report.file)


def _names(kernel: str, type_name: str | None) -> bool:
    return type_name in re.findall(r"\w+", kernel)


def _compiler() -> Compiler:
    """Return the first of NVRTC and nvcc that is here."""
    try:
        loader.nvrtc()
    except KernelError as error:
        if shutil.which("nvcc") is None:
            raise KernelError(f"{error}; nvcc is not on the PATH either") from error
        return _nvcc
    return _nvrtc


def _nvrtc(
    source: loader.Source, kernels: Sequence[str], target: str
) -> tuple[str, dict[str, str]]:
    """Return the compiler's log and the kernel behind each linker name."""
    binary = loader.build(source, kernels, target, ["--ptxas-options=-v"])
    return binary.log, {symbol: kernel for kernel, symbol in binary.symbols.items()}


def _nvcc(source: loader.Source, kernels: Sequence[str], target: str) -> tuple[str, dict[str, str]]:
    """Do as `_nvrtc`: a table of function pointers makes nvcc instantiate the kernels."""
    table = ", ".join(f"(const void*){kernel}" for kernel in kernels)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, Path(source.name).name)
        path.write_text(f"{source.text}\nconst void* kernels[] = {{{table}}};\n")
        code = target.replace("sm_", "compute_")
        command = ["nvcc", *source.options, f"-gencode=arch={code},code={target}", "--cubin"]
        command += ["-Xptxas", "-v", "-o", str(path.with_suffix(".cubin")), str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise KernelError(f"{source.name}: for {target} got errors, expected none:\n{done.stderr}")
    symbols = _ENTRY.findall(done.stderr)
    return done.stderr, {symbol: _demangle(symbol) for symbol, _ in symbols}


def _demangle(symbol: str) -> str:
    """Return the C++ name of a linker name where c++filt is here to tell."""
    if shutil.which("c++filt") is None:
        return symbol
    name = subprocess.run(["c++filt", symbol], capture_output=True, text=True, check=True).stdout
    name = name.strip().removeprefix("void ")
    # Template arguments may have brackets too, as (Finish)1: those of the parameters come after.
    return name[: name.rindex(">(") + 1] if ">(" in name else name.partition("(")[0]


def _report(
    compiler: Compiler, source: loader.Source, kernels: Sequence[str], target: str
) -> Report:
    """Compile a batch and read the log."""
    try:
        log, symbols = compiler(source, kernels, target)
    except KernelError as error:
        return Report(source.name, target, {}, [str(error)[:4000]])
    errors = [f"{source.name}: {line}" for line in _SERIALIZED.findall(log)]
    usage = {}
    for symbol, text in _ENTRY.findall(log):
        spills = sum(map(int, re.findall(r"(\d+) bytes spill", text)))
        registers, shared = (re.search(p, text) for p in (r"Used (\d+) reg", r"(\d+) bytes smem"))
        kernel = symbols.get(symbol, symbol)
        usage[kernel] = Usage(
            int(registers[1]) if registers else 0, int(shared[1]) if shared else 0, spills
        )
        if spills:
            errors.append(f"{source.name}: {kernel} for {target} spills {spills} bytes, expected 0")
    if len(usage) != len(kernels):
        errors.append(f"{source.name}: {len(usage)} kernels for {target}, expected {len(kernels)}")
    return Report(source.name, target, usage, errors)


if __name__ == "__main__":
    sys.exit(main())
