"""The loader and the compile check. What needs NVRTC is skipped where it is missing."""

from __future__ import annotations

import os
import re
import shutil
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import tensorgrad as tg
from tensorgrad.core import backend
from tensorgrad.errors import KernelError
from tensorgrad.kernels import compile as check
from tensorgrad.kernels import loader
from tests.kernels.compiled import compile_all
from tests.source_tree import ROOT

SCALE = """// options: -fmad=false
// where: TYPE = float | double
// instantiate: scale<{TYPE}, {2 |
//     3}>
#include "factor.cuh"

template <typename T, int N>
__global__ void scale(T* y, const T* x) {
    extern __shared__ double memory[];
    T* shared = reinterpret_cast<T*>(memory);
    shared[threadIdx.x] = x[threadIdx.x] * T(factor(N));
    y[threadIdx.x] = shared[threadIdx.x];
}
"""
FACTOR = """#pragma once
__device__ inline int factor(int n) { return n * n; }
"""


def missing_nvrtc() -> str | None:
    try:
        loader.nvrtc()
    except KernelError as error:
        return str(error)
    return None


needs_nvrtc = pytest.mark.skipif(missing_nvrtc() is not None, reason=str(missing_nvrtc()))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of kernels of its own, and an empty disk cache."""
    (tmp_path / "scale.cu").write_text(SCALE)
    (tmp_path / "factor.cuh").write_text(FACTOR)
    monkeypatch.setattr(loader, "FOLDER", tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(loader, "_kernels", {})
    for cached in (loader._read, loader._cache_folder):
        cached.cache_clear()
    yield tmp_path
    for cached in (loader._read, loader._cache_folder):
        cached.cache_clear()


@pytest.fixture
def cache(folder: Path) -> Path:
    """Return the folder of the disk cache."""
    cache = loader._cache_folder()
    assert cache == folder / "cache" / "tensorgrad" / "kernels"
    return cache


def test_includes_are_inlined_once_with_their_lines(folder: Path) -> None:
    (folder / "two.cu").write_text('#include "factor.cuh"\nint a;\n#include "factor.cuh"\nint b;\n')
    lines = loader.inline(folder / "two.cu").splitlines()
    assert sum("factor(int n)" in line for line in lines) == 1
    assert lines[0] == '#line 1 "two.cu"'
    assert lines[1] == '#line 1 "factor.cuh"'
    assert lines[lines.index("int a;") - 1] == '#line 2 "two.cu"'
    assert lines[lines.index("int b;") - 1] == '#line 4 "two.cu"'


def test_directives(folder: Path) -> None:
    source = loader.read(folder / "scale.cu")
    assert source.options == (*loader.OPTIONS, "-fmad=false")
    assert source.arch is None
    assert source.kernels == tuple(f"scale<{t}, {n}>" for t in ("float", "double") for n in (2, 3))


def test_choices_nest() -> None:
    assert loader.expand("f<{A<{x | y}> | B<x,y>}>") == ["f<A<x>>", "f<A<y>>", "f<B<x, y>>"]
    assert loader.expand("f<{a | b}, {c | d}>") == ["f<a, c>", "f<a, d>", "f<b, c>", "f<b, d>"]
    assert loader.expand("f<{T}, 4>", {"T": ["int", "float"]}) == ["f<int, 4>", "f<float, 4>"]


def test_every_kernel_file_lists_templates_that_it_has() -> None:
    files = sorted(loader.FOLDER.rglob("*.cu"))
    assert files
    for file in files:
        source = loader.read(file)
        templates = set(re.findall(r"(\w+)\(", source.text))
        assert source.kernels, f"{file.name} lists no kernel"
        for kernel in source.kernels:
            assert kernel.split("<")[0] in templates, f"{file.name} has no {kernel}"


def test_the_chapter_counts_the_instantiations() -> None:
    sources = [loader.read(file) for file in sorted(loader.FOLDER.rglob("*.cu"))]
    counts = [
        sum(len(source.kernels) for source in sources if source.arch in (None, arch))
        for arch in ("sm_90a", "sm_80")
    ]
    chapter = (ROOT / "docs/chapters/kernels.md").read_text()
    expected = "There are {:,} instantiations for sm_90a and {:,} for sm_80.".format(*counts)
    assert expected in chapter


def test_a_missing_file_is_named(folder: Path) -> None:
    (folder / "bad.cu").write_text('#include "other.cuh"\n')
    with pytest.raises(KernelError, match=r"got file 'other\.cuh', expected one in"):
        loader.read(folder / "bad.cu")


def test_a_kernel_that_is_not_listed(folder: Path) -> None:
    with pytest.raises(KernelError, match=r"scale\.cu: got kernel 'scale<int, 2>', expected"):
        loader._binary("scale.cu", "scale<int, 2>", "sm_80")


def test_a_file_for_another_gpu(folder: Path) -> None:
    (folder / "hopper.cu").write_text(
        "// arch: sm_90a\n// instantiate: f\n__global__ void f() {}\n"
    )
    with pytest.raises(KernelError, match=r"hopper\.cu: the GPU is sm_80, expected sm_90a"):
        loader._binary("hopper.cu", "f", "sm_80")


def test_the_disk_cache_survives_damage(cache: Path) -> None:
    path = cache / "entry"
    loader._write_cache(path, "_Z5scale", b"machine\ncode")
    found = loader._read_cache(path, "scale")
    assert found == loader.Binary(b"machine\ncode", {"scale": "_Z5scale"}, "")
    path.write_bytes(path.read_bytes()[:-1])
    assert loader._read_cache(path, "scale") is None
    path.write_bytes(b"")
    assert loader._read_cache(path, "scale") is None
    assert list(path.parent.iterdir()) == [path]


def test_threads_may_write_one_entry_at_once(cache: Path) -> None:
    path = cache / "entry"

    def write_and_read(_: int) -> loader.Binary | None:
        loader._write_cache(path, "symbol", b"code" * 2000)
        return loader._read_cache(path, "f")

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(write_and_read, range(120)))
    assert found == [loader.Binary(b"code" * 2000, {"f": "symbol"}, "")] * 120
    assert list(path.parent.iterdir()) == [path]


def test_the_disk_cache_is_private(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    loader._write_cache(cache / "entry", "symbol", b"code")
    loader._cache_folder.cache_clear()
    assert loader._cache_folder() == cache
    assert loader._read_cache(cache / "entry", "f") is not None
    assert not caplog.text


def test_a_cache_that_others_could_write_is_emptied(
    cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loader._write_cache(cache / "entry", "symbol", b"code")
    (cache / "link").symlink_to(cache / "entry")
    cache.chmod(0o777)
    loader._cache_folder.cache_clear()
    assert loader._cache_folder() == cache
    assert list(cache.iterdir()) == []
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    assert "closed and emptied" in caplog.text


def test_the_cache_of_another_user_is_not_used(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: cache.stat().st_uid + 1)
    loader._cache_folder.cache_clear()
    assert loader._cache_folder() is None
    assert "belongs to another user: not used" in caplog.text


def test_a_cache_that_cannot_be_written_is_no_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "file").write_text("")
    loader._write_cache(folder / "file" / "entry", "symbol", b"code")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "file"))
    loader._cache_folder.cache_clear()
    assert loader._cache_folder() is None


def test_without_a_home_kernels_are_compiled_and_not_kept(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    made = loader.Binary(b"code", {"scale": "_Z5scale"}, "")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.setattr(loader, "build", lambda *_: made)
    monkeypatch.setattr(loader, "nvrtc", lambda: SimpleNamespace(getVersion=lambda: (13, 0)))
    source = loader.Source("scale.cu", "", (), None, ("scale",))
    assert loader._cached(source, "scale", "sm_80") == made


def test_what_was_compiled_is_kept_on_disk(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[Any] = []

    def build(source: loader.Source, kernels: Any, target: str) -> loader.Binary:
        built.append((source.text, kernels, target))
        return loader.Binary(b"code", {kernels[0]: "_Z5scale"}, "log")

    version = [(13, 0)]
    monkeypatch.setattr(loader, "build", build)
    monkeypatch.setattr(loader, "nvrtc", lambda: SimpleNamespace(getVersion=lambda: version[0]))
    (cache.parents[2] / "hopper.cu").write_text("// arch: sm_90a\n// instantiate: f\nint g;\n")
    for kernel, file, target, count in (
        ("scale<float,2>", "scale.cu", "sm_80", 1),
        ("scale<float,2>", "scale.cu", "sm_80", 1),
        ("scale<float,2>", "scale.cu", "sm_90", 2),
        ("scale<float,3>", "scale.cu", "sm_90", 3),
        ("f", "hopper.cu", "sm_90", 4),
    ):
        found = loader._binary(file, kernel, target)
        assert (found.image, found.symbols) == (b"code", {kernel: "_Z5scale"})
        assert len(built) == count
    assert built[-1][1:] == (("f",), "sm_90a")
    version[0] = (13, 1)
    loader._binary("hopper.cu", "f", "sm_90")
    assert len(built) == 5
    names = [path.name for path in cache.iterdir()]
    assert len(names) == 5
    assert all(re.fullmatch("[0-9a-f]{32}", name) for name in names)


@pytest.mark.parametrize(
    ("device", "target"),
    [(80, "sm_80"), (90, "sm_90"), (100, "compute_90"), (89, "compute_80"), (70, "compute_75")],
)
def test_a_gpu_that_is_too_new_gets_ptx(
    device: int, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = SimpleNamespace(getDevice=lambda: 0)
    monkeypatch.setattr(backend, "cupy", SimpleNamespace(cuda=SimpleNamespace(runtime=runtime)))
    monkeypatch.setattr(loader, "capability", lambda _: device)
    compiler = SimpleNamespace(getSupportedArchs=lambda: [75, 80, 90])
    monkeypatch.setattr(loader, "nvrtc", lambda: compiler)
    assert loader._gpu_target() == target


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise RuntimeError("libnvrtc.so: cannot open")

    nvrtc = SimpleNamespace(getVersion=missing)
    for cupy, message in (
        (None, "kernels: CuPy is missing; pip install"),
        (SimpleNamespace(cuda=SimpleNamespace(nvrtc=nvrtc)), "NVRTC is missing; .*or a CUDA toolk"),
    ):
        monkeypatch.setattr(backend, "cupy", cupy)
        with pytest.raises(KernelError, match=message):
            loader.nvrtc.__wrapped__()
    nvrtc.getVersion = lambda: (13, 0)
    assert loader.nvrtc.__wrapped__() is nvrtc


class FakeNvrtc:
    """NVRTC's functions that the loader calls."""

    class NVRTCError(Exception):
        pass

    def __init__(self, error: bool) -> None:
        self.error = error
        self.calls: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> Any:
            self.calls.append((name, *arguments[1:]))
            if name == "compileProgram" and self.error:
                raise self.NVRTCError("no")
            named = {"getProgramLog": "\nlog\0", "getLoweredName": f"_Z{arguments[-1]}"}
            return named.get(name, name)

        return call


