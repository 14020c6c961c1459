from __future__ import annotations

import inspect
import json
import os
import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cyclopts import App

from tensorgrad.errors import ArgumentError, CheckpointError
from tensorgrad.train import command_line, config
from tensorgrad.train.config import documented, option
from tensorgrad.train.language import LanguageSettings
from tensorgrad.train.script import ScriptSettings


@dataclass(frozen=True)
class Settings:
    steps: int = option(10, "how many, 100 % of them", low=1)
    lr: float = option(0.1, "learning rate", low=0, high=1)
    text: str = option("", "some text", free=True)
    kind: str = option("a", "which", choices=("a", "b"))
    limit: int | None = option(None, "at most this number", shown="no limit")
    fast: bool = option(True, "whether to hurry", free=True)
    names: tuple[str, ...] = option((), "which names", choices=("x", "y"), free=True)

    def __post_init__(self) -> None:
        config.check(self)


def given(*args: str) -> dict[str, object]:
    found: dict[str, object] = {}
    command = command_line.options_command(Settings, found.update)
    command_line.run_app(App(default_command=command, **command_line.STYLE), args)
    return found


def test_the_command_line_gives_only_the_options_given() -> None:
    assert given() == {}
    assert given("--steps", "3", "--no-fast", "--limit", "4", "--kind", "b") == {
        "steps": 3,
        "fast": False,
        "limit": 4,
        "kind": "b",
    }


