"""Versions of the site: a folder each, beside a list of them and a page that opens the newest."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from packaging.version import Version
from sphinx.application import Sphinx


def list_versions(app: Sphinx, error: Exception | None) -> None:
    """Write what the menu of versions lists, newest first, and the page above all versions."""
    if error is None:
        site = Path(app.outdir).parent
        shutil.rmtree(site / "jupyter_execute", ignore_errors=True)  # copies of notebooks
        names = (path.parent.name for path in site.glob("*/objects.inv"))
        versions = sorted(names, key=Version, reverse=True)
        (site / "versions.js").write_text(f"const VERSIONS = {json.dumps(versions)};\n")
        newest = f"{versions[0]}/index.html"
        (site / "index.html").write_text(
            f'<!DOCTYPE html>\n<html lang="en"><head><title>{app.config.project}</title>\n'
            f'<meta http-equiv="refresh" content="0; url={newest}"></head>\n'
            f'<body><a href="{newest}">{app.config.project} {versions[0]}</a></body></html>\n'
        )


def setup(app: Sphinx) -> dict[str, Any]:
    """Connect the functions above."""
    app.connect("build-finished", list_versions)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
