from __future__ import annotations

import pytest

from tensorgrad.errors import ArgumentError
from tensorgrad.parallel.comm.agreement import by_rank, differences, digest, to_json


def test_ranks_with_one_value_are_named_together() -> None:
    assert by_rank(["a", "b", "a", "a"]) == "a on ranks 0, 2-3, b on rank 1"
    assert by_rank(["a"] * 1000) == "a on ranks 0-999"


def test_only_what_differs_is_named() -> None:
    facts = [{"lr": 0.1, "steps": 5}, {"lr": 0.1, "steps": 6}, {"lr": 0.1}]
    assert differences(facts) == "steps is 5 on rank 0, 6 on rank 1, missing on rank 2"
    assert differences(facts[:1] * 3) == ""


def test_many_differences_are_counted() -> None:
    facts = [{f"p{i}": (i, rank) for i in range(8)} for rank in range(2)]
    found = differences(facts)
    assert found.startswith("p0 is (0, 0) on rank 0, (0, 1) on rank 1; p1 ")
    assert found.endswith("(4, 1) on rank 1; and 3 more")


def test_none_is_not_missing() -> None:
    assert differences([{"seed": None}, {}]) == "seed is None on rank 0, missing on rank 1"


def test_json_is_the_same_for_equal_values() -> None:
    assert to_json("op", {"a": 1, "b": (2,)}) == to_json("op", {"b": [2], "a": 1})
    with pytest.raises(ArgumentError, match=r"op: value is .*, expected what JSON can hold"):
        to_json("op", {"a": object()})


def test_a_digest_and_its_negative_fit_an_int64() -> None:
    digests = [digest(str(n)) for n in range(1000)]
    assert len(set(digests)) == 1000
    assert 0 <= min(digests) <= max(digests) < 2**62