def test_every_field_is_an_option_with_help(capsys: pytest.CaptureFixture[str]) -> None:
    given("--help")
    shown = " ".join(capsys.readouterr().out.split())
    for text in (
        "--steps INT how many, 100 % of them [default: 10]",
        "[choices: a, b] [default: a]",
        "--no-fast",
        "number [default: no limit]",
        "--names CHOICE... which names [choices: x, y]",
    ):
        assert text in shown


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"steps": 0}, "--steps: got 0, expected 1 or more"),
        ({"lr": 2.0}, "--lr: got 2.0, expected 1 or less"),
        ({"lr": float("nan")}, "--lr: got nan, expected a finite number"),
        ({"lr": np.float32("nan")}, "--lr: got np.float32(nan), expected a finite number"),
        ({"kind": "c"}, "--kind: got 'c', expected one of a, b"),
        ({"kind": None}, "--kind: got None, expected one of a, b"),
        ({"steps": "5"}, "--steps: got '5', expected an integer"),
        ({"steps": 1.5}, "--steps: got 1.5, expected an integer"),
        ({"lr": "x"}, "--lr: got 'x', expected a number"),
        ({"lr": None}, "--lr: got None, expected a number"),
        ({"text": 1}, "--text: got 1, expected a text"),
        ({"limit": "x"}, "--limit: got 'x', expected an integer"),
        ({"fast": "no"}, "--fast: got 'no', expected True or False"),
        ({"limit": True}, "--limit: got True, expected an integer"),
        ({"names": "x"}, "--names: got 'x', expected a list of names"),
        ({"names": ("x", "z")}, "--names: got 'z', expected names of x, y"),
        ({"names": [1]}, "--names: got 1, expected names of x, y"),
        ({"lr": False}, "--lr: got False, expected a number"),
    ],
)
def test_a_value_out_of_range_is_named(values: dict[str, float], message: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        Settings(**values)  # type: ignore[arg-type]
    assert str(caught.value) == message


def test_several_names_may_be_given_and_survive_json(tmp_path: Path) -> None:
    assert given("--names", "x", "y") == {"names": ("x", "y")}
    assert given("--names", "x", "--names", "y") == {"names": ("x", "y")}
    settings = Settings(names=("y", "x"))
    config.save(settings, tmp_path)
    assert config.load(Settings, tmp_path) == settings
    assert Settings(names=["y", "x"]) == settings  # type: ignore[arg-type]


def test_ranges_hold_their_ends_and_integers_63_bits() -> None:
    assert (Settings(steps=1, lr=0.0).lr, Settings(lr=1.0).lr) == (0.0, 1.0)
    assert type(Settings(lr=1).lr) is float
    assert type(Settings(steps=np.int64(3)).steps) is int  # type: ignore[arg-type]
    assert Settings(limit=2**63 - 1).limit == 2**63 - 1
    assert len(Settings(text="x" * (1 << 16)).text) == 1 << 16
    wrong: tuple[tuple[dict[str, Any], str], ...] = (
        ({"limit": 2**63}, "--limit: got 9223372036854775808, expected less than 2^63"),
        ({"limit": -(2**63)}, "expected less than 2^63"),
        ({"lr": 10**400}, "expected a finite number"),
        ({"lr": -0.1}, "--lr: got -0.1, expected 0 or more"),
        ({"text": "\udce9"}, "expected text that fits UTF-8"),
        ({"text": "x" * ((1 << 16) + 1)}, "expected at most 65,536 characters"),
    )
    for values, message in wrong:
        with pytest.raises(ArgumentError, match=re.escape(message)):
            Settings(**values)


@dataclass(frozen=True)
class Changing(Settings):
    total: int = option(4, "steps", grows=True)
    parts: int = option(1, "of a batch", by_ranks=True)
    data: str = option("stdlib", "a file", path=True)
    momentum: float | None = option(None, "of SGD", by=("kind", {"a": 0.5}))


def test_what_a_resumed_run_may_change() -> None:
    before = Changing()

    def wrong(now: dict[str, Any], same_ranks: bool = False) -> list[str]:
        return config.contradictions(before, vars(before), now, same_ranks)

    assert wrong({"text": "b", "parts": 2, "unknown": 1, "total": 5, "data": "/a/stdlib"}) == []
    assert wrong({"total": 3}) == ["--total is 4 there, got 3, expected 4 or more"]
    assert wrong({"parts": 2}, same_ranks=True) == [
        "--parts is 1 there, got 2, expected 1 with the same number of ranks"
    ]
    assert wrong({"data": "/a/b"}) == ["--data is 'stdlib' there, got '/a/b'"]
    assert config.contradictions(before, {"total": None}, {"total": 5}) == [
        "--total is None there, got 5, expected None or more"
    ]


def test_a_default_may_be_that_of_another_setting() -> None:
    assert (Changing().momentum, Changing(kind="b").momentum) == (0.5, None)
    assert Changing(momentum=0.25).momentum == 0.25
    with pytest.raises(ArgumentError) as caught:
        Changing(kind="b", momentum=0.25)
    assert str(caught.value) == (
        "--momentum: got 0.25 with --kind b, expected none: it is for --kind a"
    )
    (momentum,) = (f for f in fields(Changing) if f.name == "momentum")
    assert momentum.metadata["shown"] == "0.5 with a"
    found = [config.default_of(momentum, {"kind": kind}) for kind in ("a", "b", ["a"])]
    assert found == [0.5, None, None]


def test_paths_are_saved_as_absolute_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").touch()
    (tmp_path / "stdlib").touch()  # the word names Python's source
    for data, saved in (("text", f"{tmp_path}/text"), ("none", "none"), ("stdlib", "stdlib")):
        config.save(Changing(data=data), tmp_path)
        assert json.loads((tmp_path / "config.json").read_text())["data"] == saved
    settings = config.load(Changing, tmp_path)
    with pytest.raises(
        ArgumentError, match="--data: gone/stdlib does not exist; expected the same"
    ):
        config.resume(settings, {"data": "gone/stdlib"}, tmp_path)
    assert config.resume(settings, {"data": "hf:a/stdlib"}, tmp_path).data == "hf:a/stdlib"


def test_settings_are_saved_and_resumed(tmp_path: Path) -> None:
    settings = Settings(steps=5, text="one")
    config.save(settings, tmp_path)
    saved = config.load(Settings, tmp_path)
    assert saved == settings
    assert config.resume(saved, {"steps": 5, "text": "two"}, tmp_path) == Settings(5, text="two")
    with pytest.raises(ArgumentError, match=r"--steps is 5 there, got 6; --lr is 0.1 there"):
        config.resume(saved, {"steps": 6, "lr": 0.2, "fast": False}, tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        *("{", '{"unknown": 1}', '{"steps": 0}', "[]", '{"steps": 2, "steps": 3}'),
        *('{"lr": NaN}', '{"steps": ' + "9" * 5000 + "}", "[" * 100_000, '{"text": "\\ud800"}'),
    ],
)
def test_a_config_that_is_not_of_these_settings_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match="cannot be used"):
        config.load(Settings, tmp_path)


