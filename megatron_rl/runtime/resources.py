"""Resources left on this machine. Imports nothing heavy: `doctor` must work with few packages."""

from pathlib import Path

import psutil


def available_memory_bytes() -> int:
    """Return the bytes of memory that this process may still use.

    The limit is the machine's available memory, or the rest of the control group when lower.
    """
    available = int(psutil.virtual_memory().available)
    group = Path("/sys/fs/cgroup")
    for limit_file, usage_file in (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes")):
        if (group / limit_file).is_file() and (group / usage_file).is_file():
            limit = (group / limit_file).read_text().strip()
            if limit != "max":
                available = min(available, max(0, int(limit) - int((group / usage_file).read_text())))
    return available
