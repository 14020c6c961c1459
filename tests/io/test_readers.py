from __future__ import annotations

import io
import json
import os
import struct
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensorgrad.errors import DataError
from tensorgrad.io import readers
from tensorgrad.io.readers import (
    JSON_BYTES,
    JSON_DEPTH,
    JSON_LINE_BYTES,
    json_object,
    log_lines,
    map_array,
    needed,
    no_link,
    open_regular,
    parse_json,
    read_bytes,
    read_json,
    read_json_lines,
)


def nested(depth: int) -> str:
    return '{"a":' * depth + "1" + "}" * depth


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "cannot be read as JSON: Expecting value"),
        ('{"a": 1', "cannot be read as JSON: Expecting"),
        ('{"a": NaN}', "has the number NaN, expected finite ones"),
        ('{"a": [-Infinity]}', "has the number -Infinity, expected finite ones"),
        ('{"a": 1e999}', "has the number 1e999, expected finite ones"),
        (f'{{"a": {"7" * 5000}}}', "has 5000 digits, expected 64 bits"),
        (f'{{"a": {2**64}}}', "has 20 digits, expected 64 bits"),
        (f'{{"a": {-(2**63) - 1}}}', "has 20 digits, expected 64 bits"),
        ('{"a": 1, "b": 2, "a": 1}', "the key 'a' is there 2 times, expected once"),
        ('{"b": {"a": 1, "a": 2}}', "the key 'a' is there 2 times, expected once"),
        ('{"a": "\\ud800"}', "has half of a surrogate pair"),
        ('{"\\udfff": 1}', "has half of a surrogate pair"),
        (nested(JSON_DEPTH + 1), f"nested more than {JSON_DEPTH} deep"),
        ("[" * 100_000, f"nested more than {JSON_DEPTH} deep"),
        (nested(100_000), f"nested more than {JSON_DEPTH} deep"),
        ("[1]", "holds a list, expected a mapping"),
        ("3", "holds a int, expected a mapping"),
        ("null", "holds a NoneType, expected a mapping"),
    ],
)
def test_json_that_is_refused_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(DataError, match=message) as caught:
        read_json(path)
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 500
    with pytest.raises(DataError, match=message):
        parse_json(text, "a header")


def test_json_is_read_as_it_is() -> None:
    value = {
        "numbers": [0, -1, 2**64 - 1, -(2**63), 0.1, -1e-300, 1.7e308],
        "texts": ["", "ä\u2028", "\U0001f600", "\\ud800 in words"],
        "more": {"a": None, "b": True, "c": [[], {}]},
    }
    for text in (json.dumps(value), json.dumps(value, ensure_ascii=False)):
        assert parse_json(text, "x") == value
    assert json.loads(nested(JSON_DEPTH - 1)) == parse_json(nested(JSON_DEPTH - 1), "x")


def test_json_that_passes_can_be_shown_where_the_stack_is_nearly_full() -> None:
    value = parse_json(nested(JSON_DEPTH - 1), "x")

    def down(frames: int) -> str:
        return down(frames - 1) if frames else repr(value) + json.dumps(value)

    here, frame = 0, sys._getframe()
    while frame.f_back is not None:
        here, frame = here + 1, frame.f_back
    assert down(sys.getrecursionlimit() - here - 2 * JSON_DEPTH - 20)


def test_a_byte_order_mark_is_no_text_and_other_encodings_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}')
    assert read_json(path) == {"a": 1}
    for data in ('{"a": 1}'.encode("utf-16"), b'{"a": "\xff"}', b'{"a": "\xed\xa0\x80"}'):
        path.write_bytes(data)
        with pytest.raises(DataError, match=rf"{path} cannot be read as JSON: .* decode"):
            read_json(path)


