"""The store of a daemon that FastDeploy's plugin of an earlier release started: this version's plugin finds it again.

The plugin names a daemon's directory after its settings. Each version knows settings that the one before did not.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.machine.upgrade.builds import RELEASES, ROOT, Release, exported
from tests.machine.upgrade.engine import LAYOUT
from transferd.adapters.fastdeploy.companion import _to_start

ENGINE = Path(__file__).with_name("engine.py")
PROGRAM = """
import json, sys
from transferd.adapters.fastdeploy.companion import find_or_start
made = find_or_start(json.loads(sys.argv[1]), port=9100, data_parallel_id=0)
print(json.dumps([made.endpoint, str(made.directory)]), flush=True)
sys.stdin.read()
made.close()
"""


@pytest.fixture(scope="module", params=RELEASES, ids=lambda release: release.tree)
def released(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    release: Release = request.param
    if why := release.missing():
        pytest.skip(why)
    return exported(release.commit, tmp_path_factory.mktemp("released"))


def asked(ownership: str, **more: Any) -> dict[str, Any]:
    """What FastDeploy's arguments say. With "create" the daemon serves one group alone."""
    cache = LAYOUT | {"ranks": 2, "devices": [0, 1], "device": "shm", "ownership": ownership, "host_blocks": 0}
    return {"cache": cache | more, "storage": {"backend": "file", "model": "m"}}


def of(tree: Path, place: Path, sections: dict[str, Any], *words: str, **more: str) -> tuple[str, set[int]]:
    """An engine stores or loads at the daemon that this tree's plugin finds or starts. Returns its directory, too."""
    environment = os.environ | {"PYTHONPATH": str(tree), "XDG_RUNTIME_DIR": str(place)} | more
    program = [sys.executable, "-c", PROGRAM, json.dumps(sections)]
    pipe = subprocess.PIPE
    with subprocess.Popen(program, stdin=pipe, stdout=pipe, text=True, env=environment, cwd=tree) as plugin:
        assert plugin.stdout is not None
        endpoint, directory = json.loads(plugin.stdout.readline())
        if sections["cache"]["ownership"] == "attach":
            words = ("register", "2", "0", *words)
        engine = [sys.executable, str(ENGINE), endpoint, *words]
        done = subprocess.run(
            engine, capture_output=True, text=True, timeout=120, check=False, env=environment, cwd=place
        )
        plugin.communicate(timeout=60)
    assert done.returncode == 0, done.stderr[-2000:]
    return directory, set(json.loads(done.stdout))


@pytest.mark.parametrize("ownership", ["attach", "create"])
def test_a_store_of_a_release_is_found_again(released: Path, tmp_path: Path, ownership: str) -> None:
    mine = asked(ownership)
    before, stored = of(released, tmp_path, mine, "write", "0", "8")
    assert stored == set(range(8))
    for tree, first in ((ROOT, 8), (released, 16), (ROOT, 24)):
        more, read = ["write", str(first), "8"], ["read", "0", "64"]
        there, found = of(tree, tmp_path, mine, *more, *read)
        assert (there, found) == (before, set(range(first + 8))), "up, down and up again: one store"


def test_a_store_of_a_release_becomes_that_of_one_daemon(
    released: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, _ = of(released, tmp_path, asked("attach"), "write", "0", "1")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))

    def found(sections: dict[str, Any], named: str | None = None) -> str:
        made = _to_start(sections, named, {}, {}, {})
        made.close()
        return str(made.directory)

    assert found(asked("attach"), "ipc:///elsewhere") != before, "a daemon at another address is another daemon"
    assert found(asked("create", device_blocks=32)) != before
    assert found(asked("attach", device_blocks=32)) == before, "a shared daemon serves caches of every size"
    monkeypatch.setenv("TRANSFERD_STORAGE__FILE__CAPACITY", "1GiB")
    assert found(asked("attach")) != before, "both may run at the same time"
