from __future__ import annotations

import inspect
import json
import math
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensorgrad.cli import main
from tensorgrad.data import Tokenizer
from tensorgrad.errors import ArgumentError, CheckpointError, TensorgradError, TrainingError
from tensorgrad.models.presets import PRESETS
from tensorgrad.nn import Linear
from tensorgrad.parallel import Mesh
from tensorgrad.parallel.program import check_model, check_one_process, mesh_of, strategy_name
from tensorgrad.parallel.schedule import SCHEDULES
from tensorgrad.train import Task
from tensorgrad.train.checkpoint import Checkpoint
from tensorgrad.train.language import LanguageModeling, LanguageSettings, _summary, prepare_corpus
from tensorgrad.train.load import _model_class
from tensorgrad.train.log import read_metrics
from tensorgrad.train.sentiment import SentimentSettings
from tensorgrad.train.settings import TrainSettings
from tensorgrad.train.strategy_settings import PIPELINE_SCHEDULES
from tensorgrad.train.task import _check_attributes
from tensorgrad.train.tasks import task_class
from tensorgrad.train.translation import TranslationSettings
from tensorgrad.train.user_file import all_texts, called, class_in, model_class, sizes_of
from tests.ranks import ROOT, missing, run_ranks

GUIDE = ROOT / "docs" / "guides" / "custom-models.md"
TEXT = "--data text.txt --vocab 300 --context 16 --sample 8"
STEPS = "--steps 6 --warmup 1 --no-plot --device cpu --log-every 1"
SIZES = "--layers 2 --heads 2 --width 16"
# The words of the command that trains each, and the options of strategies that it does not have.
RUNS = {
    "nope": (f"--model nope.py {TEXT} {SIZES} --batch 4 {STEPS}", ()),
    "transformer-lm": (f"transformer-lm {TEXT} {SIZES} --batch 4 {STEPS}", ()),
    "parity": (f"parity.py --bits 4 --batch 8 --evaluate-every 3 {STEPS}", ("--tp", "--pp")),
    "translation": (
        f"translation --data phrases --vocab 300 --context 64 --batch 200 {SIZES} {STEPS} "
        "--average 0 --test-limit 2",
        (),
    ),
    "sentiment": (
        f"sentiment --data reviews --model transformer {SIZES} --batch 50 --dropout 0 "
        f"--word-dropout 0 {STEPS}",
        ("--pp",),
    ),
}
STRATEGIES = ("--parallel overlap", "--parallel zero3", "--tp 2", "--pp 2")


def write_files(folder: Path) -> None:
    """Write the files of the guide, and a text."""
    for code in re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.S):
        name = code.partition("\n")[0].removeprefix("# ")
        (folder / name).write_text(code)
    lines = [f"def add_{i}(a, b):\n    return a + b + {i}\n\n" for i in range(300)]
    (folder / "text.txt").write_text("".join(lines))


@pytest.mark.parametrize(
    ("options", "ranks", "name"),
    [
        ({}, 2, "data parallel (overlap)"),
        ({"parallel": "zero2"}, 4, "data parallel (zero2)"),
        ({"tp": 2}, 2, "tensor parallel"),
        (
            {"pp": 2, "tp": 2},
            8,
            "2 data parallel (overlap) x 2 pipeline (1f1b) x 2 tensor parallel",
        ),
        ({"pp": 4}, 4, "pipeline (1f1b)"),
        ({}, 1, ""),
    ],
    ids=str,
)
def test_a_strategy_has_a_name(options: dict[str, Any], ranks: int, name: str) -> None:
    assert strategy_name(TrainSettings(**options), ranks) == name


