"""How the project is called where it is installed, and whether its files are its own.

It is imported as `tensorgrad`, the name of another project on the package index. pip installs one
over the other without a word, and uninstalling either then removes files of both.
"""

from __future__ import annotations

import os
import sys

NAME = "tensorgrad-cupy"
_REPAIR = f"run `pip uninstall -y tensorgrad {NAME}`, then install this project again"
_PACKAGE = sys.modules["tensorgrad"]
_OTHER = ("tensorgrad-", ".dist-info")  # pip's records of that project have such names
FIRST_DRIVER_OF_CUDA_13 = 580


def install(extra: str) -> str:
    """Return the command that installs an extra, and where: the project is on no index.

    Args:
        extra: its name in pyproject.toml.
    """
    return f'pip install -e ".[{extra}]" in the checkout'


def cuda_extra() -> str:
    """Return the extra for GPUs: of the CuPy that is installed, else of the driver."""
    from importlib import metadata  # slow, and seldom needed

    for extra in ("cuda13", "cuda12"):
        try:
            metadata.version(f"cupy-{extra}x")
        except metadata.PackageNotFoundError:
            continue
        return extra
    driver = _driver()
    return "cuda12" if driver and driver < FIRST_DRIVER_OF_CUDA_13 else "cuda13"


def _driver() -> int | None:
    """Return the branch of the NVIDIA driver, such as 580, where Linux tells it."""
    try:
        with open("/sys/module/nvidia/version", encoding="ascii") as file:
            return int(file.read().partition(".")[0])
    except (OSError, ValueError):
        return None


def check_owner() -> None:
    """Warn where the other project is installed in the same folder.

    Raises:
        ImportError: it has replaced tensorgrad/__init__.py, or removed it.
    """
    file = getattr(_PACKAGE, "__file__", None)
    if file is None or getattr(_PACKAGE, "__distribution__", None) != NAME:
        owner = "belongs to another distribution" if file else "is missing"
        place = file or os.path.join(*_PACKAGE.__path__, "__init__.py")
        raise ImportError(f"tensorgrad: {place} {owner}, expected that of {NAME}: {_REPAIR}")
    folder = os.path.dirname(os.path.dirname(file))
    start, end = _OTHER
    try:
        others = [n for n in os.listdir(folder) if n.startswith(start) and n.endswith(end)]
    except OSError:  # in an archive that Python imports from
        return
    if others:
        import warnings

        warnings.warn(
            f"tensorgrad: another distribution, {others[0].removesuffix(end)}, is installed in "
            f"{folder} and owns files of this one: {_REPAIR}",
            stacklevel=5,  # where tensorgrad is imported
        )


check_owner()
