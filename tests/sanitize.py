"""Run tests for compute-sanitizer: `make sanitize`, or under one of its tools by hand.

    compute-sanitizer --tool racecheck python -m tests.sanitize --part 1/4 tests/kernels

CuPy's memory pool is off, so that every array has bounds of its own for the tools to watch;
racecheck looks at shared memory alone, and `--pool` saves it the time. They are some ten to fifty
times slower: the largest sizes are skipped unless `-k` says what to run, and processes can take
parts of the tests.
"""

from __future__ import annotations

import argparse
import sys

import pytest

from tensorgrad.core import backend

LARGE = ("8192", "8200", "16385", "20011", "50257", "50304", "65536", "65537", "120001", "many")
SKIPPED = ("float64", "compile", *LARGE)  # compile: those tests run no kernel
KERNELS = [
    "tests/kernels",
    *(
        f"tests/ops/test_{name}.py"
        for name in ("dropout", "embedding", "indexing", "reduce", "rotary")
    ),
]


class Part:
    """A pytest plugin that keeps one test of every N."""

    def __init__(self, text: str) -> None:
        number, _, count = text.partition("/")
        if not (number.isdigit() and count.isdigit() and 1 <= int(number) <= int(count)):
            raise argparse.ArgumentTypeError(f"got {text!r}, expected such as 1/4")
        self.first, self.step = int(number) - 1, int(count)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Keep the tests of this part."""
        items[:] = items[self.first :: self.step]


def main() -> int:
    """Run the tests that the command line names and return pytest's exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.sanitize")
    parser.add_argument("--part", type=Part, default="1/1", help="such as 1/4: the first of four")
    parser.add_argument("--pool", action="store_true", help="keep CuPy's memory pool")
    options, rest = parser.parse_known_args()
    if not backend.gpu_count():
        sys.exit("sanitize: no GPU was found")
    if not options.pool:
        backend.cupy.cuda.set_allocator(None)
    if "-k" not in rest:
        rest += ["-k", " and ".join(f"not {text}" for text in SKIPPED)]
    if not any(text.startswith("tests") for text in rest):
        rest += KERNELS
    patient = ["-o", "faulthandler_timeout=0"]  # tests that take too long otherwise end the run
    return int(pytest.main(["-q", "-x", *patient, *rest], [options.part]))


if __name__ == "__main__":
    sys.exit(main())
