"""The vector tool: the shared file passes under every layout, a wrong number is a miss, a malformed file names its fault."""

import copy
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[3]
SHARED = ROOT / "tests" / "data" / "objective.json"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_vectors", ROOT / "tools" / "check_vectors.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["check_vectors"] = module
    spec.loader.exec_module(module)
    return module


def run(tool: ModuleType, monkeypatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["check_vectors.py", *arguments])
    return tool.main()


def write(path: Path, content: object) -> str:
    path.write_text(json.dumps(content))
    return str(path)


def test_the_shared_file_passes_under_all_layouts(tool, monkeypatch, capsys) -> None:
    # One with each context-parallel size; test_invariance has more.
    monkeypatch.setattr(tool, "NUM_LAYOUTS", 3)
    assert run(tool, monkeypatch, str(SHARED), "--layouts") == 0
    assert "0 missed" in capsys.readouterr().out


def test_a_wrong_expectation_is_a_miss(tool, monkeypatch, tmp_path, capsys) -> None:
    content = json.loads(SHARED.read_text())
    content["cases"][0]["expect"]["loss"] += 1e-6
    assert run(tool, monkeypatch, write(tmp_path / "wrong.json", content)) == 1
    assert "1 missed" in capsys.readouterr().out


def small() -> dict:
    sequence = {
        "log_probs": [-1.0, "nan", -2.0], "old_log_probs": [-1.0, "inf", -2.0], "entropy": [0.5, "-inf", 1.5], "advantage": 1.0,
        "loss_mask": [1, 0, 1],
    }  # fmt: skip
    masked = {
        "log_probs": ["nan"], "old_log_probs": ["nan"], "entropy": ["nan"], "advantage": 1.0, "loss_mask": [0],
    }  # fmt: skip
    case = {
        "name": "holes", "kind": "policy", "set": "s", "config": {"preset": "grpo"}, "tolerance": 1e-12,
        "expect": {"loss": -1.0, "grad_norm": 0.5**0.5, "metrics": {"entropy": 1.0}},
    }  # fmt: skip
    return {"format": "objective-vectors/1", "sets": {"s": {"sequences": [sequence, masked]}}, "cases": [case]}


def test_masked_positions_may_hold_named_values(tool, monkeypatch, tmp_path) -> None:
    assert run(tool, monkeypatch, write(tmp_path / "holes.json", small()), "--layouts") == 0


def test_other_kinds_of_input(tool, monkeypatch, tmp_path) -> None:
    cases = [
        {
            "kind": "advantage",
            "config": {"estimator": "remax"},
            "rewards": [[1, 0], [0.5]],
            "baselines": [0.5, [0.25]],
            "expect": {"advantages": [[0.5, -0.5], [0.25]]},
        },
        {
            "kind": "advantage",
            "config": {"estimator": "opo"},
            "rewards": [[1, 0]],
            "lengths": [[3, 1]],
            "expect": {"advantages": [[0.25, -0.75]]},
        },
        {
            "kind": "advantage",
            "config": {"estimator": "pass_at_k", "std_epsilon": 0},
            "rewards": [[1, 0]],
            "expect": {"advantages": [[2**0.5, 0]]},
        },
        {
            "kind": "advantage",
            "config": {"estimator": "gdpo", "whiten": False, "std_epsilon": 0},
            "rewards": [[[1, 5], [0, 5]]],
            "expect": {"advantages": [[0.5**0.5, -(0.5**0.5)]]},
        },
        {
            "kind": "gae",
            "config": {"gamma": 0.5, "lam": 1.0},
            "token_rewards": [[1, "nan", 0]],
            "values": [[0, "nan", 0]],
            "loss_mask": [[1, 0, 1]],
            "bootstrap": [4.0],
            "expect": {"advantages": [[2.0, None, 2.0]], "returns": [[2.0, None, 2.0]]},
        },
        {
            "kind": "entropy",
            "config": {"temperature": 1.0, "vocab_size": 2},
            "logits": [[0, 0, "nan"]],
            "targets": [1],
            "expect": {"entropy": [0.6931471805599453], "log_probs": [-0.6931471805599453]},
        },
        {
            "kind": "entropy_controller",
            "config": {"actuator": "clip_high", "target": 0.3, "delta": 0.25, "max": 2.5, "clip_high": 1.5},
            "entropies": [0.1, 0.5],
            "expect": {"applied": [1.5, 1.75], "after": [0.25, 0.0]},
        },
    ]
    content = {"format": "objective-vectors/1", "cases": [{"name": str(number), **case} for number, case in enumerate(cases)]}
    assert run(tool, monkeypatch, write(tmp_path / "kinds.json", content)) == 0


@pytest.mark.parametrize(
    ("keys", "value", "path"),
    [
        (("format",), "objective-vectors/9", "$.format"),
        (("cases", 0, "kind"), "policies", "$.cases[0].kind"),
        (("cases", 0, "set"), "t", "$.cases[0].set"),
        (("cases", 0, "config"), {"preset": "grpp"}, "$.cases[0].config.preset"),
        (("cases", 0, "config"), {"clip_lo": 0.2}, "$.cases[0].config.clip_lo"),
        (("cases", 0, "config"), {"off_policy_correction": {"mode": "cut"}}, "$.cases[0].config.off_policy_correction.mode"),
        (("cases", 0, "expect", "loss"), "zero", "$.cases[0].expect.loss"),
        (("cases", 0, "expect"), {"los": 1.0}, "$.cases[0].expect"),
        (("sets", "s", "sequences", 0, "log_probs", 0), "nan", "$.sets.s.sequences[0].log_probs[0]"),
        (("sets", "s", "sequences", 0, "log_probs", 0), "-1.0", "$.sets.s.sequences[0].log_probs[0]"),
        (("sets", "s", "sequences", 0, "log_probs", 0), None, "$.sets.s.sequences[0].log_probs[0]"),
        (("sets", "s", "sequences", 0, "loss_mask"), [1, 2, 1], "$.sets.s.sequences[0].loss_mask[1]"),
        (("sets", "s", "sequences", 0, "old_log_probs"), [-1.0], "$.sets.s.sequences[0].old_log_probs"),
        (("sets", "s", "sequences", 1, "entropy"), None, "$.sets.s.sequences[1].entropy"),
        (("sets", "s", "sequences", 0, "advantge"), 1.0, "$.sets.s.sequences[0].advantge"),
    ],
)
def test_a_malformed_file_names_the_json_path(tool, monkeypatch, tmp_path, capsys, keys, value, path: str) -> None:
    content = copy.deepcopy(small())
    place = content
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = value
    assert run(tool, monkeypatch, write(tmp_path / "bad.json", content)) == 2
    assert f"{path}: " in capsys.readouterr().err


def test_what_is_no_json_or_no_file_is_refused(tool, monkeypatch, tmp_path) -> None:
    (tmp_path / "broken.json").write_text("{")
    assert run(tool, monkeypatch, str(tmp_path / "broken.json")) == 2
    assert run(tool, monkeypatch, str(tmp_path / "missing.json")) == 2
