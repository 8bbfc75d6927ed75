import re
from collections.abc import Callable

import pytest

from megatron_rl.config.checks import contradictions
from megatron_rl.config.setting_notes import setting_notes
from megatron_rl.config.settings import Settings
from megatron_rl.errors import UserError

MakeSettings = Callable[..., Settings]


CORRECTED = ["objective.off_policy={mode: truncate, high: 2.0}"]


@pytest.mark.parametrize(
    ("overrides", "part"),
    [
        (["training.topology={num_ranks: 6, tp: 2, pp: 2}"], "6 ranks cannot be divided by tp 2 × pp 2 × cp 1 = 4"),
        (["training.topology={num_ranks: 6, tp: 2, pp: 2}"], "set training.topology.num_ranks to 4 or 8"),
        (["training.topology={num_ranks: 1, tp: 2}"], "set training.topology.num_ranks to 2,"),
        (["training.topology.vpp=2"], "vpp is 2 with pp 1"),
        (["training.topology.sequence_parallel=true"], "sequence_parallel is true with tp 1"),
        (["training.topology={num_ranks: 1, tp: 2}"], "1 rank cannot be divided by tp 2 × pp 1 × cp 1 = 2"),
        (["training.topology={num_ranks: 2, ep: 4}"], "2 ranks cannot be divided by etp 1 × ep 4 × pp 1 = 4"),
        (["training.topology={num_ranks: 2, etp: 4}"], "2 ranks cannot be divided by etp 4 × ep 1 × pp 1 = 4"),
        (["run.seed=1431655765", "rollout.num_engines=3"], "1431655765 × rollout.num_engines 3 + 2 = 4294967297 is the seed"),
        (["run.seed=1431655765", "rollout.num_engines=3"], "at most 4294967295; set run.seed to 1431655764 or less"),
        (["training.topology={num_ranks: 4, tp: 2, ep: 2}"], "ep 2 with tp 2 needs sequence_parallel"),
        (["training.optimizer_steps_per_batch=3"], "64 prompts × 8 samples = 512, not divisible by 3 optimizer steps"),
        (["training.optimizer_steps_per_batch=3"], "set training.optimizer_steps_per_batch to 2 or 4"),
        (["objective.policy_loss=sft", "training.optimizer_steps_per_batch=3"], "64 rows, not divisible by 3"),
        *[
            (["data.samples_per_prompt=1", f"objective.advantage={name}"], f"kind {name} compares the samples of one prompt")
            for name in ("group", "rloo", "reinforce_plus_plus_baseline", "opo", "gdpo", "pass@k")
        ],
        (
            ["training.max_tokens_per_micro_batch=1000"],
            "1024 = 2048 tokens, but a micro-batch holds training.max_tokens_per_micro_batch 1000 × cp 1",
        ),
        (
            ["run.num_steps=10", "objective.preset=ppo", "training.critic.warmup_steps=6", "training.schedule.warmup_steps=5"],
            "4 of them behind training.critic.warmup_steps, so the learning rate would never reach its peak",
        ),
        (["rollout.sglang.context_length=2047"], "2048 tokens, but rollout.sglang.context_length is 2047; raise it"),
        (["rollout.sglang.max_total_tokens=512"], "2048 tokens, but rollout.sglang.max_total_tokens is 512; raise it"),
        (
            [
                "run.num_steps=9",
                "objective.preset=ppo",
                "training.critic.warmup_steps=4",
                "training.schedule={decay_style: linear, warmup_steps: 5}",
            ],
            "floor at optimizer step 5 behind training.critic.warmup_steps 4, but warms up for 5",
        ),
        (["training.max_tokens_per_micro_batch=2047"], "a micro-batch holds training.max_tokens_per_micro_batch 2047"),
        (["training.max_tokens_per_micro_batch=1000"], "set training.max_tokens_per_micro_batch to 2048 or more"),
        (["run.num_steps=5", "training.schedule.warmup_steps=6"], "run.num_steps 5 × training.optimizer_steps_per_batch 1 = 5"),
        (["training.schedule.decay_steps=5"], "decay_style constant never decays"),
        (["training.schedule={decay_style: cosine, decay_steps: 5, warmup_steps: 5}"], "set warmup_steps below 5"),
        (["training.schedule={decay_style: inverse_square_root, decay_steps: 5}"], "inverse_square_root has no end"),
        (["objective.distillation_coef=0.5"], "model.teacher is not set"),
        (["objective.policy_loss=distillation"], "in a run the initial policy, from which there is nothing to learn; choose another"),
        (["run.num_steps=5", "training.schedule={decay_style: linear, warmup_steps: 5}"], "floor at optimizer step 5, but warms up for 5"),
        (["training.optimizer={lr: 1e-6, min_lr: 1e-5}"], "min_lr 1e-05 is above lr 1e-06"),
        (["run.num_steps=5", "objective.preset=ppo", "training.critic.warmup_steps=5"], "set training.critic.warmup_steps below 5"),
        (["eval.interval=5"], "eval.sets is empty"),
        (
            ["eval.sets.a={data: x, sampling: {min_p: 0.1}}", "rollout.sglang.enable_deterministic_inference=true"],
            "eval.sets.a.sampling.min_p is 0.1, but SGLang ends at such a request",
        ),
        (["objective.policy_loss=sft", "eval.sets.e=e.jsonl"], "starts no engine that could generate"),
        (["runtime.colocate=true", "rollout.sglang.enable_memory_saver=false"], "must be able to release their memory"),
        (["rollout.sglang.pp_size=2"], "rollout.sglang.pp_size is 2, needs 1"),
        (
            ["rollout.sglang.router={}", "training.routing_replay=true"],
            "rollout.sglang.router is set with training.routing_replay, but SGLang's router does not pass on",
        ),
        (["rollout.sglang.router={}", "rollout.sampling.top_p=0.9"], "with rollout.sampling.top_p, top_k or min_p, but"),
        (["rollout.sglang.pp_size=2"], "remove it, and set rollout.sglang.tp_size"),
        (["rollout.sglang={tp_size: 4, nnodes: 2, attn_dp_size: 2}"], "rollout.sglang.attn_dp_size is 2 with nnodes 2, needs 1"),
        (["rollout.sglang.quantization=fp8"], "rollout.sglang.quantization is fp8, needs none"),
        (["rollout.sglang.torchao_config=int4wo-128"], "rollout.sglang.torchao_config is int4wo-128, needs none"),
        (["runtime.colocate=true", "weights.delta=true"], "weights.delta is true with runtime.colocate or weights.transport ipc"),
        (["weights.delta=true", "rollout.sglang.quantization=fp8"], "weights.delta is true with rollout.sglang.quantization fp8"),
        (
            ["weights.delta=true", "rollout.sglang={dp_size: 2, tp_size: 2, enable_dp_attention: true}"],
            "weights.delta is true with rollout.sglang.dp_size 2",
        ),
        (["runtime.colocate=true", "rollout.max_staleness=2"], "set rollout.max_staleness to 0, or runtime.colocate to false"),
        *(
            (["rollout.sampling={entropy: {thresholds: [1, 1]}, top_p: 0.9}", *CORRECTED], part)
            for part in ("rollout.sampling.entropy is set with top_p 0.9", "records no candidates", "or remove entropy")
        ),
        (["rollout.sampling={entropy: {thresholds: [1, 1]}, min_p: 0.2}", *CORRECTED], "min_p 0.2, but SGLang records no candidates"),
        (["rollout.agent={}"], "rollout.agent has neither command nor function, needs exactly one"),
        (["rollout.agent={command: [a], function: 'b:c'}"], "rollout.agent has command ['a'] and function b:c, needs exactly one"),
        (["rollout={agent: {function: 'a:b'}, environment: 'c:D'}"], "rollout.environment is c:D and rollout.agent is set, needs at most"),
        (["rollout={agent: {command: [a]}, args: {x: 1}}"], "rollout.args has x, but rollout.agent.command takes none"),
        (["rollout.order={kind: first_complete}"], "oversampling 1.5 and rollout.max_staleness 0"),
        (["rollout.order={kind: first_complete, oversampling: 2.5}", "rollout.max_staleness=1"], "an oversampling of at most 1 + 1; raise"),
    ],
)
def test_contradictions_show_the_arithmetic(settings_with: MakeSettings, overrides: list[str], part: str) -> None:
    with pytest.raises(UserError) as caught:
        settings_with(*overrides)
    assert part in str(caught.value), str(caught.value)


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["training.topology={num_ranks: 8, tp: 2, pp: 2, cp: 2}"],
        ["training.topology={num_ranks: 8, tp: 2, pp: 2, vpp: 2, sequence_parallel: true}"],
        ["training.topology={num_ranks: 4, ep: 4}"],
        ["training.topology={num_ranks: 4, etp: 2}"],
        ["run.seed=1431655764", "rollout.num_engines=3"],
        ["run.seed=2147483647", "rollout.num_engines=2"],
        ["data.samples_per_prompt=1", "objective.preset=ppo"],
        ["data.samples_per_prompt=1", "objective.policy_loss=sft"],
        ["training.max_tokens_per_micro_batch=1024", "training.topology={num_ranks: 2, cp: 2}"],
        ["run.num_steps=5", "training.schedule.warmup_steps=5"],
        ["eval.sets.e=e.jsonl", "eval.interval=5"],
        ["eval.interval=0"],
        ["runtime.colocate=true"],
        ["rollout.max_staleness=4", "objective.off_policy={mode: truncate, high: 2.0}"],
        ["rollout.max_staleness=4", "objective.proximal=rollout"],
        ["rollout.max_staleness=4", "objective.proximal=interpolated", "objective.off_policy={mode: mask, high: 5.0}"],
        ["rollout.max_staleness=4", "objective.policy_loss=sft"],
        ["rollout.max_staleness=1", "objective.proximal=rollout", "rollout.order={kind: first_complete, oversampling: 2}"],
        ["rollout.order={kind: first_complete, oversampling: 9, partial: true}"],
        [
            "rollout.max_staleness=1",
            "objective.proximal=rollout",
            "rollout.order={kind: first_complete, partial: true}",
            "runtime.colocate=true",
        ],
    ],
)
def test_consistent_settings_pass(settings_with: MakeSettings, overrides: list[str]) -> None:
    assert contradictions(settings_with(*overrides)) == []


