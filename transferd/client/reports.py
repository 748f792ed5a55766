"""What a client may ask of the daemon itself: reports, which change nothing. Most of them observers may ask as well."""

from __future__ import annotations

from typing import Any

from transferd.client.calls import Calls
from transferd.wire import protocol as wire
from transferd.wire.answers import AtRestart

CHECK_TIMEOUT_S = 3600.0  # to ask a bucket for each object of a large memory level


class ReportCalls(Calls):
    """What the daemon reports: of itself, its tasks and its clients."""

    async def stats(self) -> dict[str, Any]:
        """Return the daemon's report, the same as `transferd stats --format json`."""
        return dict(await self._ask(wire.Stats()))

    async def explain(self, task_id: str, engine: str = "") -> dict[str, Any]:
        """Return the story of a task from the flight recorder; transferd/observability/story.py describes its fields.

        engine: the task's engine; default this client's own. Raises RequestError with code `unknown_task` if the
        recorder does not have the task (any more).
        """
        return dict(await self._ask(wire.Explain(task_id, engine)))

    async def why(self, key: str, engine: str = "") -> list[dict[str, Any]]:
        """What the daemon knows of a stored block: where it is, when it was stored and by whom, or why it has left.

        engine: only what this engine has stored. Returns a row for each engine and generation that has, or had, the
        block; transferd/daemon/traffic.py describes it. For the engine's user, the daemon's user and root: raises
        RequestError (`not_yours`).
        """
        return list(await self._ask(wire.Why(key, engine)))

    async def tasks(self, which: wire.Which = "recent", limit: int = 100, engine: str = "") -> list[dict[str, Any]]:
        """List running, slow, failed or recent tasks; transferd/daemon/listing.py describes a row.

        limit: the most rows to return, 1 to 1000.
        engine: only its tasks.
        """
        return list(await self._ask(wire.ListTasks(which, limit, engine)))

    async def clients(self, limit: int = 100, engine: str = "") -> list[dict[str, Any]]:
        """List connected clients: {client, engine, peer, uid, pid, observer, connected_s, silent_s, tasks} of each."""
        return list(await self._ask(wire.ListClients(limit, engine)))

    async def record(self, after: int = 0) -> dict[str, Any]:
        """Engines' look-ups since the one of number `after`, without contents, for the daemon's user and root.

        {last, lost, requests: [[seconds, engine, tokens, ids]]}; ask again within 30 seconds, with after=last. The
        daemon keeps nothing before the first call. `transferd record` writes them as a trace. Raises RequestError.
        """
        return dict(await self._ask(wire.Record(after)))

    async def restart_check(self) -> AtRestart:
        """What a restart of the daemon would lose besides what `stats` says: for the daemon's user and root.

        `transferd restart-check` makes a verdict of both. It asks each level of storage what it has, as a drain does,
        and reads the configuration. Raises RequestError (`not_yours`).
        """
        return AtRestart(**await self._ask(wire.RestartCheck(), CHECK_TIMEOUT_S))
