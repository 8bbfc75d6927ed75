"""Training rows in training order, from data files or a custom data source (`data.source`).

Both follow from the seed alone and can stop anywhere and continue, in the driver alone.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from megatron_rl.config.data_settings import DataFiles, DataSettings
from megatron_rl.data.row_files import Row, check_row, data_paths
from megatron_rl.data.row_table import BadRows, Rows, read_rows
from megatron_rl.errors import UserError, counted
from megatron_rl.plugins.kinds import KINDS, Curriculum, DataSource
from megatron_rl.plugins.loader import load, without_exits
from megatron_rl.types import Bools, Ints

NamedRow = tuple[str, Row]  # a row and the id of its prompt, which no other row of the run has
MeanReward = Callable[[str], float | None]
"""The mean reward of a prompt's answers by its id; None for one that no step has taken, or without a reward."""
_PROBED_ROWS = 2
RENDERING = "rendering"
"""Key of a state of files: the settings with which the same rows are other tokens."""


class FileRows:
    """The rows of data.train, each source shuffled anew every epoch of its own, mixed by weight.

    Ids are EPOCH-ROW, with rows counted from 0 over all sources. After n rows, each source has
    given its share of n within one row. From a source's second epoch on, a row whose last answers
    fit one of the source's `pools` comes with the pool's chance.
    """

    def __init__(self, sources: Sequence[DataFiles], *, settings: DataSettings, seed: int, need_response: bool, bad: BadRows) -> None:
        parts = [read_rows(files, settings=settings, need_response=need_response, bad=bad) for files in sources]
        self.rows = Rows.joined(parts)
        self._starts = np.cumsum([0, *map(len, parts)])
        self._shuffle, self._seed = settings.shuffle, seed
        weights = np.array([files.weight for files in sources])
        self._shares = weights / weights.sum()
        self._digest = _digest(sources)
        self._rendering = settings.model_dump(mode="json", include={"system_prompt", "chat_template_kwargs"})
        self._pools = [files.pools for files in sources]
        self._taken = [0] * len(parts)
        self._passed = [0] * len(parts)  # rows taken or left out by a pool
        self._orders = [(-1, np.empty(0, np.int64))] * len(parts)  # of each source: an epoch, and its order of rows

    def drop(self, dropped: Bools) -> None:
        """Leave out the rows of a mask [rows], before any row is taken. Raises UserError where no row of a source is left."""
        kept = np.flatnonzero(~dropped)
        starts = np.searchsorted(kept, self._starts)
        for part in np.flatnonzero(np.diff(starts) == 0):
            origin = self.rows[self._starts[part]].origin
            raise UserError(
                f"all prompts from {origin} on are longer than data.max_prompt_tokens, which data.overlong drops, or cannot be used; "
                "raise it, truncate, or mend them"
            )
        self.rows, self._starts = self.rows.take(kept), starts

    def take(self, count: int, mean_reward: MeanReward = lambda name: None) -> list[NamedRow]:
        """Return the next `count` rows; a new epoch of a source starts where it ends."""
        return [self._next(mean_reward) for _ in range(count)]

    def _next(self, mean_reward: MeanReward) -> NamedRow:
        part = int(np.argmax(self._shares * (sum(self._taken) + 1) - self._taken))
        size = int(self._starts[part + 1] - self._starts[part])
        self._taken[part] += 1
        while True:
            epoch, cursor = divmod(self._passed[part], size)
            index = int(self._starts[part] + self._order(part, epoch)[cursor])
            self._passed[part] += 1
            if self._comes(part, epoch, index, mean_reward):
                return f"{epoch}-{index}", self.rows[index]

    def _order(self, part: int, epoch: int) -> Ints:
        """Return the order of a source's rows in an epoch, each counted from the source's first."""
        if self._orders[part][0] != epoch:
            size = int(self._starts[part + 1] - self._starts[part])
            # A first part's zero changes no seed.
            order = np.random.default_rng([self._seed, epoch, part]).permutation(size) if self._shuffle else np.arange(size)
            self._orders[part] = (epoch, order)
        return self._orders[part][1]

    def _comes(self, part: int, epoch: int, index: int, mean_reward: MeanReward) -> bool:
        """Return True unless the pool of a row's last answers leaves the row out of this epoch."""
        if not self._pools[part]:
            return True
        rewards = (mean_reward(f"{before}-{index}") for before in reversed(range(epoch)))
        last = next((reward for reward in rewards if reward is not None), None)
        chances = (pool.chance for pool in self._pools[part] if last is not None and pool.fits(last))
        return bool(np.random.default_rng([self._seed, epoch, part, index]).random() < next(chances, 1.0))

    def follow(self, names: Sequence[str]) -> list[NamedRow]:
        """Return the next rows, which are those of `names`: the rewards that chose them may be gone.

        Raises UserError for rows that do not follow in the present order.
        """
        for name in names:
            # Rows of a data.source have no epoch.
            epoch, index = map(int, name.split("-")) if "-" in name else (0, len(self.rows))
            part = int(np.searchsorted(self._starts, index, side="right")) - 1
            size = self._starts[part + 1] - self._starts[part] if part < len(self._pools) else 0
            passed = epoch * size + 1 + np.flatnonzero(self._order(part, epoch) == index - self._starts[part])[0] if size else 0
            if passed <= self._passed[part if size else 0]:
                raise UserError(
                    f"prompt {name!r} of the buffer does not follow in the order of data.train; restore run.seed, data.shuffle and "
                    "data.train, or choose another run.directory"
                )
            self._taken[part] += 1
            self._passed[part] = int(passed)
        return self.again(names)

    def first(self, count: int) -> list[Row]:
        """Return at most `count` rows in the order of the files. Moves nothing."""
        return self.rows[:count]

    def again(self, names: Sequence[str]) -> list[NamedRow]:
        """Return the rows of these ids as the present settings read them. Moves nothing."""
        return [(name, self.rows[int(name.partition("-")[2])]) for name in names]

    def state(self) -> dict[str, Any]:
        """Return the rows taken of each source, with the facts that must stay equal for them to be valid."""
        facts = {"seed": self._seed, "shuffle": self._shuffle, "digest": self._digest, "num_rows": len(self.rows)}
        return {"taken": list(self._taken), "passed": list(self._passed), RENDERING: self._rendering, **facts}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from `state()`. Raises UserError for other files, rows, weights, seed or data.shuffle."""
        num_rows = "number of rows of data.train that data.max_prompt_tokens, data.max_bad_rows and reward.check_labels leave"
        names = {"digest": "content of data.train", "num_rows": num_rows}
        _check_same(state, self.state(), names | {"seed": "run.seed", "shuffle": "data.shuffle"})
        self._taken, self._passed = list(state["taken"]), list(state.get("passed", state["taken"]))


def _digest(sources: Sequence[DataFiles]) -> str:
    """Return a checksum of the content of all files, and of the rows, weights and fields chosen of them."""
    digest = hashlib.sha256()
    for files in sources:
        for path in data_paths(files.path):
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        digest.update(f"{files.rows} {files.weight} {sorted(files.keys.items())}".encode())
    return digest.hexdigest()


class OwnRows:
    """The rows of the user's `data.source`, each checked as a line of a file is. Ids count from 0.

    Construction raises UserError for a failed load and for unusable first rows.
    """

    def __init__(self, *, settings: DataSettings, seed: int, need_response: bool) -> None:
        assert settings.source is not None, "without data.source there is a file"
        self._name = f"{KINDS['data_source'].setting} {settings.source}"
        self._settings, self._seed, self._need_response = settings, seed, need_response
        made = load(settings.source, kind="data_source", args=settings.args)
        self._make: Callable[[], DataSource] = lambda: self._call("being made", lambda: made(seed=seed))
        self._source = self._make()
        self._num_taken, self._seen_step = 0, 0
        self.first(_PROBED_ROWS)
        self.state()

    def take(self, count: int, mean_reward: MeanReward | None = None) -> list[NamedRow]:
        """Return the next `count` rows, for any rewards. Raises UserError for an unusable row."""
        rows = self._rows(self._source, count, start=self._num_taken)
        named = [(str(number), row) for number, row in enumerate(rows, start=self._num_taken)]
        self._num_taken += count
        return named

    def follow(self, names: Sequence[str]) -> list[NamedRow]:
        """Take the next rows, which are those of `names`; return none of a curriculum, which may have seen other rewards then."""
        taken = self.take(len(names))
        return [] if isinstance(self._source, Curriculum) else taken

    def see(self, mean_rewards: Callable[[int, int], Mapping[str, float]], *, step: int) -> None:
        """Show a curriculum the mean rewards of the prompts of new steps up to `step`.

        `mean_rewards` returns them by id, of the prompts of steps after its first argument.
        """
        source = self._source
        if isinstance(source, Curriculum) and step > self._seen_step:
            rewards = {int(name): reward for name, reward in mean_rewards(self._seen_step, step).items()}
            self._call("seeing rewards", lambda: source.see(rewards))
            self._seen_step = step

    def first(self, count: int) -> list[Row]:
        """Return the first `count` rows, of another instance of the source."""
        return self._rows(self._make(), count, start=0)

    def again(self, names: Sequence[str]) -> list[NamedRow]:
        """Return no rows: `restore` refuses settings that would read them differently."""
        return []

    def state(self) -> dict[str, Any]:
        """Return the source's state with ours. Raises UserError for one that JSON cannot hold."""
        own = self._call("giving its state", lambda: self._source.state)
        try:
            own = json.loads(json.dumps(own, allow_nan=False))
        except (TypeError, ValueError) as error:
            raise UserError(f"{self._name} has the state {own!r:.80}, which JSON cannot hold ({error}); use plain values") from error
        settings = self._settings
        keys: dict[str, Any] = {"prompt_key": settings.prompt_key, "label_key": settings.label_field}
        # A checkpoint of an earlier release has none of the two.
        keys |= {"system_prompt": settings.system_prompt, "chat_template_kwargs": settings.chat_template_kwargs or None}
        facts = {"source": settings.source, "args": settings.args, "seed": self._seed, **keys}
        return {**facts, "taken": self._num_taken, "seen": self._seen_step, "own": own}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from `state()`. Raises UserError for another source, arguments, seed or fields."""
        keys = ("source", "args", "prompt_key", "label_key", "system_prompt", "chat_template_kwargs")
        names = {"seed": "run.seed"} | {key: f"data.{key}" for key in keys}
        _check_same(state, self.state(), names)
        self._call("taking back its state", lambda: setattr(self._source, "state", state["own"]))
        self._num_taken, self._seen_step = state["taken"], state.get("seen", 0)

    def _rows(self, source: DataSource, count: int, *, start: int) -> list[Row]:
        records = self._call(f"giving {counted(count, 'row')}", lambda: source.next_rows(count))
        if not isinstance(records, Sequence) or isinstance(records, str | bytes) or len(records) != count:
            got = counted(len(records), "row") if isinstance(records, Sequence) else f"{records!r:.80} of type {type(records).__name__}"
            raise UserError(f"{self._name} returned {got}, needs a list of {count}; a source has no end, so start over where data end")
        return [self._checked(record, f"{self._name}, row {number}") for number, record in enumerate(records, start=start)]

    def _checked(self, record: Any, origin: str) -> Row:
        if not isinstance(record, Mapping) or not all(isinstance(key, str) for key in record):
            raise UserError(f'{origin}: is {record!r:.80}, needs a mapping like {{"prompt": ..., "label": ...}}')
        return check_row(record, origin, settings=self._settings, need_response=self._need_response)

    def _call(self, what: str, call: Callable[[], Any]) -> Any:
        try:
            with without_exits(self._name, doing=what):
                return call()
        except UserError:
            raise
        except Exception as error:  # a user's source can fail in any way
            raise UserError(f"{self._name} failed while {what}: {type(error).__name__}: {error}") from error


def _check_same(then: Mapping[str, Any], now: Mapping[str, Any], names: Mapping[str, str]) -> None:
    for key, name in names.items():
        if then.get(key) != now[key]:
            raise UserError(
                f"cannot resume: {name} is {str(now[key])[:40]}, was {str(then.get(key))[:40]} when the checkpoint was written; "
                "restore it or start a new run"
            )
