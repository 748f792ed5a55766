"""One machine for every test of the unit: a boot is what costs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.machine.systemd.installed import WATCHED, Installed
from tests.machine.systemd.machine import Machine, obstacle


@pytest.fixture(scope="session", autouse=True)
def possible() -> None:
    if why_not := obstacle():
        pytest.skip(why_not)


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installed]:
    work = tmp_path_factory.mktemp("machine") / "work"
    work.mkdir()
    with Machine(work) as machine:
        yield Installed(machine)


@pytest.fixture
def daemon(installed: Installed) -> Iterator[Installed]:
    """Started, and stopped at the end."""
    installed.start()
    yield installed
    installed.stop()
    installed.configure()


@pytest.fixture
def watched(installed: Installed) -> Iterator[Installed]:
    """Started with a watchdog that bites after two seconds. The others have the packaged one."""
    installed.drop_in("watched", WATCHED)
    installed.start()
    yield installed
    installed.stop()
    installed.remove_drop_in("watched")
