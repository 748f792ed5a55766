"""Puts a daemon under another user: `python -m tests.machine.hostile.daemon_as UID GID python -m transferd serve …`.

A prefix for `launch.start`. It is one process: it imports everything as root, becomes the user and runs the command.
"""

from __future__ import annotations

import contextlib
import sys

from transferd.runtime.signals import hold_dump_signals

hold_dump_signals()  # before numpy starts threads

from tests.machine.hostile.accounts import become, preload  # noqa: E402
from transferd.cli.main import main  # noqa: E402
from transferd.errors import ConfigError  # noqa: E402
from transferd.storage.attention_store.sdk import load_library  # noqa: E402

if __name__ == "__main__":
    uid, gid, _python, _m, _transferd, *arguments = sys.argv[1:]
    preload()
    with contextlib.suppress(ConfigError):  # its double is in tests/
        load_library()
    with contextlib.suppress(ImportError):  # what the first trace imports
        import encodings.raw_unicode_escape  # noqa: F401

        import opentelemetry.sdk.trace.export  # noqa: F401
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        OTLPSpanExporter(endpoint="http://127.0.0.1:9/")
    become(int(uid), int(gid))
    sys.argv[1:] = arguments
    main()
