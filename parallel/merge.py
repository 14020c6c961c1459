"""Make one plain model file of a checkpoint, of any number of ranks or of one process.

    python -m tensorgrad.parallel.merge runs/gpt2-1/checkpoints/step-00000500 model.safetensors

The file has the parameters and buffers of the whole model under their names, whole, and in its
header the step and the model's sizes; the checkpoint stays as it is. The folder of a run, or of its
checkpoints, stands for its newest checkpoint that is whole.

    model = GPT2(PRESETS["gpt2-124M"])
    model.load_state_dict(load_arrays("model.safetensors"))
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from tensorgrad.errors import CheckpointError, ShapeError, TensorgradError
from tensorgrad.parallel.checkpoint import open_pieces, read_piece
from tensorgrad.parallel.placement import Placement
from tensorgrad.train.checkpoint import Checkpoint, load_checkpoint, load_latest
from tensorgrad.weights import save_arrays

_MODEL = "model/"


def merge(checkpoint: Checkpoint, out: Path) -> int:
    """Write the parameters and buffers of a checkpoint to one safetensors file.

    Args:
        checkpoint: of any number of ranks.
        out: the file to write; its folder must exist.
    Returns:
        The number of arrays.
    Raises:
        CheckpointError: a part of an array is missing, or the file cannot be written.
    """
    arrays = {}
    with ExitStack() as stack:
        for name, stored in open_pieces(checkpoint, stack).items():
            if name.startswith(_MODEL):
                shape = stored[0].piece.placement.shape
                try:
                    values = read_piece(Placement(name, shape).piece, stored)
                except ShapeError as error:
                    raise CheckpointError(
                        f"merge: {checkpoint.path} is not whole: {error}"
                    ) from error
                arrays[name.removeprefix(_MODEL)] = values.reshape(shape)
    if not arrays:
        raise CheckpointError(f"merge: {checkpoint.path} has no arrays of a model, expected some")
    header = {"step": str(checkpoint.step)}
    if "model" in checkpoint.state:
        header["model"] = json.dumps(checkpoint.state["model"])
    save_arrays(out, arrays, header)
    return len(arrays)


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a checkpoint, or the newest whole one of a run or of a folder of checkpoints.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    for folder in (path, path / "checkpoints"):
        if (folder / "state.json").exists():
            return load_checkpoint(folder)
        found = load_latest(folder)
        if found is not None:
            return found
    raise CheckpointError(f"merge: {path} has no checkpoint, expected one or more")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tensorgrad.parallel.merge", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("checkpoint", type=Path, help="a checkpoint, or the folder of a run")
    parser.add_argument("out", type=Path, help="the safetensors file to write")
    given = parser.parse_args(arguments)
    try:
        checkpoint = open_checkpoint(given.checkpoint)
        count = merge(checkpoint, given.out)
    except (TensorgradError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{given.out}: {count} arrays of {checkpoint.path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
