from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tensorgrad.bench.steps import StepSettings
from tensorgrad.engine import Node
from tensorgrad.errors import ArgumentError
from tensorgrad.models.gpt2 import GPT2, PRESETS, GPT2Config
from tensorgrad.models.language_model import LanguageModel
from tensorgrad.parallel import Comm
from tensorgrad.parallel.planning.costs import Costs, cut_blocks
from tensorgrad.parallel.planning.estimate import TrainingJob
from tensorgrad.parallel.stages import block_costs, partition
from tensorgrad.parallel.tensor import tensor_parallel
from tensorgrad.tensor import Tensor
from tests.parallel.threads import on_ranks

TINY = GPT2Config(vocab_size=36, context=16, layers=2, heads=4, width=16)


def kept(loss: Tensor, model: LanguageModel) -> int:
    """Return the bytes of all arrays that a graph keeps, each memory once, without parameters."""
    memory: dict[int, np.ndarray[Any, Any]] = {}

    def visit(value: Any) -> None:
        if isinstance(value, np.ndarray):
            while isinstance(value.base, np.ndarray):
                value = value.base
            memory[id(value)] = value
        elif isinstance(value, tuple | list):
            for each in value:
                visit(each)

    seen: set[int] = set()
    nodes: list[Any] = [loss.node]
    while nodes:
        edge = nodes.pop()
        node = getattr(edge, "node", edge)  # an edge may be one of several outputs of a node
        if isinstance(node, Node) and id(node) not in seen:
            seen.add(id(node))
            visit(node.saved)
            nodes += node.edges
    for parameter in model.parameters():
        memory.pop(id(parameter.data), None)
    return sum(array.nbytes for array in memory.values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bfloat16-parameters"])
@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("batch", [1, 5])
def test_a_graph_keeps_what_the_formula_says(layers: int, batch: int, dtype: str) -> None:
    config = GPT2Config(vocab_size=40, context=16, layers=layers, heads=2, width=8)
    settings = StepSettings(config, batch, dtype)
    model = settings.model("cpu")
    tokens, targets = np.random.default_rng(0).integers(0, 40, (2, batch, 16))
    costs, count = TrainingJob(config, batch=batch, dtype=dtype).costs, batch * 16
    expected = layers * costs.kept_by_block(count) + costs.weight_copies(layers, head=True)
    expected += costs.kept_by_head(count) + costs.kept_by_embedding(count)
    expected += (4 - costs.item) * 8 * count  # a gradient of the head's input, on a CPU in float32
    with settings.casts():
        found = kept(model(tokens.copy(), targets.copy()), model)
    # Besides, which targets count: a byte each.
    assert expected <= found <= expected + count + 8


@pytest.mark.parametrize("config", [TINY, *PRESETS.values()], ids=["tiny", *PRESETS])
def test_parameters_add_up(config: GPT2Config) -> None:
    costs = Costs(config)
    found = config.layers * costs.block_parameters + costs.root_parameters(True, True)
    assert found == config.parameters


@pytest.mark.parametrize(("tp", "hidden"), [(2, None), (4, None), (2, 24)])
def test_a_tensor_parallel_rank_has_as_many_parameters(tp: int, hidden: int | None) -> None:
    config = replace(TINY, hidden=hidden)

    def program(comm: Comm) -> None:
        model = GPT2(config)
        for parameter in model.parameters():
            parameter.data[...] = 0
        tensor_parallel(model, comm)
        costs = Costs(config, tp)
        block = sum(parameter.size for parameter in model.blocks[0].parameters())
        assert costs.block_parameters == block
        assert costs.block_matrices == sum(
            parameter.size for parameter in model.blocks[0].parameters() if parameter.ndim == 2
        )
        everything = sum(parameter.size for parameter in model.parameters())
        assert config.layers * block + costs.root_parameters(True, True) == everything

    on_ranks(tp, program)


def test_tensor_parallelism_divides_memory() -> None:
    one, four = Costs(TINY), Costs(TINY, 4)
    outside = 4 * 16 * 2 + 16  # inputs and results of norms, and their statistics
    assert one.kept_by_block(10) == 10 * (16 * 16 * 2 + 16 + 4 * 4)
    assert four.kept_by_block(10) == 10 * (outside + (12 * 16 * 2 + 4 * 4) / 4)
    rows = Costs(TINY, 4, sequence=True)
    inputs = 2 * 16 * 2 + 16
    assert four.kept_by_block(10) - rows.kept_by_block(10) == 10 * inputs * 3 / 4
    assert rows.boundary(8) == four.boundary(8) / 4
    assert sum(four.block_flops()) == sum(one.block_flops()) / 4


def test_flops_are_six_for_a_parameter_and_attention() -> None:
    costs = Costs(PRESETS["gpt2-124M"])
    forward, backward = costs.block_flops()
    assert forward == 2 * 12 * 768**2 + 2 * 1024 * 768
    assert backward == 4 * 12 * 768**2 + 5 * 1024 * 768
    assert costs.head_flops() == (2 * 50257 * 768, 4 * 50257 * 768)


def test_logits_come_in_chunks() -> None:
    costs = Costs(GPT2Config(vocab_multiple=128))
    assert costs.chunk(32 * 1024) == 3328 * 50304 * 2
    assert costs.chunk(8 * 1024) == 8192 * 50304 * 2
    assert costs.chunk(100) == 100 * 50304 * 2


def test_blocks_are_divided_so_that_the_largest_cost_is_least() -> None:
    large = Costs(PRESETS["gpt2-1558M"])
    assert cut_blocks(large, 1) == (48,)
    assert cut_blocks(large, 4) == (12, 13, 13, 10)  # the head is as much as 2.5 blocks
    assert cut_blocks(large, 48) == (1,) * 48
    small = Costs(PRESETS["gpt2-124M"])
    assert cut_blocks(small, 2) == (8, 4)
    for config in (TINY, GPT2Config(vocab_size=99, context=8, layers=9, heads=1, width=4)):
        model = GPT2(config)
        for parts in range(1, config.layers + 1):
            expected = tuple(len(each) for each in partition(block_costs(model), parts))
            assert cut_blocks(Costs(config), parts) == expected
    with pytest.raises(ArgumentError, match=r"pp \* chunks is 13, expected 1 to the 12 layers"):
        cut_blocks(small, 13)
