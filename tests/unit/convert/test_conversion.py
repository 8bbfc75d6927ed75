"""There and back bit by bit for every family, what is kept beside the weights, and targets that are whole or absent."""

import ctypes
import json
import shutil
import threading
from contextlib import closing
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch
from layout_table import DENSE_FAMILIES, MIXTURE_FAMILIES
from safetensors.torch import load_file, save_file

from megatron_rl.checkpoints import manifest
from megatron_rl.checkpoints.hugging_face import save_hf
from megatron_rl.checkpoints.manifest import entry_of
from megatron_rl.checkpoints.stored_weights import open_weights
from megatron_rl.convert import conversion
from megatron_rl.convert.conversion import Options, convert
from megatron_rl.errors import UserError
from megatron_rl.models.read_spec import read_model_spec
from megatron_rl.models.weight_table import tensor_shapes
from megatron_rl.system import files

FAMILIES = {
    "qwen3": {},
    "qwen3, odd vocabulary": {"tied": False, "vocab": 33},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "tied": False},
    "qwen3 moe": {"family": "qwen3_moe"},
    "gpt-oss": {"family": "gpt_oss", "tied": False},
    "glm 4.5": {"family": "glm4_moe"},
    "deepseek v3": {"family": "deepseek_v3"},
    "deepseek v3 without a latent of queries": {"family": "deepseek_v3", "q_lora_rank": None, "first_k_dense_replace": 0},
}
MTP = {"model.layers.2.eh_proj.weight": torch.randn(64, 128), "model.layers.2.mlp.experts.0.up_proj.weight": torch.randn(32, 64)}


def tensors_of(path):
    return {name: tensor for file in path.glob("*.safetensors") for name, tensor in load_file(file).items()}


def assert_same_tensors(path, want):
    got = tensors_of(path)
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert got[name].dtype == tensor.dtype and torch.equal(got[name], tensor), name


OTHERS = {*DENSE_FAMILIES, *MIXTURE_FAMILIES} - {options.get("family") for options in FAMILIES.values()}


@pytest.mark.parametrize(
    ("family", "dtype"), [*product(FAMILIES, ["float32", "bfloat16"]), *((family, "bfloat16") for family in sorted(OTHERS))]
)
def test_there_and_back_is_bit_exact(tiny_model, tmp_path, family, dtype):
    path = tiny_model(**FAMILIES.get(family, {"family": family}), torch_dtype=dtype)
    original = {name: tensor.to(getattr(torch, dtype)) for name, tensor in tensors_of(path).items()}
    for name in original:
        if name.endswith("e_score_correction_bias"):
            original[name] = original[name].float()
    save_file(original, path / "model.safetensors", metadata={"format": "pt"})
    assert convert(path, tmp_path / "ours", Options(max_shard_bytes=30_000)).startswith("megatron, ")
    assert len(list((tmp_path / "ours").glob("*.distcp"))) > 1
    assert convert(tmp_path / "ours", tmp_path / "back", Options(max_shard_bytes=50_000)).startswith("hf, ")
    assert_same_tensors(tmp_path / "back", original)
    names = {file.name for file in path.iterdir() if file.suffix != ".safetensors"}
    assert "config.json" in names and "tokenizer.json" in names
    for name in names - {"config.json"}:
        assert (tmp_path / "back" / name).read_bytes() == (path / name).read_bytes(), name
    config, back = (json.loads((place / "config.json").read_text()) for place in (path, tmp_path / "back"))
    mtp = {"num_nextn_predict_layers": 0} if "num_nextn_predict_layers" in config else {}
    assert back == config | mtp, "layers of multi-token prediction that are not there must not be promised"


def test_layers_that_are_not_built_are_kept_or_dropped_whole(tiny_model, tmp_path):
    path = tiny_model(family="glm4_moe")
    original = tensors_of(path)
    save_file(original | MTP, path / "model.safetensors")
    convert(path, tmp_path / "ours", Options())
    assert json.loads((tmp_path / "ours/manifest.json").read_text())["stale_once_trained"] == sorted(MTP)
    convert(tmp_path / "ours", tmp_path / "back", Options())
    assert_same_tensors(tmp_path / "back", original | MTP)
    assert json.loads((tmp_path / "back/config.json").read_text())["num_nextn_predict_layers"] == 1
    convert(tmp_path / "ours", tmp_path / "dropped", Options(drop_mtp=True))
    assert_same_tensors(tmp_path / "dropped", original)
    assert json.loads((tmp_path / "dropped/config.json").read_text())["num_nextn_predict_layers"] == 0


