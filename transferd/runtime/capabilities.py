"""What the kernel lets this process do beyond its user's rights (capabilities(7))."""

from __future__ import annotations

from pathlib import Path

STATUS = Path("/proc/self/status")
CAP_CHOWN = 0  # the numbers of linux/capability.h
CAP_IPC_LOCK = 14  # may lock memory beyond RLIMIT_MEMLOCK
CAP_SYS_RESOURCE = 24


def has_capability(number: int) -> bool:
    """Whether this capability is effective in this process. False if the kernel does not say."""
    try:
        status = STATUS.read_text(errors="replace")
    except OSError:
        return False
    line = next((line for line in status.splitlines() if line.startswith("CapEff:")), "CapEff: 0")
    return bool(int(line.split()[1], 16) >> number & 1)
