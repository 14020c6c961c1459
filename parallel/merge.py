"""Merge a sharded checkpoint, or one of one process, into one model file.

    python -m tensorgrad.parallel.merge runs/gpt2-1/checkpoints/step-00000500 model.safetensors

The file has the whole parameters and buffers of the model under their names. Its header has the
step, the model's sizes, the tokenizer's digest and a CRC-32 of everything, which loading verifies.
The checkpoint does not change. The folder of a run, or of its checkpoints, stands for its newest
undamaged checkpoint.

    model = GPT2(PRESETS["gpt2-124M"])
    model.load_state_dict(load_arrays("model.safetensors"))
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from tensorgrad.core.errors import CheckpointError
from tensorgrad.io.command import command, printable
from tensorgrad.io.files import check_writable
from tensorgrad.io.weights import save_arrays
from tensorgrad.train.checkpoint import Checkpoint, load_checkpoint, load_latest


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
    arrays = checkpoint.arrays("model")
    if not arrays:
        raise CheckpointError(f"merge: {checkpoint.path} has no arrays of a model")
    header = {"step": str(checkpoint.step)}
    for name in ("model", "tokenizer"):
        if name in checkpoint.state:
            header[name] = json.dumps(checkpoint.state[name])
    model = checkpoint.settings("settings").get("model")
    if model:
        header["settings"] = json.dumps({"model": model})
    save_arrays(out, arrays, header)
    return len(arrays)


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a checkpoint, or the newest undamaged one of a run or of a folder of checkpoints.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    path = path.resolve()  # the user may name a link; those in a run are refused
    for folder in (path, path / "checkpoints"):
        if (folder / "state.json").exists():
            return load_checkpoint(folder)
        found = load_latest(folder)
        if found is not None:
            return found
    raise CheckpointError(f"merge: {path} has no checkpoint, expected one or more")


@command
def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="python -m tensorgrad.parallel.merge", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("checkpoint", type=Path, help="a checkpoint, or the folder of a run")
    parser.add_argument("out", type=Path, help="the safetensors file to write")
    given = parser.parse_args(arguments)
    try:
        check_writable(given.out.parent)  # before much is read
    except OSError as error:
        raise CheckpointError(f"merge: cannot write {given.out}: {error}") from error
    checkpoint = open_checkpoint(given.checkpoint)
    count = merge(checkpoint, given.out)
    print(printable(f"{given.out}: {count} arrays of {checkpoint.path}"))


if __name__ == "__main__":
    sys.exit(main())
