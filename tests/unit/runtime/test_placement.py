from functools import cache

import pytest
import ray
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.parallel_state import RankGenerator
from ray.util.placement_group import PlacementGroup

from megatron_rl.config.load import load_settings
from megatron_rl.config.settings import ClusterSettings
from megatron_rl.errors import UserError
from megatron_rl.planning.launch_plan import placement_rows
from megatron_rl.runtime.cluster import Reservation, gpu_order, own_gpus, usable_nodes
from megatron_rl.runtime.placement import Needs, NodeShare, Placement, match_bundles, nodes_needed, place
from megatron_rl.runtime.preflight import crossing_notes


def needs(num_ranks: int, num_engines: int = 0, slots_per_engine: int = 1, nodes_per_engine: int = 1, *, colocated: bool = False) -> Needs:
    sizes = {"slots_per_engine": slots_per_engine, "nodes_per_engine": nodes_per_engine}
    return Needs(num_ranks=num_ranks, num_engines=num_engines, **sizes, colocated=colocated)


def node_of_rank(placement: Placement, rank: int) -> int:
    return next(number for number, share in enumerate(placement.nodes) if rank in share.ranks)


@settings(deadline=None)
@given(
    num_ranks=st.integers(1, 70),
    num_engines=st.integers(0, 12),
    slots_per_part=st.sampled_from([1, 2, 3, 4, 8]),
    nodes_per_engine=st.sampled_from([1, 1, 2, 3]),
    slots_per_node=st.sampled_from([3, 4, 8]),
    colocated=st.booleans(),
)
def test_everything_is_placed_once_and_engines_stay_whole(
    num_ranks: int, num_engines: int, slots_per_part: int, nodes_per_engine: int, slots_per_node: int, colocated: bool
) -> None:
    wanted = needs(num_ranks, num_engines, slots_per_part * nodes_per_engine, nodes_per_engine, colocated=colocated)
    try:
        count = nodes_needed(wanted, slots_per_node=slots_per_node)
        placement = place(wanted, nodes=[slots_per_node] * count)
    except UserError as error:
        too_large = slots_per_part > slots_per_node
        too_many = colocated and _most_engines(num_ranks, slots_per_node, slots_per_part, nodes_per_engine) < num_engines
        assert too_large or too_many, error
        return
    assert len(placement.nodes) == count
    assert [rank for share in placement.nodes for rank in share.ranks] == list(range(num_ranks))
    for number in range(num_engines):
        nodes = placement.nodes_of_engine(number)
        assert nodes == tuple(range(nodes[0], nodes[0] + nodes_per_engine))
    for share in placement.nodes:
        taken = [*([] if colocated else range(len(share.ranks))), *(slot for slots in share.engines.values() for slot in slots)]
        assert len(set(taken)) == len(taken)
        assert share.slots <= slots_per_node
        assert all(len(slots) == slots_per_part for slots in share.engines.values())
    if colocated:
        beside = [rank for engine in range(num_engines) for rank in placement.ranks_beside(engine)]
        assert len(set(beside)) == len(beside) == num_engines * slots_per_part * nodes_per_engine
    if count > 1 and not colocated:
        with pytest.raises(UserError):
            place(wanted, nodes=[slots_per_node] * (count - 1))


