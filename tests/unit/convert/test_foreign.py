"""Distributed checkpoints as other programs write them: stacked layers, experts and halves apart, padded vocabularies, no config.json."""

import json
import pickle
import shutil

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed import checkpoint as distributed_checkpoint

from megatron_rl.checkpoints.pickles import read_metadata
from megatron_rl.checkpoints.stored_weights import load_hf_weights, open_weights
from megatron_rl.config.settings import TopologySettings
from megatron_rl.convert.conversion import Options, convert
from megatron_rl.errors import UserError
from megatron_rl.models.build import build_model
from megatron_rl.models.megatron_config import transformer_config
from megatron_rl.models.read_spec import read_model_spec


def save_as_megatron(path, directory, *, change=None, **metadata):
    """The model of `path` by megatron-core's own dist_checkpointing, with what a training script keeps beside the weights."""
    from megatron.core import dist_checkpointing

    spec = read_model_spec(path)
    config = transformer_config(spec, topology=TopologySettings(), dtype=torch.float32, overrides={})
    (model,) = build_model(spec, config, attention="torch")
    load_hf_weights([model], spec, path)
    state = {"model": model.sharded_state_dict(metadata=metadata), "iteration": 7, "args": {"lr": 1.0}}
    if change is not None:
        change(state["model"])
    directory.mkdir(parents=True)
    dist_checkpointing.save(state, str(directory), sharded_strategy=in_process_save())


def in_process_save():
    """megatron-core's format through torch's own writer: upstream's forks a process for every file."""
    from megatron.core.dist_checkpointing.strategies import torch as upstream

    class InProcessSave(upstream.TorchDistSaveShardedStrategy):
        def save(self, sharded_state_dict, checkpoint_dir):
            state, _, _ = upstream._replace_state_dict_keys_with_sharded_keys(sharded_state_dict, self.keep_only_main_replica)
            distributed_checkpoint.save(
                upstream.mcore_to_pyt_state_dict(state, False),
                storage_writer=distributed_checkpoint.FileSystemWriter(checkpoint_dir),
                planner=upstream.MCoreSavePlanner(dedup_replicated_tensors=not self.keep_only_main_replica, flatten_state_dict=False),
            )

    return InProcessSave("torch_dist", 1)


STORED = {"stacked": {}, "one by one": {"non_homogeneous_layers": True}, "in single shards": {"singleton_local_shards": True}}


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "glm4_moe", "deepseek_v3", "phi3", "glm4", "gpt_oss"])
def test_whatever_megatron_wrote_comes_back(tiny_model, tmp_path, one_rank, stored, family):
    path = tiny_model(family=family)
    save_as_megatron(path, tmp_path / "megatron/iter_0000007", **STORED[stored])
    (tmp_path / "megatron/latest_checkpointed_iteration.txt").write_text("7")
    # That a step's directory is found like the one above it does not depend on what lies in it.
    for source in (tmp_path / "megatron", tmp_path / "megatron/iter_0000007")[: 2 if family == "qwen3" else 1]:
        target = tmp_path / f"back from {source.name}"
        convert(source, target, Options(config=path))
        original, back = load_file(path / "model.safetensors"), load_file(target / "model.safetensors")
        assert back.keys() == original.keys()
        assert all(torch.equal(back[name], tensor) for name, tensor in original.items())


def test_layers_are_stacked_where_they_are_all_alike(tiny_model, tmp_path, one_rank):
    save_as_megatron(tiny_model(), tmp_path / "release")
    stored = read_metadata(tmp_path / "release").state_dict_metadata["decoder.layers.mlp.linear_fc1.weight"]
    assert tuple(stored.size) == (2, 384, 64) and len(stored.chunks) == 4, "each layer and each half has its own place"
    with pytest.raises(UserError, match=r"layer_norm_weight of checkpoint .* has shape \(2, 64\), .* needs \(3, 64\)"):
        open_weights(tmp_path / "release", config=tiny_model(name="other", layers=3))


