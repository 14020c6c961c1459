"""What pyproject.toml cannot say: editable installs, source archives, the long description."""

import gzip
import os
import re
import tarfile
import time
import tomllib
from pathlib import Path

from setuptools import setup
from setuptools.command.editable_wheel import editable_wheel
from setuptools.command.sdist import sdist

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


class SourceArchive(sdist):
    """A source archive with equal bytes for equal files and an equal SOURCE_DATE_EPOCH.

    Wheels of setuptools have this property; its source archives record times, owners and modes.
    """

    def make_archive(self, base_name: str, format: str, *args: str, **options: str) -> str:
        """Write the .tar.gz file and return its path."""
        if format != "gztar":
            return super().make_archive(base_name, format, *args, **options)
        moment = int(os.environ.get("SOURCE_DATE_EPOCH", time.time()))

        def reproducible(member: tarfile.TarInfo) -> tarfile.TarInfo:
            member.mtime = moment
            member.uid = member.gid = 0
            member.uname = member.gname = ""
            member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            return member

        path = f"{base_name}.tar.gz"
        with (
            open(path, "wb") as file,
            gzip.GzipFile("", "wb", fileobj=file, mtime=moment) as compressed,
            tarfile.open(fileobj=compressed, mode="w", format=tarfile.PAX_FORMAT) as archive,
        ):
            archive.add(options["base_dir"], filter=reproducible)  # in the order of the names
        return path


def long_description() -> str:
    """Return the README with absolute links, for pages that show it without the files."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

    def absolute(link: re.Match[str]) -> str:
        kind = "raw" if link[1].endswith((".png", ".svg")) else "blob"
        return f"]({project['urls']['Repository']}/{kind}/main/{link[1]})"

    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return re.sub(r"\]\((?!\w+:|#)([^)\s]+)\)", absolute, text)


setup(
    cmdclass={"editable_wheel": Editable, "sdist": SourceArchive},
    long_description=long_description(),
    long_description_content_type="text/markdown",
)