@pytest.mark.parametrize(
    ("options", "ranks", "message"),
    [
        ({"tp": 2}, 3, "--tp 2: got 3 ranks, expected a multiple of 2 ranks"),
        ({"tp": 2, "pp": 2}, 2, "--pp 2 --tp 2: got 2 ranks, expected a multiple of 4 ranks"),
        ({"dp": 1}, 2, "--dp 1: got 2 ranks, expected 1 ranks"),
        ({"dp": 2, "tp": 2}, 8, "--dp 2 --tp 2: got 8 ranks, expected 4 ranks"),
    ],
    ids=str,
)
def test_a_mesh_has_all_ranks(options: dict[str, Any], ranks: int, message: str) -> None:
    with pytest.raises(ArgumentError, match=f"^{message}$"):
        mesh_of(TrainSettings(**options), ranks)


def test_several_ranks_are_asked_of_mpirun() -> None:
    check_one_process(TrainSettings(dp=1), "train")
    for options, message in (
        ({"tp": 2}, "--tp 2: got one process, expected several ranks: mpirun -n 2 train --tp 2"),
        ({"dp": 2, "pp": 3}, "--pp 3: .*: mpirun -n 6 train --pp 3 --dp 2"),
        ({"parallel": "zero1"}, "--parallel zero1: .*: mpirun -n 2 train --parallel zero1"),
    ):
        with pytest.raises(ArgumentError, match=f"^{message}$"):
            check_one_process(TrainSettings(**options), "train")


def test_models_that_ranks_cannot_share_are_errors_at_once() -> None:
    sizes = {"layers": 4, "heads": 2, "width": 16}
    for options, mesh, message in (
        ({}, Mesh(pp=5), "--layers: the model has 4 layers, expected 5 or more: 5 stages with 1 "),
        ({"chunks": 2, "pipeline_schedule": "interleaved"}, Mesh(pp=4),
         "--layers: the model has 4 layers, expected 8 or more: 4 stages with 2 parts each"),
        ({}, Mesh(tp=3), "--heads: the model has 2, expected one or more for each of the 3 tens"),
        ({"hidden": 27}, Mesh(tp=2), "--tp: got 2 where blocks.0.feed_forward.up has 27 outputs"),
    ):  # fmt: skip
        settings = LanguageSettings(**sizes, **options)  # type: ignore[arg-type]
        with pytest.raises(ArgumentError, match=message):
            check_model(settings, mesh)
    for mesh in (Mesh(pp=4), Mesh(tp=2), Mesh(2, 4, 2)):
        check_model(LanguageSettings(**sizes), mesh)  # type: ignore[arg-type]
    check_model(LanguageSettings(**sizes, hidden=27), Mesh(2))  # type: ignore[arg-type]


def losses(folder: Path) -> list[float]:
    """Return the losses of a run, then those of its evaluations."""
    records = read_metrics(folder / "metrics.jsonl")
    return [r[name] for name in ("loss", "validation_loss") for r in records if name in r]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.skipif(missing() is not None, reason=missing() or "")
def test_every_task_trains_alike_with_every_strategy(folder: Path) -> None:
    for name, (words, _) in RUNS.items():
        assert main(["train", *words.split(), "--out", name]) == 0
    run_ranks("tests.train.task_ranks", 2, [folder], timeout=300)
    for name, (_, left_out) in RUNS.items():
        alone = losses(folder / name)
        assert len(alone) > 6
        for strategy in STRATEGIES:
            if strategy.split()[0] not in left_out:
                shared = losses(folder / f"{name} {strategy}")
                np.testing.assert_allclose(shared, alone, rtol=1e-5, err_msg=f"{name} {strategy}")