def test_a_run_s_checkpoint_gives_layers_of_its_export_only(tiny_model, tmp_path):
    path, step = tiny_model(family="glm4_moe"), tmp_path / "step-000001"
    original = tensors_of(path)
    convert(path, step / "megatron", Options())
    (step / "megatron/config.json").unlink()
    # A run's export of other weights than its checkpoint's: only what the model does not build is taken from it.
    save_hf(step / "hf", {name: tensor + 1 for name, tensor in original.items()}, source=path, stale=MTP.items())
    assert convert(step, tmp_path / "back", Options()).startswith("hf, ")
    assert_same_tensors(tmp_path / "back", original | MTP)
    assert json.loads((tmp_path / "back/config.json").read_text())["num_nextn_predict_layers"] == 1
    assert json.loads((tmp_path / "back/manifest.json").read_text())["stale_once_trained"] == sorted(MTP)
    convert(step, tmp_path / "dropped", Options(drop_mtp=True))
    assert_same_tensors(tmp_path / "dropped", original)


def test_computed_tensors_are_no_multi_token_prediction_layer(tiny_model, tmp_path):
    path = tiny_model(family="glm4_moe")
    original = tensors_of(path) | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    save_file(original, path / "model.safetensors")
    convert(path, tmp_path / "back", Options(to="hf", drop_mtp=True))
    assert_same_tensors(tmp_path / "back", original)
    assert json.loads((tmp_path / "back/manifest.json").read_text())["stale_once_trained"] == []
    assert json.loads((tmp_path / "back/config.json").read_text())["num_nextn_predict_layers"] == 0


def test_another_dtype_is_rounded_once_and_named(tiny_model, tmp_path):
    path = tiny_model(family="deepseek_v3")
    original = tensors_of(path)
    convert(path, tmp_path / "ours", Options(dtype=torch.bfloat16))
    convert(tmp_path / "ours", tmp_path / "back", Options())
    keep = {name for name in original if name.endswith("e_score_correction_bias")}
    assert keep, "the routers' biases stay float32"
    want = {name: tensor if name in keep else tensor.bfloat16() for name, tensor in original.items()}
    assert_same_tensors(tmp_path / "back", want)
    assert json.loads((tmp_path / "back/config.json").read_text())["torch_dtype"] == "bfloat16"


def test_the_dtype_is_named_also_where_config_json_named_none(tiny_model, tmp_path):
    path = tiny_model()
    file = path / "config.json"
    config = {key: value for key, value in json.loads(file.read_text()).items() if key not in ("dtype", "torch_dtype")}
    file.write_text(json.dumps(config))
    convert(path, tmp_path / "as it is", Options(to="hf"))
    convert(path, tmp_path / "rounded", Options(to="hf", dtype=torch.bfloat16))
    assert (tmp_path / "as it is/config.json").read_bytes() == file.read_bytes()
    assert json.loads((tmp_path / "rounded/config.json").read_text()) == config | {"torch_dtype": "bfloat16"}


def test_a_parameter_of_two_dtypes_has_the_wider(tiny_model, tmp_path):
    path = tiny_model(torch_dtype="bfloat16")
    tensors = {name: tensor.bfloat16() for name, tensor in tensors_of(path).items()}
    wide = "model.layers.0.self_attn.k_proj.weight"
    tensors[wide] = torch.randn(tensors[wide].shape)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    convert(path, tmp_path / "ours", Options())
    with closing(open_weights(tmp_path / "ours")) as source:
        assert torch.equal(source.read(wide), tensors[wide])


