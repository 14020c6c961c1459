"""`tensorgrad info`: devices, drivers, versions and what is missing."""

from __future__ import annotations

import importlib.util
import os
import platform
from collections.abc import Iterator
from importlib import metadata

from tensorgrad import __version__
from tensorgrad.core import backend
from tensorgrad.kernels import device as kernel_device
from tensorgrad.kernels import gpu
from tensorgrad.parallel.comm.mpi_nccl import nccl_version
from tensorgrad.startup.distribution import cuda_extra, install

_CUDA = ""  # the extra that `cuda_extra` names
_EXTRAS = {
    "cupy": ("GPUs", _CUDA),
    "cupti": ("traces of single kernels", _CUDA),
    "pynvml": ("GPU clock and power", _CUDA),
    "mpi4py": ("several ranks", "mpi"),
    "datasets": ("Hugging Face data sets", "text"),
    "pyarrow": ("Parquet files", "text"),
    "sacrebleu": ("BLEU", "text"),
    "huggingface_hub": ("downloads of models", "hub"),
    "jinja2": ("chat templates", "hub"),
    "matplotlib": ("plots", "plot"),
    "mlflow": ("the MLflow logger", "mlflow"),
    "tensorboardX": ("the TensorBoard logger", "tensorboard"),
    "trackio": ("the trackio logger", "trackio"),
    "wandb": ("the W&B logger", "wandb"),
}


def info() -> int:
    """Show devices, drivers, versions and what is missing, as a block for a bug report."""
    for name, value in (*_software(), *_devices()):
        print(f"{name:12} {value}")
    missing = [f"{package} ({use}): {install(extra)}" for package, use, extra in _missing()]
    print(f"{'missing':12} {missing[0] if missing else 'nothing'}")
    for line in missing[1:]:
        print(f"{'':12} {line}")
    return 0


def _software() -> Iterator[tuple[str, str]]:
    """Yield names and versions."""
    yield "tensorgrad", __version__
    yield "Python", f"{platform.python_version()} on {platform.platform()}"
    names = ("numpy", "ml-dtypes", "tokenizers", "safetensors", "mpi4py")
    yield "packages", ", ".join(f"{name} {_version(name)}" for name in names)
    yield "CPU", f"{os.cpu_count()} cores, {backend.threads()} threads used"


def _devices() -> Iterator[tuple[str, str]]:
    """Yield the GPUs, their driver and libraries, and which kernels serve them."""
    count = backend.gpu_count()
    if not count:
        yield "GPU", "none" if backend.cupy else "none that CuPy could use: it is not installed"
        return
    runtime = backend.cupy.cuda.runtime
    versions = (runtime.driverGetVersion(), runtime.runtimeGetVersion())
    cuda = ", ".join(
        f"{name} {number // 1000}.{number % 1000 // 10}"
        for name, number in zip(("CUDA driver", "runtime"), versions, strict=True)
    )
    yield "driver", f"{gpu.driver_version() or 'unknown version'}; {cuda}"
    yield "CuPy", f"{backend.cupy.__version__}; NCCL {nccl_version()}"
    for index in range(count):
        with backend.cupy.cuda.Device(index):
            free, total = runtime.memGetInfo()
            capability = kernel_device.capability(index)
        memory = f"{total / 2**30:.0f} GiB, {free / 2**30:.0f} free"
        name = f"{gpu.name_of(index)}, {memory}, compute capability {capability / 10:.1f}"
        yield f"cuda:{index}", f"{name}: {kernels_of(capability)}"


def kernels_of(capability: int) -> str:
    """Return which kernels serve a GPU of a compute capability, such as 90."""
    if capability >= 90:
        return "kernels for Hopper (wgmma, TMA), bfloat16"
    if capability >= 80:
        return "kernels for mma.sync, bfloat16"
    return "kernels without tensor cores; no bfloat16"


def _missing() -> list[tuple[str, str, str]]:
    """Return the packages that are not installed: name, what they are for, extra."""
    return [
        (package, use, extra or cuda_extra())
        for package, (use, extra) in _EXTRAS.items()
        if importlib.util.find_spec(package) is None
    ]


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"