def test_a_model_of_a_file_trains_resumes_and_generates(
    folder: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    train = ["train", *RUNS["nope"][0].split()]
    assert main([*train, "--out", "whole"]) == 0
    assert main([*train, "--out", "run", "--stop-after", "3"]) == 0
    assert "--resume run --model nope.py" in caplog.text
    assert main(["train", "--resume", "run"]) == 1  # a run does not say what is executed
    assert "name it with --model" in caplog.text
    assert main(["train", "--resume", "run", "--model", "nope.py"]) == 0
    assert losses(folder / "run") == losses(folder / "whole")
    facts = json.loads((folder / "run" / "facts.json").read_text())
    sizes = {"layers": 2, "heads": 2, "width": 16, "context": 16, "warmup": 1}
    assert facts.items() >= sizes.items()
    assert facts["vocab"] <= 300
    assert facts["training_tokens"] > 9 * facts["validation_tokens"] > 0
    tokens = f"vocabulary {facts['vocab']}, {facts['training_tokens']:,} tokens of text, on cpu"
    assert f"run: {facts['parameters']:,} parameters, {tokens}" in caplog.text
    assert main(["generate", "run", "def "]) == 1
    assert "which is executed" in caplog.text
    capsys.readouterr()
    assert main(["generate", "run", "def ", "--model", "nope.py", "--max-new-tokens", "4"]) == 0
    assert capsys.readouterr().out.startswith("def ")
    assert main(["export", "run", "exported"]) == 1
    assert "is of a model in nope.py" in caplog.records[-1].getMessage().replace(f"{folder}/", "")
    assert main(["evaluate", "run", "--model", "nope.py", "--json"]) == 0
    measured = json.loads(capsys.readouterr().out)["validation_loss"]
    assert measured == pytest.approx(losses(folder / "run")[-1], abs=1e-6)
    more = f"--data text.txt --batch 4 --sample 0 {STEPS} --out tuned --init-from run".split()
    assert main(["train", *more]) == 1
    assert "which is executed" in caplog.records[-1].getMessage()
    assert main(["train", *more, "--model", "nope.py", "--stop-after", "3"]) == 0
    assert main(["train", "--resume", "tuned", "--model", "nope.py"]) == 0
    assert losses(folder / "tuned")[6] == pytest.approx(measured, abs=1e-6)
    assert main(["train", *more, "--model", "nope.py", "--dropout", "0.1", "--out", "x"]) == 1
    assert "--dropout: got 0.1 for NoPE, expected none" in caplog.records[-1].getMessage()


def test_micro_batches_take_the_steps_of_whole_batches(folder: Path) -> None:
    words = f"translation --data phrases --vocab 300 --context 64 --batch 200 {SIZES} {STEPS} "
    for parts in "13":  # 3 does not divide the rows
        options = f"--average 0 --test-limit 1 --micro-batches {parts} --out parts-{parts}"
        assert main(["train", *words.split(), *options.split()]) == 0
    np.testing.assert_allclose(losses(folder / "parts-3"), losses(folder / "parts-1"), rtol=1e-5)


def test_a_task_of_a_file_trains_resumes_and_evaluates(
    folder: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    train = ["train", *RUNS["parity"][0].split()]
    assert main([*train, "--out", "whole"]) == 0
    assert main([*train, "--out", "run", "--stop-after", "3"]) == 0
    assert main(["train", "parity.py", "--resume", "run"]) == 0
    assert losses(folder / "run") == losses(folder / "whole")
    assert main(["evaluate", "run"]) == 1
    assert "--task: got none, expected the Python file" in caplog.text
    capsys.readouterr()
    facts = json.loads((folder / "whole" / "facts.json").read_text())
    assert facts["warmup"] == 1
    assert f"whole: {facts['parameters']} parameters" in caplog.text
    assert main(["evaluate", "run", "--task", "parity.py", "--json"]) == 0
    measured = json.loads(capsys.readouterr().out)["validation_loss"]
    assert measured == pytest.approx(losses(folder / "run")[-1], abs=1e-6)
    assert main(["report", "run"]) == 0
    assert main(["train", "parity.py", "--help"]) == 0
    assert "Learn whether the number of ones" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("missing.py", "TASK: missing.py does not exist, expected a Python file"),
        ("nope.py", "TASK: nope.py defines none, expected one subclass of Task"),
        ("broken.py", "TASK: broken.py fails with ZeroDivisionError: division by zero"),
        ("--model gpt3", "--model: got gpt3, expected one of gpt2, transformer-lm, or a Python"),
        ("--model parity.py", "--model: parity.py defines none, expected one subclass of Lang"),
        ("--kv-heads 2", "--kv-heads: got 2 for GPT2, expected none: its config has no kv_heads"),
        ("--model nope.py --qk-norm", "--qk-norm: got True for NoPE, expected none"),
        ("gpt2 --preset llama-1B", "--preset: got llama-1B with --model gpt2, expected one of"),
        ("gpt2 --model transformer-lm", "--model: got transformer-lm with tensorgrad train gpt2"),
        ("transformer-lm --width 30 --heads 4", "--width: got 30, expected a multiple of 8"),
        ("parity.py --bits 0", "--bits: got 0, expected 1 or more"),
        ("parity.py --foo", "--foo: unknown option; see `tensorgrad train parity.py --help`"),
        ("blind.py --patience 2", "--patience: got 2 for Blind, which measures no validation_loss"),
        (
            "blind.py --device cpu --out x",
            "TASK: Blind has no `batches`, expected the method, or a loader",
        ),
        ("empty.py", "TASK: Empty has no `build`, expected the method that returns its model"),
        ("parity.py --tp 2", "--tp 2: got one process, expected several ranks: mpirun -n 2 tens"),
    ],
)
def test_bad_words_are_one_line(
    words: str, said: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "broken.py").write_text("1 / 0")
    start = "from tensorgrad.train import Task\n"
    (folder / "empty.py").write_text(f"{start}class Empty(Task): ...")
    (folder / "blind.py").write_text(f"{start}class Blind(Task):\n    def build(self): ...")
    assert main(["train", *words.split()]) == 1
    lines = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert len(lines) == 1
    assert lines[0].startswith(said)
    assert not (folder / "runs").exists()


