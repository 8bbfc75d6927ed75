"""An environment whose module starts a helper when it is imported. No test of its own."""

import subprocess

from megatron_rl import Environment, Reply
from megatron_rl.types import Message

HELPER = subprocess.Popen(["sleep", "1000"])


class Helped(Environment):
    """Starts a daemon, too, in a session of its own, and says the numbers of both."""

    def step(self, *, message: Message) -> Reply:
        shell = "setsid sleep 1000 > /dev/null 2>&1 & echo $!"
        daemon = subprocess.run(["sh", "-c", shell], check=True, capture_output=True, text=True).stdout.strip()
        return Reply(content=f"{HELPER.pid} {daemon}")
