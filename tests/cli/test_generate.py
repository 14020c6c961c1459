from __future__ import annotations

import gzip
import hashlib
import io
import json
import re
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tensorgrad import random
from tensorgrad.cli import generate, main
from tensorgrad.core import backend
from tensorgrad.data import PublishedTokenizer, Tokenizer
from tensorgrad.io.weights import load_arrays, save_arrays
from tensorgrad.models.generation import generate_batch
from tensorgrad.models.gpt2 import GPT2, GPT2Config
from tensorgrad.models.pretrained import from_pretrained, save_pretrained
from tensorgrad.models.transformer_lm import TransformerLM, TransformerLMConfig
from tensorgrad.parallel.merge import merge, open_checkpoint
from tensorgrad.train.load import load_trained
from tests.checkpoints import save_checkpoint
from tests.disk import flip
from tests.processes import closed_streams, unread_output

OPTIONS = ["--device", "cpu", "--max-new-tokens", "12"]


def program(arguments: list[str]) -> int:
    return main(["generate", *arguments])


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(["def first(a):\n    return second(a)\n"], 280)


@pytest.fixture(scope="module")
def model(tokenizer: Tokenizer) -> GPT2:
    random.seed(0)
    model = GPT2(GPT2Config(tokenizer.vocab_size, context=16, layers=1, heads=2, width=16))
    for parameter in model.parameters():
        parameter.data *= 8
    return model


@pytest.fixture
def run(model: GPT2, tokenizer: Tokenizer, tmp_path: Path) -> Path:
    """A folder as train_gpt2.py leaves it."""
    folder = tmp_path / "run"
    folder.mkdir()
    arrays = {name: tensor.data for name, tensor in model.state_dict().items()}
    digest = hashlib.sha256(tokenizer.to_json().encode()).hexdigest()
    for step, loss in ((1, 2.0), (2, 3.0)):
        state = {
            "model": asdict(model.config),
            "tokenizer": {"sha256": digest},
            "metrics": {"validation_loss": loss},
        }
        save_checkpoint(folder / "checkpoints", step, {"model": arrays}, state)
        arrays = {name: 0 * array for name, array in arrays.items()}
    tokenizer.save(folder / "tokenizer.json")
    return folder


def expected(model: GPT2, tokenizer: Tokenizer, prompt: str) -> str:
    ids = generate_batch(
        model, [tokenizer.encode(prompt)], 12, temperature=0.8, top_p=0.95,
        stop_tokens=[tokenizer.end_of_text],
    )  # fmt: skip
    return prompt + tokenizer.decode(ids[0])


