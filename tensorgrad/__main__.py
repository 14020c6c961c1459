"""`python -m tensorgrad`: the program `tensorgrad`."""

from __future__ import annotations

import sys

from tensorgrad.cli import main

if __name__ == "__main__":
    sys.exit(main())
