from __future__ import annotations

import json
import os
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from tensorgrad.errors import ArgumentError, CheckpointError, DamagedError, DtypeError
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
        np.testing.assert_array_equal(file.read("a"), expected.reshape(2, 2))
        for start, stop in ((None, 3), (1, None)):
            assert file.read("a", start, stop).shape == (2, 2)


def test_parts_of_a_row_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_arrays(path, {"a": np.arange(9), "scalar": np.array(3.5), "none": np.zeros((0, 2))})
    with ArrayFile(path) as file:
        assert file.read("a", 2, 5).tolist() == [2, 3, 4]
        assert file.read("a", 2, 2).shape == (0,)
        assert file.read("a", 0, 9).tolist() == list(range(9))
        assert file.read("scalar", 0, 1).tolist() == [3.5]
        assert [str(file.dtype(name)) for name in ("a", "scalar", "none")] == [
            "int64", "float64", "float64",
        ]  # fmt: skip


def test_what_was_written_is_said_and_summed(tmp_path: Path) -> None:
    path, calls = tmp_path / "a.safetensors", []
    big = np.arange(3, dtype=">i4")
    arrays = {"c": np.ones(5, "int8"), "a": big, "b": np.ones((2, 3))[:, ::2]}
    found = save_arrays(path, arrays, {"note": "ü"}, rest=lambda: calls.append(1))
    content = path.read_bytes()
    assert found == {"bytes": len(content), "crc32": zlib.crc32(content)}
    assert len(calls) == 4  # after the header and each array
    with ArrayFile(path) as file:
        assert file.sum is not None
        assert len(file.sum) == 8
        assert file.metadata == {"note": "ü"} == load_metadata(path)
    length = int.from_bytes(content[:8], "little")
    assert length % 8 == 0
    header = json.loads(content[8 : 8 + length])
    places = {name: header[name]["data_offsets"] for name in arrays}
    assert places == {"b": [0, 32], "a": [32, 44], "c": [44, 49]}  # larger elements first
    loaded = load_arrays(path)
    for name, expected in arrays.items():
        np.testing.assert_array_equal(loaded[name], expected)
    path.write_bytes(content[:-1] + b"\2")
    with pytest.raises(DamagedError, match="has another CRC-32 than when it was written"):
        load_arrays(path)
    save_arrays(path, arrays, with_sum=False)
    with ArrayFile(path) as file:
        assert file.sum is None
    path.write_bytes(path.read_bytes()[:-1] + b"\2")
    assert load_arrays(path)["c"].tolist() == [1, 1, 1, 1, 2]


def test_what_could_not_be_read_again_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    one = np.ones(1)
    cases: list[tuple[Any, Any, type[Exception], str]] = [
        ({"\udc80": one}, None, ArgumentError, "as a name or metadata, expected text that fits"),
        ({"a": one}, {"b": 3}, ArgumentError, "got 3 as a name or metadata"),
        ({"a": one}, {"\udc80": "x"}, ArgumentError, "as a name or metadata"),
        ({"__metadata__": one}, None, ArgumentError, "'__metadata__', expected any other name"),
        ({"a": np.ones(1, complex)}, None, CheckpointError, "a has dtype complex128, expected one"),
        ({"a": one.astype("float8_e4m3")}, None, DtypeError, "a has dtype float8_e4m3, expected o"),
    ]
    for arrays, metadata, error, message in cases:
        with pytest.raises(error, match=f"save: .*{message}"):
            save_arrays(path, arrays, metadata)
    assert not path.exists()
    with pytest.raises(CheckpointError, match=r"save: cannot write .*none/a"):
        save_arrays(tmp_path / "none" / "a", {"a": one})
