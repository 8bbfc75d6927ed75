"""Two GRPO steps under torchrun, without Ray and without engines.

torchrun --nproc-per-node 2 examples/library/grpo_torchrun.py MODEL_DIRECTORY
"""

import json
import os
import sys

import numpy as np

from megatron_rl import ModelSettings, Objective, TopologySettings, TrainBatch, Trainer, TrainingSettings


def make_batch(seed: int) -> TrainBatch:
    """4 prompts with 4 responses each: stands for your generator and your reward, the same on every rank."""
    random = np.random.default_rng(seed)
    prompts = [prompt for prompt in random.integers(2, 32, (4, 5)) for _ in range(4)]
    responses = [random.integers(2, 32, random.integers(3, 12)) for _ in prompts]
    return TrainBatch.from_sequences(prompts=prompts, responses=responses, rewards=[float((ids % 2).mean()) for ids in responses])


def main() -> None:
    """Train on two batches; rank 0 prints each step's metrics as a line of JSON."""
    training = TrainingSettings(
        topology=TopologySettings(num_ranks=int(os.environ.get("WORLD_SIZE", "1"))),
        optimizer={"lr": 1e-3},
        max_tokens_per_micro_batch=64,
    )
    with Trainer(model=ModelSettings(path=sys.argv[1]), training=training, objective=Objective(kl_loss_coef=0.01)) as trainer:
        for seed in range(2):
            for metrics in trainer.train(make_batch(seed)):
                if os.environ.get("RANK", "0") == "0":
                    print(json.dumps(metrics), flush=True)


if __name__ == "__main__":
    main()
