"""The training loop. It reads like the sentence it implements.

       prompts ──► RolloutManager ──(token ids)──► engines, which serve the weights of version v
                        │    rollout/manager: groups with rewards, kept in the buffer until their step comes
       next_batch       ▼
                   TrainBatch        one flat record: tokens, masks, rewards, log-probs and versions of the engines
                        │    data/packing: one shard for each data-parallel rank
       train            ▼
                   TrainerGroup      training/trainer on every Megatron rank: advantages, then training/policy_step
                        │
       publish          ▼
                   WeightSync ──(version v + 1)──► engines

Read next: training_run, which has the calls below; rollout_run, what they do with engines; training_run.SupervisedRun, a run without any.
"""

from megatron_rl.runtime.training_run import TrainingRun


def train_loop(run: TrainingRun, *, first_step: int) -> None:
    """Next batch, train, save, publish weights, evaluate, log, until the run's last step.

    `first_step` is 0 or where a checkpoint left off. The weights that s steps have made carry version s. With a `max_staleness` above 0
    the samples of later steps are made meanwhile: `next_batch` then finds them ready.
    """
    run.begin(step=first_step)
    for step in range(first_step, run.num_steps):
        batch = run.next_batch(step)
        run.train(batch, step=step)
        if run.saves_after(step):
            run.save(step=step + 1)
        run.publish(version=step + 1)
        if run.evaluates_after(step):
            run.evaluate()
        run.log(step=step + 1)