@pytest.mark.parametrize("preset", ["llama-124M", "qwen3-0.6B", "gpt2-124M", "small", "char"])
def test_presets_have_a_model(preset: str) -> None:
    settings = LanguageSettings(preset=preset)
    config = settings.known_sizes()
    assert isinstance(config, settings.model_class.Config)
    assert config.vocab_size == settings.largest_vocab
    deeper = LanguageSettings(preset=preset, layers=3).known_sizes()
    assert deeper.layers == 3
    assert deeper.width == config.width


def test_presets_have_the_published_sizes() -> None:
    sizes = {
        name: (PRESETS[name].parameters, PRESETS[name].context, PRESETS[name].rope_base)
        for name in ("llama-124M", "llama-1B", "qwen3-0.6B")
    }
    assert sizes == {
        "llama-124M": (114_150_144, 1024, 10000),
        "llama-1B": (1_235_814_400, 131_072, 500_000),
        "qwen3-0.6B": (596_049_920, 40_960, 1_000_000),
    }


def test_the_vocabulary_is_that_of_the_tokenizer_or_of_the_initial_model() -> None:
    assert LanguageSettings(vocab=300).config(280).vocab_size == 280
    assert LanguageSettings(vocab=300).config().vocab_size == 300
    assert LanguageSettings(init_from="run", vocab=300).config(280).vocab_size == 300


