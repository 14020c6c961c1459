"""Errors of commands name the option that was typed, and say what was meant."""

from __future__ import annotations

from pathlib import Path

import pytest

from tensorgrad.cli import main
from tensorgrad.data import prepare
from tensorgrad.errors import ArgumentError, DataError, TrainingError
from tensorgrad.train.options import in_options, suggest
from tensorgrad.train.sentiment import SentimentSettings

# A message for each kind of value: missing, empty, of the wrong type, a folder, zero, huge.
LINES = [
    ("train sentimnt", "sentimnt: unknown command; did you mean sentiment?"),
    ("train text.txt", "text.txt: unknown command; did you mean --data text.txt?"),
    ("train translation text.txt", "did you mean --data text.txt?"),
    ("train --learning-rate 1", "--learning-rate: unknown option; did you mean --lr?"),
    ("train --batch_size 1", "--batch_size: unknown option; did you mean --batch?"),
    ("train --dtype fp16", "; did you mean float16?"),
    ("train --preset gpt2", "; did you mean gpt2-124M or gpt2-355M or gpt2-774M or gpt2-1558M?"),
    ("train --preset gpt2-xl", "; did you mean gpt2-1558M?"),
    ("train --steps", "--steps: got none, expected a value"),
    ("train --steps 1.5", "--steps: got 1.5, expected an integer"),
    ("train --steps x", "--steps: got 'x', expected an integer"),
    ("train --lr x", "--lr: got 'x', expected a number"),
    ("train --data missing.txt", "--data missing.txt: no such file or folder; expected"),
    ("train --data text.tx", "--data text.tx: no such file or folder; did you mean text.txt?"),
    ("train --data in/text.tx", "in/text.tx: no such file or folder; did you mean in/text.txt?"),
    ("train --data=", "--data: got '', expected the name of a file or a folder"),
    ("train --data text.txt --tokenizer lost.json", "--tokenizer lost.json: no such file"),
    ("train --data text.txt --tokenizer folder", "--tokenizer: cannot read folder/"),
    (
        "train --data text.txt --tokenizer notes.txt",
        "--tokenizer: notes.txt cannot be read as JSON",
    ),
    ("train --data text.txt --init-from lost", "--init-from lost: no such file or folder"),
    ("train --data text.txt --validation 1", "--validation: got 1.0, expected between 0 and 1"),
    ("train --data text.txt --device gpu", "--device: got 'gpu', expected 'cpu'"),
    ("train --data text.txt --cache /dev/null/x", "--cache: cannot read or write /dev/null"),
    ("train --config lost.yaml", "--config: cannot read lost.yaml: No such file"),
    ("train --resume lost", "--resume lost: no such file or folder"),
    ("train --steps 99999999999999999999", "expected less than 2^63"),
    ("train --bucket-mb 0", "--bucket-mb: got 0.0, expected more than 0"),
    ("train sentiment --data lost", "--data lost: no such file or folder"),
    ("train sentiment --data reviews --vectors lost", "--vectors lost: no such file"),
    ("train translation --data lost", "--data lost: no such file or folder"),
    ("train translation --data phrases --source xx", "'de' and 'en'"),
    (
        "train --tp 2",
        "--tp 2: got one process, expected several ranks: mpirun -n 2 tensorgrad train",
    ),
    ("train --pp 2 --tp 2", "mpirun -n 4 tensorgrad train --tp 2 --pp 2"),
    ("train --parallel zero1", "mpirun -n 2 tensorgrad train --parallel zero1"),
    ("prepare lost", "DATA lost: no such file or folder"),
    ("prepare text.txt --vocab 0", "--vocab: got 0, expected 257 or more"),
    ("prepare text.txt --vocab 1e30", "--vocab: got '1e30', expected an integer"),
    ("prepare", "DATA: got none, expected a value"),
    (
        "prepare text.txt new --vocab 300 --pattern ([",
        "--pattern: got '([', expected a regular expression",
    ),
    ("generate lost a", "MODEL lost: no such file or folder"),
    ("evaluate lost", "MODEL lost: no such file or folder"),
    ("generate lost a --tokens 3", "--tokens: unknown option; did you mean --max-new-tokens?"),
    ("export lost new", "MODEL lost: no such file or folder"),
    ("translate lost a", "RUN lost: no such file or folder"),
    ("classify lost a", "RUN lost: no such file or folder"),
    ("report lost", "RUN lost: no such file or folder"),
    ("curvature lost", "RUN lost: no such file or folder"),
    ("curvature lost --eigenvalues 21", "--eigenvalues: got 21, expected at most 20"),
    ("compare lost gone", "RUNS lost: no such file or folder"),
    ("profile lost", "RUN lost: no such file or folder"),
    ("profile --heads 5", "--width: got 192, expected a multiple of --heads, 5"),
    ("profile --rows -1", "--rows: got -1, expected 0 or more"),
    ("plan --vocab 0", "--vocab: got 0, expected 257 or more"),
    ("plan --latency 0", "--latency: got 0.0, expected more than 0"),
    ("plan --memory 80", "--memory: got '80', expected bytes with their unit, such as 80GiB"),
    ("plan --memory 0GiB", "--memory: got 0GiB, expected more than 0"),
    ("plan --micro-batches 3", "--batch: got 512 sequences, expected a multiple of --dp * --micro"),
    ("bench attention --widths 0 --out new", "--widths: got 0, expected 1 or more"),
    ("info x", "x: unexpected argument; see `tensorgrad info --help`"),
]