def test_a_release_and_the_places_of_other_programs_are_found(tiny_model, tmp_path, one_rank):
    path = tiny_model()
    save_as_megatron(path, tmp_path / "slime/release")
    (tmp_path / "slime/latest_checkpointed_iteration.txt").write_text("release")
    assert open_weights(tmp_path / "slime", config=path).path == tmp_path / "slime/release"
    shutil.copytree(tmp_path / "slime/release", tmp_path / "verl/actor/dist_ckpt")
    shutil.copytree(path, tmp_path / "verl/actor/huggingface")
    found = open_weights(tmp_path / "verl")
    assert found.path == tmp_path / "verl/actor/dist_ckpt" and found.directory == tmp_path / "verl/actor/huggingface"
    with pytest.raises(UserError, match=r"has no config\.json beside it; name the Hugging Face directory of its model with --config"):
        open_weights(tmp_path / "slime")


def test_rows_of_padding_are_cut_off(tiny_model, tmp_path, one_rank):
    """Bridge#5375: padded rows of the vocabulary were exported."""
    path = tiny_model(tied=False)

    def pad(state):
        for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
            tensor = state[name]
            tensor.data = torch.nn.functional.pad(tensor.data, (0, 0, 0, 96), value=7.0)
            tensor.local_shape = tensor.global_shape = (128, 64)

    save_as_megatron(path, tmp_path / "padded", change=pad)
    convert(tmp_path / "padded", tmp_path / "back", Options(config=path))
    original, back = load_file(path / "model.safetensors"), load_file(tmp_path / "back/model.safetensors")
    assert all(torch.equal(back[name], tensor) for name, tensor in original.items())


def test_a_tied_copy_has_to_be_the_same(tiny_model, tmp_path, one_rank):
    path = tiny_model(tied=False)
    save_as_megatron(path, tmp_path / "untied")
    (path / "config.json").write_text(json.dumps(json.loads((path / "config.json").read_text()) | {"tie_word_embeddings": True}))
    with pytest.raises(UserError, match=r"ties the embeddings, but output_layer\.weight of checkpoint .* differs"):
        open_weights(tmp_path / "untied", config=path)


def test_a_parameter_too_many_is_named(tiny_model, tmp_path, one_rank):
    path = tiny_model()

    def add(state):
        import dataclasses

        extra = state["decoder.final_layernorm.weight"]
        state["more"] = dataclasses.replace(extra, key="decoder.more.weight")

    save_as_megatron(path, tmp_path / "more", change=add)
    with pytest.raises(UserError, match=r"has 1 tensor that Qwen3ForCausalLM of .* does not, the first is decoder\.more\.weight"):
        open_weights(tmp_path / "more", config=path)


def test_another_format_is_named(tiny_model, tmp_path, one_rank):
    path = tiny_model()
    save_as_megatron(path, tmp_path / "old")
    (tmp_path / "old/metadata.json").write_text(json.dumps({"sharded_backend": "zarr", "sharded_backend_version": 1}))
    with pytest.raises(UserError, match=r"sharded_backend 'zarr' .*needs 'torch_dist'"):
        open_weights(tmp_path / "old", config=path)


def test_half_of_a_parameter_is_never_filled_up(tiny_model, tmp_path, one_rank):
    path = tiny_model()
    save_as_megatron(path, tmp_path / "half", non_homogeneous_layers=True)
    file = tmp_path / "half/.metadata"
    metadata = pickle.loads(file.read_bytes())
    metadata.state_dict_metadata["decoder.layers.0.mlp.linear_fc1.weight"].chunks.pop()
    file.write_bytes(pickle.dumps(metadata))
    with pytest.raises(UserError, match=r"linear_fc1\.weight of checkpoint .* has 12,288 of 24,576 numbers in its files"):
        convert(tmp_path / "half", tmp_path / "back", Options(config=path))
    assert not (tmp_path / "back").exists()
