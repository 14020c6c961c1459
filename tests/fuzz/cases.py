"""How many cases a fuzz test runs: few and always the same in the suite, many by `make fuzz`."""

from __future__ import annotations

import hypothesis


def cases(count: int) -> hypothesis.settings:
    """Return the settings of a fuzz test, to decorate it with.

    Under the profile "fuzz" (`make fuzz`) the test runs 100,000 new cases, and prints what
    reproduces one that fails. Otherwise it runs the same `count` cases every time.

    Args:
        count: cases in a plain run of pytest.
    """
    fuzz = hypothesis.settings.get_profile("fuzz")
    if hypothesis.settings().max_examples == fuzz.max_examples:
        return fuzz
    return hypothesis.settings(max_examples=count, derandomize=True, database=None)
