"""`tensorgrad info` names what is missing, and the extra of pyproject.toml that installs it."""

from __future__ import annotations

import os
import re
import tomllib
from contextlib import nullcontext
from importlib import metadata
from types import SimpleNamespace

import pytest

from tensorgrad import __version__
from tensorgrad.cli import info
from tensorgrad.kernels import device, gpu
from tensorgrad.startup import distribution
from tests.source_tree import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
# The distributions of packages with other names.
DISTRIBUTIONS = {
    "cupti": "cupti-python",
    "huggingface_hub": "huggingface-hub",
    "mlflow": "mlflow-skinny",
    "pynvml": "nvidia-ml-py",
}


@pytest.mark.parametrize("cuda", ["cuda12", "cuda13"])
def test_every_missing_package_comes_with_the_extra_that_is_named(
    cuda: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(info, "cuda_extra", lambda: cuda)
    assert info.info() == 0
    pattern = r"(\w+) \(.+\): pip install -e \"\.\[(\w+)\]\" in the checkout"
    named = dict(re.findall(pattern, capsys.readouterr().out))
    assert {"cupy", "pynvml", "cupti", "mpi4py", "wandb", "matplotlib"} <= set(named)
    assert named["pynvml"] == cuda
    for package, extra in named.items():
        wanted = f"cupy-{cuda}x" if package == "cupy" else DISTRIBUTIONS.get(package, package)
        assert wanted in {re.split(r"[\[>=;]", line)[0] for line in EXTRAS[extra]}, package


def test_a_machine_without_gpus_where_all_is_installed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setattr(info, "backend", SimpleNamespace(
        gpu_count=lambda: 0, cupy=None, threads=lambda: 3
    ))  # fmt: skip
    assert info.info() == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [
        *("tensorgrad", "Python", "packages", "CPU", "GPU", "missing")
    ]
    assert lines[0] == f"tensorgrad   {__version__}"
    assert f"numpy {metadata.version('numpy')}, ml-dtypes " in lines[2]
    assert lines[3] == f"CPU          {os.cpu_count()} cores, 3 threads used"
    assert lines[4] == "GPU          none that CuPy could use: it is not installed"
    assert lines[5] == "missing      nothing"
    assert info._version("no-such-package") == "not installed"


def test_gpus_are_described(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = SimpleNamespace(
        driverGetVersion=lambda: 13010,
        runtimeGetVersion=lambda: 12080,
        memGetInfo=lambda: (3 << 30, 80 << 30),
    )
    cupy = SimpleNamespace(
        cuda=SimpleNamespace(runtime=runtime, Device=nullcontext), __version__="14.0"
    )
    monkeypatch.setattr(info, "backend", SimpleNamespace(gpu_count=lambda: 3, cupy=cupy))
    monkeypatch.setattr(info, "nccl_version", lambda: "2.28")
    monkeypatch.setattr(gpu, "driver_version", lambda: None)
    monkeypatch.setattr(gpu, "name_of", lambda index: f"GPU {index}")
    monkeypatch.setattr(device, "capability", lambda index: (75, 80, 90)[index])
    memory = "80 GiB, 3 free, compute capability"
    assert list(info._devices()) == [
        ("driver", "unknown version; CUDA driver 13.1, runtime 12.8"),
        ("CuPy", "14.0; NCCL 2.28"),
        ("cuda:0", f"GPU 0, {memory} 7.5: kernels without tensor cores; no bfloat16"),
        ("cuda:1", f"GPU 1, {memory} 8.0: kernels for mma.sync, bfloat16"),
        ("cuda:2", f"GPU 2, {memory} 9.0: kernels for Hopper (wgmma, TMA), bfloat16"),
    ]


def test_the_extra_for_gpus_is_that_of_cupy_or_of_the_driver(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    installed: set[str] = set()

    def version(name: str) -> str:
        if name in installed:
            return "14.0"
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", version)
    found = []
    for driver in (None, 550, 580):
        monkeypatch.setattr(distribution, "_driver", lambda driver=driver: driver)
        found.append(distribution.cuda_extra())
    installed.add("cupy-cuda12x")
    assert [*found, distribution.cuda_extra()] == ["cuda13", "cuda12", "cuda13", "cuda12"]


def test_every_install_hint_names_an_extra() -> None:
    named: set[str] = set()
    for folder in ("tensorgrad", "models", "parallel", "docs", "tests"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".py", ".md"):
                text = path.read_text(encoding="utf-8")
                named |= set(re.findall(r"install\([\"'](\w+)[\"']\)", text))
                for extras in re.findall(r"pip install -e [\"']\.\[([\w,]+)\]", text):
                    named |= set(extras.split(","))
    assert {"hub", "mpi", "plot", "text", "log", "cuda13"} <= named
    assert named - set(EXTRAS) == set()


def test_the_extra_log_is_all_loggers() -> None:
    loggers = {"mlflow", "tensorboard", "trackio", "wandb"}
    (whole,) = EXTRAS["log"]
    assert set(re.findall(r"\w+", whole.partition("[")[2])) == loggers
    assert loggers <= set(EXTRAS)


def test_what_is_for_linux_alone_says_so() -> None:
    for cuda, other in (("cuda12", "13"), ("cuda13", "12")):
        lines = [line for line in EXTRAS[cuda] if "nccl" in line or "cupti" in line]
        assert len(lines) == 2
        assert [line for line in lines if "sys_platform == 'linux'" not in line] == []
        assert not any(f"cu{other}" in line or f"cuda{other}" in line for line in EXTRAS[cuda])