@pytest.mark.parametrize(
    ("kind", "paths", "fractions", "free"),
    [
        (
            LanguageSettings, "data model tokenizer init_from", "dropout validation top_p",
            "data text_column tokenizer download revision recompute recompute_norms out cache "
            "prompt sample sample_every temperature top_p",
        ),
        (
            TranslationSettings, "data also",
            "beta2 lr_end dropout attention_dropout activation_dropout label_smoothing",
            "data also bleu_every save_every test_limit beams length_penalty rows "
            "out evaluate_every checkpoint_every keep log_every",
        ),
        (
            SentimentSettings, "data vectors", "beta2 lr_end dropout word_dropout",
            "data text_column label_column checkpoint_every",
        ),
    ],
)  # fmt: skip
def test_options_that_are_paths_or_fractions_or_free_in_a_resumed_run(
    kind: type[TrainSettings], paths: str, fractions: str, free: str
) -> None:
    own = {f.name: f.metadata for f in fields(kind) if f.name in kind.__annotations__}
    assert {name for name, about in own.items() if about["path"]} == set(paths.split())
    bounded = {name for name, about in own.items() if (about["low"], about["high"]) == (0, 1)}
    assert bounded == set(fractions.split())
    assert {name for name, about in own.items() if about["free"]} == set(free.split())


def test_names_and_files() -> None:
    assert tuple(SCHEDULES) == PIPELINE_SCHEDULES  # parallel/'s tuple, which train/ does not import
    assert task_class("sentiment").__name__ == "Sentiment"
    assert model_class("gpt2").__name__ == "GPT2"


def test_options_of_a_language_model_fit_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ArgumentError, match=r"--vocab: got 300 with --tokenizer, expected none"):
        LanguageSettings(tokenizer="a.json", vocab=300)
    assert LanguageSettings(tokenizer="a.json", vocab=300, init_from="a").vocab == 300
    assert LanguageSettings(preset="llama-1B", model="transformer-lm").model == "transformer-lm"
    for given in ({"init_from": "a", "model": "own.py"}, {"layers": 3}, {"init_from": "a"}):
        assert LanguageSettings.complete(dict(given)) == given
    message = "--kv-heads: got 2 with --init-from, expected none: the model has its own"
    with pytest.raises(ArgumentError, match=message):
        LanguageSettings.complete({"init_from": "a", "kv_heads": 2})
    for options, folder in (
        ({}, "runs/gpt2-1"),
        ({"preset": "llama-1B"}, "runs/transformer-lm-1"),
        ({"model": "a/own.py"}, "runs/own-1"),
        ({"out": "b"}, "b"),
    ):
        assert str(LanguageSettings(**options).folder) == folder  # type: ignore[arg-type]
    assert LanguageSettings().largest_vocab == 1024
    assert LanguageSettings(vocab=300).largest_vocab == 300
    assert LanguageSettings(preset="gpt2-124M").largest_vocab == 50257
    assert LanguageSettings(init_from="a").known_sizes() is None
    sizes = LanguageSettings(model="transformer-lm", heads=8).config()
    assert (sizes.heads, sizes.kv_heads) == (8, 8)
    assert LanguageSettings(dropout=0.5).with_dropout(LanguageSettings().config()).dropout == 0.5


def test_the_losses_of_a_run_in_words(tmp_path: Path) -> None:
    evaluations: list[dict[str, Any]] = [
        {"step": 0, "validation_loss": 5.0, "validation_tokens": 80},
        {"step": 1, "loss": 4.0},
        {"step": 2000, "validation_loss": 2.0, "validation_tokens": 80},
        {"step": 3000, "validation_loss": 3.0, "validation_tokens": 80},
    ]
    final = {"final_validation_loss": 2.5, "final_validation_tokens": 1234}
    whole = [*evaluations[:3], {**evaluations[3], **final}]
    broken = [*evaluations, {"step": 4000, "validation_loss": None}]
    lowest = "the lowest was 2.0000, at step 2,000"

    def summary(records: list[dict[str, Any]]) -> str:
        lines = "".join(json.dumps(record) + "\n" for record in records)
        (tmp_path / "metrics.jsonl").write_text(lines)
        return _summary(tmp_path)

    assert summary(evaluations) == f"validation loss 5.000 -> 3.000 ({lowest})"
    assert summary(whole) == (
        "validation loss 2.5000 on the whole text, 1,234 tokens; "
        f"5.000 -> 3.000 on 80 of them ({lowest})"
    )
    with pytest.raises(TrainingError) as caught:
        summary(broken)
    assert str(caught.value) == (
        f"train: the validation loss after the last step, 4,000, is not finite; {lowest}. Try a "
        f"lower learning rate. All is in {tmp_path}"
    )
    with pytest.raises(TrainingError, match=r"4,000, is not finite\. Try a lower"):
        summary(broken[-1:])


