"""The training loop, in the words of its algorithm.

       prompts ──► RolloutManager ──(token ids)──► engines, serving the weights of version v
                        │    rollout/manager: groups with rewards, in the buffer until used
       next_batch       ▼
                   TrainBatch        one flat record: tokens, masks, rewards, log-probs, versions
                        │    data/packing: one shard for each data-parallel rank
       train            ▼
                   TrainerGroup      training/trainer on every Megatron rank: advantages, then
                        │            training/step
       publish          ▼
                   WeightSync ──(version v + 1)──► engines

Read next: run, with the calls below.
"""

from megatron_rl.runtime.run import Run


def train_loop(run: Run, *, first_step: int) -> None:
    """Run batch, train, save, publish weights, evaluate and log until the run's last step, or its end by `stop_after`.

    `first_step` is 0 or the step of the checkpoint. The weights after s steps carry version s. With
    a `max_staleness` above 0 the samples of later steps are made meanwhile, and `next_batch` finds
    these samples ready.
    """
    run.begin(step=first_step)
    step = first_step
    while step < run.num_steps:
        batch = run.next_batch(step)
        run.train(batch, step=step)
        if run.saves_after(step):
            run.save(step=step + 1)
        run.publish(version=step + 1)
        run.evaluate(step=step + 1)
        run.log(step=step + 1)
        step += 1
