import signal
from collections.abc import Iterator

import pytest

from megatron_rl.runtime.grace import finishing_first


class Asked(Exception):
    """What the handler makes of SIGTERM."""


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    def leave(*_: object) -> None:
        raise Asked

    before = signal.signal(signal.SIGTERM, leave)
    yield
    signal.signal(signal.SIGTERM, before)


def test_a_signal_waits_for_the_end_of_what_is_being_done() -> None:
    done = []
    with pytest.raises(Asked), finishing_first():
        signal.raise_signal(signal.SIGTERM)
        done.append(True)
    assert done == [True]
    with pytest.raises(Asked):
        signal.raise_signal(signal.SIGTERM)


def test_a_second_signal_does_not_wait() -> None:
    with pytest.raises(Asked), finishing_first():
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        pytest.fail("went on")


def test_a_failure_is_not_hidden_by_the_signal_that_came_before_it() -> None:
    with pytest.raises(ValueError, match="broken"), finishing_first():
        signal.raise_signal(signal.SIGTERM)
        raise ValueError("broken")
    with pytest.raises(Asked):
        signal.raise_signal(signal.SIGTERM)


def test_nothing_happens_without_a_signal() -> None:
    with finishing_first():
        pass