def test_a_config_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.mkdir()
    with pytest.raises(CheckpointError, match=r"config\.json cannot be used"):
        config.load(Settings, tmp_path)
    path.rmdir()
    os.mkfifo(path)
    with pytest.raises(CheckpointError, match=rf"cannot be used: .*{path} is a FIFO or a device"):
        config.load(Settings, tmp_path)


def test_a_folder_without_a_config_is_not_a_run(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        config.load(Settings, tmp_path)
    for content in ('{"model_type": "gpt2"}', '{"architectures": []}'):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(CheckpointError, match="it has the sizes of a published model"):
            config.load(Settings, tmp_path)


def test_options_that_are_not_saved_are_given_at_each_start(tmp_path: Path) -> None:
    @dataclass(frozen=True)
    class More(Settings):
        ranks: int = option(1, "how many share the work", saved=False)

    config.save(More(steps=3, ranks=4), tmp_path)
    assert config.load(Settings, tmp_path) == Settings(steps=3)
    found = config.load(More, tmp_path)
    assert found == More(steps=3, ranks=1)
    assert config.resume(found, {"ranks": 2}, tmp_path) == More(steps=3, ranks=2)


@dataclass(frozen=True)
class Program(Settings):
    every: int = option(1, "steps between looks", refused="epochs count here; see --looks")
    out: str = option("", "folder of the run")

    @property
    def folder(self) -> Path:
        return Path(self.out)

    @classmethod
    def complete(cls, given: dict[str, Any]) -> dict[str, Any]:
        return given


def read(*args: str) -> tuple[Program, Path, bool]:
    return command_line.read_command_line(Program, "Try it.", args)


def test_an_option_takes_effect_or_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(tmp_path)
    settings, _, _ = read("--out", run, "--steps", "5")
    config.save(settings, tmp_path)
    assert set(json.loads((tmp_path / "config.json").read_text())).isdisjoint({"every"})
    expected = settings, tmp_path, True
    for given in (["--steps", "5"], ["--out", run], ["--out", f"{run}/."]):
        assert read("--resume", run, *given) == expected
    for given, message in (
        (["--every", "1"], "--every: got 1, expected none: epochs count here; see --looks"),
        (["--resume", run, "--every", "2"], "--every: got 2, expected none"),
        (["--resume", run, "--out", "other"], f"--out: got other with --resume {run}, expected"),
    ):
        with pytest.raises(ArgumentError, match=re.escape(message)):
            read(*given)
    with pytest.raises(SystemExit):
        read("--help")
    assert "--every" not in capsys.readouterr().out


def test_a_file_gives_settings_that_the_command_line_overrides(tmp_path: Path) -> None:
    files = {
        "one.yaml": "steps: 7\nkind: b\nfast: false\n",
        "one.toml": 'steps = 7\nkind = "b"\nfast = false\n',
        "one.json": '{"steps": 7, "kind": "b", "fast": false}',
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
        found = given("--config", str(tmp_path / name), "--steps", "9")
        assert found == {"steps": 9, "kind": "b", "fast": False}, name


def test_a_file_of_settings_runs_no_python_file(tmp_path: Path) -> None:
    path = tmp_path / "settings.json"
    path.write_text('{"model": "own.py"}')
    program = App(
        default_command=command_line.options_command(LanguageSettings, lambda found: found),
        **command_line.STYLE,
    )
    with pytest.raises(ArgumentError, match=r"--config: the model of .* name it with --model own"):
        command_line.run_app(program, ["--config", str(path)])
    given = ["--config", str(path), "--model", "mine.py"]
    assert command_line.run_app(program, given) == {"model": "mine.py"}


def test_a_saved_config_is_such_a_file(tmp_path: Path) -> None:
    config.save(Settings(steps=7, kind="b", limit=3), tmp_path)
    found = given("--config", str(tmp_path / "config.json"))
    assert Settings(**found) == Settings(steps=7, kind="b", limit=3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.yaml", "stps: 3", r"--stps: unknown option in .*a\.yaml; did you mean --steps"),
        ("a.yaml", "steps: five", r"--steps: got 'five' in .*a\.yaml, expected an integer"),
        ("a.yaml", "kind: c", r"--kind: got 'c' in .*a\.yaml, expected one of a, b"),
        ("a.yaml", "steps: [", r"a\.yaml.*flow node|flow node"),
        (
            "a.yaml",
            "- 1",
            r"--config: cannot read .*a\.yaml: got a list, expected settings by name",
        ),
        ("a.json", "{", r"--config: cannot read .*a\.json"),
        ("a.toml", "steps = ", r"--config: cannot read .*a\.toml"),
        ("a.ini", "", r"--config: got .*a\.ini, expected a file in \.json, \.toml, \.yaml, \.yml"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(
    tmp_path: Path, name: str, text: str, message: str
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ArgumentError, match=message):
        given("--config", str(tmp_path / name))
    with pytest.raises(ArgumentError, match=r"--config: cannot read .*none\.yaml"):
        given("--config", str(tmp_path / "none.yaml"))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--stps", "3"], "--stps: unknown option; did you mean --steps?"),
        (["--steps", "x"], "--steps: got 'x', expected an integer"),
        (["--kind", "c"], "--kind: got 'c', expected one of a, b"),
        (["--steps"], "--steps: got none, expected a value"),
        (["more"], "more"),
    ],
)
def test_what_is_wrong_on_the_command_line_is_named(args: list[str], message: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(message)):
        given(*args)


def test_settings_of_earlier_versions_have_their_new_names(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"steps": 3, "accumulate": 2}')

    @dataclass(frozen=True)
    class Renamed(Settings):
        micro_batches: int = option(1, "parts")

    assert config.load(Renamed, tmp_path) == Renamed(steps=3, micro_batches=2)


def test_a_run_of_another_task_is_named(tmp_path: Path) -> None:
    @dataclass(frozen=True)
    class OfOneTask(Settings):
        task: str = option("one", "what to train", choices=("one",))

    @dataclass(frozen=True)
    class Other(Settings):
        task: str = option("other", "what to train", choices=("other",))

    config.save(Other(), tmp_path)
    with pytest.raises(CheckpointError, match="task is 'other', expected 'one'"):
        config.load(OfOneTask, tmp_path)


@dataclass(frozen=True)
class WithCache:
    cache: str = option("default", "a folder", free=True, known_by="*/known.json")

    def __post_init__(self) -> None:
        config.check(self)


def test_a_folder_of_a_config_is_written_to_if_it_is_known(tmp_path: Path) -> None:
    folder = tmp_path / "of_others"
    folder.mkdir()
    config.save(WithCache(str(folder)), tmp_path)
    assert config.load(WithCache, tmp_path).cache == "default"
    loaded = config.load(WithCache, tmp_path)
    assert config.resume(loaded, {"cache": str(folder)}, tmp_path).cache == str(folder)
    (folder / "text").mkdir()
    (folder / "text" / "known.json").touch()
    assert config.load(WithCache, tmp_path).cache == str(folder)


def test_a_run_caches_in_no_folder_of_others() -> None:
    for kind in (LanguageSettings, ScriptSettings):
        (known_by,) = (f.metadata["known_by"] for f in fields(kind) if f.name == "cache")
        assert known_by == "*/corpus.json"


def test_a_text_with_a_nul_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"text": "a\\u0000b"}')
    with pytest.raises(CheckpointError, match=r"--text: got .*expected a text without NUL"):
        config.load(Settings, tmp_path)


def test_the_help_of_options_documents_their_class() -> None:
    @documented
    @dataclass(frozen=True)
    class Bits:
        """Count bits.

        Raises:
            ArgumentError: none.
        """

        bits: int = option(8, "bits of a number", shown="a byte")

    first = "Count bits.\n\nArgs:\n    bits: bits of a number; default: a byte\n\nRaises:\n"
    assert (inspect.getdoc(Bits) or "").startswith(first)
