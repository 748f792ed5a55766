"""Mooncake's own log lines: glog, written to stderr from C++.

They are not JSON and would corrupt a structured log: two or three lines at every healthy start, several a second
while the master is gone. Each call also returns its problem as a code, so the lines are off by default. A failed
set-up is the exception, because only the log explains a missing RDMA device: the second attempt shows errors.

The library reads `MC_LOG_LEVEL` on import, and the variable has no "off". This glog takes its flags from gflags
and ignores GLOG_* variables. So we set the flag in memory.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

LEVELS = {"off": "ERROR", "error": "ERROR", "warning": "WARNING", "info": "INFO"}
_MIN_LEVEL_FLAG = "_ZN3fLI17FLAGS_minloglevelE"  # int32 fLI::FLAGS_minloglevel
_ERROR, _FATAL = 2, 3


def silence() -> bool:
    """Log only fatal errors from now on. False if this build hides the flag; then nothing changes."""
    return _set_level(_FATAL)


def show_errors() -> bool:
    """From now on, log errors, too. False as in `silence`."""
    return _set_level(_ERROR)


def _set_level(level: int) -> bool:
    for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines():
        if "libglog" in line:
            path = line[line.index("/") :]
            try:
                ctypes.c_int32.in_dll(ctypes.CDLL(path), _MIN_LEVEL_FLAG).value = level
            except (OSError, ValueError):
                return False
            return True
    return False