def _most_engines(num_ranks: int, slots_per_node: int, slots_per_part: int, nodes_per_engine: int) -> int:
    """The most engines beside ranks, by trying every choice of neighbouring nodes for the next one."""
    full, last = divmod(num_ranks, slots_per_node)
    parts = tuple([slots_per_node // slots_per_part] * full + [last // slots_per_part])

    @cache
    def most(first: int, free: tuple[int, ...]) -> int:
        if first + nodes_per_engine > len(parts):
            return 0
        here, others = free[:nodes_per_engine], (*free[nodes_per_engine:], *parts[first + nodes_per_engine : first + nodes_per_engine + 1])
        counts = range(min(here) + 1)
        return max(count + most(first + 1, (*(left - count for left in here[1:]), *others)) for count in counts)

    return most(0, parts[:nodes_per_engine])


@pytest.mark.parametrize(
    ("tp", "cp", "pp", "ep", "num_ranks"),
    [(4, 1, 1, 1, 16), (2, 2, 2, 1, 16), (8, 1, 4, 1, 64), (4, 2, 2, 8, 64), (2, 1, 4, 16, 128)],
)
def test_blocks_of_ranks_are_the_groups_that_megatron_makes(tp: int, cp: int, pp: int, ep: int, num_ranks: int) -> None:
    """Groups within a node are found as blocks of consecutive ranks, which holds for Megatron's order of dimensions."""
    order = "tp-cp-ep-dp-pp"
    dense = RankGenerator(tp=tp, ep=1, dp=num_ranks // (tp * cp * pp), pp=pp, cp=cp, order=order)
    experts = RankGenerator(tp=1, ep=ep, dp=num_ranks // (ep * pp), pp=pp, cp=1, order=order)
    for generator, name, size in ((dense, "tp", tp), (dense, "tp-cp", tp * cp), (dense, "tp-cp-dp", num_ranks // pp), (experts, "ep", ep)):
        assert sorted(generator.get_ranks(name)) == [list(range(first, first + size)) for first in range(0, num_ranks, size)]


def test_engines_follow_the_ranks_and_fill_their_last_node() -> None:
    placement = place(needs(12, 2, 4), nodes=[8] * 4)
    assert [share.ranks for share in placement.nodes] == [range(8), range(8, 12), range(12, 12)]
    assert [placement.nodes_of_engine(engine) for engine in (0, 1)] == [(1,), (2,)]
    assert placement.nodes[1].engines == {0: range(4, 8)}


def test_an_engine_over_nodes_has_equal_parts_on_neighbours() -> None:
    """12 ranks, then engines of 8 on two nodes: 4 beside the last ranks and 4 on the next node, whose others go on."""
    placement = place(needs(12, 2, 8, 2), nodes=[8] * 4)
    assert [placement.nodes_of_engine(engine) for engine in (0, 1)] == [(1, 2), (2, 3)]
    assert [dict(share.engines) for share in placement.nodes] == [{}, {0: range(4, 8)}, {0: range(4), 1: range(4, 8)}, {1: range(4)}]
    assert nodes_needed(needs(12, 2, 8, 2), slots_per_node=8) == 4
    assert placement_rows(placement)["node 2"] == "engines 0-1 on GPUs 0-7, 4 each, on 2 nodes each"


def test_a_colocated_engine_over_nodes_is_beside_ranks_in_order() -> None:
    placement = place(needs(16, 2, 8, 2, colocated=True), nodes=[8, 8])
    assert [placement.ranks_beside(engine) for engine in (0, 1)] == [(0, 1, 2, 3, 8, 9, 10, 11), (4, 5, 6, 7, 12, 13, 14, 15)]
    options = Reservation(placement, PlacementGroup.empty(), (1, 0), "cuda", {}).engine_options(1)
    assert [each["scheduling_strategy"].placement_group_bundle_index for each in options] == [1, 0]
    assert [each["num_gpus"] for each in options] == [0, 0]
    apart = Reservation(place(needs(0, 1, 16, 2), nodes=[8, 8]), PlacementGroup.empty(), (0, 1), "cuda", {})
    assert [each["num_gpus"] for each in apart.engine_options(0)] == [8, 8]


def test_colocated_engines_share_the_slots_of_ranks() -> None:
    placement = place(needs(16, 4, 4, colocated=True), nodes=[8, 8])
    assert [placement.ranks_beside(engine) for engine in range(4)] == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11), (12, 13, 14, 15)]
    assert [share.slots for share in placement.nodes] == [8, 8]


@pytest.mark.parametrize(
    ("wanted", "nodes", "sentence"),
    [
        (needs(64, 8, 8), [8] * 15, "64 ranks + 8 engines × 8 GPUs = 128 GPUs, 15 nodes × 8 = 120 GPUs; add nodes"),
        (needs(9), [4, 4], "9 ranks = 9 GPUs, 2 nodes × 4 = 8 GPUs"),
        (needs(3), [2, 0], "2 nodes with 2 + 0 = 2 GPUs"),
        (needs(8, 1, 16), [8] * 3, "an engine of 16 GPUs needs 16 / 8 = 2 nodes of 8, but rollout.sglang.nnodes is 1; set it to 2,"),
        (needs(8, 1, 32, 2), [8] * 5, "4 nodes of 8, but rollout.sglang.nnodes is 2; set it to 4, or rollout.sglang.tp_size to 16 or less"),
        (needs(12, 1, 16, 2), [8, 8, 16], "an engine lives on 2 neighbouring nodes (rollout.sglang.nnodes), and only 0 of 1 find 8"),
        (needs(6, 2, 4), [8, 8 - 2], "only 1 of 2 find 4 free GPUs there"),
        (needs(8, 3, 4, colocated=True), [8], "3 engines × 4 GPUs = 12, but they share those of 8 ranks; set rollout.num_engines to 2"),
        (needs(8), [], "8 ranks = 8 GPUs, 0 nodes with 0 = 0 GPUs"),
    ],
)
def test_what_has_no_room_is_refused_with_the_arithmetic(wanted: Needs, nodes: list[int], sentence: str) -> None:
    with pytest.raises(UserError) as caught:
        place(wanted, nodes=nodes)
    assert sentence in str(caught.value)


def test_equal_bundles_are_taken_in_the_order_of_their_addresses() -> None:
    placement = place(needs(20, 1, 8), nodes=[8] * 4)
    # Ray put the first bundle onto 10.0.0.10; the node with 4 ranks and the one with the engine are not interchangeable with the others.
    addresses = [("10.0.0.10", "a"), ("10.0.0.9", "b"), ("10.0.0.2", "c"), ("10.0.0.1", "d")]
    assert match_bundles(placement, addresses) == (1, 0, 2, 3)
    assert match_bundles(placement, [("node10", "a"), ("node9", "b"), ("node2", "c"), ("node1", "d")]) == (1, 0, 2, 3)


def test_bundles_at_one_address_are_told_apart_by_node() -> None:
    placement = Placement(needs(2), (NodeShare(range(1), {}), NodeShare(range(1, 2), {})))
    assert match_bundles(placement, [("127.0.0.1", "f"), ("127.0.0.1", "0")]) == (1, 0)


def test_rows_hold_every_rank_and_engine_in_ranges() -> None:
    placement = place(needs(64, 8, 8), nodes=[8] * 16)
    assert placement_rows(placement) == {
        "nodes 0-7": "ranks 0-63, 8 a node on GPUs 0-7",
        "nodes 8-15": "engines 0-7, 1 a node on GPUs 0-7",
    }


def test_rows_of_one_node() -> None:
    apart = place(needs(4, 2, 2), nodes=[8])
    assert placement_rows(apart) == {"node 0": "ranks 0-3 on GPUs 0-3; engines 0-1 on GPUs 4-7, 2 each"}
    shared = place(needs(8, 8, colocated=True), nodes=[8])
    assert placement_rows(shared) == {"node 0": "ranks 0-7 on GPUs 0-7; engines 0-7 on GPUs 0-7, 1 each"}


def test_tensor_parallel_groups_across_nodes_are_noted() -> None:
    assert crossing_notes(place(needs(16), nodes=[8, 8]), tp=8) == []
    (note,) = crossing_notes(place(needs(32), nodes=[8] * 4), tp=16)
    assert note.startswith("2 of 2 tensor parallel groups of tp 16 ranks lie on 2 nodes of 8 GPUs")
    (note,) = crossing_notes(place(needs(12), nodes=[8] * 2), tp=3)
    assert note.startswith("1 of 4 tensor parallel groups of tp 3 ranks lie on 2 nodes of 8 GPUs")


def test_usable_nodes_are_those_that_the_settings_describe() -> None:
    assert usable_nodes([8, 0, 4, 8], ClusterSettings(), unit="GPU") == [8, 8, 4]
    assert usable_nodes([8, 0, 4, 8], ClusterSettings(gpus_per_node=8), unit="GPU") == [8, 8]
    assert usable_nodes([8, 8, 4], ClusterSettings(gpus_per_node=4, num_nodes=2), unit="GPU") == [4, 4]
    assert usable_nodes([2, 2], ClusterSettings(gpus_per_node=8), unit="CPU") == [2, 2]
    with pytest.raises(UserError, match="num_nodes is 3, but the Ray cluster has 2 usable nodes; start Ray on 1 more"):
        usable_nodes([8, 8], ClusterSettings(num_nodes=3), unit="GPU")
    with pytest.raises(UserError, match="gpus_per_node is 8, but the largest node of the Ray cluster has 4 GPUs"):
        usable_nodes([4, 4], ClusterSettings(gpus_per_node=8), unit="GPU")


def test_what_a_run_needs_follows_from_its_settings() -> None:
    overrides = ("rollout.sglang.tp_size=2", "rollout.num_engines=3", "training.topology.num_ranks=6")
    settings = load_settings(None, ["run.directory=run", "model.path=model", "data.train=train.jsonl", *overrides])
    topology, rollout = settings.training.topology, settings.rollout
    on_gpus, on_cpus = ({"colocate": False, "device_kind": kind} for kind in ("cuda", "cpu"))
    assert Needs.of(topology, rollout, **on_gpus) == Needs(num_ranks=6, num_engines=3, slots_per_engine=2, colocated=False, unit="GPU")
    assert Needs.of(topology, rollout, **on_cpus) == Needs(num_ranks=6, num_engines=3, slots_per_engine=1, colocated=False, unit="CPU")
    assert Needs.of(None, rollout, **on_gpus).num_ranks == 0
    # What does not train or does not generate shares nothing.
    colocated = {**on_gpus, "colocate": True}
    assert Needs.of(topology, rollout, **colocated).slots == 6 and Needs.of(None, rollout, **colocated).slots == 6
    alone = Needs.of(topology, None, **colocated)
    assert (alone.slots, alone.num_engines, alone.colocated, str(alone)) == (6, 0, False, "6 ranks = 6 GPUs")
    spread = load_settings(None, ["run.directory=run", "model.path=model", "data.train=train.jsonl", *overrides, "rollout.sglang.nnodes=2"])
    for kind, slots in (("cuda", 2), ("cpu", 2)):
        wanted = Needs.of(topology, spread.rollout, colocate=False, device_kind=kind)
        assert wanted.slots_per_engine == slots and wanted.nodes_per_engine == 2


def test_the_variables_of_a_run_reach_every_ray_process() -> None:
    placement = place(needs(2, num_engines=1), nodes=[4])
    variables = {"NCCL_NVLS_ENABLE": "0"}
    reservation = Reservation(placement, PlacementGroup.empty(), (0,), "cuda", variables)
    for options in (reservation.rank_options(0), *reservation.engine_options(0)):
        assert options["runtime_env"] == {"env_vars": variables}
    assert "runtime_env" not in Reservation(placement, PlacementGroup.empty(), (0,), "cpu", {}).rank_options(0)


def test_gpus_may_have_numbers_or_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "get_gpu_ids", lambda: [3, "GPU-8f2c", "MIG-4b1d/7/0"])
    assert own_gpus() == ("3", "GPU-8f2c", "MIG-4b1d/7/0")
    dealt = [("10",), ("9",), ("GPU-b",), ("GPU-a",)]
    assert sorted(dealt, key=gpu_order) == [("GPU-a",), ("GPU-b",), ("9",), ("10",)]


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        (needs(1, 1, 1), "1 rank + 1 engine × 1 GPU = 2 GPUs"),
        (needs(2, 2, 1, colocated=True), "2 ranks = 2 GPUs, shared by 2 engines × 1 GPU"),
    ],
)
def test_one_of_something_is_no_plural(wanted: Needs, words: str) -> None:
    assert str(wanted) == words
