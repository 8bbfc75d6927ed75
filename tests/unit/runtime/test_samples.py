import io
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from megatron_rl.config.load import load_settings
from megatron_rl.errors import ParityError
from megatron_rl.observe.console import RunConsole
from megatron_rl.observe.metrics import metric_values
from megatron_rl.observe.timing import PhaseTimer
from megatron_rl.rollout.client import Scores
from megatron_rl.rollout.engine import EngineAddress
from megatron_rl.runtime import rollouts as rollouts_module
from megatron_rl.runtime.background import BackgroundLoop
from megatron_rl.runtime.samples import PROBE_SEQUENCES, GeneratedSamples, generation_deadline_s
from megatron_rl.runtime.session import _columns, _open_samples
from megatron_rl.runtime.start_report import StartReport
from megatron_rl.runtime.watchdog import Watchdog
from megatron_rl.types import Floats, Ints, Prompt, TrainBatch
from megatron_rl.weights.parity import sequences

PATHS = ("run.directory=run", "model.path=model", "data.train=train.jsonl")
LIMITS = ("rollout.max_concurrent_requests=256", "rollout.request_timeout_s=600.0", "reward.timeout_s=2.0", "reward.num_workers=4")


def test_a_batch_of_many_waves_gets_the_time_of_all_its_waves() -> None:
    one = load_settings(None, [*PATHS, *LIMITS])
    assert generation_deadline_s(one, 256) == 2 * 600 + 64 * 2
    assert generation_deadline_s(one, 2048) == 9 * 600 + 512 * 2
    two = load_settings(None, [*PATHS, *LIMITS, "rollout.num_engines=2"])
    assert generation_deadline_s(two, 2048) == 5 * 600 + 512 * 2


@pytest.mark.parametrize(
    ("override", "shown"),
    [("run.seed=0", False), ("objective.kl_loss_coef=0.1", True), ("training.reference_interval=2", True)],
)
def test_the_console_has_a_column_of_the_kl_where_there_is_a_reference(override: str, shown: bool) -> None:
    columns = [column.title for column in _columns(load_settings(None, [*PATHS, override]))]
    assert ("KL ref" in columns) == shown and "reward" in columns


class Rewards:
    """Stands for reward workers that come and go."""

    def __init__(self, _: object, *, log_path: Path) -> None:
        pass

    def __enter__(self) -> "Rewards":
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def probe(self, prompt: Prompt) -> None:
        return None


def test_a_start_says_which_rows_lack_a_label_before_it_starts_anything(
    tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollouts_module, "RewardRunner", Rewards)
    rows = [{"prompt": "1", "label": "1"}, {"prompt": "2"}, {"prompt": "3", "label": "3"}, {"prompt": "4"}]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "held_out.jsonl").write_text(json.dumps(rows[1]) + "\n")
    data = [f"data.train={tmp_path}/train.jsonl", f"data.eval={tmp_path}/held_out.jsonl"]
    settings = load_settings(None, [f"run.directory={tmp_path}/run", f"model.path={tiny_model()}", *data])
    stream = io.StringIO()
    with ExitStack() as stack:
        _open_samples(settings, stack, Watchdog(), StartReport(RunConsole(1, stream=stream), PhaseTimer()), buffer=False)
    before = stream.getvalue().partition("start: ")[0]
    assert f"note: 2 of 4 rows have not the field 'label', the first is {tmp_path}/train.jsonl:2" in before
    assert f"note: no row of {tmp_path}/held_out.jsonl has the field 'label'" in before


class Client:
    """An engine that scores the token at position t with -t / 100 nats, and `wrong_by` less."""

    address = EngineAddress("url", "key", vocab_size=32, context_length=64, max_total_tokens=64, has_tokenizer=False)

    def __init__(self, *, wrong_by: float = 0.0) -> None:
        self._wrong_by = wrong_by

    async def score(self, token_ids: Ints) -> Scores:
        return Scores((-np.arange(len(token_ids)) / 100 - self._wrong_by).astype(np.float32))


class Trainers:
    """Ranks that agree with an engine that is right."""

    def log_probs(self, batch: TrainBatch, *, temperature: float) -> Floats:
        assert temperature == 1.0
        return np.concatenate([-np.arange(len(tokens)) / 100 for tokens in sequences(batch)]).astype(np.float32)


@pytest.fixture
def make_samples(tiny_model: Callable[..., Path], tmp_path: Path) -> Iterator[Callable[..., GeneratedSamples]]:
    """`make_samples(client, ..., eval=True)`: three prompts to train on (1 to 3), two held-out ones (7, 8) if asked for."""
    background = BackgroundLoop()

    def make(*clients: Client, held_out: bool) -> GeneratedSamples:
        for name, numbers in (("train", (1, 2, 3)), ("held_out", (7, 8))):
            rows = [json.dumps({"prompt": f"{number}", "label": "1"}) for number in numbers]
            (tmp_path / f"{name}.jsonl").write_text("\n".join(rows) + "\n")
        paths = [f"run.directory={tmp_path}/run", f"model.path={tiny_model()}", f"data.train={tmp_path}/train.jsonl"]
        settings = load_settings(None, paths + [f"data.eval={tmp_path}/held_out.jsonl"] * held_out)
        samples = GeneratedSamples(settings, background=background, watchdog=Watchdog())
        samples.rollouts.clients = list(clients)  # type: ignore[arg-type]
        samples._trainers, samples._dtype = Trainers(), "float32"  # type: ignore[assignment]
        return samples

    yield make
    background.close()


@pytest.mark.parametrize("held_out", [True, False], ids=["held-out prompts", "training prompts"])
def test_the_parity_probe_starts_with_prompts_of_the_run(make_samples: Callable[..., GeneratedSamples], held_out: bool) -> None:
    samples = make_samples(Client(), held_out=held_out)
    scored = samples.score_probe()
    probe = sequences(scored.batch)
    known = samples.rollouts.eval_prompts if held_out else samples.rollouts.source.first(10)
    assert len(probe) == PROBE_SEQUENCES and len(known) == (2 if held_out else 3)
    for row, tokens in enumerate(probe):
        prompt = known[row % len(known)].token_ids
        assert tokens[: len(prompt)].tolist() == prompt.tolist()
    assert metric_values(samples.check_parity(scored))["weights/parity_mean"] == 0


def test_one_engine_of_two_that_disagrees_stops_the_run(make_samples: Callable[..., GeneratedSamples]) -> None:
    samples = make_samples(Client(), Client(wrong_by=2e-4), held_out=False)
    with pytest.raises(ParityError, match=r"mean \|Δ\| 2\.00e-04"):
        samples.check_parity(samples.score_probe())
