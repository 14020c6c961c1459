from __future__ import annotations

from pathlib import Path

from tensorgrad.train.folder import free_folder


def test_folders_are_numbered(tmp_path: Path) -> None:
    for number in (1, 2):
        folder = free_folder(f"{tmp_path}/run")
        assert folder == tmp_path / f"run-{number}"
        folder.mkdir()
