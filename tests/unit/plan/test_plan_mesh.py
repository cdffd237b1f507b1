"""Who stands where on the mesh, and whose samples are whose."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlpipe._core import meshes
from mlpipe.plan.mesh import Mesh

pytestmark = pytest.mark.unit

SIZE = st.integers(1, 3)
MESHES = st.builds(Mesh, pp=SIZE, dp_replicate=SIZE, dp_shard=SIZE, cp=SIZE, tp=SIZE)
SHARING = ("pp", "cp", "tp")  # axes whose ranks work on the same samples


@given(MESHES)
def test_every_rank_has_a_place_of_its_own_and_neighbours_along_the_innermost_axis(mesh: Mesh) -> None:
    places = [mesh.coordinates(rank) for rank in range(mesh.world_size)]
    assert len({tuple(place.values()) for place in places}) == mesh.world_size
    assert places == sorted(places, key=lambda place: [place[axis] for axis in mesh.axes])
    assert all(0 <= place[axis] < size for place in places for axis, size in mesh.axes.items())


@given(MESHES)
def test_ranks_share_their_samples_where_they_differ_only_along_pp_cp_or_tp(mesh: Mesh) -> None:
    groups: dict[int, set[tuple[int, ...]]] = {}
    for rank in range(mesh.world_size):
        place = mesh.coordinates(rank)
        outside = tuple(at for axis, at in place.items() if axis not in SHARING)
        groups.setdefault(mesh.data_rank(rank), set()).add(outside)
    assert sorted(groups) == list(range(mesh.num_data_ranks))
    assert all(len(places) == 1 for places in groups.values())
    sizes = Counter(mesh.data_rank(rank) for rank in range(mesh.world_size))
    assert set(sizes.values()) == {mesh.pp * mesh.cp * mesh.tp}


def test_without_other_axes_the_rank_is_the_data_rank() -> None:
    mesh = Mesh(dp_replicate=2, dp_shard=3)
    assert [mesh.data_rank(rank) for rank in range(6)] == list(range(6))
    assert mesh.coordinates(4) == {"pp": 0, "dp_replicate": 1, "dp_shard": 1, "cp": 0, "tp": 0, "ep": 0}


def test_experts_are_spread_over_neighbours_that_read_different_samples() -> None:
    mesh = Mesh(dp_shard=4, ep=2)
    assert (mesh.world_size, mesh.num_data_ranks) == (4, 4)
    assert [mesh.coordinates(rank)["ep"] for rank in range(4)] == [0, 1, 0, 1]


@pytest.mark.parametrize("sizes", [{"tp": 0}, {"dp_shard": 3, "ep": 2}])
def test_what_is_no_mesh_is_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"mesh|divide"):
        Mesh(**sizes)


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_that_is_not_there_has_no_place(rank: int) -> None:
    with pytest.raises(ValueError, match="not one of 4"):
        Mesh(tp=4).coordinates(rank)


def test_scales_of_a_row_are_counted_over_the_channels_of_all_heads() -> None:
    """Open weights may have more of them than the model is wide: it is they that tp shares."""
    figures = {"dim": 768, "ffn_dim": 2048, "num_heads": 16, "head_dim": 64}
    assert meshes.cut_blocks(2, "adamw8bit", figures) is None
    assert meshes.cut_blocks(1, "adamw8bit", {"dim": 768}) is None
    assert meshes.cut_blocks(2, "adamw", {"dim": 768}) is None
    refused = meshes.cut_blocks(2, "adamw8bit", figures | {"dim": 1024, "head_dim": 40})
    assert refused is not None
    assert "num_heads x head_dim 640 within" in refused.message
    refused = meshes.cut_blocks(2, "adamw8bit", {"dim": 768, "ffn_dim": 2048})
    assert refused is not None
    assert "dim 768 within" in refused.message
