from __future__ import annotations

from collections.abc import Callable
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorgrad.errors import ArgumentError
from tensorgrad.models.gpt2 import GPT2, GPT2Config
from tensorgrad.models.language_model import LanguageModel
from tensorgrad.models.transformer_lm import TransformerLM, TransformerLMConfig
from tensorgrad.parallel.stages import block_costs, check_not_shared, keep_parts, partition

SMALL = GPT2Config(vocab_size=48, context=8, layers=4, heads=2, width=16)


def lm(tied: bool) -> TransformerLM:
    return TransformerLM(TransformerLMConfig(48, 8, 4, 2, 1, 16, hidden=32, tied=tied))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=7), st.integers(1, 7))
def test_no_other_cut_is_better(costs: list[int], parts: int) -> None:
    parts = min(parts, len(costs))

    def value(cuts: tuple[int, ...]) -> tuple[int, int]:
        sums = [sum(costs[a:b]) for a, b in pairwise((0, *cuts, len(costs)))]
        return max(sums), sum(each**2 for each in sums)

    found = partition(costs, parts)
    assert [number for part in found for number in part] == list(range(len(costs)))
    assert len(found) == parts
    assert all(found)
    best = min(value(cuts) for cuts in combinations(range(1, len(costs)), parts - 1))
    assert value(tuple(part.stop for part in found[:-1])) == best


def test_more_parts_than_layers_are_an_error() -> None:
    with pytest.raises(ArgumentError, match="partition: parts is 3, expected 1 to the 2 layers"):
        partition([1, 1], 3)
    with pytest.raises(ArgumentError, match="partition: parts is 0, expected 1 to the 2 layers"):
        partition([1, 1], 0)


def test_the_head_counts_as_several_blocks() -> None:
    model = GPT2(SMALL)
    block = 2 * 12 * 16**2 + 2 * 8 * 16
    assert block_costs(model) == [block + 16, block, block, block + 2 * 48 * 16]
    wide = GPT2(GPT2Config(vocab_size=1000, context=8, layers=4, heads=2, width=16))
    assert [len(part) for part in partition(block_costs(wide), 2)] == [3, 1]


@pytest.mark.parametrize("make", [lambda: GPT2(SMALL), lambda: lm(True), lambda: lm(False)])
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_stages_together_have_every_parameter(
    make: Callable[[], LanguageModel], stages: int
) -> None:
    model = make()
    whole = {name: each.data for name, each in model.named_parameters()}
    parts = partition(block_costs(model), stages)
    found: dict[str, list[int]] = {}
    for stage in range(stages):
        one = make()
        keep_parts(one, parts, [stage])
        for name, each in one.named_parameters():
            assert each.shape == whole[name].shape
            found.setdefault(name, []).append(stage)
        assert len(one.blocks) == 4
    assert found.keys() == whole.keys()
    shared = {name: where for name, where in found.items() if len(where) > 1}
    tied = stages > 1 and model.output is None
    assert shared == ({"tokens.weight": [0, stages - 1]} if tied else {})


def test_shared_parameters_are_named() -> None:
    for make in (lambda: GPT2(SMALL), lambda: lm(True), lambda: lm(False)):
        check_not_shared("cut", make())
    assigned = lm(False)
    assert assigned.output is not None
    assigned.output.weight = assigned.tokens.weight
    with pytest.raises(ArgumentError, match=r"cut: output\.weight is tokens\.weight too, exp"):
        check_not_shared("cut", assigned)
    twice = GPT2(SMALL)
    vars(twice.blocks[2])["feed_forward"] = vars(twice.blocks[0])["feed_forward"]
    with pytest.raises(ArgumentError, match=r"blocks\.2\.feed_forward\.up\.weight is blocks\.0"):
        check_not_shared("cut", twice)


def test_a_remote_layer_raises() -> None:
    model = GPT2(SMALL)
    keep_parts(model, [range(2), range(2, 4)], [0])
    assert "(2): RemoteLayer(blocks.2)" in repr(model)
    x = model.blocks[1](model.blocks[0](model.embed(np.zeros((1, 4), "int32"))))
    with pytest.raises(ArgumentError, match=r"blocks\.2: is on another stage of the pipeline"):
        model.blocks[2](x)
    with pytest.raises(ArgumentError, match="norm: is on another stage"):
        model.finish(x)
