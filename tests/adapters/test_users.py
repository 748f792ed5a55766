"""A daemon lives as long as one of its users does, whoever started it, and however they end."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from transferd.adapters.common.users import Users

READER = "import os, sys; os.read(0, 1); sys.exit(7)"
USER = """
import sys, time
from pathlib import Path
from transferd.adapters.common.users import Users
users = Users(Path(sys.argv[1]))
print(users.join(), flush=True)
sys.stdin.read()
"""


def daemon_of(users: Users) -> subprocess.Popen[bytes]:
    with users.watched() as end:
        return subprocess.Popen([sys.executable, "-c", READER], stdin=end)


def user(directory: Path) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-c", USER, str(directory)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"True\n"
    return process


def test_nobody_reads_before_a_daemon_is_started_and_after_it_has_ended(tmp_path: Path) -> None:
    users = Users(tmp_path)
    assert not users.join()
    daemon = daemon_of(users)
    assert users.join()
    assert users.join(), "once more is once"
    daemon.kill()
    daemon.wait()
    assert not users.join()
    again = daemon_of(users)
    assert users.leave(), "it was the last"
    assert again.wait(30) == 7
    assert users.leave()


def test_a_daemon_outlives_the_one_that_started_it_and_ends_with_the_last_even_if_that_is_killed(
    tmp_path: Path,
) -> None:
    first = Users(tmp_path)
    daemon = daemon_of(first)
    others = [user(tmp_path) for _ in range(3)]
    assert not first.leave()
    others[0].kill()
    others[1].send_signal(signal.SIGSTOP)
    others[1].kill()
    for one in others[:2]:
        one.communicate()
    assert daemon.poll() is None
    again = Users(tmp_path)
    assert again.join()
    others[2].kill()
    others[2].communicate()
    assert daemon.poll() is None
    assert again.leave()
    assert daemon.wait(30) == 7


def test_the_end_of_the_fifo_is_not_handed_to_programs_that_a_user_starts(tmp_path: Path) -> None:
    users = Users(tmp_path)
    daemon = daemon_of(users)
    child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    assert users.leave()
    assert daemon.wait(30) == 7
    child.communicate()
    assert (os.stat(tmp_path / "users").st_mode & 0o777) == 0o600


def test_a_directory_that_somebody_removes_costs_no_more_than_a_new_daemon(tmp_path: Path) -> None:
    place = tmp_path / "daemon"
    place.mkdir()
    users = Users(place)
    assert users.leave(), "nobody has begun"
    lost = daemon_of(users)
    shutil.rmtree(place)
    assert not users.join()
    place.mkdir()
    again = daemon_of(users)
    assert lost.wait(30) == 7, "its last user has turned to another one"
    assert users.join()
    shutil.rmtree(place)
    assert users.leave()
    assert again.wait(30) == 7
