"""Run tests for compute-sanitizer: `make sanitize`, or under one of its tools by hand.

CuPy's memory pool is off, so that every array has bounds of its own for the tools to watch. They
are some ten to fifty times slower: without arguments the largest sizes are left out.
"""

from __future__ import annotations

import sys

import pytest

from tensorgrad import backend

LARGE = ("8192", "8200", "16385", "20011", "50257", "50304", "65536", "65537", "120001", "many")
DEFAULT = ["tests/kernels", "-k", " and ".join(f"not {size}" for size in ("float64", *LARGE))]


def main() -> int:
    """Run the tests that the command line names and return pytest's exit status."""
    if not backend.gpu_count():
        sys.exit("sanitize: no GPU was found")
    backend.cupy.cuda.set_allocator(None)
    return int(pytest.main(["-q", "-x", *(sys.argv[1:] or DEFAULT)]))


if __name__ == "__main__":
    sys.exit(main())
