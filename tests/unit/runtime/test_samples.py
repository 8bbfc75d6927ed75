from megatron_rl.config.load import load_settings
from megatron_rl.runtime.samples import generation_deadline_s

PATHS = ("run.directory=run", "model.path=model", "data.train=train.jsonl")
LIMITS = ("rollout.max_concurrent_requests=256", "rollout.request_timeout_s=600.0", "reward.timeout_s=2.0", "reward.num_workers=4")


def test_a_batch_of_many_waves_gets_the_time_of_all_its_waves() -> None:
    one = load_settings(None, [*PATHS, *LIMITS])
    assert generation_deadline_s(one, 256) == 2 * 600 + 64 * 2
    assert generation_deadline_s(one, 2048) == 9 * 600 + 512 * 2
    two = load_settings(None, [*PATHS, *LIMITS, "rollout.num_engines=2"])
    assert generation_deadline_s(two, 2048) == 5 * 600 + 512 * 2
