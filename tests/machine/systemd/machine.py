"""A throw-away machine with a real systemd as process 1, to install the unit on. machine.sh makes it.

`obstacle()` says why there can be none here. Its files are reached at `Machine.root` from outside, its
commands are run inside by nsenter. Nothing outlives it: process 1 is killed when the process that holds
it ends, and takes every other process of its namespace along.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from transferd.runtime.compat import Self

T = TypeVar("T")

ROOT = Path(__file__).parents[3]
SCRIPT = Path(__file__).with_name("machine.sh")
SYSTEMD = Path("/lib/systemd/systemd")
BOOT_S = 60.0

# Where the machine finds this interpreter, its packages and this package: ProtectHome= hides where they are.
PYTHON_HOME, SITE, PACKAGE = "/opt/python", "/opt/site", "/opt/transferd"


def obstacle() -> str:
    """Why no machine can be made here; "" when one can."""
    if os.geteuid() != 0:
        return "only root can make namespaces with a systemd in them"
    for tool in ("unshare", "nsenter", "setpriv", "pivot_root"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed"
    if not SYSTEMD.exists():
        return "systemd is not installed"
    # The first steps of machine.sh, each of which a container may forbid.
    steps = (
        "mount -t tmpfs tmpfs /mnt && mkdir /mnt/a /mnt/b /mnt/c /mnt/d && mount -t cgroup2 cgroup2 /mnt/a"
        " && mkdir /mnt/a/transferd-probe-$$ && rmdir /mnt/a/transferd-probe-$$"
        " && mount -t overlay overlay -o lowerdir=/,upperdir=/mnt/b,workdir=/mnt/c /mnt/d"
    )
    command = ["unshare", "--mount", "--propagation", "private", "--pid", "--net", "--fork", "sh", "-c", steps]
    tried = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    if tried.returncode != 0:
        return f"namespaces, an overlay or control groups cannot be had here: {tried.stderr.strip()[-200:]}"
    return ""


# The interpreter's own library is looked for where it was built, which is hidden, too.
PYTHON_ENVIRONMENT = [
    f"PYTHONPATH={PACKAGE}:{SITE}",
    "PYTHONDONTWRITEBYTECODE=1",
    *([] if sys.base_prefix == "/usr" else [f"LD_LIBRARY_PATH={PYTHON_HOME}/lib"]),
]


class Machine:
    """One machine, from `boot` to `stop`. Also a context manager."""

    def __init__(self, work: Path) -> None:
        """work: an empty directory, which a tmpfs hides while the machine runs."""
        self._work = work
        self._process: subprocess.Popen[bytes] | None = None
        self.pid = 0  # of its process 1, as seen from here
        self.root = Path("/nonexistent")  # its root directory, as seen from here

    def __enter__(self) -> Self:
        self.boot()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def boot(self) -> None:
        """Start it and wait until systemd has come up."""
        shared = {sysconfig.get_path("purelib"): SITE, str(ROOT): PACKAGE}
        if sys.base_prefix != "/usr":
            shared[sys.base_prefix] = PYTHON_HOME
        binds = [f"{source}:{target}" for source, target in shared.items()]
        script = ["bash", str(SCRIPT), "outer", str(self._work), *binds]
        command = ["setpriv", "--pdeathsig", "KILL", "unshare", "--mount", "--propagation", "private", *script]
        with (self._work.parent / "machine.log").open("ab") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            self.pid = wait_for(self._find_first, "process 1", BOOT_S)
            self.root = Path(f"/proc/{self.pid}/root")
            wait_for(self._is_up, "systemd", BOOT_S)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Kill process 1, and wait until its namespace, control group and mounts are gone."""
        process, self._process = self._process, None
        if process is None:
            return
        if self.pid and process.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(30)

    def _find_first(self) -> int:
        """The process that machine.sh has become, by its number inside."""
        assert self._process is not None
        assert self._process.poll() is None, "the machine ended while it booted"
        for pid in descendants(self._process.pid):
            with_number = _status(pid, "NSpid")
            if with_number[1:] == ["1"] and _status(pid, "Name") == ["systemd"]:
                return pid
        return 0

    def _is_up(self) -> bool:
        return self.run("systemctl", "is-active", "basic.target", check=False).stdout.strip() == "active"

    # --- inside -------------------------------------------------------------------------------------

    def run(
        self, *command: str, user: str = "root", check: bool = True, timeout: float = 60.0
    ) -> subprocess.CompletedProcess[str]:
        """Run a command inside, to its end."""
        done = subprocess.run(self.inside(*command, user=user), capture_output=True, text=True, timeout=timeout)
        assert not check or done.returncode == 0, f"{command}: exit {done.returncode}\n{done.stdout}{done.stderr}"
        return done

    def without_transferd(self) -> None:
        """Remove what this installation lends it, and policy-rc.d, which keeps packages from starting services."""
        self.run("umount", PACKAGE)
        gone = "/opt/transferd /etc/transferd /var/lib/transferd /usr/bin/transferd /usr/sbin/policy-rc.d"
        self.run("sh", "-c", f"rm -rf {gone}")

    def inside(self, *command: str, user: str = "root") -> list[str]:
        """The command line that runs another one inside."""
        who = [] if user == "root" else ["setpriv", "--reuid", user, "--regid", user, "--init-groups"]
        enter = ["nsenter", "--target", str(self.pid), "--all", "--root", "--wdns=/"]
        clean = ["env", "-i", "PATH=/usr/sbin:/usr/bin:/sbin:/bin", "LANG=C.UTF-8", *PYTHON_ENVIRONMENT]
        return [*enter, *clean, *who, *command]

    def put(self, path: str, content: str, mode: int = 0o644) -> None:
        """Write a file inside; its directory is made."""
        target = self.root / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(content, encoding="utf-8")
        target.chmod(mode)

    @property
    def python(self) -> str:
        """The interpreter, as it is found inside."""
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        return f"/usr/bin/{version}" if sys.base_prefix == "/usr" else f"{PYTHON_HOME}/bin/{version}"


def wait_for(condition: Callable[[], T], what: str, timeout: float = 30.0) -> T:
    """Ask again and again until it is true, and return what it was."""
    give_up = time.monotonic() + timeout
    while not (value := condition()):
        assert time.monotonic() < give_up, f"{what} did not come within {timeout:g} s"
        time.sleep(0.02)
    return value


def descendants(pid: int) -> Iterator[int]:
    """All processes below one, nearest first."""
    try:
        children = [
            int(child)
            for thread in Path(f"/proc/{pid}/task").iterdir()
            for child in (thread / "children").read_text().split()
        ]
    except OSError:  # it has ended meanwhile
        return
    for child in children:
        yield child
        yield from descendants(child)


def _status(pid: int, key: str) -> list[str]:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return []
    return next((line.split()[1:] for line in lines if line.startswith(f"{key}:")), [])
