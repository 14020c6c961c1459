from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import tarfile
import time
import tomllib
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tensorgrad
from tests.source_tree import FOLDERS, ROOT, library, module_names

pytestmark = pytest.mark.slow

OPTIONAL = (
    "cuda",
    "cupy",
    "cupyx",
    "datasets",
    "matplotlib",
    "mpi4py",
    "nvmath",
    "sacrebleu",
    "torch",
    "transformers",
    "triton",
)
NOT_SOURCE = tuple(
    [
        ".git",
        ".venv*",
        ".*_cache",
        ".hypothesis",
        "__pycache__",
        "*.egg-info",
        "build",
        "dist",
        "runs",
    ]
)
EPOCH = 1_700_000_000  # SOURCE_DATE_EPOCH of builds, in seconds, which zip archives halve
DATA = {
    "tensorgrad": ("py.typed",),
    "tensorgrad.core": ("*.pyi",),
    "tensorgrad.kernels": ("*.cu", "*.cuh", "tuned.json"),
    "tensorgrad.kernels.attention": ("*.cu", "*.cuh"),
    "tensorgrad.kernels.matmul": ("*.cu", "*.cuh"),
    "tensorgrad.report": ("charts.js", "page.css"),
}


def python(*args: str, cwd: Path, paths: Sequence[Path] = ()) -> subprocess.CompletedProcess[str]:
    """Run Python in a folder, with nothing of this checkout on its path but `paths`."""
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    variables["SOURCE_DATE_EPOCH"] = str(EPOCH)
    if paths:
        variables["PYTHONPATH"] = os.pathsep.join(map(str, paths))
    return subprocess.run(
        [sys.executable, *args], cwd=cwd, env=variables, capture_output=True, text=True, timeout=240
    )


def succeed(*args: str, cwd: Path, paths: Sequence[Path] = ()) -> str:
    result = python(*args, cwd=cwd, paths=paths)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def packages_on_disk() -> set[str]:
    return {s.module for s in library() if s.path.name == "__init__.py"}


def expected_in_wheel() -> set[str]:
    """Name the files of the package as a wheel holds them."""
    files = set()
    for source in library():
        init = "/__init__" if source.path.name == "__init__.py" else ""
        files.add(source.module.replace(".", "/") + init + ".py")
    for package, patterns in DATA.items():
        folder = package.replace(".", "/")
        files |= {
            f"{folder}/{p.name}" for pattern in patterns for p in (ROOT / folder).glob(pattern)
        }
    return files


