"""DataLoader: epochs, exact resume, and how items become batches."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

import tensorgrad as tg
from tensorgrad import Tensor
from tensorgrad.data import DataLoader, Dataset, TensorDataset, collate
from tensorgrad.errors import ArgumentError, CheckpointError, DataError, DtypeError, ShapeError

X = np.arange(20, dtype="float32").reshape(10, 2)


class Squares(Dataset):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, number: int) -> Any:
        return number, {"square": np.float32(number**2), "name": str(number)}


def numbers(loader: DataLoader) -> list[list[int]]:
    return [batch[0].tolist() for batch in loader]


def flat(loader: DataLoader) -> list[int]:
    return [number for batch in numbers(loader) for number in batch]


@pytest.mark.parametrize("ahead", [False, True])
def test_epochs_visit_every_item_once_in_another_order(ahead: bool) -> None:
    loader = DataLoader(Squares(), 4, shuffle=True, seed=1, ahead=ahead)
    epochs = [flat(loader) for _ in range(3)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert (len(loader), loader.epoch) == (3, 3)
    again = DataLoader(Squares(), 4, shuffle=True, seed=1)
    assert [flat(again) for _ in range(3)] == epochs
    assert again.batch(4)[0].tolist() == epochs[1][4:8]
    assert not [each for each in threading.enumerate() if "read_ahead" in each.name]


def test_without_shuffling_and_without_the_last_batch() -> None:
    assert numbers(DataLoader(Squares(), 4)) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert numbers(DataLoader(Squares(), 4, drop_last=True)) == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("stop", range(1, 7))
def test_a_run_resumes_at_the_next_batch(stop: int, ahead: bool) -> None:
    loader = DataLoader(Squares(), 4, shuffle=True, seed=7, ahead=ahead)
    expected, found = [], []
    for _ in range(3):
        for batch in loader:
            expected.append(batch[0].tolist())
            if len(expected) == stop:
                state = loader.state_dict()
    other = DataLoader(Squares(), 4, shuffle=True, ahead=ahead)
    other.load_state_dict(state)
    while other.epoch < 3:
        found += numbers(other)
    assert expected[:stop] + found == expected


def test_a_loop_left_early_counts_as_an_epoch() -> None:
    loader = DataLoader(Squares(), 4, shuffle=True)
    for _ in loader:
        break
    assert loader.epoch == 0
    assert sorted(flat(loader)) == list(range(10))
    assert loader.epoch == 2


def test_wrong_states_change_nothing() -> None:
    loader = DataLoader(Squares(), 4)
    for state in ({}, {"seed": 0, "epoch": 0, "batch": 3}, {"seed": -1, "epoch": 0, "batch": 0}, 3):
        with pytest.raises(CheckpointError, match="expected seed, epoch, and a batch below 3"):
            loader.load_state_dict(state)  # type: ignore[arg-type]
    for name, end in (("seed", 2**64), ("epoch", 2**32), ("batch", 3)):
        for wrong in (end, -1, 1.0):
            with pytest.raises(CheckpointError, match="expected seed, epoch, and a batch below 3"):
                loader.load_state_dict({"seed": 0, "epoch": 0, "batch": 0, name: wrong})
    assert loader.state_dict() == {"seed": 0, "epoch": 0, "batch": 0}
    last = {"seed": 2**64 - 1, "epoch": 2**32 - 1, "batch": 2}
    loader.load_state_dict(last)
    assert loader.state_dict() == last
    assert len(numbers(loader)) == 1


def test_batches_of_nested_items() -> None:
    ids, fields = next(iter(DataLoader(Squares(), 3)))
    assert (ids.dtype, ids.shape) == (np.dtype("int64"), (3,))
    assert isinstance(fields["square"], Tensor)
    assert fields["square"].dtype == "float32"
    assert fields["name"] == ["0", "1", "2"]
    assert collate([1.5, 2.5]).dtype == "float32"
    assert collate([[X, 1], [X, 2]])[0].shape == (2, 10, 2)
    assert DataLoader([1, 2, 3], 2, collate_fn=sum).batch(0) == 3


def test_tensor_datasets_are_indexed_at_once() -> None:
    labels = tg.arange(10)
    dataset = TensorDataset(X, labels)
    assert len(dataset) == 10
    assert dataset[3][0].tolist() == [6, 7]
    x, y = next(iter(DataLoader(dataset, 4, shuffle=True)))
    np.testing.assert_array_equal(x.numpy()[:, 0], 2 * y.numpy())
    with pytest.raises(ShapeError, match=r"tensors\[1\] has shape \(3,\), expected the length of"):
        TensorDataset(X, np.zeros(3))
    with pytest.raises(DtypeError, match=r"tensors\[0\] is a list, expected a tensor"):
        TensorDataset([1, 2])
    with pytest.raises(ArgumentError, match="got no tensor"):
        TensorDataset()


def test_data_sets_and_items_that_do_not_fit() -> None:
    with pytest.raises(ArgumentError, match="dataset is a generator, expected an object with __l"):
        DataLoader(i for i in range(3))
    with pytest.raises(DataError, match="dataset has 3 items, expected 4 or more"):
        DataLoader([1, 2, 3], 4, drop_last=True)
    with pytest.raises(ArgumentError, match="batch_size is 0, expected 1 or more"):
        DataLoader([1], 0)
    with pytest.raises(ShapeError, match="stack"):
        collate([X, X[1:]])
    with pytest.raises(ArgumentError, match="different lengths"):
        collate([(1,), (1, 2)])
    with pytest.raises(ArgumentError, match="different names"):
        collate([{"a": 1}, {"b": 1}])
    with pytest.raises(NotImplementedError, match="Dataset defines no __len__"):
        DataLoader(Dataset())
    with pytest.raises(NotImplementedError, match="Dataset defines no __getitem__"):
        Dataset()[0]
    with pytest.raises(ArgumentError, match="f is a int, expected a function"):
        DataLoader([1], collate_fn=3)  # type: ignore[arg-type]
    with pytest.raises(DataError, match="dataset has 0 items, expected 1 or more"):
        DataLoader([])
    with pytest.raises(ShapeError, match=r"tensors\[0\] has shape \(\), expected the length"):
        TensorDataset(np.zeros(()))


def test_the_settings_are_shown() -> None:
    assert repr(TensorDataset(X, np.arange(10))) == ("TensorDataset(float32 (10, 2), int64 (10,))")
    loader = DataLoader(Squares(), 4, shuffle=True, seed=5)
    assert flat(loader)
    assert repr(loader) == (
        "DataLoader(items=10, batches=3, batch_size=4, shuffle=True, epoch=1, seed=5)"
    )
    default = DataLoader(Squares())
    assert repr(default) == (
        "DataLoader(items=10, batches=10, batch_size=1, shuffle=False, epoch=0, seed=0)"
    )
    assert flat(default) == list(range(10))
    assert collate([True, False]).dtype == "bool"
    assert collate([np.float64(1)]).dtype == "float64"
    assert collate(["a"]) == ["a"]
    assert collate([Tensor(X, requires_grad=True)]).requires_grad is False


@pytest.mark.gpu
def test_batches_on_a_gpu() -> None:
    for dataset in (TensorDataset(X, np.arange(10)), [(x, i) for i, x in enumerate(X)]):
        x, y = DataLoader(dataset, 4, device="cuda", ahead=True).batch(1)
        assert x.device == y.device == "cuda:0"
        np.testing.assert_array_equal(x.numpy(), X[4:8])
