"""Reward functions of every kind that a user may write."""

import asyncio
import os
import subprocess
import sys
import time


def exact(*, prompt, response, label, metadata):
    return float(response == label)


async def exact_later(*, prompt, response, label, metadata):
    await asyncio.sleep(0.001)
    return response == label


def parts(*, prompt, response, label, metadata):
    return {"reward": 0.5, "format": 1, "length": len(response)}


def parts_without_total(*, prompt, response, label, metadata):
    return {"format": 1.0}


def by_response(*, prompt, response, label, metadata):
    """What the response asks for."""
    if response == "raise":
        raise KeyError("no such answer")
    if response == "hang":
        time.sleep(60)
    if response == "exit":
        os._exit(3)
    return {"nan": float("nan"), "none": None, "text": "1.0"}.get(response, 1.0)


def echo_metadata(*, prompt, response, label, metadata):
    return float(metadata["a"] * 10 + metadata["b"])


def heavy_modules(*, prompt, response, label, metadata):
    return float(sum(name in sys.modules for name in ("torch", "sglang", "ray", "megatron", "transformers")))


def wrong_names(prompt, answer):
    return 0.0


NOT_A_FUNCTION = 3


def worker(*, prompt, response, label, metadata):
    """The number of the process."""
    return os.getpid()


def leaves_processes(*, prompt, response, label, metadata):
    """Start a child of this session and one of its own, write their numbers where the label says, and do what the response asks for."""
    children = [subprocess.Popen(["sleep", "600"], start_new_session=own) for own in (False, True)]
    with open(label, "w") as file:
        file.write(" ".join(str(child.pid) for child in children))
    if response == "hang":
        time.sleep(60)
    if response == "exit":
        os._exit(3)
    return 1.0


def prints(*, prompt, response, label, metadata):
    print("printed:", response)
    print("warned:", response, file=sys.stderr)
    return 1.0