def test_programs_are_compiled_and_destroyed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "_headers", lambda: ("-Iheaders",))
    source = loader.Source("a.cu", "text", ("-O",), None, ())
    for target, image in (("sm_80", "getCUBIN"), ("compute_80", "getPTX")):
        compiler: Any = FakeNvrtc(error=False)
        monkeypatch.setattr(loader, "nvrtc", lambda compiler=compiler: compiler)
        found = loader.build(source, ["f", "g"], target, ["-extra"])
        assert found == loader.Binary(image, {"f": "_Zf", "g": "_Zg"}, "log")  # type: ignore[arg-type]
        assert compiler.calls[:4] == [
            ("createProgram", "a.cu", [], []),
            ("addNameExpression", "f"),
            ("addNameExpression", "g"),
            ("compileProgram", ["-default-device", "-O", "-extra", f"-arch={target}", "-Iheaders"]),
        ]
        assert compiler.calls[-1] == ("destroyProgram",)
    compiler = FakeNvrtc(error=True)
    monkeypatch.setattr(loader, "nvrtc", lambda: compiler)
    with pytest.raises(
        KernelError, match=r"a\.cu: f, g for sm_80 got no, expected to compile:\nlog$"
    ):
        loader.build(source, ["f", "g"], "sm_80")
    assert compiler.calls[-1] == ("destroyProgram",)