def test_a_run_a_checkpoint_and_published_weights_write_the_same(
    run: Path, model: GPT2, tokenizer: Tokenizer, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    published = tmp_path / "published"
    save_pretrained(model, published)
    tokenizer.save(published / "tokenizer.json")
    text = expected(model, tokenizer, "def ")
    for folder in (run, run / "checkpoints/step-00000001", published):
        given = [str(folder), "def ", *OPTIONS]
        assert program(given) == 0
        assert capsys.readouterr().out == text + "\n"
    assert program([str(run), "def ", "--checkpoint", "last", *OPTIONS]) == 0
    assert capsys.readouterr().out != text + "\n"  # its weights are 0


def test_an_empty_prompt_begins_a_document(
    run: Path, model: GPT2, tokenizer: Tokenizer, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    ids = generate_batch(
        model, [[tokenizer.end_of_text]], 12, temperature=0.8, top_p=0.95,
        stop_tokens=tokenizer.end_tokens,
    )  # fmt: skip
    assert main(["export", str(run), str(tmp_path / "exported")]) == 0
    for folder in (run, tmp_path / "exported"):
        capsys.readouterr()
        assert program([str(folder), "", *OPTIONS]) == 0
        assert capsys.readouterr().out == tokenizer.decode(ids[0]) + "\n"


def test_a_merged_file_writes_as_its_run(
    run: Path, model: GPT2, tokenizer: Tokenizer, tmp_path: Path,
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    file, other = run / "merged.safetensors", tmp_path / "other.safetensors"
    merge(open_checkpoint(run / "checkpoints/step-00000001"), file)
    assert program([str(file), "def ", *OPTIONS]) == 0
    assert capsys.readouterr().out == expected(model, tokenizer, "def ") + "\n"
    for said in ({}, {"model": "a free text"}):
        caplog.clear()
        save_arrays(other, load_arrays(file), said)
        assert program([str(other), "a", *OPTIONS]) == 1
        assert "lacks the sizes of the model" in caplog.text


def test_the_speed_has_a_line_of_its_own(
    run: Path, model: GPT2, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def say(*said: Any) -> None:
        lines.append((capsys.readouterr().out, said))

    lines: list[Any] = []
    monkeypatch.setattr(generate._log, "info", say)
    assert program([str(run), "def ", *OPTIONS]) == 0
    assert capsys.readouterr().out == ""
    ((before, (_, count, speed, utilization)),) = lines
    assert before == expected(model, tokenizer, "def ") + "\n"
    assert count == 12
    assert speed > 0
    assert utilization == ""  # known on a GPU alone


def test_the_utilization_of_a_gpu_is_reported(
    model: GPT2, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = generate.PromptGenerator(model, tokenizer, generate.Options())
    monkeypatch.setattr(backend, "gpu_index", lambda device: 0)
    monkeypatch.setattr(generate, "name_of", lambda index: "NVIDIA H200")
    half = 0.5 * 4800e9 / model.step_bytes(1, 20)  # steps a second
    assert generator.utilization(40, half) == ", MBU 50 %"
    monkeypatch.setattr(generate, "name_of", lambda index: "NVIDIA T400")
    assert generator.utilization(40, half) == ""


def test_lines_of_a_file_are_written_on_together(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = ["def a", "return", "x"]
    (tmp_path / "lines.txt").write_text("\n\n".join(lines))
    given = [str(run), "--prompts", str(tmp_path / "lines.txt"), *OPTIONS]
    assert program([*given, "--batch", "2"]) == 0
    together = capsys.readouterr().out
    for number, line in enumerate(lines):
        single = [str(run), line, "--seed", str(number), *OPTIONS]
        assert program(single) == 0
        assert capsys.readouterr().out + "\n" in together


def test_lines_end_at_line_feeds_and_byte_order_marks_are_dropped(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "def a\u2028b\rc\r\n\nx\x0cy\n"
    (tmp_path / "plain.txt").write_bytes(text.encode())
    (tmp_path / "marked.txt").write_bytes(text.encode("utf-8-sig"))
    (tmp_path / "packed.txt.gz").write_bytes(gzip.compress(text.encode()))
    outputs = set()
    for name in ("plain.txt", "marked.txt", "packed.txt.gz", "-"):
        source = name if name == "-" else str(tmp_path / name)
        stdin = io.TextIOWrapper(io.BytesIO(text.encode("utf-8-sig")), encoding="utf-8")
        monkeypatch.setattr("sys.stdin", stdin)
        assert program([str(run), "--prompts", source, *OPTIONS]) == 0
        outputs.add(capsys.readouterr().out)
    (found,) = outputs
    assert found.startswith("def a\u2028b\rc")
    assert "\n\nx\x0cy" in found


def test_a_prompt_that_is_too_long_is_found_before_the_first_is_written(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> list[list[int]]:
        raise AssertionError("work was done")

    monkeypatch.setattr(generate, "generate_batch", refuse)
    (tmp_path / "lines.txt").write_text("a\n" + "xyz" * 20)
    given = [str(run), "--prompts", str(tmp_path / "lines.txt"), *OPTIONS]
    assert program([*given, "--batch", "1"]) == 1
    (tmp_path / "lines.txt").write_text("a\nb\n")
    assert program([*given, "--stop", ""]) == 1


def test_what_is_written_is_shown_before_the_rest_is(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(model: GPT2, prompts: list[list[int]], *_: object, **given: Any) -> Any:
        seeds.append(given["seed"])
        if len(seeds) == 2:
            raise KeyboardInterrupt
        return [[] for _ in prompts]

    seeds: list[int] = []
    monkeypatch.setattr(generate, "generate_batch", interrupted)
    (tmp_path / "lines.txt").write_text("a\nb\nc\n")
    given = [str(run), "--prompts", str(tmp_path / "lines.txt"), *OPTIONS]
    assert program([*given, "--batch", "2", "--seed", str(2**64 - 1)]) == 130
    assert capsys.readouterr().out == "a\n\nb\n\n\n"
    assert seeds == [2**64 - 1, 1]  # prompt i has the seed s + i, modulo 2^64


def test_what_cannot_be_written_is_an_error(
    run: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    assert program([str(run), "für", *OPTIONS]) == 1
    assert "'ascii' codec can't encode" in caplog.text


def test_nobody_need_read_on(
    run: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with unread_output(monkeypatch):
        assert program([str(run), "def ", *OPTIONS]) == 141
    assert caplog.records == []


def test_a_disk_that_is_full_is_an_error(
    run: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as patch, open("/dev/full", "w") as full:
        patch.setattr("sys.stdout", full)
        assert program([str(run), "def ", *OPTIONS]) == 1
    assert [record.getMessage() for record in caplog.records] == [
        "[Errno 28] No space left on device"
    ]


def test_a_conversation_without_an_input_ends_at_once(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closed_streams(monkeypatch):
        assert program([str(run), *OPTIONS]) == 0


def test_it_asks_for_prompts(
    run: Path, model: GPT2, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr("sys.stdin", io.StringIO("def \n\n  x\n"))
    assert program([str(run), *OPTIONS]) == 0
    texts = [expected(model, tokenizer, prompt) + "\n" for prompt in ("def ", "  x")]
    assert capsys.readouterr().out == "".join(texts)


def test_prompts_after_one_that_is_too_long_are_answered(
    run: Path, model: GPT2, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setattr("sys.stdin", io.StringIO("xyz" * 20 + "\ndef \n"))
    assert program([str(run), *OPTIONS]) == 1
    assert capsys.readouterr().out == expected(model, tokenizer, "def ") + "\n"
    assert "the prompt has 60 tokens" in caplog.text


def test_a_stop_text_ends_the_output(
    run: Path, model: GPT2, tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    text = expected(model, tokenizer, "def ")
    stop = text[7:9]
    given = [str(run), "def ", "--stop", stop, *OPTIONS]
    assert program(given) == 0
    assert capsys.readouterr().out == text[: text.index(stop, 4)] + "\n"


def test_an_end_token_ends_the_text_unless_it_is_ignored(model: GPT2, tokenizer: Tokenizer) -> None:
    steps = [[tokenizer.encode("a")[0]], [tokenizer.end_of_text], [tokenizer.encode("b")[0]]]
    for options, text in ((generate.Options(), "a"), (generate.Options(ignore_end=True), "ab")):
        found = generate.PromptGenerator(model, tokenizer, options)
        shown = "".join(found._decoded(found._text_stream(), iter(steps)))
        assert shown.replace("<|endoftext|>", "") == text


def test_an_answer_continues_the_conversation(model: GPT2, tokenizer: Tokenizer) -> None:
    options = generate.Options(max_new_tokens=12)
    found = generate.PromptGenerator(model, tokenizer, options)
    text = generate._show(found, "def ")
    assert f"def {text}" == expected(model, tokenizer, "def ")
    found.remember("def ", text)
    assert found._conversation == [
        {"role": "user", "content": "def "}, {"role": "assistant", "content": text},
    ]  # fmt: skip
    assert (found.shown("a"), generate.Options().chat) == ("a", False)


def test_a_prompt_may_fill_the_context(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompt = "xyz" * 5 + "x"  # 16 tokens
    assert program([str(run), prompt, "--max-new-tokens", "0"]) == 0
    assert capsys.readouterr().out.strip() == prompt


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["xyz" * 20], "the prompt has 60 tokens .* expected at most 16"),
        (["a", "--temperature", "-1"], r"--temperature: got -1\.0, expected a finite"),
        (["a", "--top-p", "2"], r"--top-p: got 2\.0, expected above 0 and at most 1"),
        (["a", "--top-k", "-3"], "--top-k: got -3, expected 1 or more"),
        (["a", "--repetition-penalty", "0"], "--repetition-penalty: got 0"),
        (["a", "--max-new-tokens", "-2"], "--max-new-tokens: got -2, expected 0 or more"),
        (["a", "--stop", ""], "--stop: got ''"),
        (["a", "--seed", "-1"], "--seed: got -1, expected an integer"),
        (["a", "--seed", str(2**64)], "--seed: got 18446744073709551616, expected an integer"),
        (["a", "--prompts", "lines.txt"], "--prompts: got lines.txt and a prompt, expected one"),
        (["--prompts", "nowhere.txt"], "nowhere.txt"),
        (["--prompts", "-", "--batch", "0"], "--batch: got 0, expected 1 or more"),
        (["nowhere", "a"], "MODEL nowhere: no such file or folder"),
        ([".", "a"], r"MODEL: \. has none of these"),
        (["a", "--device", "tpu"], "device: got 'tpu'"),
    ],
)
def test_bad_options_are_named(
    run: Path, options: list[str], message: str, caplog: pytest.LogCaptureFixture,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    model = [] if options[0] in (".", "nowhere") else [str(run)]
    assert program([*model, *OPTIONS, *options]) == 1
    assert len(caplog.records) == 1
    assert re.search(message, caplog.text)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("capability", "dtype"), [("75", "float16"), ("80", "bfloat16"), ("90", "bfloat16")]
)
def test_the_dtype_of_a_device(
    capability: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert generate.choose_dtype("auto", "cpu") == "float32"
    assert generate.choose_dtype("float16", "cpu") == "float16"
    gpu = SimpleNamespace(compute_capability=capability)
    cupy = SimpleNamespace(cuda=SimpleNamespace(Device={1: gpu}.__getitem__))
    monkeypatch.setattr(generate, "backend", SimpleNamespace(gpu_index=lambda device: 1, cupy=cupy))
    assert generate.choose_dtype("auto", "cuda:1") == dtype


def test_other_models_are_refused(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = run / "checkpoints/step-00000001/state.json"
    state = json.loads(path.read_text())
    state["model"]["rope_base"] = 10000.0
    del state["crc32"]
    path.write_text(json.dumps(state))
    assert program([str(run), "a", *OPTIONS]) == 1
    assert "is a different kind of model, expected a GPT2" in caplog.text
    path.write_text("{")
    assert program([str(path.parent), "a", *OPTIONS]) == 1
    assert "is damaged" in caplog.text


def test_a_tokenizer_of_another_model_is_refused(
    run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Tokenizer.train(["more words, more words"], 265).save(run / "tokenizer.json")
    merged = run / "model.safetensors"
    merge(open_checkpoint(run), merged)
    for checkpoint in (run, run / "checkpoints/step-00000001", merged):
        caplog.clear()
        assert program([str(checkpoint), "a", *OPTIONS]) == 1
        assert re.search(
            "does not match the tokenizer of this run: sha256 is '.*' there", caplog.text
        )


def test_a_tokenizer_that_is_larger_than_the_model_is_refused(
    run: Path, model: GPT2, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_pretrained(model, tmp_path / "published")
    Tokenizer.train(["more words, more words"], 265).save(tmp_path / "published/tokenizer.json")
    published = [str(tmp_path / "published")]
    assert program([*published, "a", *OPTIONS]) == 1
    assert re.search(r"tokenizer has 26\d tokens, expected at most 25\d", caplog.text)


def test_weights_with_a_flipped_bit_are_refused(
    run: Path, model: GPT2, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    merge(open_checkpoint(run), run / "model.safetensors")
    save_pretrained(model, tmp_path / "published")
    for path, checkpoint in (
        (run / "model.safetensors", run / "model.safetensors"),
        (tmp_path / "published/model.safetensors", tmp_path / "published"),
    ):
        flip(path)
        caplog.clear()
        assert program([str(checkpoint), "a", *OPTIONS]) == 1
        assert "model.safetensors has another CRC-32 than when it was written" in caplog.text


def ask_for_more(run: Path, sizes: dict[str, Any]) -> None:
    path = run / "checkpoints/step-00000001/state.json"
    state = json.loads(path.read_text())
    state["model"] |= sizes
    del state["crc32"]
    path.write_text(json.dumps(state))


@pytest.mark.parametrize("name", ["vocab_size", "context", "layers", "width"])
def test_sizes_that_no_memory_holds_are_refused(
    run: Path, model: GPT2, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    ask_for_more(run, {name: 10**12})
    arrays = {name: tensor.data for name, tensor in model.state_dict().items()}
    merged = run / "merged.safetensors"
    save_arrays(merged, arrays, {"model": json.dumps(asdict(model.config) | {name: 10**12})})
    for number, path in enumerate((run / "checkpoints/step-00000001", merged)):
        assert program([str(path), "a", *OPTIONS]) == 1
        assert f"MODEL: {path} has arrays of" in caplog.records[number].getMessage()


@pytest.mark.parametrize(
    "header", ["", "[]", "{", "[" * 100_000, '{"layers": ' + "9" * 5000 + "}", '{"a": NaN}']
)
def test_a_merged_file_whose_header_is_damaged_is_named(
    run: Path, model: GPT2, header: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = run / "merged.safetensors"
    arrays = {name: tensor.data for name, tensor in model.state_dict().items()}
    save_arrays(path, arrays, {"model": header})
    assert program([str(path), "a", *OPTIONS]) == 1
    assert f"MODEL: the header of {path} lacks the sizes of the model" in caplog.text


@pytest.fixture
def llama(tokenizer: Tokenizer, tmp_path: Path) -> Path:
    """A folder of a model for conversations, its weights in several files."""
    random.seed(0)
    model = TransformerLM(TransformerLMConfig(300, 128, 1, 4, 2, 16, 24, window=9))
    for parameter in model.parameters():
        parameter.data *= 8
    model.tokens.weight.data[tokenizer.vocab_size :] = -model.tokens.weight.data[1]  # not tokens
    save_pretrained(model, tmp_path / "llama", max_file_bytes=9000)
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    PublishedTokenizer.of(tokenizer, template).save(tmp_path / "llama")
    return tmp_path / "llama"


def test_an_exported_run_writes_the_same(
    run: Path, model: GPT2, tokenizer: Tokenizer, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    folder = str(tmp_path / "exported")
    assert main(["export", str(run), folder, "--max-file-bytes", "5000"]) == 0
    assert len(list(Path(folder).glob("*.safetensors"))) > 1
    capsys.readouterr()
    assert program([folder, "def ", *OPTIONS]) == 0
    assert capsys.readouterr().out == expected(model, tokenizer, "def ") + "\n"
    assert load_trained(Path(folder))[1].digest == tokenizer.digest  # to train it on


def test_another_model_than_gpt2_is_trained_further_and_exported(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert program([str(llama), "def ", "--temperature", "0", *OPTIONS]) == 0
    assert capsys.readouterr().out.startswith("def ")
    run, exported = str(tmp_path / "run"), tmp_path / "exported"
    (tmp_path / "text.txt").write_text("def add(a, b):\n    return a + b\n" * 90)
    places = ["--data", str(tmp_path / "text.txt"), "--cache", str(tmp_path / "cache")]
    steps = ["--steps", "2", "--warmup", "0", "--batch", "2", "--sample", "0", "--device", "cpu"]
    assert main(["train", "--init-from", str(llama), "--out", run, *places, *steps]) == 0
    assert main(["train", "--resume", run, "--steps", "3"]) == 0
    assert main(["export", run, str(exported)]) == 0
    model, _ = load_trained(Path(run), "last")
    before, after = (from_pretrained(folder).state_dict() for folder in (llama, exported))
    for name, tensor in model.state_dict().items():
        assert (tensor.data == after[name].data).all()
    assert any((before[name].data != after[name].data).any() for name in after)


def test_a_conversation_goes_on(
    llama: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("jinja2", reason="jinja2 is not installed")
    options = ["--temperature", "0", "--ignore-end", *OPTIONS]
    monkeypatch.setattr("sys.stdin", io.StringIO("first\nreturn\n"))
    assert program([str(llama), "--chat", "--system", "a", *options]) == 0
    talk = capsys.readouterr().out
    asked = "system: a\nuser: first\n"
    assert program([str(llama), asked, *options]) == 0
    answer = capsys.readouterr().out.removeprefix(asked).removesuffix("\n")
    asked += f"assistant: {answer}\nuser: return\n"
    assert program([str(llama), asked, *options]) == 0
    assert talk == f"{answer}\n{capsys.readouterr().out.removeprefix(asked)}"


def test_chat_and_download_say_what_they_need(
    run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for arguments, message in (
        (["--chat"], "--chat is given for a model of a run, which has no chat template"),
        (["--system", "a"], "--system: got a text without --chat, expected both"),
    ):
        assert program([str(run), "a", *arguments, *OPTIONS]) == 1
        assert message in caplog.text
    assert main(["export", str(run), str(tmp_path / "exported")]) == 0
    assert program([str(tmp_path / "exported"), "a", "--chat", *OPTIONS]) == 1
    assert "exported has no chat template" in caplog.text
    assert program(["some/model", "a", *OPTIONS]) == 1
    assert "downloaded only with --download" in caplog.text
