"""The adapters of the courses; those that need PyTorch are in tests/parity/test_courses.py."""

from __future__ import annotations

import math
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

import minitorch
import tensorgrad as tg
from cs336 import bpe, layers
from minitorch.cuda_kernel_ops import CudaKernelOps
from project.run_machine_translation import collate_batch, generate, loss_fn
from project.run_sentiment_linear import Network

ROOT = Path(__file__).parents[2]
BACKENDS = [minitorch.SimpleBackend, minitorch.TensorBackend(CudaKernelOps)]


def test_topological_sort_gives_each_variable_before_its_parents() -> None:
    x, y = minitorch.Scalar(2), minitorch.Scalar(3)
    product = x * y
    total = product + x
    order = minitorch.topological_sort(total)
    assert order[0] is total
    assert {each.unique_id for each in order} == {each.unique_id for each in (x, y, product, total)}
    places = {each.unique_id: place for place, each in enumerate(order)}
    for each in order:
        for parent in each.parents:
            assert places[each.unique_id] < places[parent.unique_id]
    assert len(minitorch.topological_sort(minitorch.tensor([1.0]) * 2)) == 2  # without the constant


def test_a_long_chain_needs_no_recursion() -> None:
    x = minitorch.Scalar(1)
    y = x
    for _ in range(1500):
        y = -y
    y.backward()
    assert x.derivative == 1


def test_scalars_have_the_derivatives_of_calculus() -> None:
    x, y = minitorch.Scalar(0.5), minitorch.Scalar(-2)
    z = (x * y).exp() / (1 - x) + x.log() - y.sigmoid() + (x < y) + y.relu()
    minitorch.backpropagate(z, 2.0)
    assert x.derivative == pytest.approx(2 * (math.exp(-1) * (-2 / 0.5 + 4) + 1 / 0.500001))
    sigmoid = 1 / (1 + math.exp(2))
    assert y.derivative == pytest.approx(2 * (math.exp(-1) - sigmoid * (1 - sigmoid)))


def test_sgd_replaces_scalars_as_tensors() -> None:
    scalar, number = minitorch.Parameter(minitorch.Scalar(2)), minitorch.Parameter(5)
    optimizer = minitorch.SGD([scalar, number], lr=0.25)
    (scalar.value**3).backward()
    optimizer.step()
    assert (scalar.value.data, scalar.value.derivative, number.value) == (-1, None, 5)
    (scalar.value / 4).backward()
    assert scalar.value.derivative == 0.25
    optimizer.zero_grad()
    assert scalar.value.derivative is None


@pytest.mark.parametrize("backend", BACKENDS, ids=["SimpleOps", "CudaKernelOps"])
def test_tensors_broadcast_and_sum_their_gradients(backend: minitorch.TensorBackend) -> None:
    a = minitorch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], backend)
    b = minitorch.tensor([1.0, -1.0, 2.0], backend)
    y = (a * b).sum(1)
    assert y.shape == (2, 1)
    y.sum().backward()
    assert a.grad.to_numpy().tolist() == [[1, -1, 2], [1, -1, 2]]
    assert b.grad.to_numpy().tolist() == [5, 7, 9]
    (a * b).sum().backward()
    assert b.grad.to_numpy().tolist() == [10, 14, 18]  # gradients add up
    assert (a == a.view(2, 3)).all().item() == 1
    assert a.permute(1, 0).view(6).to_numpy().tolist() == [1, 4, 2, 5, 3, 6]
    assert a.var(1)[1, 0] == pytest.approx(2 / 3)


def test_a_function_of_ones_own_is_differentiated_by_its_backward() -> None:
    class Double(minitorch.Function):
        @staticmethod
        def forward(ctx: minitorch.Context, x: minitorch.Tensor) -> minitorch.Tensor:
            return x.f.add_zip(x, x)  # type: ignore[no-any-return]

        @staticmethod
        def backward(ctx: minitorch.Context, dy: minitorch.Tensor) -> minitorch.Tensor:
            return dy * 7  # not 2: its own

    x = minitorch.tensor([3.0])
    y = Double.apply(x)
    y.backward()
    assert (y.item(), x.grad.item()) == (6, 7)
    with pytest.raises(AttributeError, match="expected one of"):
        x.f.sine_map(x)


