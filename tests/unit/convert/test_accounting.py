"""Every number of the model, built without memory and without peers, is written by tensors of its files, each of which is read."""

import dataclasses
import json
from contextlib import closing, nullcontext
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_rl.checkpoints.stored_weights import open_weights
from megatron_rl.convert import verification
from megatron_rl.convert.conversion import Options, convert
from megatron_rl.convert.verification import WatchedTensors, check_numbers, check_padding, check_parameters, model_shapes
from megatron_rl.errors import UserError
from megatron_rl.models.read_spec import read_model_spec
from megatron_rl.models.weight_table import parameter_shape, rules


def check(source):
    check_parameters(WatchedTensors(source))


@pytest.fixture
def cheap_model(monkeypatch):
    def of_the_table(spec):
        return {rule.megatron: parameter_shape(rule) for rule in rules(spec) if rule.exported}

    monkeypatch.setattr(verification, "model_shapes", of_the_table)


@pytest.mark.parametrize("family", ["qwen3", "deepseek_v3"])
def test_parameters_and_rules_are_the_same(tiny_model, family, monkeypatch):
    path = tiny_model(family=family)
    shapes = model_shapes(read_model_spec(path))
    monkeypatch.setattr(verification, "model_shapes", lambda spec: dict(shapes))
    with closing(open_weights(path)) as source:
        check(source)
        table = list(verification.rules(source.spec))
        monkeypatch.setattr(verification, "rules", lambda spec: table[:-2])
        with pytest.raises(UserError, match=r"makes nothing of .*, which the model has"):
            check(source)
        monkeypatch.setattr(verification, "rules", lambda spec: [*table, dataclasses.replace(table[0], megatron="decoder.more.weight")])
        with pytest.raises(UserError, match=r"makes decoder\.more\.weight of shape .*, which the model does not have"):
            check(source)
        monkeypatch.setattr(verification, "rules", lambda spec: [dataclasses.replace(table[0], tensors=table[1].tensors), *table[1:]])
        with pytest.raises(UserError, match=r"the weight table makes .*, which the model does not have"):
            check(source)


@pytest.mark.parametrize("to", ["hf", "megatron"])
@pytest.mark.parametrize("family", ["gpt_oss", "glm4_moe"])
def test_every_number_is_written_and_every_tensor_read(tiny_model, tmp_path, cheap_model, family, to):
    convert(tiny_model(family=family, tied=False), tmp_path / "made", Options(to=to))
    with closing(open_weights(tmp_path / "made")) as source:
        tensors = WatchedTensors(source)
        check_parameters(tensors)
        assert tensors.read_names == source.names()


def test_a_number_that_nothing_writes_shows(tiny_model, cheap_model, monkeypatch):
    """Whatever a parameter had before it was loaded must be gone: memory that is new holds old numbers."""
    load = verification.load_parameter

    def load_all_but_a_row(parameter, rule, *arguments, **ranks):
        row = parameter[0].clone()
        load(parameter, rule, *arguments, **ranks)
        if rule.megatron.endswith("layers.1.mlp.linear_fc1.weight"):
            parameter[0] = row

    monkeypatch.setattr(verification, "load_parameter", load_all_but_a_row)
    words = r"wrote 64 of 24,576 numbers of decoder\.layers\.1\.mlp\.linear_fc1\.weight"
    with closing(open_weights(tiny_model())) as source, pytest.raises(UserError, match=words):
        check(source)


def test_a_tensor_that_goes_nowhere_is_named(tiny_model, cheap_model, monkeypatch):
    with closing(open_weights(tiny_model())) as source:
        names = source.names()
        monkeypatch.setattr(source, "names", lambda: {*names, "model.more.weight"})
        with pytest.raises(UserError, match=r"model\.more\.weight in .* goes into no parameter of the model"):
            check(source)


def test_numbers_that_the_model_leaves_out_are_checked(tiny_model, cheap_model):
    path = tiny_model(family="glm4_moe")
    mtp = {"model.layers.2.eh_proj.weight": torch.full((64, 128), float("inf"))}
    save_file(load_file(path / "model.safetensors") | mtp, path / "model.safetensors")
    with closing(open_weights(path)) as source:
        tensors = WatchedTensors(source)
        check_parameters(tensors)
        with pytest.raises(UserError, match=r"eh_proj\.weight in .* has 8,192 of 8,192 numbers not finite"):
            check_numbers(tensors)


def test_a_number_that_is_not_finite_is_written_all_the_same(tiny_model, cheap_model):
    path = tiny_model()
    tensors = load_file(path / "model.safetensors")
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, path / "model.safetensors")
    with closing(open_weights(path)) as source:
        check(source)


@pytest.mark.parametrize("vocab", [32, 33])
def test_padded_rows_are_looked_at_as_ranks_load_them(tiny_model, monkeypatch, vocab):
    """The smallest tp under which there are any is 3 for 32 tokens, 2 for 33."""
    load, seen = verification.load_parameter, []

    def load_with_padding(value, parameter, rule, *arguments, tp_rank, tp):
        load(parameter, rule, *arguments, tp_rank=tp_rank, tp=tp)
        seen.append((rule.megatron, tuple(parameter.shape), tp_rank, tp))
        if rule.megatron.startswith("output_layer") and tp_rank == tp - 1:
            parameter.view(torch.int32)[-1] = value

    with closing(open_weights(tiny_model(vocab=vocab, tied=False))) as source:
        monkeypatch.setattr(verification, "load_parameter", partial(load_with_padding, 0))
        check_padding(source)
        tp, rows = (3, 11) if vocab == 32 else (2, 17)
        names = ("embedding.word_embeddings.weight", "output_layer.weight")
        assert seen == [(name, (rows, 64), rank, tp) for name in names for rank in range(tp)]
        monkeypatch.setattr(verification, "load_parameter", partial(load_with_padding, verification._UNWRITTEN))
        with pytest.raises(UserError, match=rf"wrote 64 of {64 * rows:,} numbers of output_layer\.weight"):
            check_padding(source)
        monkeypatch.setattr(verification, "load_parameter", partial(load_with_padding, 1))
        with pytest.raises(UserError, match=rf"output_layer\.weight is loaded with padded rows that are not zero by rank {tp - 1} of {tp}"):
            check_padding(source)


@pytest.mark.parametrize("value", [0.0, 7.0, float("nan")])
def test_padded_rows_of_a_runs_checkpoint_are_zero(tiny_model, tmp_path, value):
    path = tiny_model(vocab=33, tied=False)
    tensors = load_file(path / "model.safetensors")
    for tensor in (tensors["model.embed_tokens.weight"], tensors["lm_head.weight"]):
        tensor[-2:] = 0
    tensors["lm_head.weight"][-2:, 5] = value
    save_file(tensors, path / "model.safetensors")
    convert(path, tmp_path / "step/megatron", Options())
    file = tmp_path / "step/megatron/config.json"
    # Two of the rows that are stored are no token's any more.
    file.write_text(json.dumps(json.loads(file.read_text()) | {"vocab_size": 31}))
    words = r"output_layer\.weight of checkpoint .* has 2 numbers that are not zero in its 2 rows behind the vocabulary of 31 tokens"
    with closing(open_weights(tmp_path / "step")) as source:
        with pytest.raises(UserError, match=words) if value else nullcontext():
            check_padding(source)
        (tmp_path / "step/megatron/manifest.json").unlink()
        check_padding(source)
