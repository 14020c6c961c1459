"""Costs of a GPT-2 on one rank of a mesh: parameters, FLOPs and bytes of its pipeline stage.

The formulas are those of this library's layers, on the fullest of the tp ranks that share a layer:
flash attention, which keeps no score matrix; a feed-forward layer that keeps the input and output
of GELU; a cross entropy that computes gradients in chunks and keeps no logits.
docs/chapters/planning.md derives them; tests/parallel/planning/test_costs.py compares them with
models and graphs.

    a block keeps for each token, in elements of the activations' dtype
        inputs of both norms      2 C      divided by tp with `sequence`
        outputs of both norms     2 C
        q, k, v and their output  4 C / tp
        before and after GELU     8 C / tp
        large products with tp = 1 and 16-bit parameters keep the derivative of GELU, a byte
        each, in place of the former; see kernels/matmul/sm90.py
    and in float32 mean and rstd of both norms and a logarithm for each head

Under autocast the inputs of norms are float32, as the parameters are. The graph of each micro-batch
keeps 16-bit copies of the weights that matrix products take.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from tensorgrad.errors import ArgumentError
from tensorgrad.kernels.matmul.sm90 import fills
from tensorgrad.models.gpt2 import GPT2Config
from tensorgrad.ops.linear_cross_entropy import rows_at_a_time

_IDS = 16  # bytes of a token and its target on the device


@dataclass(frozen=True)
class Costs:
    """Sizes on a rank that shares each layer with others.

    Args:
        config: of the model.
        tp: number of tensor parallel ranks.
        sequence: whether these also share the rows between the layers.
        item: bytes of an activation inside the layers: 2 or 4.
        autocast: whether parameters and the residual stream are float32 all the same.
    """

    config: GPT2Config
    tp: int = 1
    sequence: bool = False
    item: int = 2
    autocast: bool = False

    @property
    def wide(self) -> int:
        """Bytes of a parameter, and of an element of the residual stream and of a norm's output."""
        return 4 if self.autocast else self.item

    @property
    def heads(self) -> int:
        """The largest number of heads on a rank."""
        return -(-self.config.heads // self.tp)

    @property
    def inner(self) -> int:
        """The width of the output of these heads."""
        return self.heads * self.config.width // self.config.heads

    @property
    def hidden(self) -> int:
        """The largest hidden width on a rank."""
        return -(-self.config.hidden_width // self.tp)

    @property
    def rows(self) -> int:
        """The largest number of rows of the token embedding on a rank."""
        return -(-self.config.rows // self.tp)

    @property
    def block_matrices(self) -> int:
        """Elements of the matrices of a block."""
        return self.config.width * (4 * self.inner + 2 * self.hidden)

    @property
    def block_parameters(self) -> int:
        """All parameters of a block: 12 C^2 + 13 C with tp 1 and a hidden width of 4 C."""
        return self.block_matrices + 3 * self.inner + self.hidden + 6 * self.config.width

    @property
    def embedding(self) -> int:
        """Elements of the token embedding, which is also the head."""
        return self.rows * self.config.width

    def root_parameters(self, first: bool, last: bool) -> int:
        """Return a stage's parameters outside the blocks: embeddings and last norm."""
        tables = self.embedding if first or last else 0
        positions = self.config.context * self.config.width if first else 0
        return tables + positions + (2 * self.config.width if last else 0)

    def block_flops(self) -> tuple[float, float]:
        """Return the FLOPs of a block for a token, forward and backward.

        Forward: 2 for each element of a matrix, and 2 T C / tp for causal attention. Backward:
        twice the former, and 2.5 times the latter because flash attention recomputes the scores.
        """
        matrices, attention = 2 * self.block_matrices, 2 * self.config.context * self.inner
        return matrices + attention, 2 * matrices + 2.5 * attention

    def head_flops(self) -> tuple[float, float]:
        """Return the FLOPs of the head for a token: 2 V C / tp, and twice that for gradients."""
        return 2 * self.embedding, 4 * self.embedding

    def kept_by_block(self, tokens: int) -> float:
        """Return the bytes that a block keeps for backward; see the top of this file."""
        outside = tokens / (self.tp if self.sequence else 1)
        width = self.config.width
        inside = (2 * width + 4 * self.inner + self.hidden) * tokens * self.item
        inside += self.hidden * tokens * self.gelu_item(tokens)
        return 2 * width * outside * self.wide + inside + 4 * (4 * outside + self.heads * tokens)

    def gelu_item(self, tokens: int) -> int:
        """Return the bytes of what backward needs for GELU of a value, on Hopper."""
        narrow = self.item == 2 and self.tp == 1 and not self.autocast
        return 1 if narrow and fills(tokens, self.config.width, self.hidden, 2) else self.item

    def weight_copies(self, blocks: int, head: bool) -> float:
        """Return the bytes of the copies of weights that the graph of a micro-batch keeps."""
        elements = blocks * self.block_matrices + (self.embedding if head else 0)
        return elements * self.item if self.autocast else 0.0

    def kept_by_head(self, tokens: int) -> float:
        """Return the bytes that norm, head and loss keep: inputs, and gradients computed early.

        These are input and output of the norm, and the gradient of the output, C each, and the
        gradient of the head's matrix in float32.
        """
        outside = tokens / (self.tp if self.sequence else 1)
        width = self.config.width
        activations = width * outside * self.wide + 2 * width * tokens * self.item
        return activations + 4 * self.embedding + 8 * outside

    def kept_by_embedding(self, tokens: int) -> float:
        """Return the bytes of the ids of tokens and targets."""
        return _IDS * tokens

    def chunk(self, tokens: int) -> float:
        """Return the bytes of a chunk of logits."""
        item = 4 if self.tp > 1 else self.item  # a shared head computes in float32
        rows = rows_at_a_time("plan", None, tokens, self.rows * item, on_host=False)
        return float(min(rows, tokens) * self.rows * item)

    def head_work(self, tokens: int) -> float:
        """Return the bytes while the head computes: a chunk, and what autocast made 16 bits of."""
        source = self.config.width * tokens * self.wide if self.autocast else 0
        return self.chunk(tokens) + source

    def block_work(self, tokens: int) -> float:
        """Return the bytes of activation gradients during the backward pass of a block.

        These are the gradients of its output, of the input of GELU, and of two layers in between.
        """
        width = self.config.width
        return (width * self.wide + (2 * width + self.hidden) * self.item) * tokens

    def boundary(self, tokens: int) -> float:
        """Return the bytes that a stage sends to the next for a micro-batch."""
        return self.config.width * tokens * self.wide / (self.tp if self.sequence else 1)


@lru_cache(maxsize=1024)
def cut_blocks(costs: Costs, parts: int) -> tuple[int, ...]:
    """Return the number of blocks of each part of a pipeline, with the largest cost minimal.

    The last part also has the head, which costs as much as several blocks.

    Args:
        costs: of the model.
        parts: stages times parts on each stage.
    Raises:
        ArgumentError: there are more parts than blocks.
    """
    layers = costs.config.layers
    if not 1 <= parts <= layers:
        raise ArgumentError(f"plan: pp * chunks is {parts}, expected 1 to the {layers} layers")
    if parts == 1:
        return (layers,)
    whole = Costs(costs.config)  # as in stages.py: costs of the model before tensor parallelism
    block = 2 * whole.block_matrices + 2 * whole.config.context * whole.config.width
    head = 2 * whole.embedding / block

    def value(last: int) -> tuple[float, float]:
        each, more = divmod(layers - last, parts - 1)
        most = max(each + (more > 0), last + head)
        squares = (parts - 1 - more) * each**2 + more * (each + 1) ** 2 + (last + head) ** 2
        return most, squares

    last = min(range(1, layers - parts + 2), key=value)
    each, more = divmod(layers - last, parts - 1)
    return (*[each] * (parts - 1 - more), *[each + 1] * more, last)