def wheel_files(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return [name for name in archive.namelist() if ".dist-info/" not in name]


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy the sources, so that builds leave nothing in the checkout and find nothing old."""
    copy = tmp_path_factory.mktemp("source") / "tensorgrad"
    shutil.copytree(ROOT, copy, symlinks=True, ignore=shutil.ignore_patterns(*NOT_SOURCE))
    return copy


@pytest.fixture(scope="module")
def without_links(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy the sources as an archive without symbolic links unpacks: small text files instead."""
    copy = tmp_path_factory.mktemp("archive") / "tensorgrad"
    shutil.copytree(checkout, copy, symlinks=True)
    for name in ("models", "parallel"):
        link = copy / "tensorgrad" / name
        link.unlink(missing_ok=True)
        link.write_text(f"../{name}")
    return copy


def build_wheel(source: Path, target: Path) -> Path:
    succeed(
        *("-m", "pip", "wheel", "-q", "--no-build-isolation", "--no-deps", "--no-index"),
        *("-w", str(target), str(source)),
        cwd=target,
    )
    (wheel,) = target.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(checkout, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def sdist(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("sdist")
    succeed(
        *("-m", "build", "--sdist", "--no-isolation", "-o", str(target), str(checkout)), cwd=target
    )
    (archive,) = target.glob("*.tar.gz")
    return archive


def test_the_package_list_matches_the_disk() -> None:
    assert set(project()["tool"]["setuptools"]["packages"]) == packages_on_disk()
    homeless = {
        str(source)
        for source in library()
        if source.path.name != "__init__.py"
        and source.module.rpartition(".")[0] not in packages_on_disk()
    }
    assert homeless == set(), "folders without __init__.py"


def test_the_folders_of_the_root_are_mapped() -> None:
    mapped = {package: folder for package, folder in FOLDERS.items() if package != folder}
    assert project()["tool"]["setuptools"]["package-dir"] == mapped
    for package, folder in mapped.items():
        link = ROOT / package.replace(".", "/")
        if link.is_symlink():
            assert os.readlink(link) == f"../{folder}"


def test_a_wheel_holds_each_file_once_and_nothing_else(wheel: Path) -> None:
    files = wheel_files(wheel)
    assert len(files) == len(set(files))
    assert set(files) == expected_in_wheel()


def test_a_wheel_says_what_it_needs(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        metadata = archive.read(name).decode()
        assert any(name.endswith("/licenses/LICENSE") for name in archive.namelist())
    always = [
        line.split()[1].split(">")[0]
        for line in metadata.splitlines()
        if line.startswith("Requires-Dist:") and "extra ==" not in line
    ]
    assert sorted(always) == [
        "cyclopts", "ml-dtypes", "numpy", "pyyaml", "safetensors", "threadpoolctl",
        "tokenizers", "tqdm",
    ]  # fmt: skip
    assert wheel.name.startswith(f"tensorgrad_cupy-{tensorgrad.__version__}-")
    assert "\nName: tensorgrad-cupy\n" in metadata
    assert f"\nVersion: {tensorgrad.__version__}\n" in metadata
    for extra in ("cuda13", "cuda12", "mpi", "text", "plot", "dev"):
        assert f"Provides-Extra: {extra}\n" in metadata
    urls = dict(re.findall(r"^Project-URL: (\w+), (\S+)$", metadata, re.MULTILINE))
    assert set(urls) == {"Repository", "Documentation", "Changelog", "Security", "Issues"}
    _, _, description = metadata.partition("\n\n")
    assert description.startswith("# tensorgrad\n")
    links = re.findall(r"\]\(([^)\s]+)\)", description)
    assert [link for link in links if not link.startswith("https://")] == []
    own = [link.removeprefix(f"{urls['Repository']}/") for link in links]
    assert len(own) > 10
    assert "raw/main/docs/loss.png" in own
    paths = [path.partition("/main/")[2].partition("#")[0] for path in own if path in own]
    assert [path for path in paths if not (ROOT / path).is_file()] == []


# Names that no index has: the other project's as a requirement with extras, or either name
# after `install`.
WRONG_NAME = re.compile(r"""\btensorgrad\\?\[[^\]\s]|\binstall(\s+-\S+)*\s+["'`]?tensorgrad\b""")


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("pip install -U 'tensor" "grad'", True),
        ("pip install tensor" "grad", True),
        ('needs "tensor' 'grad[mpi,plot]"', True),
        ('pip install "tensor' 'grad-cupy[mpi]"', True),
        ("pip install -e '.[mpi]'", False),
        ("pip uninstall -y tensorgrad tensorgrad-cupy", False),
        ("import tensorgrad", False),
    ],
)  # fmt: skip
def test_the_wrong_name_is_told_from_ours(text: str, wrong: bool) -> None:
    assert bool(WRONG_NAME.search(text)) is wrong


def test_nobody_is_told_to_install_another_project(checkout: Path) -> None:
    texts = [path for path in checkout.rglob("*") if path.is_file() and path.suffix != ".png"]
    assert len(texts) > 300
    wrong = [
        f"{path.relative_to(checkout)}:{number}: {line.strip()}"
        for path in texts
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if WRONG_NAME.search(line)
    ]
    assert wrong == []


def test_an_sdist_holds_the_sources_alone_and_builds_the_same_wheel(
    checkout: Path, sdist: Path, wheel: Path, tmp_path: Path
) -> None:
    with tarfile.open(sdist) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # from Python 3.11.4 on
        archive.extractall(tmp_path)
    (unpacked,) = tmp_path.iterdir()
    files = {str(path.relative_to(unpacked)) for path in unpacked.rglob("*") if path.is_file()}
    folders = (".ci", ".github", "docs", "examples", "models", "parallel", "tensorgrad", "tests")
    wanted = {
        str(path.relative_to(checkout))
        for folder in folders
        for path in (checkout / folder).rglob("*")
        if path.is_file()
    }
    wanted -= {"tensorgrad/models", "tensorgrad/parallel"}  # links, as files
    wanted |= {
        ".dockerignore",
        "CHANGELOG.md",
        "CITATION.cff",
        "CODE_OF_CONDUCT.md",
        "CONTRIBUTING.md",
        "Dockerfile",
        "LICENSE",
        "MANIFEST.in",
        "Makefile",
        "README.md",
        "SECURITY.md",
        "pyproject.toml",
        "setup.py",
    }
    made = {name for name in files if name.startswith("tensorgrad_cupy.egg-info/")}
    assert files == wanted | made | {"PKG-INFO", "setup.cfg"}
    target = tmp_path / "wheel"
    target.mkdir()
    assert set(wheel_files(build_wheel(unpacked, target))) == set(wheel_files(wheel))
    succeed("-c", "import tensorgrad.models, tensorgrad.parallel", cwd=unpacked, paths=[unpacked])


def test_archives_record_no_owner_and_no_time_of_the_build(sdist: Path, wheel: Path) -> None:
    """So `.ci/release` finds equal bytes in two builds."""
    assert struct.unpack("<4xI", sdist.read_bytes()[:8]) == (EPOCH,)  # gzip header
    with tarfile.open(sdist) as source:
        members = source.getmembers()
    assert [member.name for member in members] == sorted(
        (member.name for member in members), key=lambda name: name.split("/")
    )
    assert {(m.mtime, m.uid, m.gid, m.uname, m.gname) for m in members} == {(EPOCH, 0, 0, "", "")}
    modes = {member.name.partition("/")[2]: member.mode for member in members}
    assert set(modes.values()) == {0o644, 0o755}
    assert (modes["docs"], modes[".ci/run"], modes["setup.py"]) == (0o755, 0o755, 0o644)
    with zipfile.ZipFile(wheel) as archive:
        assert {info.date_time for info in archive.infolist()} == {time.gmtime(EPOCH)[:6]}


def test_an_archive_without_links_builds_the_same_wheel(
    without_links: Path, wheel: Path, tmp_path: Path
) -> None:
    assert set(wheel_files(build_wheel(without_links, tmp_path))) == set(wheel_files(wheel))


@pytest.mark.parametrize("kind", ["checkout", "without_links"])
def test_it_works_uninstalled_with_the_root_on_the_path(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    root: Path = request.getfixturevalue(kind)
    script = "import tensorgrad.models, tensorgrad.parallel; print(tensorgrad.models.__file__)"
    found = Path(succeed("-S", "-c", script, cwd=tmp_path, paths=[root, *site_packages()]).strip())
    assert found.resolve() == root / "models/__init__.py"


@pytest.mark.parametrize("kind", ["wheel", "checkout", "without_links"])
def test_pip_installs_it_and_type_checkers_see_it(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    source: Path = request.getfixturevalue(kind)
    editable = kind != "wheel"
    environment = tmp_path / "environment"
    succeed("-m", "venv", "--without-pip", str(environment), cwd=tmp_path)
    succeed(
        *("-m", "pip", "install", "-q", "--no-build-isolation", "--no-deps", "--no-index"),
        *("--ignore-installed", "--no-warn-script-location", "--prefix", str(environment)),
        *(["-e"] if editable else []),
        str(source),
        cwd=tmp_path,
    )
    (installed,) = environment.rglob("site-packages")
    (installed / "dependencies.pth").write_text("\n".join(map(str, site_packages())))
    interpreter = str(environment / "bin" / "python")
    script = (
        "import json, tensorgrad.models, tensorgrad.parallel;"
        "print(json.dumps([tensorgrad.__file__, tensorgrad.models.__file__]))"
    )
    run = subprocess.run(
        [interpreter, "-I", "-c", script], cwd=tmp_path, capture_output=True, check=True
    )
    places = [Path(file).resolve() for file in json.loads(run.stdout)]
    if editable:
        assert places == [source / "tensorgrad/__init__.py", source / "models/__init__.py"]
    else:
        package = installed / "tensorgrad"
        assert places == [package / "__init__.py", package / "models/__init__.py"]
        assert not (installed / "models").exists()
    shutil.copy(ROOT / "tests" / "typed_program.py", tmp_path)
    succeed(
        *("-m", "mypy", "--strict", "--config-file", "", "--python-executable", interpreter),
        *("--cache-dir", str(tmp_path.parent / "mypy"), "typed_program.py"),
        cwd=tmp_path,
    )


def site_packages() -> list[Path]:
    """Return the folders of the run-time dependencies."""
    return [Path(np.__file__).parent.parent]


@pytest.mark.parametrize("name", ["models", "parallel"])
def test_a_bare_import_says_what_to_import(name: str) -> None:
    result = python("-c", f"import {name}", cwd=ROOT)
    assert result.returncode == 1
    assert "ImportError" in result.stderr.splitlines()[-1]
    assert f"from tensorgrad import {name}" in result.stderr.splitlines()[-1]


BLOCK = """
import sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

BLOCKED = set(sys.argv[1].split())
sys.meta_path.insert(0, Block())
"""


def test_every_module_imports_without_the_optional_dependencies(tmp_path: Path) -> None:
    names = sorted(name for name in module_names() if not name.endswith("__main__"))
    script = BLOCK + "import importlib\nfor name in sys.argv[2:]: importlib.import_module(name)\n"
    succeed("-W", "error", "-c", script, " ".join(OPTIONAL), *names, cwd=tmp_path, paths=[ROOT])


def test_importing_the_library_loads_no_optional_dependency(tmp_path: Path) -> None:
    script = "import json, sys, tensorgrad; print(json.dumps(sorted(sys.modules)))"
    loaded = set(json.loads(succeed("-c", script, cwd=tmp_path, paths=[ROOT])))
    assert loaded & (set(OPTIONAL) - {"cupy", "cupyx", "cuda"}) == set()  # backend takes CuPy


def test_importing_the_library_loads_numpy_and_its_dtypes_alone(tmp_path: Path) -> None:
    """Then it takes 0.2 s, of which NumPy takes half."""
    script = BLOCK + "import json, tensorgrad; print(json.dumps(sorted(sys.modules)))"
    before = BLOCK + "import json, numpy; print(json.dumps(sorted(sys.modules)))"
    loaded, numpy = (
        {name.partition(".")[0] for name in json.loads(text)}
        for text in (
            succeed("-c", each, "cupy", cwd=tmp_path, paths=[ROOT]) for each in (script, before)
        )
    )
    found = loaded - numpy
    assert found - sys.stdlib_module_names == {"ml_dtypes", "tensorgrad"}
    assert found & {"asyncio", "email", "http", "multiprocessing", "ssl", "unittest"} == set()


def test_the_blocker_blocks(tmp_path: Path) -> None:
    assert importlib.util.find_spec("matplotlib") is not None
    result = python("-c", BLOCK + "import matplotlib\n", "matplotlib", cwd=tmp_path)
    assert "No module named 'matplotlib'" in result.stderr


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """Return a folder of installed packages: tensorgrad, as links to the files of this checkout."""
    package = tmp_path / "site" / "tensorgrad"
    package.mkdir(parents=True)
    for path in (ROOT / "tensorgrad").iterdir():
        if path.name not in ("__pycache__", "models", "parallel"):
            (package / path.name).symlink_to(path)
    for name in ("models", "parallel"):
        (package / name).symlink_to(ROOT / name)
    return package.parent


def test_another_project_beside_this_one_is_named_at_import(site: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import tensorgrad\n")
    (site / f"tensorgrad_cupy-{tensorgrad.__version__}.dist-info").mkdir()
    quiet = python("-S", str(script), cwd=tmp_path, paths=[site, *site_packages()])
    assert (quiet.returncode, quiet.stderr) == (0, "")
    (site / "tensorgrad-0.3.0.dist-info").mkdir()
    warned = python("-S", str(script), cwd=tmp_path, paths=[site, *site_packages()])
    assert warned.returncode == 0
    first, _ = warned.stderr.splitlines()  # the second is the line of the script
    assert first.startswith(
        f"{script}:1: UserWarning: tensorgrad: another distribution, tensorgrad"
    )
    assert "tensorgrad-0.3.0" in first
    assert "pip uninstall -y tensorgrad tensorgrad-cupy" in first


@pytest.mark.parametrize("owner", ["belongs to another distribution", "is missing"])
def test_where_another_project_has_replaced_files_an_import_says_so(
    owner: str, site: Path, tmp_path: Path
) -> None:
    """After the other project was installed, and after it was uninstalled."""
    for name in ("__init__.py", "tensor.py"):
        (site / "tensorgrad" / name).unlink(missing_ok=True)
        if owner != "is missing":
            (site / "tensorgrad" / name).write_text("class Tensor: ...\n")
    modules = ("autograd", "cli", "data", "models.gpt2", "models.translation", "nn", "optim",
               "parallel", "profile", "random", "report", "train", "io")  # fmt: skip
    script = """
import importlib, json, sys
lines = []
for name in sys.argv[1:]:
    try:
        importlib.import_module(f"tensorgrad.{name}")
    except ImportError as error:
        lines.append(str(error))
print(json.dumps(lines))
"""
    paths = [site, *site_packages()]
    lines = json.loads(succeed("-S", "-c", script, *modules, cwd=tmp_path, paths=paths))
    place = site / "tensorgrad" / "__init__.py"
    expected = f"tensorgrad: {place} {owner}, expected that of tensorgrad-cupy: run `pip uninstall"
    assert len(lines) == len(modules)
    assert [line for line in lines if not line.startswith(expected) or "\n" in line] == []
