"""OLMo-3: OLMo-2 with a window in three of four layers, which keep the default rotary embedding."""

import dataclasses

from megatron_rl.models.families import olmo2

FAMILY = dataclasses.replace(
    olmo2.FAMILY,
    architecture="Olmo3ForCausalLM",
    # In the older spelling transformers 5 takes this base for layers with a window whatever the file says, transformers 4 the file's.
    fixed={"rope_theta": 500000.0},
    windows="given",
    window_theta_key="rope_theta",
)
