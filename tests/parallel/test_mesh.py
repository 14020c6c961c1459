from __future__ import annotations

import pytest

from tensorgrad.errors import ArgumentError
from tensorgrad.parallel import Mesh, make_mesh

SIZES = [(1, 1, 1), (4, 1, 1), (1, 3, 1), (1, 1, 2), (2, 3, 4), (3, 2, 1), (128, 16, 8)]


@pytest.mark.parametrize(("dp", "pp", "tp"), SIZES)
def test_every_rank_has_a_place_of_its_own_and_every_place_a_rank(
    dp: int, pp: int, tp: int
) -> None:
    places = set()
    for rank in range(dp * pp * tp):
        mesh = Mesh(dp, pp, tp, rank)
        place = (mesh.dp_rank, mesh.pp_rank, mesh.tp_rank)
        assert mesh.rank_at(*place) == rank
        places.add(place)
    assert places == {(d, p, t) for d in range(dp) for p in range(pp) for t in range(tp)}


@pytest.mark.parametrize("axis", ["dp", "pp", "tp"])
def test_a_line_holds_the_ranks_that_differ_along_its_axis_alone(axis: str) -> None:
    for rank in range(24):
        mesh = Mesh(2, 3, 4, rank)
        line = [Mesh(2, 3, 4, other) for other in mesh.line(axis)]
        assert rank in mesh.line(axis)
        assert [getattr(other, f"{axis}_rank") for other in line] == list(
            range(getattr(mesh, axis))
        )
        for fixed in {"dp", "pp", "tp"} - {axis}:
            name = f"{fixed}_rank"
            assert {getattr(other, name) for other in line} == {getattr(mesh, name)}


def test_tensor_parallel_ranks_are_next_to_each_other_and_stages_furthest_apart() -> None:
    mesh = Mesh(dp=2, pp=2, tp=2, rank=0)
    assert (mesh.line("tp"), mesh.line("dp"), mesh.line("pp")) == ((0, 1), (0, 2), (0, 4))


def test_data_parallel_ranks_are_by_default_what_is_left() -> None:
    assert make_mesh(6, 5) == Mesh(6, 1, 1, 5)
    assert make_mesh(24, 7, pp=3, tp=2) == Mesh(4, 3, 2, 7)
    assert make_mesh(24, 7, dp=4, pp=3, tp=2) == Mesh(4, 3, 2, 7)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"pp": 4}, r"pp \* tp is 4 \* 1, expected a divisor of the 6 ranks"),
        ({"pp": 0}, r"pp \* tp is 0 \* 1"),
        ({"tp": 0}, r"pp \* tp is 1 \* 0"),
        ({"pp": 0, "dp": 0}, r"dp \* pp \* tp is 0 \* 0 \* 1 = 0, expected the number of ranks, 6"),
        ({"rank": -1}, "rank is -1, expected 0 to 5"),
        ({"dp": 4, "tp": 2}, r"4 \* 1 \* 2 = 8, expected the number of ranks, 6"),
        ({"rank": 6}, "rank is 6, expected 0 to 5"),
        ({"dp": -2, "pp": -3}, "dp is -2, expected 1 or more"),
    ],
)
def test_sizes_that_do_not_fit_are_errors_with_the_numbers(
    sizes: dict[str, int], message: str
) -> None:
    with pytest.raises(ArgumentError, match=message):
        make_mesh(6, **sizes)


def test_places_outside_the_mesh_are_errors() -> None:
    with pytest.raises(ArgumentError, match="pp_rank is 3, expected 0 to 2"):
        Mesh(2, 3, 4).rank_at(0, 3, 0)
    with pytest.raises(ArgumentError, match="tp_rank is -1, expected 0 to 3"):
        Mesh(2, 3, 4).rank_at(0, 0, -1)
    with pytest.raises(ArgumentError, match="Mesh: tp is 0, expected 1 or more"):
        Mesh(tp=0)
    assert Mesh() == Mesh(1, 1, 1, 0)
    with pytest.raises(ArgumentError, match="axis is 'x', expected one of dp, pp, tp"):
        Mesh().line("x")
