"""What a GPT-2 costs on one rank of a mesh: parameters, FLOPs and bytes of its pipeline stage.

Formulas for the layers as they are built here, on the fullest of the tp ranks that share a layer:
flash attention, which keeps no matrix of scores; a feed-forward layer that keeps what GELU is
taken of and its result; a cross entropy that makes gradients in chunks and keeps no logits.
docs/costs.md derives them; tests/parallel/planning/test_costs.py compares them with models and
graphs.

    a block keeps, for each token, in elements of the activations' dtype
        inputs of both norms      2 C      divided by tp with `sequence`
        what both norms give      2 C
        q, k, v and their result  4 C / tp
        before and after GELU     8 C / tp
    and in float32 mean and rstd of both norms and a logarithm for each head
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from tensorgrad.errors import ArgumentError
from tensorgrad.models.gpt2 import GPT2Config
from tensorgrad.ops.linear_cross_entropy import rows_at_a_time

_IDS = 16  # bytes of a token and its target on the device


@dataclass(frozen=True)
class Costs:
    """Sizes on a rank that shares each layer with others.

    Args:
        config: of the model.
        tp: ranks that share each layer.
        sequence: whether these also share the rows between the layers.
        item: bytes of a parameter and of an activation: 2 or 4.
    """

    config: GPT2Config
    tp: int = 1
    sequence: bool = False
    item: int = 2

    @property
    def heads(self) -> int:
        """The most heads that a rank has."""
        return -(-self.config.heads // self.tp)

    @property
    def inner(self) -> int:
        """The width of what these heads give."""
        return self.heads * self.config.width // self.config.heads

    @property
    def hidden(self) -> int:
        """The most of the hidden width that a rank has."""
        return -(-4 * self.config.width // self.tp)

    @property
    def rows(self) -> int:
        """The most rows of the table of tokens that a rank has."""
        return -(-self.config.rows // self.tp)

    @property
    def block_matrices(self) -> int:
        """Elements of the matrices of a block."""
        return self.config.width * (4 * self.inner + 2 * self.hidden)

    @property
    def block_parameters(self) -> int:
        """All parameters of a block: 12 C^2 + 13 C where nobody shares it."""
        return self.block_matrices + 3 * self.inner + self.hidden + 6 * self.config.width

    @property
    def table(self) -> int:
        """Elements of the table of tokens, which is also the head."""
        return self.rows * self.config.width

    def root_parameters(self, first: bool, last: bool) -> int:
        """Return the parameters of a stage that are in no block: tables, positions, last norm."""
        tables = self.table if first or last else 0
        positions = self.config.context * self.config.width if first else 0
        return tables + positions + (2 * self.config.width if last else 0)

    def block_flops(self) -> tuple[float, float]:
        """Return the FLOPs of a block for a token, forward and backward.

        2 for each element of a matrix and 2 T C / tp for causal attention; backward twice the
        former and 2.5 times the latter, as flash attention computes the scores again.
        """
        matrices, attention = 2 * self.block_matrices, 2 * self.config.context * self.inner
        return matrices + attention, 2 * matrices + 2.5 * attention

    def head_flops(self) -> tuple[float, float]:
        """Return the FLOPs of the head for a token: 2 V C / tp, and twice that for gradients."""
        return 2 * self.table, 4 * self.table

    def kept_by_block(self, tokens: int) -> float:
        """Return the bytes that a block keeps for backward; see the top of this file."""
        outside = tokens / (self.tp if self.sequence else 1)
        width = self.config.width
        elements = 2 * width * outside + (2 * width + 4 * self.inner + 2 * self.hidden) * tokens
        return elements * self.item + 4 * (4 * outside + self.heads * tokens)

    def kept_by_head(self, tokens: int) -> float:
        """Return the bytes that norm, head and loss keep: their input, and gradients made early.

        Of the norm its input and what it gives, C each; the gradients of that, C, and in float32
        of the head's matrix.
        """
        outside = tokens / (self.tp if self.sequence else 1)
        width = self.config.width
        return (width * outside + 2 * width * tokens) * self.item + 4 * self.table + 8 * outside

    def kept_by_embedding(self, tokens: int) -> float:
        """Return the bytes of the ids of tokens and targets."""
        return _IDS * tokens

    def chunk(self, tokens: int) -> float:
        """Return the bytes of the logits that are there at a time."""
        item = 4 if self.tp > 1 else self.item  # where ranks share the head it works in float32
        rows = rows_at_a_time("plan", None, self.rows * item, on_host=False)
        return float(min(rows, tokens) * self.rows * item)

    def block_work(self, tokens: int) -> float:
        """Return the bytes of gradients of activations while backward is in a block.

        That of the block's result, of what GELU is taken of, and of what is in between, C each.
        """
        return (3 * self.config.width + self.hidden) * tokens * self.item

    def boundary(self, tokens: int) -> float:
        """Return the bytes that a stage sends to the next for a micro-batch."""
        return self.config.width * tokens * self.item / (self.tp if self.sequence else 1)


@lru_cache(maxsize=1024)
def cut_blocks(costs: Costs, parts: int) -> tuple[int, ...]:
    """Return how many blocks each part of a pipeline has, so that the costliest costs least.

    The last part also has the head, which costs as much as several blocks.

    Args:
        costs: of the model.
        parts: stages times parts a stage.
    Raises:
        ArgumentError: there are more parts than blocks.
    """
    layers = costs.config.layers
    if not 1 <= parts <= layers:
        raise ArgumentError(f"plan: pp * chunks is {parts}, expected 1 to the {layers} layers")
    if parts == 1:
        return (layers,)
    whole = Costs(costs.config)  # as stages.py: by the model as it was before layers were shared
    block = 2 * whole.block_matrices + 2 * whole.config.context * whole.config.width
    head = 2 * whole.table / block

    def value(last: int) -> tuple[float, float]:
        each, more = divmod(layers - last, parts - 1)
        most = max(each + (more > 0), last + head)
        squares = (parts - 1 - more) * each**2 + more * (each + 1) ** 2 + (last + head) ** 2
        return most, squares

    last = min(range(1, layers - parts + 2), key=value)
    each, more = divmod(layers - last, parts - 1)
    return (*[each] * (parts - 1 - more), *[each + 1] * more, last)