def test_a_text_has_the_tokenizer_of_the_model(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "tensorgrad.train.language")
    (folder / "texts").mkdir()
    for name in ("a.txt", "b.txt"):
        (folder / "texts" / name).write_text((folder / "text.txt").read_text())
    settings = LanguageSettings(data="texts", vocab=300)
    corpus = prepare_corpus(settings)
    assert corpus.source_files
    assert caplog.messages[-1] == f"texts: {corpus.source_files}"
    caplog.clear()
    prepare_corpus(settings, shown=False)
    assert caplog.messages == []
    corpus.save(folder / "ready")
    other = Tokenizer.train(["a text"], 260)
    other.save(folder / "other.json")
    ready = LanguageSettings(data="ready")
    assert prepare_corpus(ready, corpus.tokenizer).digest == corpus.digest
    with pytest.raises(ArgumentError, match="--data: ready has another tokenizer than the model"):
        prepare_corpus(replace(ready, tokenizer="other.json"))
    size = corpus.tokenizer.vocab_size
    task = LanguageModeling(replace(ready, vocab=size + 1, sample=0), folder)
    with pytest.raises(ArgumentError, match=f"got {size + 1} with --data ready.*has {size}$"):
        task.prepare("cpu")
    chosen = LanguageSettings(data="text.txt", tokenizer="other.json")
    assert prepare_corpus(chosen).tokenizer.digest == other.digest
    for resuming in (False, True):
        task = LanguageModeling(chosen, folder, resuming=resuming)
        initial, tokenizer = task._start()
        assert initial is None
        assert tokenizer is not None
        assert tokenizer.digest == other.digest
    (folder / "other.json").rename(folder / "tokenizer.json")  # that of the run, too
    assert task._start()[1] is not None
    with pytest.raises(TensorgradError, match=r"other\.json"):
        LanguageModeling(chosen, folder)._start()


def test_a_run_of_another_task_has_no_language_model() -> None:
    state = {"settings": {"task": "sentiment", "model": "mean"}}
    with pytest.raises(CheckpointError, match="run/step-1 is of a sentiment run, expected a lang"):
        _model_class(Checkpoint(Path("run/step-1"), state), "")


