"""The benchmarks under tools/bench still run; their figures are for people."""

import dataclasses
import importlib
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_rl.algorithms.log_prob import TORCH_ROWS
from megatron_rl.types import TrainBatch

BENCH = Path(__file__).parents[2] / "tools" / "bench"
GRPO = BENCH / "grpo.py"
TRAINING = BENCH / "training.py"


def run_here(script: Path, *arguments: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run `script` as the main program, in this process, which has imported what it needs."""
    monkeypatch.setattr(sys, "argv", [str(script), *arguments])
    monkeypatch.syspath_prepend(str(script.parent))
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(script), run_name="__main__")
    assert ended.value.code == 0


def test_packing_is_compared_with_what_is_possible(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run_here(TRAINING, "--only", "packing", "--sequences", "64", "--longest", "1024", monkeypatch=monkeypatch)
    printed = capsys.readouterr().out
    assert printed.startswith("64 sequences of at most 1,024 tokens, 8 data-parallel ranks")
    assert [line.split()[0] for line in printed.splitlines()[2:]] == ["uniform", "uniform", "log-normal", "log-normal", "long", "long"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_without_a_gpu_nothing_is_measured_and_it_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run_here(BENCH / "gpu.py", monkeypatch=monkeypatch)
    assert (
        capsys.readouterr().out
        == "gpu: nothing was measured, because this machine has no GPU that torch can use; run it on one with CUDA.\n"
    )


def test_kernels_are_measured_beside_what_is_published(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """With the clock and the kernels replaced, as neither is here without a GPU; the rest is the benchmark's own."""
    monkeypatch.syspath_prepend(str(BENCH))
    gpu = importlib.import_module("gpu")
    calls = []
    monkeypatch.setattr(gpu, "DEVICE", "cpu")
    monkeypatch.setattr(gpu, "measured", lambda call, repeats=1: (calls.append(call()), (12.0, 3.0))[1])
    monkeypatch.setattr(gpu, "row_maths_on_gpus", lambda: (dataclasses.replace(TORCH_ROWS, name="triton"), TORCH_ROWS))
    gpu.bench_kernels(6, 20, 8, others=[(3, 20, 4)])
    printed = capsys.readouterr().out
    assert "differ by 0.0e+00 of the hidden states' gradient and 0.0e+00 of the weight's" in printed
    assert "  triton                             12.0 ms    3.0 GiB" in printed and "Liger" in printed and "167 ms" in printed
    assert "3 tokens, 20 x 4" in printed and len(calls) == 9


def test_syncs_are_measured_where_each_transport_has_two_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    places = importlib.import_module("gpu_system").sync_places
    assert places(SimpleNamespace(kind="cuda", num_gpus=2)) == {1: ["broadcast", "disk"], 0: ["ipc"]}
    assert places(SimpleNamespace(kind="cuda", num_gpus=1)) == {0: ["disk", "ipc"]}, "NCCL refuses two ranks on one GPU"
    assert places(SimpleNamespace(kind="cpu", num_gpus=2)) == {0: ["broadcast", "disk", "ipc"]}


def test_activations_are_recomputed_only_where_the_plan_needs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    system = importlib.import_module("gpu_system")
    monkeypatch.setattr(system, "memory_of", lambda node: 100)
    monkeypatch.setattr(system, "read_model_spec", lambda path: None)
    node = SimpleNamespace(kind="cpu", num_gpus=2, dtype="float32")
    for peaks, way in (((100, 1), "nothing recomputed"), ((101, 100), "full recompute"), ((102, 101), "101 is too much")):
        plans = [SimpleNamespace(peak=peak, verdict=f"{peak} is too much") for peak in peaks]
        monkeypatch.setattr(system, "plan_layouts", lambda variants, spec, plans=plans, **_: plans)
        settings, said = system._first_that_fits(node, tmp_path, tokens=64, sequences=8, longest=16)
        assert said == way
        recomputed = None if settings is None else bool(settings.model.megatron)
        assert recomputed == {"nothing recomputed": False, "full recompute": True}.get(way)


def test_a_peer_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text("#!/bin/sh\necho trl accelerate\n")
    bare.chmod(0o755)
    for peer, message in ((str(bare), "cannot import trl, accelerate; make its environment"), (str(tmp_path / "none"), "does not run")):
        done = subprocess.run([sys.executable, str(GRPO), "--peer", peer], capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 1
        assert message in done.stderr


@pytest.mark.slow
def test_conversions_are_measured(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run_here(BENCH / "convert.py", "--small", "--layers", "2", "--turns", "1", monkeypatch=monkeypatch)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("0.00 GB, largest parameter") and [line[:7] for line in lines[1:]] == [
        "to ours",
        "to Hugg",
        "load at",
    ]
    monkeypatch.syspath_prepend(str(BENCH))
    bench = importlib.import_module("convert")
    # A load on the machine that comes and goes slows both of a pair: shares of 0.5, 0.25 and 0.8, whose median counts.
    turns = [bench.Pair((2.0, 1.0), (4.0, 3.0, 5)), bench.Pair((10.0, 1.0), (40.0, 3.0, 7)), bench.Pair((4.0, 1.0), (5.0, 3.0, 6))]
    line = bench.row("to ours", turns, num_bytes=8_000_000_000, bound=6)
    assert " ".join(line.split()) == (
        "to ours 1.60 GB/s, cp 2.00: 0.50 of cp (0.25 to 0.80; goal 0.5) met; CPU 3.0 s, cp 1.0 s; memory 0.00 GB (goal 0.00) MISSED"
    )


def test_checkpoints_are_compared_with_cp(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    pauses = [f"pause of {what}{kind}" for what in ("a save", "an export") for kind in ("", ", no rollout")]
    names = ["save", "cp", "cp, not to the disk", "load", "export", "cp of an export", *pauses]
    names += [f"{pause}: {part}" for pause in pauses for part in ("call", "wait", "end")]
    turns = [(name, seconds, 3.0, 3 * 2**20) for seconds in (8.0, 4.0) for name in names]
    turns += [("cp", 2.0, 1.0, 0), ("pause of a save, no rollout", 0.2, 0.2, 5 * 2**20), ("pause of a save, no rollout: wait", 0.1, 0.2, 0)]
    others = [(name, 9.0, 2 * cpu, memory) for name, _, cpu, memory in turns]
    importlib.import_module("checkpoint").report("dp2", [(0, turns, [4_000_000_000, 1_000_000_000]), (1, others, [])])
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[1] == "dp2: a checkpoint of 4.00 GB, an export of 1.00 GB"
    assert lines[2] == "save 4.00 s 1.00 GB/s, 0.50 of cp (2.00 GB/s; goal 0.9), 3 MiB, CPU 2.25 s/GB, cp 0.75"
    told = "of one that is waited for (goal 0.1): call 4.00, wait"
    assert lines[5:7] == [
        f"pause of a save 4.00 s, 1.00 {told} 4.00; put in its place in 4.00 s; 3 MiB",
        f"pause of a save, no rollout 0.20 s, 0.05 {told} 0.10; put in its place in 4.00 s; 5 MiB",
    ]


def test_a_driver_and_orders_are_measured_on_stub_engines(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run_here(BENCH / "rollout.py", "--small", "--turns", "1", "--only", "control", "tails", monkeypatch=monkeypatch)
    lines = [line for line in capsys.readouterr().out.splitlines() if "samples/s" in line or "times as fast" in line]
    assert "2 engines x 64: " in lines[0] and "per CPU second of the driver; cores: " in lines[0]
    assert [line.split("  ")[0] for line in lines[1:]] == ["synchronous", "over-sampling", "partial", "asynchronous 1", "asynchronous 4"]


def test_the_policy_that_copies_learns_by_its_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against autograd: two groups of unequal lengths, a masked token, a ratio above the bound, and one group without a signal."""
    monkeypatch.syspath_prepend(str(BENCH))
    copy = importlib.import_module("copy_task")
    draw = np.random.default_rng(0)
    policy = copy.CopyPolicy(list(range(20, 28)), draw.normal(size=(8, 8)))
    answers = [(1, [1, 2, 1], 1.0), (1, [3, 4, 5, 1, 7], 0.25), (1, [0], 0.0), (6, [6, 6], 0.5), (6, [2], 0.5)]
    cu_seqlens = np.cumsum([0, *(2 + len(drawn) for _, drawn, _ in answers)])
    tokens = np.array([token for digit, drawn, _ in answers for token in (5, 20 + digit, *(20 + each for each in drawn))])
    mask = np.ones(len(tokens), np.bool_)
    for begin in cu_seqlens[:-1]:
        mask[begin : begin + 2] = False
    mask[8] = False
    behind = np.where(mask, policy.log_probs[1, 3] - 3.0, 0.0).astype(np.float32)
    rewards, groups = np.array([reward for *_, reward in answers]), np.array([0, 0, 0, 1, 1])
    batch = TrainBatch(
        tokens=tokens, cu_seqlens=cu_seqlens, prompt_lengths=np.full(5, 2), loss_mask=mask, rollout_log_probs=behind,
        weight_versions=np.where(mask, 0, -1), rewards=rewards, group_ids=groups, truncated=np.zeros(5, np.bool_),
    )  # fmt: skip
    logits = torch.tensor(policy.logits, requires_grad=True)
    log_probs, total = torch.log_softmax(logits, 1), torch.zeros((), dtype=torch.float64)
    for number, (digit, drawn, reward) in enumerate(answers):
        same = rewards[groups == groups[number]]
        for place, each in enumerate(drawn):
            at = cu_seqlens[number] + 2 + place
            if mask[at]:
                ratio = min(2.0, float(torch.exp(log_probs[digit, each].detach() - float(behind[at]))))
                total = total + (reward - same.mean()) / (same.std() + 1e-6) * ratio * log_probs[digit, each]
    (total / mask.sum()).backward()
    assert logits.grad is not None and logits.grad[1].abs().max() > 0.1 and logits.grad[6].abs().max() == 0
    before = policy.logits.copy()
    policy.learn(batch)
    assert np.allclose(policy.logits - before, 40.0 * logits.grad.numpy(), atol=1e-9)
    assert policy.reward == pytest.approx(np.mean([torch.softmax(torch.tensor(policy.logits), 1)[n, n].item() for n in range(8)]))


def test_a_turn_that_changes_a_token_before_is_a_broken_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    bench = importlib.import_module("rollout")
    chains_of = bench.chains_of

    def asked(prompt: list[int], answer: list[int]) -> tuple[dict[str, object], dict[str, object]]:
        return {"input_ids": prompt, "sampling_params": {}, "rid": "r"}, {"output_ids": answer}

    twins = [asked([1, 2], [3]), asked([1, 2], [3]), asked([1, 2, 3, 4], [5, 6])]
    last = asked([1, 2, 3, 7], [8])
    whole = chains_of([*twins, asked([1, 2, 3, 4, 5, 6, 9], [9]), last])
    assert sorted([len(request["input_ids"]) for request in chain] for chain in whole) == [[2, 4], [2, 4, 7]]
    broken = chains_of([*twins, last, asked([1, 2], [8]), asked([1, 2, 3, 4, 5, 9, 9], [9])])
    assert len(broken) == 4 and bench.num_broken(broken) == 1, "token 6 was sampled, and is 9 now; one trajectory was begun again"
    assert bench.num_broken(whole) == 0


def test_the_policy_of_the_shop_ends_or_calls_a_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    shop = importlib.import_module("shop_task")
    shop.write_task(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi."}], tools=shop.TOOLS, add_generation_prompt=True, return_dict=False
    )
    prompts = torch.tensor([ids] * 16)
    torch.manual_seed(0)
    made = model.generate(prompts, do_sample=True, max_new_tokens=32, top_k=0, attention_mask=torch.ones_like(prompts))
    said = {tokenizer.decode(row[len(ids) :]).partition("<|im_end|>")[0] for row in made}
    letters = "abcdefghijklmnop"
    ends = ("", f"<tool_call>{shop.CALL}</tool_call>")
    assert said == {letters + letter + end for letter in "xy" for end in ends}


def test_what_faults_cost_is_told_in_starts_and_steps(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Steps of 1 s but for one of 10 s behind a death, of 2 s, and an engine that waits for its second turn for a second."""
    monkeypatch.syspath_prepend(str(BENCH))
    faults = importlib.import_module("faults")
    took_s = {step: 1.0 for step in range(1, 13)} | {5: 10.0, 9: 2.0}
    ends = {step: sum(took_s[each] for each in range(1, step + 1)) for step in took_s}
    faults.report(ends, {4: "a", 8: "b"}, every=4, cold_s=10.0, backs=[(0, 12.0), (1, 12.0), (0, 14.0)])
    printed = capsys.readouterr().out
    assert "engine 0 was back after 14 s, of them 1 s back-off: 1.30 cold starts" in printed
    assert "median 1.20 cold starts, goal 1.2: met" in printed
    assert "death of a: 9.0 s, 9.0 steps; 0.25 % of an hour's throughput" in printed and "death of b: 1.0 s, 1.0 steps" in printed
