from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import pytest

from tensorgrad import nn
from tensorgrad.core.nodes import Node
from tensorgrad.core.tensor import Tensor
from tensorgrad.errors import ArgumentError
from tensorgrad.models import LanguageModel, training_flops
from tensorgrad.models.gpt2 import GPT2, GPT2Config
from tensorgrad.models.language_model import initialize, model_of
from tensorgrad.models.presets import PRESETS
from tensorgrad.models.transformer_lm import TransformerLM, TransformerLMConfig
from tensorgrad.nn.rows import Rows
from tensorgrad.optim import AdamW
from tensorgrad.parallel import Comm
from tensorgrad.parallel.mesh import Mesh
from tensorgrad.parallel.planning.costs import Costs, cut_blocks
from tensorgrad.parallel.planning.estimate import TrainingJob, stage_memory
from tensorgrad.parallel.stages import block_costs, keep_parts, partition
from tensorgrad.parallel.tensor import tensor_parallel
from tensorgrad.profile import Profiler
from tensorgrad.profile.memory import KINDS
from tensorgrad.train.language import LanguageSettings
from tests.parallel.threads import on_ranks

TINY = GPT2Config(vocab_size=36, context=16, layers=2, heads=4, width=16)
LLAMA = TransformerLMConfig(40, 16, layers=2, heads=4, kv_heads=2, width=16, hidden=24)
PUBLISHED = replace(
    LLAMA, head_width=6, qk_norm=True, qkv_bias=True, feed_forward_bias=True, tied=False
)


@dataclass(frozen=True)
class OwnConfig:
    vocab_size: int = 40
    context: int = 16
    layers: int = 3
    heads: int = 4
    width: int = 16

    @property
    def parameters(self) -> int:
        return sum(each.size for each in Own(self).parameters())

    def training_flops(self, keys: float | None = None, targets: float = 1.0) -> float:
        hidden = sum(2 * self.width * (number + 1) for number in range(self.layers))
        matrices = 4 * self.layers * self.width + 2 * hidden + targets * self.vocab_size
        keys = self.context / 2 if keys is None else keys
        return training_flops(matrices * self.width, self.layers, self.width, keys)


class OwnBlock(nn.Module):
    """A block without norms of its input, whose feed-forward layer has a width of its own."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        self.attention = nn.MultiHeadAttention(width, heads, causal=True, bias=False)
        self.norm = nn.RMSNorm(width)
        self.feed_forward = nn.FeedForward(width, hidden)

    def forward(self, x: Any, mask: Any = None, cache: Any = None) -> Tensor:
        y: Tensor = x + self.attention(x, mask, cache)
        result: Tensor = self.feed_forward(self.norm(y), y)
        return result


class Own(LanguageModel):
    """A model of a user's, without positions, whose blocks differ."""

    Config = OwnConfig

    def __init__(self, config: OwnConfig) -> None:
        self.config, self.vocab_size, self.context = config, config.vocab_size, config.context
        self.tokens = nn.Embedding(config.vocab_size, config.width)
        block = partial(OwnBlock, config.width, config.heads)
        self.blocks = nn.ModuleList(
            block(2 * config.width * (number + 1)) for number in range(config.layers)
        )
        self.norm = nn.RMSNorm(config.width)
        initialize(self)

    def embed(self, tokens: Any, cache: Any = None) -> Tensor:
        x: Tensor = self.tokens(self._checked(tokens, cache)[0])
        return x


CONFIGS = {"gpt2": TINY, "llama": LLAMA, "published": PUBLISHED, "own": OwnConfig()}
each_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


def model(config: Any) -> LanguageModel:
    kind = model_of(config)
    assert kind is not None
    return kind(config)  # type: ignore[call-arg]


def everything(costs: Costs) -> int:
    """Return all parameters."""
    return sum(each.parameters for each in costs.blocks) + costs.root_parameters(True, True)


