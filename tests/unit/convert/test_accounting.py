"""Every parameter of the model, built without memory and without peers, is made of tensors of the weight table."""

import dataclasses

import pytest

from megatron_rl.convert import verification
from megatron_rl.convert.verification import check_parameters
from megatron_rl.errors import UserError
from megatron_rl.models.read_spec import read_model_spec


@pytest.mark.parametrize("family", ["qwen3", "deepseek_v3"])
def test_parameters_and_rules_are_the_same(tiny_model, family, monkeypatch):
    spec = read_model_spec(tiny_model(family=family))
    check_parameters(spec)
    rules = list(verification.rules(spec))
    monkeypatch.setattr(verification, "rules", lambda spec: rules[:-2])
    with pytest.raises(UserError, match=r"makes nothing of .*, which the model has"):
        check_parameters(spec)
    monkeypatch.setattr(verification, "rules", lambda spec: [*rules, dataclasses.replace(rules[0], megatron="decoder.more.weight")])
    with pytest.raises(UserError, match=r"makes decoder\.more\.weight of shape .*, which the model does not have"):
        check_parameters(spec)
