"""A wrong tangent fails its check: each rule, replaced by zeros, 3 % more, or a neighbour's row.

A rule is tried on the first case that uses it. Rules that no case uses are an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from tensorgrad.autograd import tangents
from tests import test_linalg_derivatives
from tests.ops import (
    test_attention_derivatives,
    test_fused_derivatives,
    test_indexing_derivatives,
    test_products_derivatives,
    test_reduce_derivatives,
    test_shape_derivatives,
)

MODULES = (
    test_linalg_derivatives,
    test_products_derivatives,
    test_attention_derivatives,
    test_fused_derivatives,
    test_indexing_derivatives,
    test_reduce_derivatives,
    test_shape_derivatives,
)
Rule = Callable[..., Any]


def _rolled(t: Any) -> Any:
    return t if not t.ndim else _roll(t)


def _roll(t: Any) -> Any:
    return t[np.roll(np.arange(len(t)), 1)]


MUTATIONS: dict[str, Rule] = {
    "zeros": lambda t: 0 * t,
    "3 % more": lambda t: 1.03 * t,
    "a neighbour's row": _rolled,
}


def _cases() -> dict[str, Sequence[Any]]:
    return {
        f"{module.__name__}: {name}": case
        for module in MODULES
        for name, case in module.CASES.items()
    }


def _mutated(rule: Rule, change: Rule) -> Rule:
    def mutated(op: Any, *given: Any) -> Any:
        found = rule(op, *given)
        each = found if isinstance(found, tuple | list) else (found,)
        changed = [None if t is None else change(t) for t in each]
        return changed if isinstance(found, tuple | list) else changed[0]

    return mutated


class _Rules(dict[Any, Rule]):
    """The rules, one of which is mutated: the first that is asked for and was not tried before."""

    def __init__(self, rules: dict[Any, Rule], change: Rule, tried: set[Any]) -> None:
        super().__init__(rules)
        self._change, self._tried = change, tried
        self.chosen: Any = None

    def get(self, key: Any, default: Any = None) -> Any:
        """Return a rule, or the mutated one."""
        if self.chosen is None and key in self and key not in self._tried:
            self._tried.add(key)
            self.chosen = key
        rule = super().get(key, default)
        return _mutated(rule, self._change) if key == self.chosen else rule


@pytest.mark.nightly
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_wrong_tangent_is_found(mutation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rules, tried, missed = dict(tangents._RULES), set[Any](), []
    for module in MODULES:
        for name in module.CASES:
            mutated = _Rules(rules, MUTATIONS[mutation], tried)
            monkeypatch.setattr(tangents, "_RULES", mutated)
            try:
                module.test_derivatives_match_differences(name)
            except AssertionError:
                continue
            if mutated.chosen is not None:
                missed.append(f"{module.__name__}, {name}: {mutated.chosen.__qualname__}")
    assert missed == []
    assert sorted(key.__qualname__ for key in rules.keys() - tried) == []
