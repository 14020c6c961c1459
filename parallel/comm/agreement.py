"""Comparison of what ranks pass to a collective: digests, and messages that name the difference."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from tensorgrad.core.errors import ArgumentError

Json = Any  # None, bool, int, float, str, and lists and dicts of them
_MOST_NAMED = 5  # differences in one message: models of two widths differ in every parameter


def to_json(op: str, value: Json) -> str:
    """Return the value as JSON, the same text for equal values.

    Raises:
        ArgumentError: JSON cannot hold the value; the message begins with `op`.
    """
    try:
        return json.dumps(value, sort_keys=True)
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"{op}: value is {value!r}, expected what JSON can hold") from error


@lru_cache(maxsize=1024)
def digest(text: str) -> int:
    """Return 62 bits of the text's hash, so that it and its negative both fit an int64."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 2


def differences(facts: Sequence[Mapping[str, Json]], ranks: Sequence[int] | None = None) -> str:
    """Name the facts that differ between ranks: `lr is 0.1 on rank 0, 0.2 on rank 1`.

    Args:
        facts: one mapping for each rank.
        ranks: numbers of the ranks (default: 0, 1, ...).
    """
    names = dict.fromkeys(name for fact in facts for name in fact)
    found = []
    for name in names:
        values = [repr(fact[name]) if name in fact else "missing" for fact in facts]
        if len(set(values)) > 1:
            found.append(f"{name} is {by_rank(values, ranks)}")
    more = len(found) - _MOST_NAMED
    return "; ".join(found[:_MOST_NAMED]) + (f"; and {more} more" if more > 0 else "")


def by_rank(values: Sequence[str], ranks: Sequence[int] | None = None) -> str:
    """Group ranks by their value: `a on ranks 0, 2-3, b on rank 1`.

    Args:
        values: one for each rank.
        ranks: numbers of the ranks (default: 0, 1, ...).
    """
    ranks_of: dict[str, list[int]] = {}
    for rank, value in zip(ranks or range(len(values)), values, strict=True):
        ranks_of.setdefault(value, []).append(rank)
    return ", ".join(f"{value} on {name_ranks(found)}" for value, found in ranks_of.items())


def name_ranks(ranks: Sequence[int]) -> str:
    """Name ranks in order: `rank 3`, `ranks 0-2, 5`."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
    return f"rank{'s' if len(ranks) > 1 else ''} {text}"
