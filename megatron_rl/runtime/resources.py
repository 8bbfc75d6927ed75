"""What this machine has left for a run. Imports nothing heavy: `doctor` must work where little is installed."""

from pathlib import Path

import psutil


def available_memory_bytes() -> int:
    """Memory that this process may still use: the machine's available memory, or what its control group leaves when that is less."""
    available = int(psutil.virtual_memory().available)
    group = Path("/sys/fs/cgroup")
    for limit_file, usage_file in (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes")):
        if (group / limit_file).is_file() and (group / usage_file).is_file():
            limit = (group / limit_file).read_text().strip()
            if limit != "max":
                available = min(available, max(0, int(limit) - int((group / usage_file).read_text())))
    return available
