"""A wrong tangent fails its check: each rule, replaced by zeros, 3 % more, or a neighbour's row.

A rule is tried on the first case that uses it. Rules that no case uses are an error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tensorgrad.autograd import tangents
from tensorgrad.ops.elementwise.row import Row
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
# Rules that no case uses, with tests of their own: of users' ops, of collectives, of other walks,
# and of ops that a GPU alone records.
ELSEWHERE = (
    *("tensorgrad.autograd.", "tensorgrad.compat.", "tensorgrad.parallel."),
    *(
        "tensorgrad.ops.linear._linear_gelu_backward",
        "tensorgrad.ops.linear._feed_forward_backward",
    ),
    *("tensorgrad.ops.dropout._swiglu_backward", "tensorgrad.ops.dropout._unfused_swiglu_backward"),
    *("tensorgrad.ops.norm_tangent._backward", "tensorgrad.ops.attention_tangent."),
    "tensorgrad.ops.cross_entropy._rows_backward",
    "tensorgrad.ops.shape._to_backward",
)


def _rolled(t: Any) -> Any:
    return t if not t.ndim else _roll(t)


def _roll(t: Any) -> Any:
    return t[np.roll(np.arange(len(t)), 1)]


MUTATIONS: dict[str, Rule] = {
    "zeros": lambda t: 0 * t,
    "3 % more": lambda t: 1.03 * t,
    "a neighbour's row": _rolled,
}


class _Rules(dict[Any, Rule]):
    """The rules, one of which is mutated: the first that is asked for and was not tried before.

    Attributes:
        chosen: the backward function of that rule.
        changed: whether the mutation has changed a tangent.
    """

    def __init__(self, rules: dict[Any, Rule], change: Rule, tried: set[Any]) -> None:
        super().__init__(rules)
        self._change, self._tried = change, tried
        self.chosen: Any = None
        self.changed = False

    def get(self, key: Any, default: Any = None) -> Any:
        """Return a rule, or the mutated one."""
        if self.chosen is None and key in self and key not in self._tried:
            self.chosen = key
        rule = super().get(key, default)
        return self._mutated(rule) if key == self.chosen else rule

    def _mutated(self, rule: Rule) -> Rule:
        def mutated(op: Any, *given: Any) -> Any:
            found = rule(op, *given)
            each = found if isinstance(found, tuple | list) else (found,)
            changed: list[Any] = [None if t is None else self._change(t) for t in each]
            self.changed |= any(
                t is not None and not np.allclose(t.numpy(), other.numpy())
                for t, other in zip(each, changed, strict=True)
            )
            return changed if isinstance(found, tuple | list) else changed[0]

        return mutated


@pytest.mark.nightly
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_wrong_tangent_is_found(mutation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rules, missed = dict(tangents._RULES), list[str]()
    tried = set[Any]()
    if mutation == "a neighbour's row":  # each check multiplies and adds up, which hides the order
        tried.add(Row._backward)
    for module in MODULES:
        for name in module.CASES:
            mutated = _Rules(rules, MUTATIONS[mutation], tried)
            monkeypatch.setattr(tangents, "_RULES", mutated)
            try:
                module.test_derivatives_match_differences(name)
            except AssertionError:
                tried.add(mutated.chosen)
                continue
            if mutated.changed:
                missed.append(f"{module.__name__}, {name}: {mutated.chosen.__qualname__}")
    assert missed == []
    untried = {f"{key.__module__}.{key.__qualname__}" for key in rules.keys() - tried}
    assert {name for name in untried if not name.startswith(ELSEWHERE)} == set()
