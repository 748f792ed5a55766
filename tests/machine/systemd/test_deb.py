"""The Debian package of `make deb` in dist/: installs, serves under systemd, is upgraded, rolled back, removed, purged.

Skipped where dist/ has none: building it takes minutes.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.machine.systemd.machine import Machine

ROOT = Path(__file__).parents[3]
PACKAGES = sorted((ROOT / "dist").glob("transferd_*.deb"), key=lambda path: path.stat().st_mtime)
LATER = "9.9.9"

pytestmark = [pytest.mark.one_loop, pytest.mark.skipif(not PACKAGES, reason="there is no package: make deb")]


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """A machine that has nothing of transferd but the packages in /tmp."""
    work = tmp_path_factory.mktemp("debian") / "work"
    work.mkdir()
    with Machine(work) as machine:
        machine.without_transferd()
        shutil.copy(PACKAGES[-1], machine.root / "tmp/transferd.deb")
        yield machine


def later(machine: Machine) -> None:
    """The same package as a later version."""
    script = f"dpkg-deb -R transferd.deb later && sed -i 's/^Version: .*/Version: {LATER}/' later/DEBIAN/control"
    machine.run("sh", "-ec", f"cd /tmp; {script}; dpkg-deb -Znone -b later later.deb; rm -r later", timeout=600)


def command(machine: Machine, *arguments: str) -> str:
    """What the package's own transferd prints, without this tree on its path."""
    return machine.run("env", "-i", "PATH=/usr/bin:/bin", "transferd", *arguments, timeout=120).stdout


def boot_id(machine: Machine) -> str:
    return command(machine, "ping", "--ready", "--timeout", "60").split()[1]


def version(machine: Machine) -> str:
    return machine.run("dpkg-query", "-W", "-f", "${Version}", "transferd").stdout


def active(machine: Machine) -> str:
    return machine.run("systemctl", "is-active", "transferd", check=False).stdout.strip()


def test_the_life_of_the_package(machine: Machine) -> None:
    """One test, because each step begins where the last one ended."""
    machine.run("dpkg", "-i", "/tmp/transferd.deb", timeout=600)
    first, built = boot_id(machine), version(machine)
    assert active(machine) == "active"
    assert machine.run("systemctl", "is-enabled", "transferd").stdout.strip() == "enabled"
    assert "+g" in command(machine, "--version"), "the version has the commit"
    stat = machine.run("stat", "-c", "%U %G %a %n", "/etc/transferd/transferd.toml", "/var/lib/transferd").stdout
    assert stat == "root transferd 640 /etc/transferd/transferd.toml\ntransferd transferd 750 /var/lib/transferd\n"
    machine.run("sh", "-c", "echo '# mine' >>/etc/transferd/transferd.toml")
    machine.run("sh", "-c", "echo kept >/var/lib/transferd/mark")

    later(machine)
    machine.run("dpkg", "-i", "/tmp/later.deb", timeout=600)
    assert version(machine) == LATER
    second = boot_id(machine)
    assert second != first, "an upgrade restarts the daemon"
    assert "# mine" in machine.run("cat", "/etc/transferd/transferd.toml").stdout

    machine.run("dpkg", "-i", "/tmp/transferd.deb", timeout=600)
    assert version(machine) == built
    assert boot_id(machine) != second, "a rollback, too"

    machine.run("dpkg", "-r", "transferd", timeout=600)
    assert active(machine) in ("inactive", "unknown", "failed")
    there = ("/etc/transferd/transferd.toml", "/var/lib/transferd/mark")
    assert all(machine.run("test", "-e", path, check=False).returncode == 0 for path in there), "data and settings stay"
    gone = ("/opt/transferd", "/usr/bin/transferd", "/lib/systemd/system/transferd.service")
    assert all(machine.run("test", "-e", path, check=False).returncode == 1 for path in gone)

    machine.run("dpkg", "-P", "transferd", timeout=600)
    assert all(machine.run("test", "-e", path, check=False).returncode == 1 for path in there), "a purge takes them"


def test_the_package_is_well_formed() -> None:
    told = subprocess.run(["dpkg-deb", "-f", PACKAGES[-1]], capture_output=True, text=True, check=True).stdout
    fields = dict(line.split(": ", 1) for line in told.splitlines() if ": " in line)
    assert fields["Version"].startswith("0.")
    assert "python3 (<< 3." in fields["Depends"], "its environment is that of one Python"