def test_a_task_without_measures_logs_no_evaluation(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    (folder / "silent.py").write_text(
        (folder / "parity.py").read_text().replace("def evaluate(", "def not_called(")
    )
    options = "--bits 4 --batch 8 --steps 2 --warmup 1 --no-plot --device cpu --out silent"
    assert main(["train", "silent.py", *options.split()]) == 0
    assert [line for line in caplog.messages if line.startswith("step 0")] == []
    assert main(["evaluate", "silent", "--task", "silent.py"]) == 1
    assert "the task of silent measures nothing, expected one whose" in caplog.messages[-1]


def test_a_task_has_defaults(tmp_path: Path) -> None:
    task = Task(TrainSettings(steps=30), tmp_path)
    assert (task.step, task.finished, task.first_step, task.resuming) == (0, False, 0, False)
    assert (task.tokens_per_step, task.flops_per_token, task.steps_per_epoch) == (0, 0.0, 0)
    assert (task.samples, task.sample_every, task.begins) == (False, 0, True)
    assert task.sizes() is None
    found: list[Any] = [task.evaluate(), task.fingerprint(), task.facts(), task.assess()]
    assert found == [{}, {}, {}, {}]
    outcome: Any = None
    assert (task.about(), task.end(outcome)) == ("", "")
    assert task.resolved.steps == 30
    assert task.count(np.zeros((2, 3)), np.array([1, -100, 4])) == 2
    with pytest.raises(NotImplementedError):
        task.build()
    with pytest.raises(NotImplementedError):
        task.sample()
    (tmp_path / "checkpoints" / "step-00000001").mkdir(parents=True)
    assert task.begins
    assert not Task(TrainSettings(), tmp_path, resuming=True).begins


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("tokens_per_step", 1.5, "a whole number, 0 or more"),
        ("steps_per_epoch", -1, "a whole number, 0 or more"),
        ("sample_every", "a", "a whole number, 0 or more"),
        ("flops_per_token", math.inf, "a finite number, 0 or more"),
        ("flops_per_token", -0.5, "a finite number, 0 or more"),
    ],
)
def test_numbers_of_a_task_are_checked(
    name: str, value: Any, expected: str, tmp_path: Path
) -> None:
    task = Task(TrainSettings(), tmp_path)
    task.model = Linear(1, 1)
    for right in (0, np.int64(3), 3):
        setattr(task, name, right)
        _check_attributes(task)
    setattr(task, name, value)
    with pytest.raises(ArgumentError) as caught:
        _check_attributes(task)
    assert str(caught.value) == f"TASK: {name} is {value!r}, expected {expected}"


def test_errors_of_functions_of_the_user() -> None:
    def fails(number: int) -> int:
        return number + "a"  # type: ignore[operator]

    with pytest.raises(ArgumentError, match=r"^TASK: f got 2 arguments: "):
        called("TASK", "f", fails, [1, 2])
    with pytest.raises(TypeError, match="unsupported operand"):
        called("TASK", "f", fails, [1])
    assert called("TASK", "f", abs, [-3]) == 3
    assert [all_texts(values) for values in ([], ["a"], ["a", 1])] == [True, True, False]


def test_a_file_defines_one_class(folder: Path) -> None:
    start = "from tensorgrad.train import Task\n"
    (folder / "two.py").write_text(f"{start}class A(Task): ...\nclass B(Task): ...\n")
    with pytest.raises(ArgumentError, match=r"^TASK: two.py defines A, B, expected one subclass"):
        task_class("two.py")
    (folder / "plain.py").write_text(
        "from dataclasses import dataclass\nfrom tensorgrad.train import Task, TrainSettings\n"
        "@dataclass(frozen=True)\nclass Own(TrainSettings):\n    bits: int = 3\n"
        "class A(Task):\n    Settings = Own\n"
    )
    with pytest.raises(ArgumentError, match=r"^--task: Own has 'bits' without a help, expected"):
        task_class("plain.py", "--task")
    message = "^--task: got chess, expected one of language-model, translation, sentiment, or a P"
    with pytest.raises(ArgumentError, match=message):
        task_class("chess", "--task")


@pytest.mark.parametrize(
    ("count", "is_right"), [(0, True), (1.5, True), (-1, False), (math.inf, False), ("a", False)]
)
def test_the_counts_of_a_config_are_numbers(count: Any, is_right: bool) -> None:
    kind = type("Config", (), {"parameters": 1, "training_flops": lambda self: count})
    if is_right:
        assert isinstance(sizes_of(kind, {}), kind)
        return
    with pytest.raises(ArgumentError, match=f"--model: training_flops of Config is {count!r}, exp"):
        sizes_of(kind, {})


