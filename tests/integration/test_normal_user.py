"""A user without rights types `transferd serve`; and check-config refuses what serve refuses, for users and paths."""

from __future__ import annotations

import json
import os
import pwd
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.waits import wait_until
from transferd.config.sections import DEFAULT_ENDPOINT

pytestmark = [pytest.mark.one_loop, pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to add users")]

RUNNER = Path(__file__).parents[1] / "support" / "other_user.py"
EXAMPLES = int(os.environ.get("TRANSFERD_TEST_EXAMPLES", "60"))


@pytest.fixture(scope="module")
def users() -> Iterator[list[pwd.struct_passwd]]:
    names = [f"td{os.getpid()}{letter}" for letter in "ab"]
    for name in names:
        subprocess.run(["useradd", "--no-create-home", "--shell", "/usr/sbin/nologin", name], check=True)
    yield [pwd.getpwnam(name) for name in names]
    for name in names:
        subprocess.run(["userdel", name], check=True)


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that other users may pass; pytest's own may not be passed."""
    path = Path(tempfile.mkdtemp(prefix="td"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


def environment_of(user: pwd.struct_passwd, place: Path) -> dict[str, str]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("TRANSFERD_", "XDG_"))}
    for name in ("run", "home"):
        (place / name).mkdir(mode=0o700)
        os.chown(place / name, user.pw_uid, user.pw_gid)
    return clean | {"XDG_RUNTIME_DIR": str(place / "run"), "HOME": str(place / "home"), "USER": user.pw_name}


@pytest.mark.skipif(os.path.lexists(DEFAULT_ENDPOINT.removeprefix("ipc://")), reason="a packaged daemon is here")
def test_serve_as_it_is_typed(users: list[pwd.struct_passwd], place: Path) -> None:
    user = users[0]
    line = [sys.executable, str(RUNNER), str(user.pw_uid), str(user.pw_gid)]
    environment = environment_of(user, place)
    log = place / "log"
    with log.open("wb") as out:
        daemon = subprocess.Popen([*line, "serve"], env=environment, stderr=out, cwd=place)
    try:
        socket = place / "run/transferd/transferd.sock"
        wait_until(lambda: '"event": "ready"' in log.read_text() or daemon.poll() is not None, within=120)
        said = log.read_text()
        assert daemon.poll() is None, said
        assert f"serving at ipc://{socket}" in said, said
        assert (socket.stat().st_uid, socket.parent.stat().st_uid) == (user.pw_uid, user.pw_uid)

        def asked(*arguments: str) -> subprocess.CompletedProcess[str]:
            return subprocess.run(
                [*line, *arguments],
                env=environment,
                cwd=place,
                capture_output=True,
                text=True,
                timeout=120,
                check=False,
            )

        done = asked("ping", "--ready", "--timeout", "60")
        assert done.returncode == 0, done.stderr
        assert str(socket) in asked("stats").stdout
        checked = asked("check-config")
        assert checked.returncode == 0, checked.stderr
        assert f'path = "{place}/home/.cache/transferd/blocks"' in checked.stdout
    finally:
        daemon.send_signal(signal.SIGTERM)
        assert daemon.wait(60) == 0


def test_without_a_runtime_directory_it_says_what_is_missing(users: list[pwd.struct_passwd], place: Path) -> None:
    line = [sys.executable, str(RUNNER), str(users[0].pw_uid), str(users[0].pw_gid)]
    environment = environment_of(users[0], place)
    del environment["XDG_RUNTIME_DIR"]
    said = []
    for command in ("serve", "check-config"):
        done = subprocess.run(
            [*line, command], env=environment, cwd=place, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 2, (command, done.stderr)
        said.append(done.stderr.splitlines()[-1])
    assert all("server.endpoint" in text and "/run" in text for text in said), said


def made(rng: random.Random, path: Path, uids: list[int], depth: int) -> Path:
    """A path below `path` of which nothing, some or all exists, with owners, modes and kinds by chance."""
    for _ in range(depth):
        path /= rng.choice(("a", "b"))
        if os.path.lexists(path):
            continue
        if not path.parent.is_dir():
            break
        kind = rng.random()
        if kind < 0.55:
            path.mkdir()
            path.chmod(rng.choice((0o700, 0o755, 0o555, 0o777, 0o1777, 0o000, 0o711)))
            uid = rng.choice(uids)
            os.chown(path, uid, uid)
        elif kind < 0.62:
            path.write_text("a file")
        elif kind < 0.68:
            path.symlink_to(rng.choice(("nowhere", ".", "/tmp", "/proc/nothing")))
        else:
            break
    return path / rng.choice(("s", "t"))


@pytest.mark.parametrize("whose", ["root", "a user"])
def test_check_config_and_a_start_say_the_same(users: list[pwd.struct_passwd], whose: str) -> None:
    seed = int(os.environ.get("TRANSFERD_TEST_SEED", "0")) or random.randrange(2**32)
    print(f"TRANSFERD_TEST_SEED={seed}")
    rng = random.Random(seed)
    uid, gid = (0, 0) if whose == "root" else (users[0].pw_uid, users[0].pw_gid)
    base = Path(tempfile.mkdtemp(prefix="td"))
    base.chmod(0o777)
    runner = subprocess.Popen(
        [sys.executable, RUNNER, str(uid), str(gid), "--same-verdicts"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert runner.stdin is not None
    assert runner.stdout is not None
    accepted = 0
    try:
        for number in range(EXAMPLES):
            place = base / str(number)
            place.mkdir()
            place.chmod(0o777)
            uids = [0, users[0].pw_uid, users[1].pw_uid]
            socket, store = (made(rng, place, uids, rng.randrange(4)) for _ in range(2))
            tree = {
                "server": {"endpoint": f"ipc://{socket}"},
                "storage": {"backend": "file", "file": {"path": str(store), "capacity": "1GiB"}},
                "recorder": {"directory": ""},
            }
            runner.stdin.write(json.dumps(tree) + "\n")
            runner.stdin.flush()
            checked, started = json.loads(runner.stdout.readline())
            assert bool(checked) == bool(started), (seed, number, str(socket), str(store), checked, started)
            if checked:
                assert checked.split(":")[0] in ("server.endpoint", "storage.file.path"), checked
            accepted += not checked
        assert 0 < accepted < EXAMPLES, "the examples are all alike"
    finally:
        runner.communicate(timeout=60)
        shutil.rmtree(base)
