"""Entropy-aware sampling on an engine: a logit processor of SGLang, named by requests of this program's client alone."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_rl.algorithms.entropy_aware import Tensor, reshaped

PARAMETER = "entropy_aware"
"""Key of a request's custom_params: the numbers of `EntropyAware.numbers`."""


class EntropyProcessor:
    """SGLang's protocol of a logit processor: it divides the result by the temperature, draws, and reports log-probs of the quotient."""

    def __call__(self, logits: Tensor, custom_param_list: Sequence[Mapping[str, Any]]) -> Tensor:
        """Return `logits` [T, V] as `reshaped`, by the parameters of each row's request."""
        return reshaped(logits, [parameters[PARAMETER] for parameters in custom_param_list])


# A pickle of the class's name alone, which the engine imports from this package: no code travels.
PROCESSOR = json.dumps({"callable": f"c{EntropyProcessor.__module__}\n{EntropyProcessor.__qualname__}\n.".encode().hex()})
"""Value of a request's custom_logit_processor."""
