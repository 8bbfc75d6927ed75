"""Every byte that a rank gives up for a colocated engine, and gets back: on a pretended GPU, whose tensors are all counted."""

import gc
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from layout_runs import make_settings, make_trainer, train_batches
from layout_table import BASE, LAYOUTS

pytestmark = pytest.mark.fresh_ranks

OBJECTIVES: dict[str, dict[str, Any]] = {
    "ppo": {"advantage": {"kind": "gae"}, "kl": {"coef": 0.05}},
    "distillation": {"distillation_coef": 0.5},
}


def device_and_host_bytes() -> tuple[int, int]:
    """Bytes of all storages of tensors on the pretended GPU, and of those in host memory."""
    import torch
    from pretended_gpu import on_host

    gc.collect()
    found: dict[bool, dict[int, int]] = {False: {}, True: {}}
    for tensor in gc.get_objects():
        if issubclass(type(tensor), torch.Tensor) and tensor.layout == torch.strided:
            storage = tensor.untyped_storage()
            found[on_host(tensor)][storage._cdata] = storage.nbytes()
    return sum(found[False].values()), sum(found[True].values())


def sleep_and_wake(trainer: Any) -> dict[str, Any]:
    """What is counted at each station of a turn: all here, weights alone, after a sync of them, nothing, all again; and sizes of parts."""
    import torch

    from megatron_rl.training.offload import PARTS
    from megatron_rl.weights.ipc import allocate_shared
    from megatron_rl.weights.transport import WeightSpec, fill_buckets, make_buckets

    memories = trainer._memories.values()
    counted: dict[str, Any] = {part: sum(memory.num_bytes(part) for memory in memories) for part in PARTS}
    counted["all"] = device_and_host_bytes()
    trainer.put_away(("gradients", "optimizer"))
    counted["weights"] = device_and_host_bytes()
    manifest = [WeightSpec.of(name, tensor) for name, tensor in trainer.weights()]
    buckets = make_buckets(manifest, max_bytes=50_000)
    filled = fill_buckets(trainer.weights(), buckets, allocate=lambda size, _: allocate_shared(size, torch.device("cuda")))
    counted["most in buckets"] = max(device_and_host_bytes()[0] for _ in filled) - counted["weights"][0]
    counted["largest bucket"] = max(sum(spec.num_bytes for spec in bucket) for bucket in buckets)
    counted["after a sync"] = device_and_host_bytes()
    trainer.put_away()
    counted["nothing"] = device_and_host_bytes()
    trainer.take_back()
    counted["all again"] = device_and_host_bytes()
    return counted


def asked_bytes(resting: Any) -> tuple[int, int]:
    """What the pretended GPU and the host hold more while a reference or a teacher is in its place."""
    before = device_and_host_bytes()
    with resting.in_place():
        inside = device_and_host_bytes()
    return inside[0] - before[0], inside[1] - before[1]


def run(rank: int, world_size: int, init_method: str, model: str, teacher: str, directory: str) -> dict[str, dict[str, Any]]:
    """For each objective three turns of training, sleeping and waking; bytes of what rests in host memory throughout, of what is left of it
    elsewhere, and of what it takes while it is asked.
    """
    import pretended_gpu

    pretended_gpu.pretend()
    import megatron_rl.training.trainer  # noqa: F401
    from megatron_rl.training.topology import shutdown

    gc.collect()
    gc.freeze()  # what was imported is not looked through again and again
    found = {}
    for name, objective in OBJECTIVES.items():
        settings = make_settings(model, Path(directory) / name, LAYOUTS[BASE], objective=objective, dtype="bfloat16")
        if name == "distillation":
            settings = settings.model_copy(update={"model": settings.model.model_copy(update={"teacher": Path(teacher)})})
        trainer = make_trainer(settings, rank, f"{init_method}-{name}")
        turns = []
        for seed in range(3):
            train_batches(trainer, settings, [seed])
            turns.append(sleep_and_wake(trainer))
        resting = trainer._reference if trainer._teacher is None else trainer._teacher._weights
        found[name] = {
            "turns": turns,
            "models": sorted(trainer.trained_models()),
            "rests": sum(len(part) for parts in resting._host for part in parts),
            "here": sum(tensor.nbytes for tensor in resting._tensors()),
            "asked": asked_bytes(resting),
            "trained": sum(parameter.nbytes for chunk in trainer._model.chunks for parameter in chunk.parameters()),
        }
        shutdown()
        del trainer, resting  # their bytes are not the next one's
    return found


def test_every_byte_is_given_up_and_comes_back_three_times(
    run_ranks: Callable[..., list[Any]], tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    teacher = tiny_model(name="teacher", tied=False, layers=3)
    (found,) = run_ranks(run, 1, str(tiny_model(tied=False)), str(teacher), str(tmp_path / "run"), timeout_s=240)
    assert {name: objective["models"] for name, objective in found.items()} == {"ppo": ["critic", "policy"], "distillation": ["policy"]}
    reference, distilled = found["ppo"], found["distillation"]
    assert reference["rests"] == reference["here"] == reference["trained"], "the reference is of the policy, in whose place it is put"
    assert reference["asked"] == (0, 0), "it changes places with the policy"
    assert distilled["rests"] > distilled["trained"] and distilled["here"] == 0, "a teacher of more layers than the policy"
    assert distilled["asked"] == (distilled["rests"], 0), "a teacher is copied to the device and dropped"
    for name, objective in found.items():
        for number, turn in enumerate(objective["turns"]):
            check_turn(turn, f"{name}, turn {number}", first=number == 0)
        assert objective["turns"][1] == objective["turns"][2], f"{name}: no turn leaves more than the one before"


def check_turn(turn: Mapping[str, Any], name: str, *, first: bool) -> None:
    """The `first` takes page-locked memory, which is kept."""
    device = {station: counted[0] for station, counted in turn.items() if isinstance(counted, tuple)}
    host = {station: counted[1] for station, counted in turn.items() if isinstance(counted, tuple)}
    assert min(turn["parameters"], turn["gradients"], turn["optimizer"]) > 10_000, name
    assert device["all"] - device["weights"] == turn["gradients"] + turn["optimizer"], name
    assert device["weights"] - device["nothing"] == turn["parameters"], name
    assert device["after a sync"] == device["weights"] and device["all again"] == device["all"], name
    assert turn["most in buckets"] == turn["largest bucket"], name
    assert device["nothing"] < 0.02 * device["all"], f"{name}: what is left are frequencies of rotary embeddings and such"
    taken = turn["parameters"] + turn["optimizer"] if first else 0
    assert (host["nothing"] - host["all"], host["all again"]) == (taken, host["nothing"]), name
