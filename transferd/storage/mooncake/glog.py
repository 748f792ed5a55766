"""Mooncake's own log lines: glog, written to stderr from C++.

They are not JSON and would spoil a structured log: two or three at every healthy start, and several a
second with the master gone. Everything they say about a call comes back as that call's code anyway, so
they are off by default. A set-up that fails is the exception (a missing RDMA device is explained nowhere
else): when it is tried the second time, errors are shown.

`MC_LOG_LEVEL` is read when the library is imported and knows no "off"; GLOG_* variables are ignored,
because this glog takes its flags from gflags. Hence the flag itself is set.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

LEVELS = {"off": "ERROR", "error": "ERROR", "warning": "WARNING", "info": "INFO"}
_MIN_LEVEL_FLAG = "_ZN3fLI17FLAGS_minloglevelE"  # int32 fLI::FLAGS_minloglevel
_ERROR, _FATAL = 2, 3


def silence() -> bool:
    """Let only fatal lines through from now on. False where this build hides the flag: the lines stay."""
    return _set_level(_FATAL)


def show_errors() -> bool:
    """Let error lines through, too."""
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
