from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tensorgrad.data import TokenFile, Tokenizer, token_dtype, write_tokens
from tensorgrad.data import token_file as module
from tensorgrad.errors import DataError, DtypeError
from tests.disk import full_disk
from tests.source_tree import ROOT

WORDS = "the quick brown fox jumps over the lazy dog and runs away\n"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train([WORDS * 10], 300)


def saved(path: Path, values: object) -> Path:
    np.save(path, np.asarray(values))
    return path


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("batch", [1, 100, 1 << 20])
def test_documents_become_one_array(
    tokenizer: Tokenizer, tmp_path: Path, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_BATCH_CHARACTERS", batch)
    texts = ["fox", "", "é\n", WORDS * 50]
    seen: list[tuple[int, int]] = []
    path = tmp_path / "a.npy"
    count = write_tokens(path, iter(texts), tokenizer, lambda *done: seen.append(done))
    array = np.load(path)
    expected = [i for text in texts for i in (*tokenizer.encode(text), tokenizer.end_of_text)]
    assert array.dtype == np.uint16
    assert array.tolist() == expected
    assert count == len(expected)
    assert seen == sorted(seen)
    assert seen[-1] == (len("".join(texts)), count)
    assert names(tmp_path) == ["a.npy"]
    file = TokenFile.open(path, tokenizer.vocab_size)
    assert type(file.tokens) is np.ndarray  # a memmap is a subclass, which says "not the CPU"
    assert len(file) == count
    assert file.tokens.tolist() == expected
    assert not file.tokens.flags.writeable


def test_the_type_follows_the_vocabulary() -> None:
    assert token_dtype(257) == token_dtype(1 << 16) == np.uint16
    assert token_dtype((1 << 16) + 1) == np.uint32


def test_the_header_has_one_length_for_every_count(tmp_path: Path) -> None:
    sizes = set()
    for count in (0, 1, 10**6, 10**18):
        with (tmp_path / "a").open("wb") as file:
            module._write_header(file, token_dtype(0), count)
            sizes.add(file.tell())
    assert len(sizes) == 1


def test_no_documents_are_an_error_that_keeps_the_old_file(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    path = saved(tmp_path / "a.npy", [1])
    with pytest.raises(DataError, match="documents has no text"):
        write_tokens(path, [], tokenizer)
    with pytest.raises(DtypeError, match="documents is a str, expected a list of them"):
        write_tokens(path, "one text", tokenizer)
    assert np.load(path).tolist() == [1]
    assert names(tmp_path) == ["a.npy"]


def test_a_full_disk_keeps_the_old_file(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = saved(tmp_path / "a.npy", [1])
    with full_disk(2000), pytest.raises(DataError, match=r"cannot write .*a\.npy after .* tokens"):
        write_tokens(path, [WORDS * 100] * 10, tokenizer)
    assert np.load(path).tolist() == [1]
    assert names(tmp_path) == ["a.npy"]


def test_a_missing_folder_is_an_error(tokenizer: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot write .* No such file or directory"):
        write_tokens(tmp_path / "none" / "a.npy", [WORDS], tokenizer)


def test_an_error_in_the_documents_keeps_the_old_file(tokenizer: Tokenizer, tmp_path: Path) -> None:
    def broken() -> Iterator[str]:
        yield WORDS
        raise RuntimeError("broken")

    path = saved(tmp_path / "a.npy", [1])
    with pytest.raises(RuntimeError, match="broken"):
        write_tokens(path, broken(), tokenizer)
    assert np.load(path).tolist() == [1]
    assert names(tmp_path) == ["a.npy"]


def test_a_kill_keeps_the_old_file(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = saved(tmp_path / "a.npy", [1])
    tokenizer.save(tmp_path / "tokenizer.json")
    script = (
        "import os, sys\nfrom tensorgrad.data import Tokenizer, write_tokens\n"
        "def texts():\n    while True: yield '\u2603 ' * 550_000\n"
        "def progress(characters, tokens): os.kill(os.getpid(), 9)\n"
        "write_tokens(sys.argv[1], texts(), Tokenizer.load(sys.argv[2]), progress)\n"
    )
    args = [sys.executable, "-c", script, str(path), str(tmp_path / "tokenizer.json")]
    assert subprocess.run(args, cwd=ROOT, check=False).returncode == -9
    assert np.load(path).tolist() == [1]
    (left,) = (name for name in names(tmp_path) if name.endswith(".tmp"))
    assert (tmp_path / left).stat().st_size > 1_000_000
    with pytest.raises(DataError, match=r"has .* bytes, expected .* for the 0 elements"):
        TokenFile.open(tmp_path / left, 300)


def test_ids_outside_the_vocabulary_are_an_error_with_their_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved(tmp_path / "a.npy", np.array([0, 1, 299, 2, 300, 301], np.uint16))
    for chunk in (1, 4, 100):
        monkeypatch.setattr(module, "_CHECKED_TOKENS", chunk)
        message = r"a\.npy has the id 300 at position 4, expected 0 to 299 .a vocabulary of 300"
        with pytest.raises(DataError, match=message):
            TokenFile.open(path, 300)
        assert len(TokenFile.open(path, 302)) == 6
        assert len(TokenFile.open(path, 300, check_ids=False)) == 6
    big = saved(tmp_path / "b.npy", np.array([65535, 70000], np.uint32))
    with pytest.raises(DataError, match="id 70000 at position 1, expected 0 to 65535"):
        TokenFile.open(big, 1 << 16)
    assert TokenFile.open(big, 1 << 17).tokens.tolist() == [65535, 70000]
    assert len(TokenFile.open(saved(path, np.array([65535], np.uint16)), 1 << 16)) == 1


@pytest.mark.parametrize("change", [-1, -100, -239, 1])
def test_a_file_of_the_wrong_length_is_an_error(tmp_path: Path, change: int) -> None:
    path = saved(tmp_path / "a.npy", np.zeros(120, np.uint16))
    data = path.read_bytes()
    path.write_bytes(data[:change] if change < 0 else data + bytes(change))
    message = rf"a\.npy has {len(data) + change} bytes, expected {len(data)} for the 120 elements"
    with pytest.raises(DataError, match=message):
        TokenFile.open(path, 300)


@pytest.mark.parametrize("length", [0, 3, 9, 50])
def test_half_a_header_is_an_error(tmp_path: Path, length: int) -> None:
    path = saved(tmp_path / "a.npy", np.zeros(120, np.uint16))
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(DataError, match=r"a\.npy is not a \.npy file"):
        TokenFile.open(path, 300)


@pytest.mark.parametrize(("old", "new"), [(b"}", b"("), (b"(12", b"((2"), (b", }", b",  ")])
def test_a_damaged_header_is_named(tmp_path: Path, old: bytes, new: bytes) -> None:
    path = saved(tmp_path / "a.npy", np.zeros(12, np.uint16))
    whole = path.read_bytes()
    assert old in whole
    path.write_bytes(whole.replace(old, new, 1))
    with pytest.raises(DataError, match=r"a\.npy is not a \.npy file"):
        TokenFile.open(path, 300)


@pytest.mark.parametrize(
    "values",
    [
        np.zeros(9, np.int64),
        np.zeros(9, np.float32),
        np.zeros(9, ">u2"),
        np.zeros((3, 3), np.uint16),
        np.zeros((), np.uint16),
        np.array([None]),
    ],
    ids=str,
)
def test_another_array_is_an_error(tmp_path: Path, values: object) -> None:
    with pytest.raises(DataError, match=r"has dtype .* and shape .*, expected (uint|numb)"):
        TokenFile.open(saved(tmp_path / "a.npy", values), 300)


def test_an_empty_or_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a\.npy has 0 tokens"):
        TokenFile.open(saved(tmp_path / "a.npy", np.zeros(0, np.uint16)), 300)
    with pytest.raises(DataError, match=r"cannot read .*none\.npy: No such file"):
        TokenFile.open(tmp_path / "none.npy", 300)
    with pytest.raises(DataError, match=r"cannot read .*: Is a directory"):
        TokenFile.open(tmp_path, 300)
    (tmp_path / "b.npy").write_bytes(b"\x93NUMPY\x02\x00")
    with pytest.raises(DataError, match="its format version is"):
        TokenFile.open(tmp_path / "b.npy", 300)
