"""Run a writer on a buffer and kill it with SIGKILL, over and over: crash_loop.py BUFFER JOURNAL KILLS.

The writer notes every finished and every handed out group in the journal after the call has returned. It is killed at once when it has
written a number of lines, drawn per round, and so in the middle of what it does next, on a slow machine as on a fast one. Forked children
make a round cheap; this process itself never opens the buffer.
"""

import os
import random
import signal
import sys
from pathlib import Path

import numpy as np
from buffer_parts import finished_samples, take_done

from megatron_rl.data.buffer import Buffer
from megatron_rl.types import Group, Prompt, Sample, StopReason

SAMPLES = 3


def sample_of(prompt: Prompt, index: int) -> Sample:
    ids = np.arange(index + 1) + 1000 * int(prompt.id)
    return Sample(
        group_id=prompt.id,
        index=index,
        prompt=prompt,
        response_ids=ids,
        loss_mask=np.ones(len(ids)),
        rollout_log_probs=-np.arange(len(ids)),
        weight_versions=np.full(len(ids), 3),
        stop_reason=StopReason.STOP,
    )


def write_forever(buffer_path: Path, journal: int, noted: int) -> None:
    """Each turn: 8 new prompts, generate 8 of those that are pending, hand out 5 of what is done, under a step of its own.

    After each line of the journal the pipe `noted` gets a byte.
    """

    def note(line: str) -> None:
        os.write(journal, f"{line}\n".encode())
        os.write(noted, b".")

    with Buffer(buffer_path) as buffer:
        for turn in range(10**5):
            step = os.getpid() * 10**5 + turn
            first = buffer.counts().total
            buffer.add_prompts(Prompt(id=str(row), token_ids=[row], text=str(row)) for row in range(first, first + 8))
            for prompt in buffer.take_pending(8):
                finished = finished_samples(buffer, prompt)
                samples = [*finished, *(sample_of(prompt, index) for index in range(len(finished), SAMPLES))]
                buffer.put_samples(Group(id=prompt.id, prompt=prompt, samples=tuple(samples[:1])))
                note(f"sample {prompt.id}")
                buffer.put_done(Group(id=prompt.id, prompt=prompt, samples=tuple(samples)))
                note(f"done {prompt.id}")
            for group in take_done(buffer, 5, step=step):
                note(f"taken {group.id}")


def main() -> None:
    buffer_path, journal_path, kills = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    journal = os.open(journal_path, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    generator = random.Random(0)
    for _ in range(kills):
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            write_forever(buffer_path, journal, writer)
        os.close(writer)
        for _ in range(generator.randrange(4, 40)):
            os.read(reader, 1)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reader)


if __name__ == "__main__":
    main()
