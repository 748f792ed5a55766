"""Mooncake's own log lines: glog, written to stderr from C++.

They are not JSON and would spoil a structured log, and with the master gone there are several a
second; everything they say about a call comes back as that call's code anyway. So they are off by
default once the client is set up. While it is being set up errors are shown: a missing RDMA device is
explained nowhere else.

`MC_LOG_LEVEL` is read when the library first looks at its configuration and knows no "off"; GLOG_*
variables are ignored, because this glog takes its flags from gflags. Hence the flag itself is set.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

LEVELS = {"off": "ERROR", "error": "ERROR", "warning": "WARNING", "info": "INFO"}
_MIN_LEVEL_FLAG = "_ZN3fLI17FLAGS_minloglevelE"  # int32 fLI::FLAGS_minloglevel
_FATAL = 3


def silence() -> bool:
    """Let only fatal lines through from now on. False where this build hides the flag: the lines stay."""
    for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines():
        if "libglog" in line:
            path = line[line.index("/") :]
            try:
                ctypes.c_int32.in_dll(ctypes.CDLL(path), _MIN_LEVEL_FLAG).value = _FATAL
            except (OSError, ValueError):
                return False
            return True
    return False
