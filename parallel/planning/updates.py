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

from collections.abc import Sequence
from dataclasses import replace

from tensorgrad.optim.muon import ITERATIONS
from tensorgrad.parallel.planning.costs import BlockSizes, Costs

_STATE = {"adamw": (8, 8), "muon": (4, 8), "lion": (4, 4), "adafactor": (0, 0), "sgd": (4, 4)}
_KERNEL = 16  # bytes of a clipped step beside the state: p both ways, the gradient twice
# Bytes of the array operations, of which each reads and writes what a kernel keeps in registers.
_ARRAYS = {"adafactor": (120, 120), "muon": (100, _KERNEL + 2 * 8)}


def state_bytes(
    optimizer: str, costs: Costs, numbers: Sequence[int], first: bool, last: bool
) -> float:
    """Return the bytes of state of a stage that ZeRO divides, without those of master weights."""
    matrices, others = _elements(costs, numbers, first, last)
    inside, outside = _STATE[optimizer]
    return inside * matrices + outside * others


def factor_bytes(
    optimizer: str, costs: Costs, numbers: Sequence[int], first: bool, last: bool
) -> float:
    """Return the bytes of state of a stage that every rank has whole: those of Adafactor.

    A matrix (R, C) has R + C numbers. A rank that shares layers has those of the whole matrix.
    """
    if optimizer != "adafactor":
        return 0.0
    factors = replace(costs, tp=1).counted.factors[first, last]
    return 4 * (factors + sum(each.factors for each in _whole(costs, numbers)))


def moved_bytes(
    optimizer: str, costs: Costs, numbers: Sequence[int], first: bool, last: bool
) -> float:
    """Return the bytes that a clipped step of a stage moves, with float32 gradients."""
    matrices, others = _elements(costs, numbers, first, last)
    fused = tuple(_KERNEL + 2 * state for state in _STATE[optimizer])
    inside, outside = _ARRAYS.get(optimizer, fused)
    return inside * matrices + outside * others


def update_flops(optimizer: str, costs: Costs, numbers: Sequence[int]) -> float:
    """Return the FLOPs of a step's float32 products: those of Muon, of whole matrices.

    For a matrix with sides r <= c, 4 r^2 c + 2 r^3 in each iteration.
    """
    if optimizer != "muon":
        return 0.0
    sides = [sorted(shape) for each in _whole(costs, numbers) for shape in each.shapes]
    return ITERATIONS * sum(4 * r * r * c + 2 * r**3 for r, c in sides)


def gathered_bytes(optimizer: str, costs: Costs, numbers: Sequence[int]) -> float:
    """Return the bytes of a stage's matrices of which a step gathers shards: those of Muon."""
    matrices = sum(costs.blocks[number].matrices for number in numbers)
    return 4 * matrices if optimizer == "muon" else 0.0


def joined_bytes(optimizer: str, costs: Costs, numbers: Sequence[int]) -> float:
    """Return the bytes of a stage's whole matrices that ranks which share layers put together."""
    matrices = sum(each.matrices for each in _whole(costs, numbers))
    return 4 * matrices if optimizer in ("muon", "adafactor") else 0.0


def _elements(costs: Costs, numbers: Sequence[int], first: bool, last: bool) -> tuple[int, int]:
    """Return the elements of the matrices in a stage's blocks, and of all else."""
    blocks = [costs.blocks[number] for number in numbers]
    matrices = sum(each.matrices for each in blocks)
    others = sum(each.parameters for each in blocks) - matrices
    return matrices, others + costs.root_parameters(first, last)


def _whole(costs: Costs, numbers: Sequence[int]) -> list[BlockSizes]:
    """Return the sizes of blocks that no ranks share."""
    whole = replace(costs, tp=1).blocks
    return [whole[number] for number in numbers]