def test_files_are_filled_to_their_size_and_named_by_an_index(tiny_model, tmp_path):
    path = tiny_model()
    sizes = {name: tensor.nbytes for name, tensor in tensors_of(path).items()}
    convert(path, tmp_path / "hf", Options(to="hf", max_shard_bytes=max(sizes.values())))
    index = json.loads((tmp_path / "hf/model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(sizes.values())
    files = {file.name: load_file(file) for file in (tmp_path / "hf").glob("*.safetensors")}
    assert index["weight_map"] == {name: file for file, tensors in files.items() for name in tensors}
    convert(path, tmp_path / "one file", Options(to="hf", max_shard_bytes=sum(sizes.values())))
    assert [file.name for file in (tmp_path / "one file").glob("*.safetensors*")] == ["model.safetensors"]


def test_our_format_is_what_megatron_core_opens(tiny_model, tmp_path):
    from megatron.core import dist_checkpointing

    convert(tiny_model(torch_dtype="bfloat16"), tmp_path / "ours", Options())
    assert dist_checkpointing.check_is_distributed_checkpoint(str(tmp_path / "ours"))
    assert dist_checkpointing.load_common_state_dict(str(tmp_path / "ours")) == {}
    keys = dist_checkpointing.load_tensors_metadata(str(tmp_path / "ours"))
    assert "decoder.layers.1.mlp.linear_fc1.weight" in keys
    assert {(tmp_path / "ours" / name).stat().st_mode for name in ("__0_0.distcp", "config.json")} == {
        (tmp_path / "ours/config.json").stat().st_mode
    }


def test_code_is_left_behind_unless_asked_for(tiny_model, tmp_path):
    path = tiny_model(auto_map={"AutoModelForCausalLM": "modeling.Model"})
    (path / "modeling.py").write_text("raise SystemExit('ran')")
    convert(path, tmp_path / "without", Options(to="hf"))
    assert not (tmp_path / "without/modeling.py").exists()
    assert "auto_map" not in json.loads((tmp_path / "without/config.json").read_text())
    convert(path, tmp_path / "with", Options(to="hf", copy_code=True))
    assert (tmp_path / "with/modeling.py").read_bytes() == (path / "modeling.py").read_bytes()
    assert (tmp_path / "with/config.json").read_bytes() == (path / "config.json").read_bytes()


def test_progress_has_speed_and_time_left(monkeypatch):
    clock, said = [100.0], []
    monkeypatch.setattr(conversion.time, "monotonic", lambda: clock[0])
    progress = conversion.Progress(said.append, 100 * 10**9)
    clock[0] += 4
    progress.add(4 * 10**9)
    assert said == [], "every few seconds is enough"
    clock[0] += 6
    progress.add(6 * 10**9)
    assert said == ["10.00 GB of 100.00 GB, 1.00 GB/s, 90 s left"]


def test_what_is_small_has_a_size_too(monkeypatch):
    clock, said = [100.0], []
    monkeypatch.setattr(conversion.time, "monotonic", lambda: clock[0])
    progress = conversion.Progress(said.append, 2 * 10**9)
    clock[0] += 10
    progress.add(999_000_000)
    assert said == ["999.00 MB of 2.00 GB, 99.90 MB/s, 10 s left"]


def test_what_an_ended_attempt_left_is_not_used(tiny_model, tmp_path, monkeypatch, read_all):
    path, target, hashed = tiny_model(layers=4), tmp_path / "ours", []
    for name in ("__0_0.distcp", "__99_0.distcp"):
        (tmp_path / ".ours.partial").mkdir(exist_ok=True)
        (tmp_path / ".ours.partial" / name).write_bytes(b"half")

    def stop(file):
        if len(hashed) == 3:
            raise KeyboardInterrupt
        hashed.append(file)
        return entry_of(file)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(manifest, "entry_of", stop)
        convert(path, target, Options(max_shard_bytes=60_000))
    assert not [file for file in tmp_path.iterdir() if "ours" in file.name]
    convert(path, target, Options(max_shard_bytes=60_000, dtype=torch.bfloat16))
    assert {tensor.dtype for tensor in read_all(target).values()} == {torch.bfloat16}
    assert not [file for file in tmp_path.iterdir() if file.name.startswith(".ours")]


def test_a_target_has_one_writer(tiny_model, tmp_path):
    path, target = tiny_model(), tmp_path / "ours"
    with conversion._target_directory(target, 0) as partial:
        (partial / "file").write_text("of the first")
        with pytest.raises(UserError, match=f"another process is writing {target}"):
            convert(path, target, Options())
    assert [file.name for file in target.iterdir()] == ["file"]


def test_a_full_disk_is_seen_before_the_first_byte(tiny_model, tmp_path, monkeypatch):
    path = tiny_model()
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(files.shutil, "disk_usage", lambda place: usage._replace(free=100))
    with pytest.raises(UserError, match=r"the target needs 0\.\d+ GB, but .* has 0\.00 GB free"):
        convert(path, tmp_path / "ours", Options())
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_a_target_inside_of_the_source_is_refused(tiny_model, tmp_path):
    path = tiny_model()
    convert(path, tmp_path / "step/megatron", Options())
    (tmp_path / "link").symlink_to(path)
    before = sorted(tmp_path.rglob("*"))
    for source, target in ((path, path / "sub/more"), (path, tmp_path / "link/sub"), (tmp_path / "step", tmp_path / "step/out")):
        with pytest.raises(
            UserError, match=f"{target} is inside of {source}, which is converted and stays as it is; give a target elsewhere"
        ):
            convert(source, target, Options())
    assert sorted(tmp_path.rglob("*")) == before


def test_a_place_without_directories_is_one_sentence(tiny_model):
    with pytest.raises(UserError, match=r"^cannot write /proc/x/out: no directory can be made there; give another target$"):
        convert(tiny_model(), Path("/proc/x/out"), Options())


def test_an_existing_target_is_left_alone(tiny_model, tmp_path):
    path = tiny_model()
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours/mine").write_text("mine")
    with pytest.raises(UserError, match="ours exists already"):
        convert(path, tmp_path / "ours", Options())
    assert [file.name for file in (tmp_path / "ours").iterdir()] == ["mine"]


def test_weights_of_another_model_are_refused(tiny_model, tmp_path):
    path, other = tiny_model(), tiny_model(name="other", layers=3)
    convert(path, tmp_path / "ours", Options())
    (tmp_path / "ours/config.json").write_bytes((other / "config.json").read_bytes())
    with pytest.raises(UserError, match=r"has no decoder\.layers\.2\.self_attention\.linear_qkv\.layer_norm_weight, which the model of"):
        open_weights(tmp_path / "ours")
    fewer = tiny_model(name="fewer", layers=1)
    (tmp_path / "ours/config.json").write_bytes((fewer / "config.json").read_bytes())
    with pytest.raises(UserError, match=r"has 8 tensors that Qwen3ForCausalLM of .* does not, the first is decoder\.layers\.1"):
        open_weights(tmp_path / "ours")
    narrow = tiny_model(name="narrow", intermediate_size=96)
    (tmp_path / "ours/config.json").write_bytes((narrow / "config.json").read_bytes())
    with pytest.raises(UserError, match=r"linear_fc1\.weight of checkpoint .* has shape \(384, 64\), .* needs \(192, 64\)"):
        open_weights(tmp_path / "ours")
    shutil.copyfile(path / "model.safetensors", narrow / "model.safetensors")
    with pytest.raises(UserError, match=r"gate_proj\.weight in .* has shape \(192, 64\), config\.json needs \(96, 64\)"):
        convert(narrow, tmp_path / "never", Options())
    assert not [file for file in tmp_path.iterdir() if "never" in file.name], "nothing was begun"


def test_sources_that_are_none_are_refused(tmp_path):
    with pytest.raises(UserError, match="is not a directory"):
        open_weights(tmp_path / "nothing")
    with pytest.raises(UserError, match="neither a Hugging Face directory"):
        open_weights(tmp_path)


def test_a_saved_directory_of_a_run_is_converted(tiny_model, tmp_path):
    """Whatever wrote a Hugging Face directory: ours has experts one by one in files of any number."""
    path = tiny_model(family="qwen3_moe")
    save_hf(tmp_path / "saved", tensors_of(path), source=path, max_shard_bytes=20_000)
    convert(tmp_path / "saved", tmp_path / "ours", Options())
    convert(tmp_path / "ours", tmp_path / "back", Options())
    assert_same_tensors(tmp_path / "back", tensors_of(path))


def test_memory_does_not_grow_with_the_model(tiny_model, tmp_path):
    """What is allocated is a few of the largest tensors, of which this model of 120 MB has 4 MB: pages of files are not."""
    tiny = tiny_model()
    convert(tiny, tmp_path / "what the first one loads", Options())
    config = json.loads((tiny / "config.json").read_text())
    config |= {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 16, "vocab_size": 1024, "torch_dtype": "bfloat16"}
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "config.json").write_text(json.dumps(config))
    shapes = tensor_shapes(read_model_spec(tmp_path / "config"))
    tensors = ((name, torch.ones(shape, dtype=torch.bfloat16)) for name, shape in shapes)
    save_hf(tmp_path / "hf", tensors, source=tmp_path / "config", max_shard_bytes=2**24)
    largest = 2 * 2048 * 512 * 2
    assert sum(file.stat().st_size for file in (tmp_path / "hf").iterdir()) > 100e6
    for source, target in ((tmp_path / "hf", tmp_path / "ours"), (tmp_path / "ours", tmp_path / "back")):
        peak = peak_bytes(partial(convert, source, target, Options(max_shard_bytes=2**24)))
        assert peak <= 3 * largest + 32e6, f"{source.name} to {target.name} took {peak / 1e6:.0f} MB"


def peak_bytes(action):
    """The most that this process had allocated while `action` ran, beyond what it had before."""

    def allocated():
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))

    def watch():
        while not done.wait(0.002):
            found.append(allocated())

    # What is free, but still this process's, would hide the first bytes.
    ctypes.CDLL(None).malloc_trim(0)
    found, done = [allocated()], threading.Event()
    thread = threading.Thread(target=watch)
    thread.start()
    try:
        action()
    finally:
        done.set()
        thread.join()
    return max(found) - found[0]