@needs_nvrtc
def test_compile_errors_name_file_and_line(folder: Path) -> None:
    (folder / "factor.cuh").write_text("#pragma once\n\nint factor(int n) { return n * m; }\n")
    source = loader.read(folder / "scale.cu")
    with pytest.raises(KernelError, match=r"scale\.cu: scale<float, 2> for sm_80 got") as caught:
        loader.build(source, ["scale<float, 2>"], "sm_80")
    assert 'factor.cuh(3): error: identifier "m" is undefined' in str(caught.value)


@needs_nvrtc
def test_the_disk_cache_knows_edited_headers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = loader._binary("scale.cu", "scale<float, 2>", "sm_80")
    monkeypatch.setattr(loader, "build", lambda *_: pytest.fail("compiled again"))
    assert loader._binary("scale.cu", "scale<float, 2>", "sm_80").image == first.image
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    monkeypatch.setattr(loader, "FOLDER", folder)
    (folder / "factor.cuh").write_text(FACTOR.replace("n * n", "n + n + 1"))
    loader._read.cache_clear()
    assert loader._binary("scale.cu", "scale<float, 2>", "sm_80").image != first.image


def compilers() -> list[Any]:
    nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on the PATH")
    return [
        pytest.param(check._nvrtc, marks=needs_nvrtc, id="nvrtc"),
        pytest.param(check._nvcc, marks=nvcc, id="nvcc"),
    ]


