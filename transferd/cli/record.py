"""`transferd record FILE`: the look-ups of a daemon's engines as a trace, without contents."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Annotated

import typer

from transferd.cli.asking import AskedDaemon, asks
from transferd.errors import RequestError

EVERY_S = 0.5


@asks()
def record(
    daemon: AskedDaemon,
    file: Annotated[Path, typer.Argument(help="The trace to write, JSON lines; it must not exist.")],
    seconds: Annotated[
        float | None, typer.Option("--seconds", min=0.0, help="How long (default: until Ctrl-C).")
    ] = None,
    engine: Annotated[str, typer.Option("--engine", help="Only this engine's (default: all).")] = "",
) -> None:
    """Write what engines look up as a trace that `transferd replay` reads: times and hashes of keys, no contents.

    Run it as the daemon's user or root.
    """
    import asyncio

    written = _Written()
    try:
        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(_record(daemon, written, file, seconds, engine))
    except OSError as error:
        raise RequestError(f"{file}: cannot be written: {error.strerror}") from error
    tree = {"file": str(file), "requests": written.requests, "lost": written.lost}
    lost = f"; {written.lost} came too fast and are missing" if written.lost else ""
    daemon.show(tree, f"{written.requests} look-ups in {file}{lost}")


class _Written:
    """What was written so far; it stays when Ctrl-C ends the recording."""

    def __init__(self) -> None:
        self.requests = self.lost = 0
        self.began: float | None = None


async def _record(daemon: AskedDaemon, written: _Written, file: Path, seconds: float | None, engine: str) -> None:
    import asyncio

    loop = asyncio.get_running_loop()
    until = None if seconds is None else loop.time() + seconds
    async with daemon.connected() as client, contextlib.AsyncExitStack() as stack:
        found = await client.record(0)  # it may be refused: before there is a file
        lines = stack.enter_context(file.open("x", encoding="utf-8"))
        while True:
            written.lost += found["lost"]
            for at, name, tokens, ids in found["requests"]:
                if ids and engine in ("", name):
                    written.began = at if written.began is None else written.began
                    row = {"timestamp": round(1000 * (at - written.began), 3), "input_length": tokens}
                    lines.write(json.dumps(row | {"output_length": 0, "hash_ids": ids}) + "\n")
                    written.requests += 1
            lines.flush()
            if until is not None and loop.time() >= until:
                return
            if not found["requests"]:
                await asyncio.sleep(EVERY_S if until is None else min(EVERY_S, until - loop.time()))
            found = await client.record(found["last"])
