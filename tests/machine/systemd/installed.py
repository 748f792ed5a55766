"""The packaged unit installed on a throw-away machine, as docs/operations.md says."""

from __future__ import annotations

import contextlib
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.machine.systemd.machine import PACKAGE, PYTHON_ENVIRONMENT, ROOT, SITE, Machine

UNIT = "transferd.service"
SYSTEMD = ROOT / "systemd"
DROP_INS = f"/etc/systemd/system/{UNIT}.d"
CONFIG = "/etc/transferd/transferd.toml"
# The packaged configuration, smaller, so that a start takes no time.
SMALLER = {"layers = 4": "layers = 2", 'capacity = "64GiB"': 'capacity = "256MiB"'}
QUICK = "[Service]\nRestartSec=100ms\n"
WATCHED = "[Service]\nWatchdogSec=2\n"


TCP = "tcp://127.0.0.1:7800"
UNIX = "ipc:///run/transferd/transferd.sock"


def documented_steps() -> str:
    """How docs/operations.md installs the unit: from its files up to the start, which is the tests' to do."""
    text = (ROOT / "docs/operations.md").read_text()
    block = re.search(r"^## systemd$.*?^```sh\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert block is not None
    steps = [line for line in block[1].splitlines() if line.startswith(("install ", "systemd-"))]
    assert len(steps) >= 5
    return "\n".join(steps)


class Installed:
    """The machine with transferd installed as docs/operations.md says."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.run = machine.run
        # What this system has of transferd, since the machine's root is an overlay over it.
        self.run("rm", "-rf", DROP_INS, "/etc/transferd", "/run/transferd", "/var/lib/transferd")
        machine.put("/usr/lib/sysusers.d/engine.conf", 'u engine - "an engine"\nm engine transferd\nu stranger -\n')
        self.install_command()
        self.run("sh", "-ec", f"cd {PACKAGE}; {documented_steps()}")
        self.configure()
        self.drop_in("quick", QUICK)

    def install_command(self, *environment: str) -> None:
        """What a package would install: the entry point, with this interpreter and its packages."""
        line = " ".join(["exec env", *PYTHON_ENVIRONMENT, *environment, self.machine.python, "-m transferd"])
        self.machine.put("/usr/bin/transferd", f'#!/bin/sh\n{line} "$@"\n', 0o755)

    def configure(self, *, as_packaged: bool = False, **settings: str) -> None:
        """The packaged configuration with its [cache], smaller, with lines replaced: old=new of what is given.

        as_packaged: the file as it is.
        """
        text = (SYSTEMD / "transferd.toml").read_text()
        if as_packaged:
            (self.machine.root / CONFIG.lstrip("/")).write_text(text)
            return
        text = re.sub(r"(?m)^#(\[cache\]|\w+ = )", r"\1", text).replace('"0666"', '"0660"')
        for old, new in SMALLER.items():
            assert old in text
            text = text.replace(old, new)
        for section, lines in settings.items():
            for line in lines.splitlines():  # a key of the packaged file is replaced, another one added
                key = re.escape(line.partition("=")[0].strip())
                text = re.sub(rf"(?m)(^\[{section}\]\n(?:(?!\[).*\n)*?){key} = .*\n", r"\1", text)
            if f"[{section}]\n" not in text:
                text += f"\n[{section}]\n"
            text = text.replace(f"[{section}]\n", f"[{section}]\n{lines}\n")
        (self.machine.root / CONFIG.lstrip("/")).write_text(text)  # owner and mode stay as installed

    def drop_in(self, name: str, text: str) -> None:
        self.machine.put(f"{DROP_INS}/{name}.conf", text)
        self.run("systemctl", "daemon-reload")

    def remove_drop_in(self, name: str) -> None:
        self.run("rm", "-f", f"{DROP_INS}/{name}.conf")
        self.run("systemctl", "daemon-reload")

    @contextlib.contextmanager
    def with_backend(self, backend: str, code: str) -> Iterator[None]:
        """A backend plugged in by module path, `module:Class`; the daemon is stopped at the end."""
        module = backend.partition(":")[0]
        self.machine.put(f"/opt/backend/{module}.py", code)
        self.drop_in("backend", f"[Service]\nEnvironment=TRANSFERD_STORAGE__BACKEND={backend}\n")
        self.install_command(f"PYTHONPATH=/opt/backend:{PACKAGE}:{SITE}")
        try:
            yield
        finally:
            self.stop()
            self.remove_drop_in("backend")
            self.install_command()

    @contextlib.contextmanager
    def packaged_drop_in(self, name: str) -> Iterator[None]:
        """One of systemd/transferd.service.d; the daemon is stopped at the end."""
        self.drop_in(name, (SYSTEMD / f"{UNIT}.d" / f"{name}.conf").read_text())
        try:
            yield
        finally:
            self.stop()
            self.remove_drop_in(name)

    def engine(self, *arguments: str, check: bool = True, **environment: str) -> subprocess.CompletedProcess[str]:
        """tests/machine/systemd/engine.py, as the engine's user."""
        variables = ["env", *(f"{name}={value}" for name, value in environment.items())]
        command = [self.machine.python, f"{PACKAGE}/tests/machine/systemd/engine.py", *arguments]
        return self.run(*variables, *command, user="engine", check=check)

    def show(self, name: str) -> str:
        return self.run("systemctl", "show", "--value", "--property", name, UNIT).stdout.strip()

    @property
    def main_pid(self) -> int:
        return int(self.show("MainPID"))

    def start(self) -> None:
        self.run("systemctl", "reset-failed", UNIT, check=False)
        done = self.run("systemctl", "start", UNIT, check=False)
        assert done.returncode == 0, self.log()

    def stop(self) -> None:
        self.run("systemctl", "stop", UNIT)

    def kill(self, which: str) -> None:
        self.run("systemctl", "kill", "--kill-who=main", f"--signal={which}", UNIT)

    def ping(self, user: str = "engine", timeout: str = "10") -> bool:
        return self.run("transferd", "ping", "--timeout", timeout, user=user, check=False).returncode == 0

    def log(self, priority: str = "debug") -> str:
        """What the daemon has said since it was started last, to the last line; only what is as urgent as that."""
        self.run("journalctl", "--sync")
        invocation = f"_SYSTEMD_INVOCATION_ID={self.show('InvocationID')}"
        return self.run("journalctl", "--no-pager", "--output=cat", f"--priority={priority}", invocation).stdout

    def dumps(self, reason: str) -> list[Path]:
        directory = self.machine.root / "var/lib/transferd/flight"
        return sorted(directory.glob(f"flight-*-{reason}.jsonl")) if directory.exists() else []

    def restarted(self, before: int) -> Callable[[], bool]:
        """Active again, and another process."""
        return lambda: self.show("ActiveState") == "active" and self.main_pid not in (0, before)