def test_settings_without_effect_are_noted(settings_with: MakeSettings) -> None:
    assert setting_notes(settings_with("rollout.num_engines=2")) == []
    assert setting_notes(settings_with("objective.policy_loss=sft", "data.samples_per_prompt=1")) == []
    found = setting_notes(settings_with("objective.policy_loss=sft", "rollout.num_engines=2", "data.samples_per_prompt=4"))
    assert len(found) == 2
    assert "data.samples_per_prompt 4 has no effect" in found[0]
    assert "the section rollout has no effect" in found[1]
    replaying = settings_with("objective.policy_loss=sft", "training.routing_replay=true")
    assert "training.routing_replay true has no effect" in setting_notes(replaying)[0]
    assert "runtime.colocate true has no effect" in setting_notes(settings_with("objective.policy_loss=sft", "runtime.colocate=true"))[0]


@pytest.mark.parametrize(
    ("overrides", "unread"),
    [
        ((), ["args", "max_turns", "renderer", "step_timeout_s"]),
        (("rollout.function=a:b",), ["max_turns", "renderer", "step_timeout_s"]),
        (("rollout.environment=a:B",), []),
        (("rollout.agent={function: a:b, max_processes: 3}",), ["step_timeout_s", "agent.max_processes"]),
    ],
)
def test_settings_of_other_rollouts_are_noted(settings_with: MakeSettings, overrides: tuple[str, ...], unread: list[str]) -> None:
    changed = ("rollout.args={a: 1}", "rollout.max_turns=3", "rollout.renderer=qwen3", "rollout.step_timeout_s=3")
    settings = settings_with(*overrides, *changed)
    assert setting_notes(settings) == [f"rollout.{name} has no effect: {settings.rollout.name} does not read it" for name in unread]


