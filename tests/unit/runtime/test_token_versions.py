"""Which weights may have made the tokens that a step trains on."""

import numpy as np
import pytest

from megatron_rl.errors import UserError
from megatron_rl.runtime.rollouts import check_versions
from megatron_rl.types import Group, Prompt, Sample, StopReason


@pytest.mark.parametrize("versions", [[2, 2, 2], [1, 2, -1], [-1, -1, -1], [1, 1, 1]])
def test_tokens_of_the_weights_that_were_served_are_taken(versions: list[int]) -> None:
    check_versions([group_of(versions)], step=2, oldest_version=1, rollout="rollout.function a:b")


@pytest.mark.parametrize("versions", [[0, 2, 2], [2, 2, 0], [0, 0, 0], [2, 3, 2]])
def test_a_token_of_other_weights_is_one_sentence(versions: list[int]) -> None:
    message = (
        f"step 3: sample 0 of prompt p has tokens of weight versions {min(versions)} to {max(versions)}, needs 1 to 2 .*staleness 1.*"
        "rollout.function a:b has to ask the engine anew"
    )
    with pytest.raises(UserError, match=message):
        check_versions([group_of(versions)], step=2, oldest_version=1, rollout="rollout.function a:b")


def group_of(versions: list[int]) -> Group:
    prompt = Prompt(id="p", token_ids=np.array([1]), text="")
    made = [version >= 0 for version in versions]
    arrays = {"response_ids": np.ones(3), "loss_mask": made, "rollout_log_probs": np.full(3, -1.0), "weight_versions": versions}
    return Group("p", prompt, (Sample(group_id="p", index=0, prompt=prompt, stop_reason=StopReason.STOP, **arrays),))