@pytest.mark.parametrize("compiler", compilers())
def test_the_check_reports_registers_and_spills(folder: Path, compiler: Any) -> None:
    source = loader.read(folder / "scale.cu")
    report = check._report(compiler, source, source.kernels, "sm_80")
    assert report.errors == []
    assert len(report.usage) == 4
    assert all(usage.registers > 0 and usage.spills == 0 for usage in report.usage.values())
    (folder / "spill.cu").write_text("""// instantiate: spill<100>
template <int N> __global__ void __launch_bounds__(1024, 2) spill(float* x) {
    float a[N];
    for (int i = 0; i < N; ++i) a[i] = x[i];
    for (int i = 0; i < N; ++i) a[i] *= a[(i + 7) % N] + a[N - 1 - i];
    for (int i = 0; i < N; ++i) x[i] = a[i] + a[(3 * i) % N];
}
""")
    source = loader.read(folder / "spill.cu")
    errors = check._report(compiler, source, source.kernels, "sm_80").errors
    assert len(errors) == 1
    assert re.search(r"spill\.cu: spill<100> for sm_80 spills \d+ bytes", errors[0])


@pytest.mark.skipif(shutil.which("c++filt") is None, reason="c++filt is not installed")
@pytest.mark.parametrize(
    ("symbol", "name"),
    [
        ("_Z5scaleIfLi2EEvPT_PKS0_", "scale<float, 2>"),
        ("_Z5scaleIfL6Finish1ELb0EEvPT_", "scale<float, (Finish)1, false>"),
        ("_Z4waitx", "wait"),
        ("wait", "wait"),
    ],
)
def test_the_names_of_linkers_are_read_with_brackets_in_them(symbol: str, name: str) -> None:
    assert check._demangle(symbol) == name


@pytest.mark.parametrize("compiler", compilers())
def test_the_check_reports_code_that_does_not_compile(folder: Path, compiler: Any) -> None:
    (folder / "factor.cuh").write_text("")
    source = loader.read(folder / "scale.cu")
    report = check._report(compiler, source, source.kernels, "sm_80")
    assert "factor" in report.errors[0]


def test_the_check_sees_serialized_wgmma() -> None:
    log = "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are\n"
    source = loader.Source("hopper.cu", "", (), "sm_90a", ())
    report = check._report(lambda *_: (log, {}), source, (), "sm_90a")
    assert len(report.errors) == 1
    assert "C7510" in report.errors[0]


def test_the_command_says_when_there_is_no_compiler(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing() -> None:
        raise KernelError("kernels: NVRTC is missing")

    monkeypatch.setattr(loader, "nvrtc", missing)
    monkeypatch.setattr(shutil, "which", lambda _: None)
    assert check.main([]) == 1
    assert "NVRTC is missing; nvcc is not on the PATH either" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "files", "archs"),
    [
        ([], ["hopper.cu", "scale.cu"], ["sm_80", "sm_90a"]),
        (["scale.cu", "--arch", "sm_75"], ["scale.cu"], ["sm_75"]),
        (["--arch", "sm_90a", "hopper.cu", "scale.cu"], ["hopper.cu", "scale.cu"], ["sm_90a"]),
        (["--arch", "sm_80", "--arch", "sm_90a", "--quiet", "scale.cu"], ["scale.cu"],
         ["sm_80", "sm_90a"]),
    ],
)  # fmt: skip
def test_the_command_takes_files_and_architectures_in_any_order(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    files: list[str],
    archs: list[str],
) -> None:
    (folder / "hopper.cu").write_text("")
    seen: list[Any] = []

    def note(paths: Any, targets: Any, without: Any, most: Any) -> list[Any]:
        seen.append(([path.name for path in paths], targets))
        assert without is most is None
        return []

    monkeypatch.setattr(check, "check", note)
    assert check.main(arguments) == 0
    assert seen == [(files, archs)]