SUPERVISED, NO_REWARD = "objective.policy_loss=sft", ["reward.function=null", "rollout.environment=a:B"]


@pytest.mark.parametrize(
    ("overrides", "noted"),
    [
        ([SUPERVISED, "run.keep_groups=9"], "run.keep_groups has no effect: objective.policy_loss sft"),
        ([SUPERVISED, "observe.print_samples=2"], "observe.print_samples has no effect: objective.policy_loss sft"),
        (["runtime.colocate=true", "rollout.engine_restarts=2"], "rollout.engine_restarts has no effect: .* runtime.colocate"),
        ([*NO_REWARD, "reward.args={a: 1}"], "reward.args has no effect: reward.function is null"),
        ([*NO_REWARD, "reward.timeout_s=9"], "reward.timeout_s has no effect: reward.function is null"),
        ([*NO_REWARD, "reward.timeout_s=9", "eval.sets.a={data: a, reward: {function: 'b:c'}}"], None),
        (["eval.sets.a={data: a, interval: 3}", "eval.interval=4"], "eval.interval has no effect: every set"),
        (["eval.sets={a: {data: a, interval: 3}, b: b}", "eval.interval=4"], None),
        (["run.save_interval=0", "run.keep_checkpoints=3"], "run.keep_checkpoints 3 has no effect: run.save_interval is 0"),
        (["run.save_interval=20", "run.keep_interval=35"], "run.keep_interval 35 .* is step 140, and run.num_steps is 100"),
        (["run.save_interval=20", "run.keep_interval=50"], None),
        (["run.export_interval=101"], "run.export_interval 101 has no effect: run.num_steps is 100"),
        (["data={train: null, source: 'a:B', max_bad_rows: 2}"], "data.max_bad_rows 2 has no effect: data.source a:B"),
        (["training.optimizer={lr: 1e-5, min_lr: 1e-6}"], "training.optimizer.min_lr 1e-06 has no effect: .*decay_style constant"),
        (["training.optimizer={lr: 1e-5, min_lr: 1e-5}"], None),
        (["training.optimizer={lr: 1e-5, min_lr: 1e-6}", "training.schedule.decay_style=cosine"], None),
    ],
)
def test_a_setting_that_the_others_leave_unread_is_noted(settings_with: MakeSettings, overrides: list[str], noted: str | None) -> None:
    found = setting_notes(settings_with(*overrides))
    assert len(found) == (noted is not None) and all(re.match(str(noted), each) for each in found), found


