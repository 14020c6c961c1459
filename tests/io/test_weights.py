from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from tensorgrad.errors import ArgumentError, CheckpointError, DamagedError
from tensorgrad.io.weights import ArrayFile, load_arrays, load_metadata, save_arrays


def write(path: Path, header: object, data: bytes = b"") -> Path:
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def array(dtype: str, shape: list[int], stop: int) -> dict[str, Any]:
    return {"a": {"dtype": dtype, "shape": shape, "data_offsets": [0, stop]}}


@pytest.mark.parametrize(
    ("header", "data"),
    [
        (array("F32", [10**12], 4 * 10**12), b""),
        (array("F32", [2**62, 4], 0), b""),
        (array("F32", [2**64 - 1, 2**64 - 1], 4), bytes(4)),
        (array("F32", [3], 12), bytes(11)),
        (array("F32", [3], 12), bytes(13)),
        (array("F32", [-3], 12), bytes(12)),
        (array("F99", [3], 12), bytes(12)),
        ({"a": 3}, b""),
        ([], b""),
        ("[" * 10_000, b""),
        ("{", b""),
        ("\udc80".encode("utf-8", "surrogatepass").decode("latin1"), b""),
    ],
)
def test_a_header_that_does_not_fit_is_named(tmp_path: Path, header: object, data: bytes) -> None:
    path = write(tmp_path / "a.safetensors", header, data)
    for read in (load_arrays, load_metadata, ArrayFile):
        with pytest.raises(CheckpointError, match=rf"{path} is damaged or not a safetensors file"):
            read(path)


def test_a_header_that_takes_long_is_neither_read_nor_written(tmp_path: Path) -> None:
    path, limit = tmp_path / "a.safetensors", 1 << 23
    path.write_bytes(struct.pack("<Q", limit + 1))
    for read in (load_arrays, load_metadata, ArrayFile):
        with pytest.raises(DamagedError, match="header of 8,388,609 bytes, expected at most 8,"):
            read(path)
    with pytest.raises(ArgumentError, match="expected at most 8,388,608"):
        save_arrays(path, {"a": np.zeros(1)}, {"text": "a" * limit})
    longest = {"text": "a" * (limit - 200)}
    save_arrays(path, {"a": np.zeros(1)}, longest)
    assert load_metadata(path) == longest


@pytest.mark.parametrize(
    ("entry", "data"),
    [
        (array("F8_E4M3", [3], 3), bytes(3)),
        (array("F32", [0, 2**62, 4], 0), b""),
        (array("F32", [1] * 100, 4), bytes(4)),
    ],
)
def test_an_array_that_numpy_cannot_make_is_named(
    tmp_path: Path, entry: dict[str, Any], data: bytes
) -> None:
    path = write(tmp_path / "a.safetensors", entry, data)
    with pytest.raises(CheckpointError, match=rf"{path}"):
        load_arrays(path)
    with pytest.raises(CheckpointError, match=rf"{path}"), ArrayFile(path) as file:
        file.read("a", 0, 1)


def test_what_is_no_regular_file_is_named(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "zero").symlink_to("/dev/zero")
    (tmp_path / "circle").symlink_to("circle")
    (tmp_path / "empty").touch()
    for name, message in (
        ("fifo", "is a FIFO or a device, expected a regular file"),
        ("zero", "is a FIFO or a device, expected a regular file"),
        ("circle", "Too many levels of symbolic links"),
        (".", "Is a directory"),
        ("empty", "is damaged or not a safetensors file"),
        ("none", "does not exist, expected a safetensors file"),
    ):
        for read in (load_arrays, load_metadata, ArrayFile):
            with pytest.raises(CheckpointError, match=message) as caught:
                read(tmp_path / name)
            assert str(tmp_path / name) in str(caught.value)


def test_a_file_that_is_replaced_as_it_is_opened_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.safetensors"
    save_arrays(path, {"a": np.arange(3)})

    def opened(name: str, framework: str) -> Any:
        path.unlink()
        os.mkfifo(path)
        return safe_open(name, framework=framework)

    monkeypatch.setattr("tensorgrad.io.weights.safe_open", opened)
    assert load_arrays(path)["a"].tolist() == [0, 1, 2]


def test_an_array_of_another_type_is_read_in_parts(tmp_path: Path) -> None:
    path = write(tmp_path / "a.safetensors", array("I16", [2, 2], 8), bytes(range(8)))
    expected = np.frombuffer(bytes(range(8)), np.int16)
    with ArrayFile(path) as file:
        assert (file.names, file.shape("a"), str(file.dtype("a"))) == (["a"], (2, 2), "int16")
        np.testing.assert_array_equal(file.read("a", 1, 3), expected[1:3])
