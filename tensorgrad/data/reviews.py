"""Synthetic sentences about films, positive or negative: data without a download."""

from __future__ import annotations

import random
from collections.abc import Iterator

from tensorgrad.core.checks import check_integer

_GOOD = (
    *("charming", "moving", "funny", "clever", "gripping", "beautiful", "fresh", "tender"),
    *("witty", "splendid", "brilliant", "honest", "thrilling", "warm", "graceful", "inventive"),
)
_BAD = (
    *("dull", "clumsy", "tedious", "shallow", "silly", "stale", "bloated", "bland"),
    *("lifeless", "awful", "muddled", "predictable", "pointless", "cold", "noisy", "forgettable"),
)
_THINGS = (
    *("film", "story", "script", "cast", "plot", "direction", "humor", "dialogue", "ending"),
    *("music", "camera work", "second half", "leading actor", "romance", "thriller", "sequel"),
)
_DEGREES = ("", "", "", "very ", "really ", "quite ", "often ", "surprisingly ", "always ")


def reviews(count: int, seed: int = 0) -> Iterator[tuple[str, int]]:
    """Yield distinct sentences, each with the label 1 (positive) or 0 (negative).

    Some have words of both kinds: "not dull" is positive, and in "despite the witty script , the
    film is dull" the second half decides. So a model that only counts words makes errors.

    Args:
        count: the number of sentences; more than 100,000 take long.
        seed: equal seeds give equal sentences in equal order.

    Yields:
        A sentence and its label.

    Raises:
        ArgumentError: count is negative or not an integer.

    Example:
        >>> from tensorgrad.data import reviews
        >>> next(reviews(1))
        ('i found the leading actor really warm , and so was the thriller .', 1)
    """
    check_integer("reviews", "count", count, 0)
    rng = random.Random(seed)
    seen: set[str] = set()
    while count:
        label = rng.randrange(2)
        text = _sentence(rng, label)
        if text not in seen:
            seen.add(text)
            count -= 1
            yield text, label


def _sentence(rng: random.Random, label: int) -> str:
    word, other, third = rng.sample(_GOOD if label else _BAD, 3)
    contrary = rng.choice(_BAD if label else _GOOD)
    one, two = rng.sample(_THINGS, 2)
    degree = rng.choice(_DEGREES)
    return rng.choice(
        (
            f"the {one} is {degree}{word} .",
            f"the {one} is {degree}{word} and the {two} is {other} .",
            f"this {degree}{word} {one} has one more {other} {two} .",
            f"i found the {one} {degree}{word} , and so was the {two} .",
            f"{word} , {other} and {degree}{third} .",
            f"the {one} is not {contrary} .",
            f"despite the {contrary} {one} , the {two} is {degree}{word} .",
        )
    )