def test_a_reference_interval_that_nothing_reads_is_noted(settings_with: MakeSettings) -> None:
    interval = "training.reference_interval=5"
    assert setting_notes(settings_with(interval)) == []
    for other in ("objective.kl.coef=0.1", "objective.policy_loss=sft"):
        assert "training.reference_interval 5 has no effect" in setting_notes(settings_with(interval, other))[0]


def test_a_reference_is_kept_where_it_is_read(settings_with: MakeSettings) -> None:
    def kept(*overrides: str) -> bool:
        settings = settings_with(*overrides)
        return settings.training.keeps_reference(settings.objective)

    assert not kept()
    assert kept("training.reference_interval=5")
    assert kept("objective.kl.coef=0.1")
    assert not kept("objective.policy_loss=sft", "training.reference_interval=5")


def test_a_critic_without_ppo_is_noted(settings_with: MakeSettings) -> None:
    assert setting_notes(settings_with("objective.preset=ppo", "training.critic.warmup_steps=1")) == []
    assert "training.critic has no effect" in setting_notes(settings_with("training.critic.warmup_steps=1"))[0]


@pytest.mark.parametrize("size", ["0", "1025", "two", "2.0", "true", "null"])
def test_an_engine_has_a_whole_number_of_gpus(settings_with: MakeSettings, size: str) -> None:
    with pytest.raises(UserError, match=r"rollout\.sglang\.tp_size is .*, needs an integer from 1 to 1024.*; change it"):
        settings_with(f"rollout.sglang.tp_size={size}")
    assert [settings_with(*words).rollout.ranks_per_engine for words in ((), ("rollout.sglang.tp_size=1024",))] == [1, 1024]


@pytest.mark.parametrize("nodes", ["0", "3", "two", "true"])
def test_an_engine_has_as_many_gpus_on_each_node(settings_with: MakeSettings, nodes: str) -> None:
    with pytest.raises(UserError, match=r"rollout\.sglang\.nnodes is .*, needs a divisor of tp_size 4.*; change it"):
        settings_with("rollout.sglang.tp_size=4", f"rollout.sglang.nnodes={nodes}")
    assert settings_with("rollout.sglang.tp_size=4", "rollout.sglang.nnodes=2").rollout.nodes_per_engine == 2


