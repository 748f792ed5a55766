"""The last release, this version and the last release again, installed on a throw-away machine as the pages say.

`make upgrade-check` runs this: it builds both, and this version's Debian package where its tools are here. What
docs/operations.md says is typed as it stands there: each version's own page is asked.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.machine.systemd.machine import Machine, obstacle
from tests.machine.upgrade.builds import LAST, ROOT, exported

SOURCES = "/srv"  # of both versions, their wheels and what these need
CAPACITY = "8MiB"  # of the store
RANKS = 4  # of the engine
WRITTEN = 64  # more of its blocks than it holds
INSTALL, UPGRADE, BY_PACKAGE, ROLLBACK, UNINSTALL = "systemd", "Upgrade", "to the package", "Rollback", "Uninstall"

pytestmark = [
    pytest.mark.one_loop,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(os.environ.get("UPGRADE") != "whole", reason="it builds two versions: make upgrade-check"),
]


def page(tree: Path, section: str) -> str:
    """The commands of a section of a version's docs/operations.md: its first block."""
    text = (tree / "docs/operations.md").read_text()
    at = re.search(rf"^(## {section}$|\*\*[^*]*{section}\.\*\*)", text, re.MULTILINE)
    assert at is not None, section
    block = re.compile(r"^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL).search(text, at.start())
    assert block is not None
    return block[1]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """old/, new/: trees. house/: wheels of both, and of all that they need."""
    if why := LAST.missing() or obstacle():
        pytest.skip(why)
    work = tmp_path_factory.mktemp("sources")
    for name, commit in (("old", LAST.commit), ("new", "HEAD")):
        (work / name).mkdir()
        exported(commit, work / name)
        pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--wheel-dir", str(work / "house"), "setuptools>=77"]
        subprocess.run([*pip, "wheel", str(work / name)], check=True, timeout=900)
    for package in (ROOT / "dist").glob("transferd_*.deb"):
        shutil.copy(package, work / "new")
    shutil.copy(Path(__file__).with_name("engine.py"), work)
    return work


class Host:
    """The machine, and what an operator types there."""

    def __init__(self, machine: Machine, sources: Path) -> None:
        self.machine = machine
        self.sources = sources

    def type(self, script: str, where: str = "") -> str:
        """Run a script as root, as on a machine that has nothing but these wheels; return what it prints."""
        pip = ["PIP_NO_INDEX=1", f"PIP_FIND_LINKS={SOURCES}/house", "PIP_DISABLE_PIP_VERSION_CHECK=1", "PIP_QUIET=1"]
        clean = ["env", "-i", "PATH=/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/root", *pip]
        cd = f"cd {SOURCES}/{where}\n"
        done = self.machine.run(*clean, "sh", "-ec", f"exec 2>&1\n{cd}{script}", timeout=900, check=False)
        assert done.returncode == 0, f"{script}\n{done.stdout[-4000:]}\n{self._log()}"
        return done.stdout

    def _log(self) -> str:
        return self.machine.run("journalctl", "--no-pager", "-n30", "-u", "transferd", check=False).stdout

    def small(self) -> None:
        """The packaged configuration with a store that is soon full."""
        text = (self.sources / "old/systemd/transferd.toml").read_text().replace('"64GiB"', f'"{CAPACITY}"')
        (self.machine.root / "etc/transferd/transferd.toml").write_text(text)
        self.type("systemctl restart transferd; transferd ping --ready --timeout 60")

    def engine(self, what: str, first: int, count: int) -> set[int]:
        endpoint = "ipc:///run/transferd/transferd.sock"
        words = f"register {RANKS} 0 {what} {first} {count}"
        told = self.type(f"/opt/transferd/bin/python {SOURCES}/engine.py {endpoint} {words}")
        return set(json.loads(told.splitlines()[-1]))

    def serving(self) -> str:
        """The version of the daemon that runs."""
        return str(json.loads(self.type("transferd stats --format json"))["version"])

    def installed(self) -> str:
        return self.type("transferd version").split()[-1]


@pytest.fixture(scope="module")
def host(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    work = tmp_path_factory.mktemp("host") / "work"
    work.mkdir()
    with Machine(work) as machine:
        machine.without_transferd()
        shutil.copytree(sources, machine.root / SOURCES.lstrip("/"), dirs_exist_ok=True)
        yield Host(machine, sources)


def test_up_and_down_again_by_the_pages(host: Host) -> None:
    """One test, because each step begins where the last one ended."""
    old, new = host.sources / "old", host.sources / "new"
    host.type(page(old, INSTALL), "old")
    host.small()
    host.engine("write", 0, WRITTEN)
    before = host.engine("read", 0, WRITTEN)
    assert 0 < len(before) < WRITTEN, "the store is full"

    by_hand = page(new, UPGRADE)
    steps = by_hand.splitlines(keepends=True)
    host.type(steps[0], "new")
    assert (host.installed(), host.serving()) != (LAST.wheel, LAST.wheel)
    told = host.type("transferd ping")
    assert f"the daemon is {LAST.wheel}, this command {host.installed()}: restart the daemon" in told
    told = host.type("".join(steps[1:]), "new")
    assert "restart the daemon" not in told
    assert host.serving() == host.installed() != LAST.wheel
    after = host.engine("read", 0, WRITTEN)
    assert after <= before
    assert len(after) >= 0.9 * len(before)

    host.type(page(new, ROLLBACK), "house")
    assert host.serving() == LAST.wheel
    assert host.engine("read", 0, WRITTEN) == after
    host.type(by_hand, "new")
    assert host.serving() == host.installed() != LAST.wheel
    assert host.engine("read", 0, WRITTEN) == after


def test_from_an_installation_by_hand_to_the_package_and_to_the_last_release(host: Host) -> None:
    old, new = host.sources / "old", host.sources / "new"
    if not list(new.glob("transferd_*.deb")):
        pytest.skip("there is no package: make deb")
    before = host.engine("read", 0, WRITTEN)
    host.type(page(new, BY_PACKAGE), "new")
    packaged = host.type("dpkg-query -W -f '${Version}' transferd").replace("~", ".")
    assert host.serving() == host.installed() == packaged
    assert CAPACITY in host.type("cat /etc/transferd/transferd.toml"), "the operator's configuration stays"
    assert host.type("systemctl show -P FragmentPath transferd").strip() == "/lib/systemd/system/transferd.service"
    assert host.engine("read", 0, WRITTEN) == before

    host.type("apt-get remove -y transferd")
    install = page(old, INSTALL).replace("python3 -m venv", "rm -f /usr/bin/transferd; python3 -m venv", 1)
    host.type(install, "old")
    host.small()
    assert host.serving() == LAST.wheel
    assert host.engine("read", 0, WRITTEN) == before


def test_after_the_removal_nothing_is_left(host: Host) -> None:
    host.type(page(host.sources / "new", UNINSTALL))
    places = "/etc /opt/transferd /run /usr/bin /usr/lib /usr/share /lib/systemd /dev/shm /var/lib/transferd"
    assert host.type(f"find {places} -name '*transferd*' 2>/dev/null || true").split() == []
    assert host.type("systemctl list-units --plain 'transferd*' --no-legend").split() == []
    assert "transferd" not in host.type("getent passwd")
