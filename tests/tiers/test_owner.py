"""The owner of handed-over memory: known while it lives, refused in one line when it does not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from transferd.errors import EngineGone, RequestError
from transferd.tiers import owner
from transferd.tiers.owner import as_data, check_owner, this_process

OTHER = """
import json, sys
from transferd.tiers.owner import as_data, this_process
print(json.dumps(as_data(this_process())), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def other() -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen([sys.executable, "-c", OTHER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    yield process
    process.kill()
    process.communicate()


def test_this_process_is_alive() -> None:
    me = this_process()
    assert check_owner(as_data(me)) == me
    assert me.started > 0


def test_another_process_is_known_until_it_dies(other: subprocess.Popen[str]) -> None:
    assert other.stdout is not None
    data = json.loads(other.stdout.readline())
    assert check_owner(data).pid == other.pid
    other.kill()
    other.wait()
    with pytest.raises(EngineGone, match=f"{other.pid}, has ended"):
        check_owner(data)


def test_a_process_id_that_was_given_out_again_is_another_process() -> None:
    data = as_data(this_process())
    with pytest.raises(EngineGone, match="has ended"):
        check_owner(data | {"started": data["started"] - 1})


def test_a_handle_from_before_the_machine_started_is_refused() -> None:
    with pytest.raises(EngineGone, match="before this machine's last boot"):
        check_owner(as_data(this_process()) | {"boot": "another"})


def test_a_process_of_another_container_cannot_be_looked_up_and_passes() -> None:
    elsewhere = as_data(this_process()) | {"namespace": 1, "pid": 2**22 + 1}
    assert check_owner(elsewhere).namespace == 1


@pytest.mark.parametrize("pid", [0, -1, 2**22 + 1, 2**62])
def test_process_ids_that_nobody_has_are_refused(pid: int) -> None:
    with pytest.raises(EngineGone, match="has ended"):
        check_owner(as_data(this_process()) | {"pid": pid})


@pytest.mark.parametrize("data", [None, {}, [], {"boot": 1}, "x"])
def test_a_malformed_owner_is_refused(data: Any) -> None:
    with pytest.raises(RequestError, match="owner"):
        check_owner(data)


def test_a_process_is_seen_to_end_however_it_is_found() -> None:
    with subprocess.Popen(["sleep", "1000"]) as child:
        found = owner.WatchedProcess.of_pid(child.pid)
        assert found is not None
        data = owner.as_data(found.owner)
        named = owner.WatchedProcess.find(data)
        assert named is not None
        assert not found.ended
        assert not named.ended
        reused = owner.WatchedProcess.find(data | {"started": data["started"] + 1})
        assert reused is not None
        assert reused.ended, "the pid is another process's now"
        assert owner.WatchedProcess.find(data | {"namespace": 1}) is None
        assert owner.WatchedProcess.find(data | {"boot": "another"}) is None
        assert owner.WatchedProcess.find({}) is None
        assert owner.WatchedProcess.of_pid(0) is None
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert found.ended, "also before its parent has waited for it"
        assert named.ended
    assert owner.WatchedProcess.of_pid(child.pid) is None