def test_memory_is_shared_where_devices_are(settings_with: MakeSettings) -> None:
    with pytest.raises(UserError, match=r"weights\.transport is ipc with runtime\.colocate false"):
        settings_with("weights.transport=ipc")
    assert settings_with("weights.transport=ipc", "runtime.colocate=true").weight_transport == "ipc"


def test_entropy_aware_draws_need_a_correction(settings_with: MakeSettings) -> None:
    word = "rollout.sampling.entropy={thresholds: [0.5, 0.5], quadrants: {explore: {temperature: 1.5}}}"
    with pytest.raises(UserError) as caught:
        settings_with(word)
    parts = (
        "rollout.sampling.entropy is set, but",
        "objective.policy_loss clip",
        "count as the policy's own; set objective.off_policy, such as {",
    )
    for part in parts:
        assert part in str(caught.value)
    for correction in CORRECTED, ["objective.proximal=rollout"], ["objective.policy_loss=sft"]:
        assert settings_with(word, *correction).rollout.sampling.entropy.draws[2].temperature == 1.5


@pytest.mark.parametrize(
    ("entropy", "parts"),
    [
        ("{}", ["rollout.sampling.entropy.thresholds is missing"]),
        ("{thresholds: [0.3]}", ["rollout.sampling.entropy.thresholds.1 is missing"]),
        (
            "{thresholds: [0.3, -1]}",
            ["rollout.sampling.entropy.thresholds are [0.3, -1.0], needs an entropy and a varentropy of at least 0"],
        ),
        ("{thresholds: [1, 1], quadrants: {explor: {}}}", ["entropy.quadrants.explor", "'branch', 'explore' or 'resample'"]),
        ("{thresholds: [1, 1], quadrants: {explore: {top_p: 0}}}", ["quadrants.explore.top_p is 0 (integer)", "greater than 0"]),
        ("{thresholds: [1, 1], quadrants: {explore: 3}}", ["quadrants.explore is 3 (integer)", "a section"]),
        ("true", ["rollout.sampling.entropy is true (boolean)", "a section"]),
    ],
)
def test_mistakes_in_entropy_aware_sampling_are_named(settings_with: MakeSettings, entropy: str, parts: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        settings_with(f"rollout.sampling.entropy={entropy}", *CORRECTED)
    assert all(part in str(caught.value) for part in parts), str(caught.value)


@pytest.mark.parametrize("loss", ["clip", "clip_cov", "cispo", "gmpo", "dppo_tv", "sapo", "vespo", "gpg", "kl_cov", "distillation"])
def test_staleness_without_a_correction_names_three_ways(settings_with: MakeSettings, loss: str) -> None:
    with pytest.raises(UserError) as caught:
        settings_with("rollout.max_staleness=1", f"objective.policy_loss={loss}")
    parts = ("rollout.max_staleness is 1", f"objective.policy_loss {loss}", "objective.off_policy, such as {mode: truncate, high: 2.0}")
    for part in (*parts, "objective.proximal to rollout", "objective.proximal to interpolated with objective.off_policy"):
        assert part in str(caught.value)


def test_engines_may_hold_just_the_longest_sequence(settings_with: MakeSettings) -> None:
    assert contradictions(settings_with("rollout.sglang={context_length: 2048, max_total_tokens: 2048}")) == []
    own = settings_with("rollout.function=a:b", "rollout.sglang.context_length=512")
    assert contradictions(own) == [], "a rollout of one's own may ask for what is left"


def test_a_floor_of_a_constant_rate_is_noted(settings_with: MakeSettings) -> None:
    words = ["training.optimizer={lr: 1e-4, min_lr: 1e-5}"]
    assert "training.optimizer.min_lr 1e-05 has no effect" in setting_notes(settings_with(*words))[0]
    assert setting_notes(settings_with(*words, "training.schedule.decay_style=linear")) == []
    assert setting_notes(settings_with("training.optimizer={lr: 1e-4, min_lr: 1e-4}")) == []


def test_steps_of_the_policy_are_those_behind_the_critics(settings_with: MakeSettings) -> None:
    words = ["run.num_steps=9", "training.optimizer_steps_per_batch=2", "training.critic.warmup_steps=4"]
    assert [settings_with(*words, f"objective.preset={preset}").policy_steps for preset in ("ppo", "grpo")] == [14, 18]
