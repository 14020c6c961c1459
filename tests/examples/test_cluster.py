from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests.source_tree import ROOT

FOLDER = ROOT / "examples" / "cluster"


def run_script(folder: Path, *options: str) -> list[str]:
    """Run the batch script with an srun that prints what it was told."""
    (folder / "srun").write_text(
        '#!/bin/sh\necho "threads $OMP_NUM_THREADS"\nprintf "%s\\n" "$@"\n'
    )
    (folder / "srun").chmod(0o755)
    result = subprocess.run(
        ["bash", FOLDER / "train.slurm", *options],
        env={
            "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
            "SLURM_JOB_NAME": "tensorgrad",
            "SLURM_CPUS_PER_TASK": "8",
            "SLURM_SUBMIT_DIR": str(folder),
        },
        cwd="/",
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return result.stdout.splitlines()


def test_the_batch_script_starts_a_run_and_then_resumes_it(tmp_path: Path) -> None:
    program = [".venv/bin/python", "examples/train_gpt2_3d.py"]
    launch = ["threads 8", "--mpi=pmi2", "--kill-on-bad-exit=1", "--cpus-per-task=8", *program]
    begun = run_script(tmp_path, "--tp", "2", "--prompt", "once upon")
    assert begun == [*launch, "--out", "runs/tensorgrad", "--tp", "2", "--prompt", "once upon"]
    (tmp_path / "runs" / "tensorgrad").mkdir(parents=True)
    (tmp_path / "runs" / "tensorgrad" / "config.json").touch()
    assert run_script(tmp_path) == [*launch, "--resume", "runs/tensorgrad"]


def test_the_batch_script_asks_for_a_rank_a_gpu() -> None:
    lines = (FOLDER / "train.slurm").read_text().splitlines()
    asked = dict(
        line.removeprefix("#SBATCH --").split("=", 1)
        for line in lines
        if "#SBATCH --" in line and "=" in line
    )
    assert asked["ntasks-per-node"] == asked["gpus-per-node"]
    assert asked["signal"].startswith("TERM@")  # on which the training loop saves and leaves


def test_the_hostfile_names_hosts_and_their_slots() -> None:
    lines = (FOLDER / "hostfile").read_text().splitlines()
    hosts = [line.split(":") for line in lines if not line.startswith("#")]
    assert [slots for _, slots in hosts] == ["8", "8"]
