"""A reload (SIGHUP): applies what can change at once, and reports which keys need a restart."""

from __future__ import annotations

from collections.abc import Callable

import structlog

from transferd.config import Config, to_tree
from transferd.config.loading import leaves, takes_effect
from transferd.daemon.daemon import Daemon
from transferd.daemon.preflight import build, examine
from transferd.daemon.systemd import Notifier
from transferd.errors import ConfigError
from transferd.observability import logs

log = structlog.get_logger(__name__)


class Reloader:
    """Each call reads the configuration again and applies what can change while the daemon runs. Raises nothing.

    A file with a mistake changes nothing. `status` includes the last reload's outcome, so `systemctl status` shows it
    until the next reload or a restart.

    read: loads the configuration; None if there is no file to read.
    """

    def __init__(self, daemon: Daemon, notifier: Notifier, read: Callable[[], Config] | None) -> None:
        self._daemon = daemon
        self._notifier = notifier
        self._read = read
        self._running = dict(leaves(to_tree(daemon.config)))  # the settings in effect
        self._needs_restart: list[str] = []
        daemon.engines.acts.would_not_start = self.would_not_start
        self.serving = False  # whether READY=1 was sent: only then may we notify the supervisor of reloads

    def __call__(self) -> None:
        if self._read is None:
            return
        acts = self._daemon.engines.acts
        if self.serving:
            self._notifier.reloading()
        try:
            config = self._read()
            added, revoked = self._daemon.transport.read_keys()
        except ConfigError as error:
            acts.reload_refused = str(error)
            log.error("reload refused", problem=acts.reload_refused)
        else:
            acts.reload_refused = ""
            self._apply(config, added, revoked)
        if self.serving:
            self._notifier.notify("READY=1", f"STATUS={self.status()}")

    def would_not_start(self) -> str:
        """Why the daemon would not start with the configuration as it is on disk now; "" if it would."""
        try:
            if self._read is not None:
                config = self._read()
                examine(config, build(config))
        except ConfigError as error:
            return str(error)
        return ""

    def _apply(self, config: Config, added: int, revoked: int) -> None:
        logs.set_level(config.log.level)
        if self._daemon.storage is not None:
            self._daemon.storage.reconfigure(config.storage)
        new = dict(leaves(to_tree(config)))
        different = sorted(key for key in self._running.keys() | new.keys() if self._running.get(key) != new.get(key))
        changed = [key for key in different if takes_effect(key)]
        self._needs_restart = [key for key in different if not takes_effect(key)]
        keys = {"keys_added": added, "keys_revoked": revoked} if added or revoked else {}
        now = {key: [self._running.get(key), new.get(key)] for key in changed}
        self._running |= {key: new.get(key) for key in changed}
        self._daemon.engines.acts.noted("reload", ", ".join(changed))
        log.info("reloaded", changed=now, needs_restart=self._needs_restart, **keys)
        if self._needs_restart:
            log.warning("some changed settings need a restart", keys=self._needs_restart)

    def status(self) -> str:
        """The line for `systemctl status`."""
        line = _state(self._daemon)
        if refused := self._daemon.engines.acts.reload_refused:
            return f"reload refused: {refused}; {line}"
        return f"{line}; needs a restart: {', '.join(self._needs_restart)}" if self._needs_restart else line


def _state(daemon: Daemon) -> str:
    if daemon.not_ready:
        return f"not serving: {daemon.not_ready}"
    ranks = sum(len(engine.workers) for engine in daemon.engines)
    others = sum(engine.registration is not None for engine in daemon.engines)
    serving = f"serving {ranks} ranks on {daemon.transport.endpoints[0]}"
    if others or daemon.config.cache is None:
        serving += f", {others} engines registered"
    held = [hold for engine in daemon.engines for hold in engine.dispatcher.gate.held]
    pauses = sorted((hold for hold in held if hold.what == "pause"), key=lambda hold: hold.since)
    if not pauses:
        return serving
    longest = daemon.clock.monotonic() - pauses[0].since
    return f"paused by {', '.join(hold.holder for hold in pauses[:3])} for {longest:.0f} s; {serving}"