def test_equal_maxima_each_get_the_whole_gradient() -> None:
    x = minitorch.tensor([[1.0, 5.0, 5.0]])
    minitorch.max(x, 1).sum().backward()
    assert x.grad.to_numpy().tolist() == [[0, 1, 1]]
    assert minitorch.argmax(x, 1).to_numpy().tolist() == [[0, 1, 1]]


def test_convolutions_continue_into_zeros() -> None:
    x = minitorch.tensor([[[0.0, 1.0, 2.0, 3.0]]])
    weight = minitorch.tensor([[[1.0, 2.0, 3.0]]])
    assert minitorch.Conv1dFun.apply(x, weight).to_numpy().tolist() == [[[8, 14, 8, 3]]]
    image = minitorch.tensor([[[[1.0, 2.0], [3.0, 4.0]]]])
    corner = minitorch.tensor([[[[1.0, 10.0], [100.0, 1000.0]]]])
    y = minitorch.Conv2dFun.apply(image, corner)
    assert y.to_numpy().tolist() == [[[[4321, 402], [43, 4]]]]


def test_loss_and_norm_are_those_of_their_formulas() -> None:
    logits = minitorch.tensor([[1.0, 2.0, 4.0], [0.0, 0.0, 0.0]])
    loss = minitorch.softmax_loss(logits, minitorch.tensor([2, 0]))
    sums = np.log(np.exp([[1, 2, 4], [0, 0, 0]]).sum(1))
    np.testing.assert_allclose(loss.to_numpy(), sums - [4, 0], rtol=1e-6)
    np.testing.assert_allclose(minitorch.logsumexp(logits, 1).to_numpy(), sums[:, None], rtol=1e-6)
    layer = minitorch.LayerNorm1d(3, 1e-5)
    row = np.array([1.0, 2.0, 4.0])
    normal = (row - row.mean()) / np.sqrt(row.var() + 1e-5)
    np.testing.assert_allclose(layer(logits).to_numpy()[0], normal, rtol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS, ids=["SimpleOps", "CudaKernelOps"])
def test_the_decoder_is_causal_and_every_parameter_learns(backend: minitorch.TensorBackend) -> None:
    np.random.seed(0)
    model = minitorch.DecoderLM(11, 12, 3, 8, p_dropout=0.0, backend=backend, n_layer=2)
    ids = np.array([[1, 2, 3, 4, 5]])
    before = model(minitorch.tensor_from_numpy(ids, backend)).to_numpy()
    ids[0, 3] = 9
    after = model(minitorch.tensor_from_numpy(ids, backend))
    assert before.shape == (1, 5, 11)
    np.testing.assert_allclose(after.to_numpy()[0, :3], before[0, :3], atol=1e-6)
    assert abs(after.to_numpy()[0, 3:] - before[0, 3:]).max() > 1e-3
    (after * after).sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.value.grad is not None, name
    old = {name: p.value.to_numpy() for name, p in model.named_parameters()}
    minitorch.Adam(model.parameters(), lr=0.1).step()
    for name, parameter in model.named_parameters():
        move = abs(parameter.value.to_numpy() - old[name]).max()
        assert move == pytest.approx(0.1, abs=0.01) or name.endswith("k_projection.bias"), name


def test_parameters_and_modes_reach_all_modules() -> None:
    network = Network(embedding_dim=4, hidden_dim=3)
    names = [name for name, _ in network.named_parameters()]
    assert names == ["linear1.weights", "linear1.bias", "linear2.weights", "linear2.bias"]
    network.eval()
    assert not network.linear1.training
    y = network(minitorch.tensor(np.ones((2, 5, 4)), backend=network.linear1.bias.value.backend))
    assert y.shape == (2,)
    optimizer = minitorch.SGD(network.parameters(), lr=0.5)
    y.sum().backward()
    bias, grad = network.linear2.bias.value.to_numpy(), network.linear2.bias.value.grad.to_numpy()
    optimizer.step()
    np.testing.assert_allclose(network.linear2.bias.value.to_numpy(), bias - 0.5 * grad)