@pytest.mark.parametrize(("line", "message"), LINES, ids=[line for line, _ in LINES])
def test_an_error_names_the_option(
    line: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("Some words to train on.\n" * 50)
    Path("notes.txt").write_text("Notes.\n")
    Path("folder").mkdir()
    Path("in").mkdir()
    Path("in/text.txt").touch()
    assert main(line.split(" ")) == 1
    (record,) = (record for record in caplog.records if record.levelname == "ERROR")
    assert message in record.getMessage()
    assert "\n" not in record.getMessage()


# A command that writes a folder takes a new or an empty one.
WRITERS = [
    ("train --data text.txt --out {}", "--out"),
    ("train sentiment --data reviews --out {}", "--out"),
    ("train translation --data phrases --out {}", "--out"),
    ("prepare text.txt {}", "OUT"),
    ("export run {}", "FOLDER"),
    ("profile --layers 1 --width 8 --heads 1 --out {}", "--out"),
    ("bench attention --lengths 8 --widths 8 --heads 1 --device cpu --out {}", "--out"),
]
USED = {
    "run": "run holds a run, expected a new folder",
    "exported": "exported holds files (config.json, model.safetensors), expected a new folder",
    "files": "files holds files (a, b, c, ...), expected a new folder or an empty one",
    "text.txt": "text.txt is a file, expected a new folder or an empty one",
    "/dev/null/x": "cannot write to /dev/null/x",
}


@pytest.mark.parametrize("place", USED)
@pytest.mark.parametrize(("line", "option"), WRITERS, ids=[line for line, _ in WRITERS])
def test_nothing_is_written_into_a_used_folder(
    line: str,
    option: str,
    place: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("Some words to train on.\n" * 50)
    exported = "exported/config.json", "exported/model.safetensors"
    for name in ("run/config.json", *exported, "files/a", "files/b", "files/c", "files/d"):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text("{}")
    before = sorted(tmp_path.rglob("*"))
    assert main(line.format(place).split()) == 1
    assert f"{option}: " in caplog.text
    assert USED[place] in caplog.text
    assert sorted(tmp_path.rglob("*")) == before


def test_python_keeps_the_names_of_arguments(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="prepare: vocab_size is 0, expected"):
        prepare(tmp_path, tmp_path, 0)
    with pytest.raises(DataError, match="documents: source has"):
        prepare(tmp_path / "lost", tmp_path)


def test_settings_name_options_too() -> None:
    settings = SentimentSettings(data="lost")
    with pytest.raises(DataError, match=r"^--data: got 3, expected 4$"), in_options(settings):
        raise DataError("read_labelled: source has 3, expected 4")
    with pytest.raises(ArgumentError, match=r"^--data lost: no such file"), in_options(settings):
        raise FileNotFoundError(2, "No such file or directory", "lost")
    with pytest.raises(ArgumentError, match=r"^--data: lost/a.b: Is a"), in_options(settings):
        raise IsADirectoryError(21, "Is a directory", "lost/a.b")
    with pytest.raises(ArgumentError, match=r"^softmax: axis is 3"), in_options(settings):
        raise ArgumentError("softmax: axis is 3, expected 0")
    settings = SentimentSettings(data="hf:a/b", vectors="runs/glove", out="run")
    for message in ("load: run/a is of other data", "load: runs/a is of other data"):
        with pytest.raises(DataError) as caught, in_options(settings):
            raise DataError(message)
        assert str(caught.value) == message
    with pytest.raises(DataError, match=r"^--data: cannot load"), in_options(settings):
        raise DataError("documents: cannot load 'hf:a/b': the data set does not exist")
    with (
        pytest.raises(TrainingError, match=r"^train: no number; see run$"),
        in_options({"RUN": "run"}),
    ):
        raise TrainingError("train: no number; see run")


def test_suggestions() -> None:
    names = ["--lr", "--steps", "--evaluate-every"]
    assert suggest("--learning_rate", names) == "; did you mean --lr?"
    assert suggest("--evaluate", names) == "; did you mean --evaluate-every?"
    assert suggest("--stesp", names) == "; did you mean --steps?"
    assert suggest("--unrelated", names) == ""
