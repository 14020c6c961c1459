"""NumPy-style arrays with automatic differentiation, on the CPU and on NVIDIA GPUs."""

from __future__ import annotations

from pathlib import Path

if not Path(__file__).with_name("models").is_dir():
    # A checkout or archive without symbolic links: the folders of the root hold these packages.
    __path__.append(str(Path(__file__).parent.parent))