class Letters:
    """A tokenizer of letters, with the course's special tokens."""

    vocab: ClassVar = {"<pad>": 0, "<eos_de>": 1, "<eos_en>": 2, "a": 3, "b": 4}

    def __call__(self, text: str) -> dict[str, list[int]]:
        for special in ("<eos_de>", "<eos_en>"):
            text = text.replace(special, special[5].upper())
        return {"input_ids": ["?DEab".index(c) for c in text]}

    def decode(self, ids: list[int]) -> str:
        return "".join("?DEab"[i] for i in ids)


def test_batches_of_translation_and_generation() -> None:
    examples = [{"de": "ab", "en": "ba"}, {"de": "a", "en": "b"}]
    backend = minitorch.SimpleBackend
    batch = collate_batch(examples, "de", "en", Letters(), 6, backend)
    assert batch["input_ids"].to_numpy().tolist() == [[3, 4, 1, 4, 3, 2], [3, 1, 4, 2, 0, 0]]
    assert batch["labels"].to_numpy().tolist() == [[4, 1, 4, 3, 2, 0], [1, 4, 2, 0, 0, 0]]
    weights = batch["label_token_weights"].to_numpy().tolist()
    assert weights == [[0, 0, 1, 1, 1, 0], [0, 1, 1, 0, 0, 0]]

    class Says(minitorch.Module):
        """After the source, "b" and "a", then the end."""

        def forward(self, ids: Any) -> Any:
            row = ids.to_numpy()[0].astype(int).tolist()
            said = len(row) - row.index(1) - 1
            logits = np.zeros((1, len(row), 5))
            logits[0, -1, [4, 3, 2][said]] = 1
            return minitorch.tensor_from_numpy(logits)

    found = generate(Says(), examples, "de", "en", Letters(), 8, backend, "test")
    assert found == ["ba", "ba"]
    assert generate(Says(), examples, "de", "en", Letters(), 4, backend, "test") == ["b", "ba"]

    class Uniform(minitorch.Module):
        def forward(self, ids: Any) -> Any:
            return minitorch.tensor_from_numpy(np.zeros((*ids.shape, 5)))

    assert loss_fn(batch, Uniform()).item() == pytest.approx(math.log(5))