PARITY_OPTIONS = f"--bits 4 --batch 8 --evaluate-every 3 {STEPS}"


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("def build(self): return 3", "TASK: build returned 3, expected a Module"),
        (
            "def build(self, more): ...",
            "TASK: build has the parameters (self, more), expected (sel",
        ),
        ("build = 3", "TASK: build is 3, expected a method(self)"),
        ("def loss(self, bits): ...", "train: loss got 2 arguments: "),
        (
            "def batches(self, step): return [1]",
            "train: batches returned [1], expected an iterator",
        ),
        ("def batches(self, step): raise StopIteration", "train: batches ended after step 0"),
        (
            "def evaluate(self): return {'a': 'b'}",
            "train: evaluate returned {'a': 'b'}, expected n",
        ),
        (
            "def evaluate(self): return {'step': 7}",
            "train: evaluate returned 'step', expected any o",
        ),
        (
            "def fingerprint(self): return 'a'",
            "Trainer: fingerprint returned 'a', expected mapping",
        ),
        ("def facts(self): return [1]", "TASK: facts returned [1], expected values by name"),
        ("def about(self): return None", "TASK: about returned None, expected a text"),
        ("def end(self, outcome): return 3", "TASK: end returned 3, expected a text"),
        (
            "def prepare(self, device): ...",
            "TASK: Parity has no model, expected that `prepare` make",
        ),
        (
            "def __init__(self, *_): ...",
            "TASK: Parity has an __init__ that does not call that of T",
        ),
        ("samples = True", "TASK: Parity has no `sample`, expected the method, or samples = False"),
        (
            "samples, sample = True, lambda self: 3",
            "train: sample returned 3, expected a prompt and",
        ),
        ("graphs = 'a'", "TASK: graphs is 'a', expected a whole number, 0 or more"),
        (
            "Settings = dict",
            "TASK: Settings of Parity is <class 'dict'>, expected a dataclass that ",
        ),
    ],
)
def test_what_a_task_does_wrong_is_one_line(
    code: str, said: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = (folder / "parity.py").read_text().replace("class Parity(", "class Whole(")
    text += f"\n\nclass Parity(Whole):\n    {code}\n\n\nWhole.__module__ = 'elsewhere'\n"
    (folder / "wrong.py").write_text(text)
    assert main(["train", "wrong.py", *PARITY_OPTIONS.split(), "--out", "wrong"]) == 1
    lines = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert len(lines) == 1
    assert lines[0].startswith(said)


def test_a_file_that_changes_is_executed_again(folder: Path) -> None:
    path = folder / "model.py"
    text = "from tensorgrad.train import Task\n\n\nclass One(Task):\n    number = 1\n"
    found = []
    for written in (text, text.replace("1", "2"), text):  # texts of one size, perhaps in one second
        path.write_text(written)
        found.append(class_in("model.py", Task, "TASK"))
    assert [each.number for each in found] == [1, 2, 1]
    assert found[2] is found[0]
    assert inspect.getsource(found[0]).endswith("number = 1\n")
    assert not (folder / "__pycache__").exists()


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("@dataclass(frozen=True)", "", "--model: NoPE of wrong.py has no Config, expected the d"),
        ("def embed", "def other", "--model: NoPE has no `embed`, expected the method"),
        (
            "(self, config)",
            "(self)",
            "--model: __init__ of NoPE has the parameters (self), expecte",
        ),
        ("self.norm =", "self.other =", "--model: NoPE has norm = None, expected a Module"),
        (
            "return self.tokens(tokens)",
            "return self.tokens(tokens)[0]",
            "NoPE: embed returned shape",
        ),
        ("context: int = 128", "context: int = 128\n    more: int", "--model: "),
        (
            "return (self.vocab_size",
            "return None #",
            "--model: parameters of NoPEConfig is None, e",
        ),
        ("return training_flops", "return None #", "--model: training_flops of NoPEConfig is N"),
    ],
)
def test_what_a_model_lacks_is_one_line(
    before: str, after: str, said: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = (folder / "nope.py").read_text()
    assert before in text
    (folder / "wrong.py").write_text(text.replace(before, after))
    words = RUNS["nope"][0].replace("nope.py", "wrong.py").split()
    assert main(["train", *words, "--out", "wrong"]) == 1
    lines = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert len(lines) == 1
    assert said in lines[0]