def kept(loss: Tensor, model: LanguageModel) -> int:
    """Return the bytes of all arrays that a graph keeps, each memory once, without parameters."""
    memory: dict[int, np.ndarray[Any, Any]] = {}
    seen: set[int] = set()
    nodes: list[Any] = [loss.node]

    def visit(value: Any) -> None:
        if isinstance(value, np.ndarray):
            while isinstance(value.base, np.ndarray):
                value = value.base
            memory[id(value)] = value
        elif isinstance(value, tuple | list):
            for each in value:
                visit(each)
        elif isinstance(value, Node):
            nodes.append(value)
        else:
            visit(getattr(value, "arrays", ()))

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
@each_config
@pytest.mark.parametrize("batch", [1, 5])
def test_a_graph_keeps_what_the_formulas_say(config: Any, batch: int, dtype: str) -> None:
    settings = LanguageSettings(dtype=dtype)
    whole = model(config).to("cpu", settings.parameter_dtype)
    tokens, targets = np.random.default_rng(0).integers(0, 36, (2, batch, 16))
    costs, count = TrainingJob(config, batch=batch, dtype=dtype).costs, batch * 16
    expected = costs.kept_by_blocks(range(config.layers), count)
    expected += costs.weight_copies(costs.blocks, head=True)
    expected += costs.kept_by_head(count) + costs.kept_by_embedding(count)
    expected += (4 - costs.item) * 16 * count  # a gradient of the head's input, on a CPU in float32
    rotary = whole.attention_layers()[0].rotary
    angles = 0 if rotary is None else 2 * 4 * 16 * rotary.width // 2  # all blocks together
    with settings.precision()():
        found = kept(whole(tokens.copy(), targets.copy()), whole)
    # Besides, which targets count: a byte each.
    assert expected <= found <= expected + angles + count + 8


@each_config
def test_a_step_records_the_planned_activations(config: Any) -> None:
    whole = model(config)
    optimizer = AdamW(whole.named_parameters())
    tokens = Tensor(np.random.default_rng(0).integers(0, 36, (8, 16)))
    with Profiler(whole, optimizer, memory=True) as profiler, profiler.step():
        whole(tokens, tokens).backward()
        optimizer.step(1.0)
    assert profiler.memory is not None
    kinds = zip(*(sample.kinds for sample in profiler.memory.samples), strict=True)
    found = dict(zip(KINDS, map(max, kinds), strict=True))
    planned = stage_memory(TrainingJob(config, batch=8, dtype="float32"), 0)
    activations = planned["activations"] + planned["tokens, loss and head"]
    assert found["activations"] == pytest.approx(activations, rel=0.02)


@pytest.mark.parametrize("config", [*CONFIGS.values(), *PRESETS.values()], ids=[*CONFIGS, *PRESETS])
def test_parameters_and_flops_add_up_to_those_of_the_config(config: Any) -> None:
    costs = Costs(config)
    assert everything(costs) == config.parameters
    assert 3 * costs.flops(costs.blocks, head=True)[0] == config.training_flops()
    assert not any(any(each.data.strides) for each in costs.model.parameters() if each.ndim == 2)


@pytest.mark.parametrize(
    ("config", "tp"),
    [(TINY, 2), (TINY, 4), (replace(TINY, hidden=24), 2), (LLAMA, 2), (PUBLISHED, 2),
     (replace(LLAMA, heads=6, kv_heads=3, head_width=4), 2), (OwnConfig(), 4)],
)  # fmt: skip
def test_the_fullest_tensor_parallel_rank_has_these_parameters(config: Any, tp: int) -> None:
    def program(comm: Comm) -> None:
        part = model(config)
        for parameter in part.parameters():
            parameter.data[...] = 0
        tensor_parallel(part, comm)
        if comm.rank == tp - 1:  # which has one more head where they do not divide
            costs = Costs(config, tp)
            shapes = {name: each.shape for name, each in part.named_parameters()}
            assert shapes == {n: each.shape for n, each in costs.model.named_parameters()}
            assert everything(costs) == sum(each.size for each in part.parameters())
            assert costs.counted.flops == block_costs(part)

    on_ranks(tp, program)


@pytest.mark.parametrize("parts", [1, 2, 3])
@each_config
def test_a_stage_has_the_planned_parameters(config: Any, parts: int) -> None:
    config = replace(config, layers=3)
    cut = partition(block_costs(model(config)), parts)
    assert list(cut_blocks(Costs(config), parts)) == cut
    for stage in range(parts):
        part = model(config)
        keep_parts(part, cut, [stage])
        planned = stage_memory(TrainingJob(config, Mesh(pp=parts), dtype="float32"), stage)
        assert planned["parameters"] == 4 * sum(each.size for each in part.parameters())