def test_merges_take_the_greater_pair_where_two_are_equally_frequent(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("ab ab cd cd<|x|>ab", encoding="utf-8")
    vocab, merges = bpe.train(text, 260, ["<|x|>"])
    assert merges == [(b"a", b"b"), (b"c", b"d"), (b" ", b"cd")]
    assert vocab[0] == b"<|x|>"
    assert [vocab[257], vocab[258], vocab[259]] == [b"ab", b"cd", b" cd"]
    assert len(bpe.train(text, 1000, [])[0]) < 1000  # until no pair is left


def test_a_tokenizer_keeps_ones_own_ids_and_special_tokens(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("low lower lowest " * 5, encoding="utf-8")
    trained, merges = bpe.train(text, 266, [])
    vocab = {len(trained) - 1 - i: token for i, token in trained.items()}  # another order
    tokenizer = bpe.CourseTokenizer(vocab, merges, ["<|a|>", "<|a|><|a|>", "<b c>"])
    sentence = "lower low\n\n\n été <|a|><|a|><|a|> <b c>lowest  \n<|a"
    ids = tokenizer.encode(sentence)
    assert tokenizer.decode(ids) == sentence
    assert [tokenizer.decode([i]) for i in ids].count("<|a|><|a|>") == 1
    assert [tokenizer.decode([i]) for i in ids].count("<b c>") == 1
    for size in (1, 2, 3, 7):
        pieces = [sentence[i : i + size] for i in range(0, len(sentence), size)]
        assert list(tokenizer.encode_iterable(pieces)) == ids
    plain = bpe.CourseTokenizer(vocab, merges)
    assert "<|a|>" not in [plain.decode([i]) for i in plain.encode("<|a|>")]


def test_rope_turns_neighbours_by_their_positions() -> None:
    x = np.array([[1.0, 0.0, 1.0, 0.0], [1.0, 0.0, 1.0, 0.0]], np.float32)
    y = layers.rope(tg.tensor(x), np.array([0, 2]), theta=100.0).numpy()
    angles = np.array([[0, 0], [2, 0.2]])
    expected = np.stack([np.cos(angles), np.sin(angles)], axis=-1).reshape(2, 4)
    np.testing.assert_allclose(y, expected, atol=1e-6)


def test_attention_masks_and_broadcasts() -> None:
    rng = np.random.default_rng(0)
    q, k, v = (tg.tensor(rng.normal(size=(2, 3, n, 4)).astype(np.float32)) for n in (2, 5, 5))
    mask = np.array([[True, False, True, False, False], [False, True, False, False, False]])
    y = layers.attention(q, k, v, mask).numpy()
    np.testing.assert_allclose(y[:, :, 1], v.numpy()[:, :, 1], rtol=1e-6)  # a single key
    scores = (q.numpy()[:, :, :1] * k.numpy()[:, :, [0, 2]]).sum(-1) / 2
    weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    expected = (weights[..., None] * v.numpy()[:, :, [0, 2]]).sum(-2)
    np.testing.assert_allclose(y[:, :, 0], expected, rtol=1e-5)


def test_the_language_model_of_either_year_is_causal() -> None:
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> tg.Tensor:
        return tg.tensor(rng.normal(size=shape).astype(np.float32) * 0.3)

    weights = {f"layers.0.attn.{name}_proj.weight": normal(8, 8) for name in "qkv"}
    weights |= {"layers.0.attn.output_proj.weight": normal(8, 8)}
    weights |= {f"layers.0.ln{number}.weight": tg.ones(8) for number in (1, 2)}
    weights |= {"layers.0.ffn.w1.weight": normal(16, 8), "layers.0.ffn.w2.weight": normal(8, 16)}
    weights |= {"token_embeddings.weight": normal(9, 8), "ln_final.weight": tg.ones(8)}
    weights |= {"lm_head.weight": normal(9, 8)}
    gated = weights | {"layers.0.ffn.w3.weight": normal(16, 8)}
    learned = weights | {"position_embeddings.weight": normal(6, 8)}
    for theta, chosen in ((10000.0, gated), (None, learned)):
        rows = np.array([[1, 2, 3, 4], [1, 2, 3, 8]])
        y = layers.language_model(rows, chosen, 1, 2, theta).numpy()
        assert y.shape == (2, 4, 9)
        np.testing.assert_allclose(y[0, :3], y[1, :3], atol=1e-6)
        assert abs(y[0, 3] - y[1, 3]).max() > 1e-2


def test_the_guides_commands_run_a_checkouts_tests_with_the_adapters(tmp_path: Path) -> None:
    course, elsewhere = tmp_path / "course", tmp_path / "elsewhere"
    elsewhere.mkdir()
    for file, text in {
        "minitorch/__init__.py": "raise ImportError('the package of the course')",
        "tests/__init__.py": "",
        "tests/strategies.py": "numbers = [1.0, 2.0]",
        "tests/test_course.py": "import minitorch\nfrom .strategies import numbers\n"
        "def test_sum(): assert minitorch.tensor(numbers).sum().item() == 3\n",
    }.items():
        path = course / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    guide = (ROOT / "docs/guides/courses.md").read_text(encoding="utf-8")
    setup = guide.partition("```text\n")[2].partition("```")[0]
    python = f'pytest() {{ {shlex.quote(sys.executable)} -P -m pytest "$@"; }}\n'
    # The environment's path has the project first, whose `tests` is another package.
    script = python + setup.replace("PYTHONPATH=", "PYTHONPATH=$TENSORGRAD:")
    environment = os.environ | {"TENSORGRAD": str(ROOT), "COURSE": str(course)}
    run = subprocess.run(
        ["bash", "-c", script], cwd=elsewhere, env=environment, capture_output=True, text=True
    )
    assert "1 passed" in run.stdout, run.stdout + run.stderr
