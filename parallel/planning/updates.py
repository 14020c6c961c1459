"""What an optimizer costs on one rank: bytes of state, bytes that a step moves, FLOPs and traffic.

    bytes of state a parameter     matrices of blocks     others
        adamw                      8                      8
        muon                       4                      8
        lion, sgd                  4                      4
        adafactor                  rows and columns of each matrix, and 4 of each vector element

Rows and columns are whole on every rank, all else is divided by ZeRO. 16-bit parameters add the low
bits of master weights. Tests: tests/parallel/planning/test_plan.py.
"""

from __future__ import annotations

from dataclasses import replace

from tensorgrad.optim.muon import ITERATIONS
from tensorgrad.parallel.planning.costs import Costs

_STATE = {"adamw": (8, 8), "muon": (4, 8), "lion": (4, 4), "adafactor": (0, 0), "sgd": (4, 4)}
_KERNEL = 16  # bytes of a clipped step beside the state: p both ways, the gradient twice
# Bytes of the array operations, of which each reads and writes what a kernel keeps in registers.
_ARRAYS = {"adafactor": (120, 120), "muon": (100, _KERNEL + 2 * 8)}


def state_bytes(optimizer: str, costs: Costs, blocks: int, first: bool, last: bool) -> float:
    """Return the bytes of state of a stage that ZeRO divides, without those of master weights."""
    matrices = blocks * costs.block_matrices
    others = blocks * costs.block_parameters - matrices + costs.root_parameters(first, last)
    inside, outside = _STATE[optimizer]
    return inside * matrices + outside * others


def factor_bytes(optimizer: str, costs: Costs, blocks: int, first: bool, last: bool) -> float:
    """Return the bytes of state of a stage that every rank has whole: those of Adafactor.

    A matrix (R, C) has R + C numbers. A rank that shares layers has those of the whole matrix.
    """
    if optimizer != "adafactor":
        return 0.0
    whole = replace(costs, tp=1)
    width, hidden = whole.config.width, whole.config.hidden_width
    block = 8 * width + 2 * hidden + whole.block_parameters - whole.block_matrices
    tables = whole.rows + width if first or last else 0
    positions = whole.config.context + width if first else 0
    return 4 * (blocks * block + tables + positions + (2 * width if last else 0))


def moved_bytes(optimizer: str, costs: Costs, blocks: int, first: bool, last: bool) -> float:
    """Return the bytes that a clipped step of a stage moves, with float32 gradients."""
    matrices = blocks * costs.block_matrices
    others = blocks * costs.block_parameters - matrices + costs.root_parameters(first, last)
    fused = tuple(_KERNEL + 2 * state for state in _STATE[optimizer])
    inside, outside = _ARRAYS.get(optimizer, fused)
    return inside * matrices + outside * others


def update_flops(optimizer: str, costs: Costs, blocks: int) -> float:
    """Return the FLOPs of a step's float32 products: those of Muon, of whole matrices.

    For a matrix with sides r <= c, 4 r^2 c + 2 r^3 in each iteration.
    """
    if optimizer != "muon":
        return 0.0
    width, hidden = costs.config.width, costs.config.hidden_width
    sides = [sorted(pair) for pair in ((3 * width, width), (width, width), *2 * [(hidden, width)])]
    return blocks * ITERATIONS * sum(4 * r * r * c + 2 * r**3 for r, c in sides)


def gathered_bytes(optimizer: str, costs: Costs, blocks: int) -> float:
    """Return the bytes of a stage's matrices of which a step gathers shards: those of Muon."""
    return 4 * blocks * costs.block_matrices if optimizer == "muon" else 0.0


def joined_bytes(optimizer: str, costs: Costs, blocks: int) -> float:
    """Return the bytes of a stage's whole matrices that ranks which share layers put together."""
    whole = replace(costs, tp=1)
    return 4 * blocks * whole.block_matrices if optimizer in ("muon", "adafactor") else 0.0