def test_tensor_parallelism_divides_memory() -> None:
    one, four = Costs(TINY), Costs(TINY, 4)
    outside = 4 * 16 * 2 + 16  # inputs and results of norms, and their statistics
    assert one.kept_by_blocks(range(1), 10) == 10 * (16 * 16 * 2 + 16 + 4 * 4)
    assert four.kept_by_blocks(range(1), 10) == 10 * (outside + (12 * 16 * 2 + 4 * 4) / 4)
    rows = Costs(TINY, 4, sequence=True)
    inputs = 2 * 16 * 2 + 16
    kept = [costs.kept_by_blocks(range(2), 10) for costs in (four, rows)]
    assert kept[0] - kept[1] == 2 * 10 * inputs * 3 / 4
    assert rows.boundary(8) == four.boundary(8) / 4
    assert sum(four.flops(four.blocks)) == sum(one.flops(one.blocks)) / 4


def test_backward_takes_twice_the_products_and_more_attention() -> None:
    costs = Costs(PRESETS["gpt2-124M"])
    forward, backward = costs.flops(costs.blocks[:1])
    assert forward == 2 * 12 * 768**2 + 2 * 1024 * 768
    assert backward == 4 * 12 * 768**2 + 5 * 1024 * 768
    assert costs.flops((), head=True) == (2 * 50257 * 768, 4 * 50257 * 768)
    qwen = Costs(PRESETS["qwen3-0.6B"])  # whose heads are wider than the model together
    assert qwen.flops(qwen.blocks[:1])[0] == 2 * (qwen.blocks[0].matrices + 40960 * 2048)


def test_large_products_of_16_bits_keep_a_byte_of_gelu() -> None:
    with nn.init.without_values():
        layer = nn.FeedForward(1600)
    few, many = (layer.saved_bytes(Rows(rows, rows, 2, 2)) / rows for rows in (64, 8192))
    assert few - many == 6400
    assert layer.saved_bytes(Rows(8192, 8192, 2, 2, shared=True)) == 8192 * few


def test_logits_come_in_chunks() -> None:
    costs = Costs(GPT2Config(vocab_multiple=128))
    assert costs.chunk(32 * 1024) == 3328 * 50304 * 2
    assert costs.chunk(8 * 1024) == 8192 * 50304 * 2
    assert costs.chunk(100) == 100 * 50304 * 2


def test_blocks_are_divided_so_that_the_largest_cost_is_least() -> None:
    def cut(costs: Costs, parts: int) -> tuple[int, ...]:
        found = cut_blocks(costs, parts)
        assert [part.stop for part in found] == list(accumulate(map(len, found)))
        return tuple(map(len, found))

    large, small = Costs(PRESETS["gpt2-1558M"]), Costs(PRESETS["gpt2-124M"])
    assert cut(large, 1) == (48,)
    assert cut(large, 4) == (12, 13, 13, 10)  # the head is as much as 2.5 blocks
    assert cut(large, 48) == (1,) * 48
    assert cut(small, 2) == (8, 4)
    with pytest.raises(ArgumentError, match=r"pp \* chunks is 13, expected 1 to the 12 layers"):
        cut_blocks(small, 13)


def test_a_config_belongs_to_a_model() -> None:
    assert model_of(TINY) is GPT2
    assert model_of(LLAMA) is TransformerLM
    assert model_of(OwnConfig()) is Own
    with pytest.raises(ArgumentError, match="plan: config is a int, expected the Config of a"):
        _ = Costs(3).model


def test_a_model_without_a_table_has_no_tensor_parallel_plan() -> None:
    class Alone(Own):
        def __init__(self, config: OwnConfig) -> None:
            super().__init__(config)
            self.blocks = nn.ModuleList([nn.Linear(16, 16)])

        def shards(self) -> list[nn.Shard]:
            return []

    assert TrainingJob(OwnConfig(), model=Alone).costs.blocks[0].parameters == 16 * 17
    with pytest.raises(ArgumentError, match="plan: model is a Alone without a table of the la"):
        TrainingJob(OwnConfig(), Mesh(tp=2), model=Alone)
