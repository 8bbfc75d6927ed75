"""Two GRPO steps under torchrun, without Ray and without engines.

torchrun --nproc-per-node 2 examples/library/grpo_torchrun.py MODEL_DIRECTORY
"""

import json
import os
import sys
from pathlib import Path

import numpy as np

from megatron_rl import ModelSettings, Objective, TopologySettings, TrainBatch, Trainer, TrainingSettings, batch_from_sequences


def make_batch(seed: int, vocab_size: int) -> TrainBatch:
    """4 prompts with 4 responses each: stands for your generator and your reward, the same on every rank."""
    random = np.random.default_rng(seed)
    prompts = [prompt for prompt in random.integers(2, vocab_size, (4, 5)) for _ in range(4)]
    responses = [random.integers(2, vocab_size, random.integers(3, 12)) for _ in prompts]
    return batch_from_sequences(prompts=prompts, responses=responses, rewards=[float((ids % 2).mean()) for ids in responses])


def main() -> None:
    """Train on two batches; rank 0 prints each step's metrics as a line of JSON."""
    vocab_size = json.loads(Path(sys.argv[1], "config.json").read_text())["vocab_size"]
    training = TrainingSettings(
        topology=TopologySettings(num_ranks=int(os.environ.get("WORLD_SIZE", "1"))),
        optimizer={"lr": 1e-3},
        max_tokens_per_micro_batch=64,
    )
    with Trainer(model=ModelSettings(path=sys.argv[1]), training=training, objective=Objective.of(kl={"coef": 0.01})) as trainer:
        for seed in range(2):
            for metrics in trainer.train(make_batch(seed, vocab_size)):
                if os.environ.get("RANK", "0") == "0":
                    print(json.dumps(metrics), flush=True)


if __name__ == "__main__":
    main()