def test_the_check_leaves_out_a_type(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []

    def compiler(_: Any, kernels: Any, target: str) -> tuple[str, dict[str, str]]:
        compiled.extend(kernels)
        return "", {}

    monkeypatch.setattr(check, "_compiler", lambda: compiler)
    paths = [folder / "scale.cu"]
    check.check(paths, ["sm_80"], "float")
    assert compiled == ["scale<double, 2>", "scale<double, 3>"]
    with pytest.raises(KernelError, match="--without is 'floa', expected a type that kernels name"):
        check.check(paths, ["sm_80"], "floa")
    compiled.clear()
    check.check(paths, ["sm_80"], "float", most=1)
    assert compiled == ["scale<double, 2>"]
    with pytest.raises(KernelError, match="--most is 0, expected 1 or more"):
        check.check(paths, ["sm_80"], most=0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--arch", "90a"], "--arch is '90a', expected names such as sm_80"),
        (["nrom.cu"], "got file 'nrom.cu', expected one of scale.cu"),
        (["kernels/scale.cu"], "got file 'kernels/scale.cu', expected one of scale.cu"),
    ],
)
def test_the_command_names_what_it_does_not_know(
    folder: Path, caplog: pytest.LogCaptureFixture, arguments: list[str], message: str
) -> None:
    assert check.main(arguments) == 1
    assert message in caplog.text


@pytest.mark.gpu
def test_kernels_launch_and_are_kept(folder: Path) -> None:
    cupy = backend.cupy
    x = cupy.arange(64, dtype="float32")
    for n in (2, 3):
        y = cupy.zeros_like(x)
        kernel = loader.load("scale.cu", f"scale<float, {n}>")
        kernel((1,), (64,), (y, x), 64 * 4)
        np.testing.assert_array_equal(cupy.asnumpy(y), np.arange(64) * n * n)
        assert loader.load("scale.cu", f"scale<float, {n}>") is kernel


@pytest.mark.gpu
def test_all_shared_memory_may_be_used(folder: Path) -> None:
    cupy = backend.cupy
    runtime = cupy.cuda.runtime
    limit = runtime.deviceGetAttribute(runtime.cudaDevAttrMaxSharedMemoryPerBlockOptin, 0)
    x, y = cupy.ones(32, "float64"), cupy.zeros(32, "float64")
    loader.load("scale.cu", "scale<double, 2>")((1,), (32,), (y, x), shared_mem=limit)
    assert float(y.sum()) == 32 * 4


@pytest.mark.gpu
def test_kernels_compile_together(folder: Path) -> None:
    source = loader.read(folder / "scale.cu")
    compile_all([("scale.cu", kernel) for kernel in source.kernels])
    assert {kernel for _, kernel, _ in loader._kernels} == set(source.kernels)
    assert len(list((folder / "cache" / "tensorgrad" / "kernels").iterdir())) == 4


@pytest.mark.gpu
def test_edited_headers_are_compiled_again(folder: Path) -> None:
    cupy = backend.cupy
    x, found = cupy.ones(1, "float32"), []
    for formula in ("n * n", "n + n + 1", "n * n"):
        (folder / "factor.cuh").write_text(FACTOR.replace("n * n", formula))
        loader._read.cache_clear()
        loader._kernels.clear()
        y = cupy.zeros_like(x)
        loader.load("scale.cu", "scale<float, 3>")((1,), (1,), (y, x), shared_mem=8)
        found.append(y.item())
    assert found == [9, 7, 9]


@pytest.mark.gpu
def test_subnormal_numbers_are_kept(folder: Path) -> None:
    cupy = backend.cupy
    x, y = cupy.asarray(np.full(1, 1e-42, "float32")), cupy.zeros(1, "float32")
    loader.load("scale.cu", "scale<float, 2>")((1,), (1,), (y, x), shared_mem=8)
    assert y.item() == np.float32(1e-42) * np.float32(4) != 0


@pytest.mark.gpu
def test_ops_keep_subnormal_numbers() -> None:
    tiny = tg.tensor([1e-42], "float32", device="cuda")
    assert (tiny * 0.5).item() == np.float32(1e-42) * np.float32(0.5) != 0


@pytest.mark.gpu
def test_the_library_launches_no_kernel_but_raw_ones() -> None:
    x = tg.ones((4, 8), device="cuda", requires_grad=True)
    tg.softmax(tg.tanh(x) + 1, axis=-1).sum().backward()
    launched = [(file, kernel) for file, kernel, _ in loader._kernels]
    assert "softmax.cu" in [file for file, _ in launched]
    for file, kernel in launched:
        raw = loader.raw_kernel(file, kernel)
        assert type(raw) is backend.cupy.RawKernel
        assert type(raw.kernel) is type(loader.load(file, kernel))
