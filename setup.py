"""What pyproject.toml cannot say: an editable install for type checkers, the long description."""

import re
import tomllib
from pathlib import Path

from setuptools import setup
from setuptools.command.editable_wheel import editable_wheel

ROOT = Path(__file__).parent


class Editable(editable_wheel):
    """An editable install that type checkers see: they read .pth files, and run no import hooks.

    In a checkout, tensorgrad/models and tensorgrad/parallel are links to folders of the root, so
    that the root itself is a path to import from. Without links (in an archive, or on a system that
    has none) setuptools makes a folder with a link to every file: its mode "strict".
    """

    def finalize_options(self) -> None:
        """Choose the kind of install, unless a mode was asked for."""
        folders = self.distribution.package_dir
        linked = all((ROOT / package.replace(".", "/")).is_dir() for package in folders)
        if linked and self.mode is None:
            self.distribution.package_dir = {"": "."}
        super().finalize_options()
        if not linked and self.mode is None:
            self.mode = "strict"


def long_description() -> str:
    """Return the README with absolute links, for pages that show it without the files."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

    def absolute(link: re.Match[str]) -> str:
        kind = "raw" if link[1].endswith((".png", ".svg")) else "blob"
        return f"]({project['urls']['Repository']}/{kind}/main/{link[1]})"

    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return re.sub(r"\]\((?!\w+:|#)([^)\s]+)\)", absolute, text)


setup(
    cmdclass={"editable_wheel": Editable},
    long_description=long_description(),
    long_description_content_type="text/markdown",
)