def test_a_large_file_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    with path.open("wb") as file:
        file.truncate(1 << 27)  # a hole, nothing of which is on the disk
    tracemalloc.start()
    try:
        with pytest.raises(
            DataError, match=rf"{path} has 134,.* bytes, expected at most {JSON_BYTES:,}"
        ):
            read_json(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    os.truncate(path, 1 << 40)
    with pytest.raises(DataError, match="bytes, of which 0 are on disk, expected a file without"):
        open_regular(path)
    path.write_bytes(b"12345")
    assert read_bytes(path, 5) == b"12345"
    with pytest.raises(DataError, match="has 5 bytes, expected at most 4"):
        read_bytes(path, 4)


def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")  # nobody writes to it: opening it would wait
    (tmp_path / "zero").symlink_to("/dev/zero")
    for name in ("fifo", "zero"):
        path = tmp_path / name
        for read in (open_regular, read_json, map_array):
            with pytest.raises(DataError, match=rf"{path} is a FIFO or a device, expected a reg"):
                read(path)
    if sys.platform == "linux":  # a regular file by its kind, without a size
        with pytest.raises(DataError, match="/proc/self/mem is of the system and has no content"):
            open_regular("/proc/self/mem")
    (tmp_path / "circle").symlink_to("circle")
    (tmp_path / "folder").mkdir()
    for name in ("circle", "folder", "none"):
        with pytest.raises(OSError, match=str(tmp_path / name)):
            open_regular(tmp_path / name)


def test_a_file_is_opened_to_write_where_it_has_one_name(tmp_path: Path) -> None:
    path = tmp_path / "a"
    for _ in range(2):  # a new one, then one that is there
        with open_regular(path, "ab") as file:
            file.write(b"text")
    os.link(path, tmp_path / "b")
    with open_regular(path) as file:
        assert file.read() == b"text" * 2
    with pytest.raises(DataError, match="has a second name"):
        open_regular(path, "ab")


@pytest.mark.parametrize(
    "array",
    [
        np.arange(7, dtype=np.uint16),
        np.arange(6.0).reshape(2, 3),
        np.asfortranarray(np.arange(6, dtype=">i4").reshape(2, 3)),
        np.array(2.5),
        np.zeros((0, 3), np.int8),
    ],
)
def test_arrays_are_mapped_as_numpy_loads_them(tmp_path: Path, array: Any) -> None:
    np.save(tmp_path / "a.npy", array)
    found = map_array(tmp_path / "a.npy")
    np.testing.assert_array_equal(found, array, strict=True)
    assert not found.flags.writeable


def header(text: str, data: bytes = b"", version: int = 1) -> bytes:
    return b"\x93NUMPY" + bytes([version, 0]) + struct.pack("<H", len(text)) + text.encode() + data


def facts(descr: str, shape: str, order: str = "False") -> str:
    return f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, }}\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not a .npy file"),
        (b"\x93NUMPY", "is not a .npy file"),
        (b"PK\x03\x04 a zip", "is not a .npy file"),
        (header(facts("'<u2'", "(3,)"), bytes(6))[:-8], "is not a .npy file|has .* bytes"),
        (header(facts("'<u2'", "(3,)"), bytes(5)), "bytes, expected .* for the 3 elements"),
        (header(facts("'<u2'", "(3,)"), bytes(7)), "bytes, expected .* for the 3 elements"),
        (header(facts("'<u2'", f"({10**30},)")), "elements of its header"),
        (header(facts("'<u2'", f"({2**63}, 0)")), r"has shape \(9223372036854775808, 0\)"),
        (header(facts("'<u2'", f"(0, {'1, ' * 100})")), "has shape"),
        (header(facts("'<u2'", "(-3,)")), r"has dtype uint16 and shape \(-3,\), expected"),
        (header(facts("'<u2'", "(-1, -3)"), bytes(6)), "expected numbers"),
        (header(facts("'<u2'", "3")), "is not a .npy file: .*shape"),
        (header(facts("'<u2'", "(3,)", "2")), "is not a .npy file: .*fortran"),
        (header(facts("'|O'", "(1,)"), b"cos\nsystem\n(S'x'\ntR."), "has dtype object"),
        (header(facts("'<U3'", "(1,)"), bytes(12)), "has dtype <U3"),
        (header(facts("[('a', '<u2')]", "(1,)"), bytes(2)), "has dtype .* expected numbers"),
        (header(facts("()", "(1,)")), "is not a .npy file"),
        (header(facts("('<u2',)", "(1,)")), "is not a .npy file"),
        (header(facts("{'a': 1}", "(1,)")), "is not a .npy file"),
        (header(facts("__import__('os').abort()", "(1,)")), "is not a .npy file"),
        (header("(" * 9000), "is not a .npy file"),
        (header("-" * 9000 + "1"), "is not a .npy file"),
        (header("{'descr': '<u2'"), "is not a .npy file"),
        (header("[1, 2]\n"), "is not a .npy file"),
        (header(facts("'<u2'", "(" + "9" * 5000 + ",)")), "is not a .npy file"),
        (header(facts("'<u2'", "(3,)"), bytes(6), 2), r"format version is \(2, 0\)"),
        (header(facts("'<u2'", "(3,)"), bytes(6), 3), r"format version is \(3, 0\)"),
        (header(facts("'<u2'", "(3,)"), bytes(6), 9), "is not a .npy file"),
    ],
)
def test_headers_that_are_refused_are_named(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "a.npy"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        map_array(path)
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    file = io.BytesIO()
    np.save(file, np.array([{"a": 1}], object), allow_pickle=True)
    (tmp_path / "a.npy").write_bytes(file.getvalue())
    with pytest.raises(DataError, match="has dtype object"):
        map_array(tmp_path / "a.npy")


def test_lines_of_json_are_read_around_damaged_ones(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    good = [{"step": 1, "x": None}, {"step": 2, "text": "\u00fc"}, {}]
    long = b'{"x": "' + b"a" * 3 * JSON_LINE_BYTES + b'"}\n'
    bad = [b"\n", b"{\n", b"[]\n", b"{}{}\n", b"\xff\n", b"[" * 10**5 + b"\n", b"9" * 5000 + b"\n"]
    lines = [
        b'{"step": 1, "x": NaN}\n',
        *bad,
        long,
        b' {"step": 2, "text": "\xc3\xbc"} \n',
        b"{}\n",
    ]
    path.write_bytes(b"".join(lines))
    expected = [good[0], *[None] * (len(bad) + 1), *good[1:]]
    assert list(read_json_lines(path)) == expected
    path.write_bytes(b"".join(lines) + b'{"step": 3}')  # being written
    assert list(read_json_lines(path)) == expected
    path.write_bytes(b"")
    assert list(read_json_lines(path)) == []


def test_progress_of_a_long_file_of_lines_is_shown_in_bytes(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b'{"step": 1}\n' * 12_000)
    calls: list[tuple[int, int]] = []
    lines = read_json_lines(path, lambda done, total: calls.append((done, total)))
    assert sum(1 for _ in lines) == 12_000
    assert calls == [(12 * lines, 144_000) for lines in (1, 5001, 10_001)]


def test_long_integers_may_become_floats() -> None:
    text = f'{{"long": {10**18}, "most": {10**18 - 1}, "limit": {10**30}, "negative": {-(10**17)}}}'
    found = parse_json(text, "a.json", long_integers=True)
    assert found == {"long": 1e18, "most": 10**18 - 1, "limit": 1e30, "negative": -1e17}
    assert [type(each) for each in found.values()] == [float, int, float, float]
    assert type(parse_json(f'{{"long": {10**18}}}', "a.json")["long"]) is int


def test_limits_are_those_that_are_given(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    text = '{"a": 1}'
    path.write_text(text)
    assert read_json(path, len(text)) == parse_json(text, "x", limit=len(text)) == {"a": 1}
    with pytest.raises(DataError, match=f"has {len(text)} bytes, expected at most 7"):
        read_json(path, 7)
    with pytest.raises(DataError, match="x has 8 characters of JSON, expected at most 7"):
        parse_json(text, "x", limit=7)
    path.write_text(f'{{"a": {10**30}}}')
    with pytest.raises(DataError, match="has 31 digits, expected 64 bits"):
        read_json(path)
    assert read_json(path, long_integers=True) == {"a": 1e30}


def test_links_are_followed_where_that_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"a": 1}')
    (tmp_path / "link").symlink_to("a.json")
    (tmp_path / "folder").mkdir()
    (tmp_path / "to_folder").symlink_to("folder")
    (tmp_path / "to_none").symlink_to("none")
    assert read_json(tmp_path / "link", links=True) == {"a": 1}
    assert read_bytes(tmp_path / "link", 8, links=True) == b'{"a": 1}'
    assert no_link(tmp_path / "a.json") == tmp_path / "a.json"
    for name in ("link", "to_folder", "to_none"):
        with pytest.raises(
            DataError, match=rf"{tmp_path / name} is a symbolic link, expected a fi"
        ):
            read_json(tmp_path / name)
        with pytest.raises(DataError, match="is a symbolic link, expected a file or folder"):
            no_link(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        read_json(tmp_path / "to_none", links=True)


def test_a_file_that_grows_while_it_is_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"12345")
    real = os.fstat

    def smaller(descriptor: int) -> Any:
        found = list(real(descriptor))
        found[6] -= 1
        return os.stat_result(found, {"st_blocks": 8})

    monkeypatch.setattr("os.fstat", smaller)
    with pytest.raises(DataError, match=rf"{path} has no size, or grew while it was read"):
        read_bytes(path, 5)


def test_a_line_of_a_log_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "_LONGEST_LINE", 10)
    monkeypatch.setattr(readers, "JSON_LINE_BYTES", 4)
    path = tmp_path / "a.log"
    path.write_bytes(b"123456789\n123\n1234567\n")
    with path.open("rb") as file:
        assert list(log_lines(file)) == [b"1234", b"5678", b"9\n", b"123\n", b"1234", b"567\n"]
    path.write_bytes(b"1234567890\n")
    with (
        path.open("rb") as file,
        pytest.raises(DataError, match=rf"{path} has a line of more than 10 bytes, expected those"),
    ):
        list(log_lines(file))


@pytest.mark.parametrize(
    ("line", "value"),
    [('{"a": 1} ', {"a": 1}), (' {"a": NaN}\n', {"a": None}), ("[1]", None), ("{} {}", None),
     ("", None), ("x", None), ('{"a": -Infinity}', {"a": None})],
)  # fmt: skip
def test_an_object_on_a_line(line: str, value: Any) -> None:
    assert json_object(line) == value


def test_a_file_is_hollow_where_little_of_it_is_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "_HOLLOW", 1 << 20)
    path = tmp_path / "a"
    for size, written, hollow in (
        (1 << 20, 0, True),
        ((1 << 20) - 1, 0, False),
        (1 << 20, 1 << 16, True),
        (1 << 20, 3 << 16, False),
    ):
        with path.open("wb") as file:
            file.write(b"x" * written)
            file.truncate(size)
        if hollow:
            with pytest.raises(DataError, match="expected a file without large holes"):
                open_regular(path)
        else:
            open_regular(path).close()


def test_a_package_that_is_missing_is_named() -> None:
    with pytest.raises(DataError, match=r"x needs the no_such_package package: pip install .*text"):
        needed("no_such_package.inner", "x", "text")
    assert needed("os.path", "x", "text") is os.path


def test_a_package_that_fails_as_it_is_imported_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "strange.py").write_text("int('zzz')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(DataError, match=r"BLEU needs the strange package, .*: ValueError: .*zzz"):
        needed("strange", "BLEU", "text")
