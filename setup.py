"""The part of the build that depends on the checkout; everything else is in pyproject.toml.

`models` and `parallel` are folders of the root and packages inside `tensorgrad`. A checkout has
links there, so that one line of a .pth file, which type checkers read too, makes it importable.
"""

from pathlib import Path

from setuptools import setup
from setuptools.command.editable_wheel import editable_wheel

FOLDERS = {"tensorgrad.models": "models", "tensorgrad.parallel": "parallel"}
ROOT = Path(__file__).parent
LINKED = all((ROOT / package.replace(".", "/")).is_dir() for package in FOLDERS)


class Editable(editable_wheel):
    """Without links (an archive, a system without them): a folder of links to every file."""

    def finalize_options(self) -> None:
        """Choose "strict", where no other mode was asked for."""
        super().finalize_options()
        if not LINKED and self.mode is None:
            self.mode = "strict"


setup(package_dir={"": "."} if LINKED else FOLDERS, cmdclass={"editable_wheel": Editable})
