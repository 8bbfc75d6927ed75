"""Reward functions of every kind that a user may write."""

import asyncio
import ctypes
import os
import subprocess
import sys
import time


def exact(*, sample):
    return float(sample.response_text == sample.prompt.label)


async def exact_later(*, sample):
    await asyncio.sleep(0.001)
    return sample.response_text == sample.prompt.label


def parts(*, sample):
    return {"reward": 0.5, "format": 1, "length": len(sample.response_text)}


def parts_without_total(*, sample):
    return {"format": 1.0}


def by_response(*, sample):
    """What the response asks for."""
    if sample.response_text == "raise":
        raise KeyError("no such answer")
    if sample.response_text == "hang":
        time.sleep(60)
    if sample.response_text == "exit":
        os._exit(3)
    if sample.response_text == "sys.exit":
        sys.exit(3)
    if sample.response_text == "interrupt":
        raise KeyboardInterrupt
    return {"nan": float("nan"), "none": None, "text": "1.0", "huge": 10**400}.get(sample.response_text, 1.0)


def echo_metadata(*, sample):
    metadata = {**sample.prompt.metadata, **sample.metadata}
    return float(metadata["a"] * 10 + metadata["b"])


def waits(*, sample):
    """As many seconds as the response says."""
    time.sleep(float(sample.response_text))
    return 0.0


def heavy_modules(*, sample):
    return float(sum(name in sys.modules for name in ("torch", "sglang", "ray", "megatron", "transformers")))


def wrong_names(prompt, answer):
    return 0.0


NOT_A_FUNCTION = 3


def weighted(*, sample, weight: float):
    """0 where the experts were sent, too."""
    return weight * (sample.routed_experts is None) * len(sample.prompt.token_ids)


def worker(*, sample):
    """The number of the process."""
    return os.getpid()


def keys(*, sample):
    """10 for the user's key, 1 for that of the run's Ray."""
    return 10.0 * ("SEARCH_KEY" in os.environ) + ("RAY_AUTH_TOKEN" in os.environ)


def leaves_processes(*, sample):
    """Start a child of this session and one of its own, write their numbers where the label says, and do what the response asks for."""
    children = [subprocess.Popen(["sleep", "600"], start_new_session=own) for own in (False, True)]
    with open(sample.prompt.label, "w") as file:
        file.write(" ".join(str(child.pid) for child in children))
    if sample.response_text == "hang":
        time.sleep(60)
    if sample.response_text == "exit":
        os._exit(3)
    return 1.0


def prints(*, sample):
    print("printed:", sample.response_text)
    print("warned:", sample.response_text, file=sys.stderr)
    return 1.0


def makes_a_daemon(*, sample):
    """A process of a session of its own whose parent is gone; its number is written where the label says."""
    code = "import os, sys, time; os.fork() and os._exit(0); os.setsid(); open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(600)"
    subprocess.run([sys.executable, "-c", code, sample.prompt.label], check=True)
    while not os.path.exists(sample.prompt.label) or not os.path.getsize(sample.prompt.label):
        time.sleep(0.01)
    if sample.response_text == "hang":
        time.sleep(60)
    return 1.0


def rank(*, samples):
    """A response's place among those of its group by length, the shortest first."""
    lengths = sorted(len(sample.response_text) for sample in samples)
    return [float(lengths.index(len(sample.response_text))) for sample in samples]


def by_first(*, samples):
    """What the first response asks for."""
    if samples[0].response_text == "hang":
        time.sleep(60)
    if samples[0].response_text == "segfault":
        ctypes.string_at(0)
    return {"too few": [], "mapping": {"reward": 1.0}}.get(samples[0].response_text, [1.0] * len(samples))


async def later_by_response(*, sample):
    """A call that waits as many seconds as the response says, blocks the loop, or does what it asks for."""
    if sample.response_text == "block":
        time.sleep(60)
    if sample.response_text == "raise":
        raise KeyError("no such answer" + "!" * 10**6)
    await asyncio.sleep(float(sample.response_text))
    return 1.0


def memory_order(*, sample):
    """The order in which the system ends processes for memory, the highest first."""
    with open("/proc/self/oom_score_adj") as file:
        return float(file.read())
