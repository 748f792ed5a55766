"""The packaged unit under a real systemd: what it promises an operator, one after the other on one machine.

The unit file and its drop-ins are the packaged ones. Only the times of the watchdog and of restarts are
shortened, by a drop-in of the kind an operator would write.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.machine.systemd.installed import CONFIG, SYSTEMD, UNIT, WATCHED, Installed
from tests.machine.systemd.machine import PACKAGE, ROOT, wait_for


def test_start_returns_when_the_daemon_serves_and_status_says_what_it_does(daemon: Installed) -> None:
    assert daemon.ping(timeout="2"), "at the first try"
    assert daemon.show("StatusText") == "serving 2 ranks on ipc:///run/transferd/transferd.sock"
    status = daemon.run("systemctl", "status", "--no-pager", UNIT).stdout
    assert 'Status: "serving 2 ranks on ipc:///run/transferd/transferd.sock"' in status
    assert "Active: active (running)" in status


def test_the_status_follows_the_daemon(watched: Installed) -> None:
    command = watched.machine.inside(
        watched.machine.python, f"{PACKAGE}/tests/machine/systemd/engine.py", "drain", user="engine"
    )
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as engine:
        assert engine.stdout is not None
        assert json.loads(engine.stdout.readline()) == {"drained": True}
        wait_for(lambda: watched.show("StatusText") == "not serving: draining", "another status")
        assert watched.show("ActiveState") == "active"
        engine.communicate("")
    wait_for(lambda: watched.show("StatusText").startswith("serving"), "the drain ends with its client")


def test_it_is_not_ready_while_storage_opens(installed: Installed) -> None:
    """A backend that takes its time: systemd says activating, the daemon listens and says that it is not ready."""
    installed.run("rm", "-f", "/run/go")
    with installed.with_backend("slowly:Slowly", SLOWLY):
        try:
            installed.run("systemctl", "start", "--no-block", UNIT)
            sock = installed.machine.root / "run/transferd/transferd.sock"
            wait_for(sock.is_socket, "the socket")
            assert installed.show("ActiveState") == "activating"
            told = installed.run("transferd", "ping", "--timeout", "1")
            assert told.stdout.startswith("boot "), "somebody answers"
            assert "did not become ready within 1 s: the daemon is starting" in told.stderr
            assert json.loads(installed.run("transferd", "stats", "--format", "json").stdout)["ready"] is False
            assert installed.show("ActiveState") == "activating"
            installed.machine.put("/run/go", "")
            wait_for(lambda: installed.show("ActiveState") == "active", "readiness")
            assert installed.ping()
        finally:
            installed.machine.put("/run/go", "")


SLOWLY = """
import asyncio, pathlib
from transferd.storage.memory import MemoryStorage

class Slowly(MemoryStorage):
    backend = "slowly"

    async def open(self):
        while not pathlib.Path("/run/go").exists():
            await asyncio.sleep(0.02)
"""


def test_an_engine_of_another_user_moves_blocks_through_the_hardened_daemon(daemon: Installed) -> None:
    """Shared memory, socket, files, copy threads: all of it under the unit's whole hardening."""
    done = daemon.run(daemon.machine.python, f"{PACKAGE}/tests/machine/systemd/engine.py", "roundtrip", user="engine")
    assert json.loads(done.stdout) == {"ranks": 2, "ok": True, "same": True}
    process = daemon.machine.root / "proc" / str(daemon.main_pid)
    told = dict(x.split(":\t", 1) for x in (process / "status").read_text().splitlines() if ":\t" in x)
    assert (told["CapEff"], told["CapBnd"], told["NoNewPrivs"]) == ("0" * 16, "0" * 16, "1")
    assert told["Seccomp"] == "2"
    assert '"level": "error"' not in daemon.log()
    if re.search(
        r"^Max locked memory +unlimited", (process / "limits").read_text(), re.MULTILINE
    ):  # else: not to be had
        report = json.loads(daemon.run("transferd", "stats", "--format", "json", user="engine").stdout)
        assert report["host"]["pinned"] is True, "the system call filter lets it"


def test_the_daemon_as_packaged_serves_every_user_and_each_sees_its_own_blocks(installed: Installed) -> None:
    """Nothing is configured: the daemon's user may open neither the engines' memory nor their /proc."""
    installed.configure(as_packaged=True)
    installed.start()
    try:
        for turn, user in enumerate(("stranger", "engine", "stranger")):
            told = json.loads(_as(installed, user, f"{PACKAGE}/tests/machine/systemd/engine.py", "pages", f"e{turn}"))
            assert told == {"found": 8 if turn == 2 else 0, "ok": True, "same": True}, user
        assert '"level": "error"' not in installed.log()
    finally:
        installed.stop()
        installed.configure()


def test_a_user_who_is_not_in_the_group_cannot_connect(daemon: Installed) -> None:
    assert daemon.ping("engine")
    assert not daemon.ping("stranger", timeout="0.5")


def test_the_exposure_is_at_most_2_5_as_the_running_system_judges_it(daemon: Installed) -> None:
    told = daemon.run("systemd-analyze", "security", "--no-pager", UNIT).stdout
    score = re.search(rf"Overall exposure level for {UNIT}: ([\d.]+)", told)
    assert score is not None
    assert float(score[1]) <= 2.5


def test_a_daemon_whose_loop_is_stuck_is_killed_by_the_watchdog_dumps_and_is_started_again(
    installed: Installed,
) -> None:
    """A call of its backend never comes back: the process lives and its threads run, but nothing turns."""
    installed.drop_in("watched", WATCHED)
    with installed.with_backend("stuck:Stuck", STUCK):
        installed.start()
        before, dumped = installed.main_pid, set(installed.dumps("abort"))
        command = installed.machine.inside(
            installed.machine.python, f"{PACKAGE}/tests/machine/systemd/engine.py", "flood", "1", user="engine"
        )
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as engine:
            wait_for(installed.restarted(before), "another daemon")
            told, _ = engine.communicate(timeout=30)
        assert json.loads(told.splitlines()[-1]) == {"failed: daemon_lost": 1}
        assert installed.show("NRestarts") == "1"
        assert installed.ping()
        (dump,) = set(installed.dumps("abort")) - dumped
        threads = json.loads(dump.read_text().splitlines()[0])["threads"]
        (main,) = (stack for name, stack in threads.items() if name.startswith("MainThread"))
        assert main[-1].endswith(" never_returns"), "the dump says where"
    installed.remove_drop_in("watched")


STUCK = """
import time
from transferd.storage.memory import MemoryStorage

def never_returns():
    while True:
        time.sleep(1)

class Stuck(MemoryStorage):
    backend = "stuck"

    async def store(self, items, fill, slots):
        never_returns()
"""


def test_after_kill_9_it_is_started_again_and_nothing_of_its_memory_is_left(daemon: Installed) -> None:
    before, shm = daemon.main_pid, daemon.machine.root / "dev/shm"
    left = {path.name for path in shm.iterdir()}
    assert left
    daemon.kill("KILL")
    wait_for(daemon.restarted(before), "another daemon")
    assert daemon.ping()
    assert not left & {path.name for path in shm.iterdir()}


def test_stop_drains_answers_every_task_and_is_clean(daemon: Installed) -> None:
    command = daemon.machine.inside(
        daemon.machine.python, f"{PACKAGE}/tests/machine/systemd/engine.py", "flood", "300", user="engine"
    )
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as engine:
        assert engine.stdout is not None
        assert json.loads(engine.stdout.readline()) == {"pushed": 300}
        began = time.monotonic()
        daemon.stop()
        took = time.monotonic() - began
        counts = json.loads(engine.stdout.readline())
        assert engine.wait(30) == 0
    assert sum(counts.values()) == 300
    assert set(counts) <= {"ok", "failed: shutdown", "rejected: draining"}
    assert daemon.show("Result") == "success"
    assert daemon.show("ExecMainStatus") == "0"
    (stop_timeout,) = map(float, re.findall(r"^TimeoutStopSec=(\d+)$", (SYSTEMD / UNIT).read_text(), re.MULTILINE))
    assert took < stop_timeout, "no SIGKILL was needed"


def test_reload_takes_over_what_may_change_and_refuses_a_bad_file(daemon: Installed) -> None:
    pid = daemon.main_pid
    daemon.run("sed", "-i", 's/level = "info"/level = "warning"/', CONFIG)
    daemon.run("systemctl", "reload", UNIT)
    daemon.run("sed", "-i", 's/level = "warning"/level = "info"/', CONFIG)
    daemon.run("systemctl", "reload", UNIT)
    wait_for(lambda: '"event": "reloaded"' in daemon.log(), "the second reload")
    daemon.run("sed", "-i", 's/level = "info"/level = "loud"/', CONFIG)
    daemon.run("systemctl", "reload", UNIT)
    wait_for(lambda: "reload refused" in daemon.log(), "the refusal")
    assert "log.level" in daemon.log("err")
    assert '"event": "reloaded"' not in daemon.log("warning")
    assert daemon.show("StatusText").startswith("reload refused: log.level: ")
    assert (daemon.show("ActiveState"), daemon.main_pid) == ("active", pid)
    assert daemon.ping()
    daemon.run("sed", "-i", 's/level = "loud"/level = "info"/; s/max_queued_tasks = .*//', CONFIG)
    daemon.run("sed", "-i", r"s/^\[server\]/[server]\nmax_queued_tasks = 3/", CONFIG)
    daemon.run("systemctl", "reload", UNIT)
    wait_for(lambda: "server.max_queued_tasks" in daemon.show("StatusText"), "what needs a restart")
    assert '"needs_restart": ["server.max_queued_tasks"]' in daemon.log()
    daemon.configure()
    daemon.run("systemctl", "reload", UNIT)
    wait_for(lambda: daemon.show("StatusText").startswith("serving"), "the old file again")


def test_a_client_of_the_socket_can_neither_read_nor_write_the_store(daemon: Installed) -> None:
    done = daemon.engine("roundtrip")
    assert json.loads(done.stdout)["ok"] is True
    blocks = daemon.machine.root / "var/lib/transferd/blocks"
    assert [oct(p.stat().st_mode & 0o777) for p in (blocks, *blocks.rglob("*")) if p.is_dir()].count("0o700") >= 3
    assert not [path for path in blocks.rglob("*") if path.is_dir() and path.stat().st_mode & 0o077]
    touched = daemon.run("touch", "/var/lib/transferd/blocks/objects/evil", user="engine", check=False)
    assert touched.returncode != 0


def test_a_bad_configuration_fails_the_start_with_its_one_line_in_the_journal(installed: Installed) -> None:
    installed.configure(cache="rank = 3")
    try:
        assert installed.run("systemctl", "start", UNIT, check=False).returncode != 0
        assert installed.show("ExecMainStatus") == "2"
        assert "cache.rank: unknown key; did you mean ranks? (3)" in installed.log("err")
        assert (installed.show("ActiveState"), installed.show("NRestarts")) == ("failed", "0"), "it is not tried again"
    finally:
        installed.configure()


def test_sigusr1_dumps_the_flight_recorder_into_the_state_directory(daemon: Installed) -> None:
    daemon.kill("USR1")
    (dump,) = wait_for(lambda: daemon.dumps("signal"), "the dump")
    assert dump.stat().st_mode & 0o777 == 0o640
    told = daemon.run("transferd", "explain", "nobody", "--dump", "/var/lib/transferd/flight", check=False)
    assert (told.returncode, told.stdout) == (1, "")
    assert told.stderr.splitlines()[-1].startswith("unknown task 'nobody'")


def test_lists_of_users_work_under_the_unit(installed: Installed) -> None:
    installed.configure(server='allowed_uids = ["engine"]\nobserver_uids = ["root"]\nsocket_mode = "0666"')
    try:
        installed.start()
        assert installed.ping("engine")
        assert not installed.ping("transferd", timeout="0.5"), "in the group, and not in the list"
        assert installed.ping("root")
        report = json.loads(installed.run("transferd", "stats", "--format", "json").stdout)
        assert report["ready"] is True
        assert report["users"] == {"told_apart": True, "hidden_as": None, "why": ""}
        assert "cannot tell all users apart" not in installed.log()
    finally:
        installed.stop()
        installed.configure()


def test_a_user_whom_private_users_hides_owns_nothing_and_the_daemon_says_so(installed: Installed) -> None:
    """The opposite of the packaged unit: an operator's drop-in that blinds the daemon."""
    engine = ("engine", f"{PACKAGE}/tests/machine/systemd/engine.py", "register")
    installed.start()
    assert json.loads(_as(installed, *engine)) == {"register": "ok"}, "the packaged unit hides nobody"
    installed.stop()
    installed.drop_in("blind", "[Service]\nPrivateUsers=yes\nRestart=no\n")
    try:
        installed.start()
        assert json.loads(_as(installed, *engine)) == {"register": "user_hidden"}
        assert json.loads(_as(installed, "transferd", *engine[1:])) == {"register": "ok"}, "its own user it can tell"
        report = json.loads(installed.run("transferd", "stats", "--format", "json").stdout)
        assert (report["users"]["told_apart"], report["users"]["hidden_as"]) == (False, 65534)
        assert installed.log("warning").count("cannot tell all users apart") == 1
        installed.stop()
        uid = installed.run("id", "-u", "engine").stdout.strip()
        installed.configure(server='allowed_uids = ["engine"]\nsocket_mode = "0666"')
        assert installed.run("systemctl", "start", UNIT, check=False).returncode != 0
        assert "server.allowed_uids: these uids are not mapped in this user namespace" in installed.log()
        assert f"([{uid}])" in installed.log()
    finally:
        installed.stop()
        installed.remove_drop_in("blind")
        installed.configure()


def _as(installed: Installed, user: str, *command: str) -> str:
    return installed.run(installed.machine.python, *command, user=user).stdout


# --- the machine itself ---------------------------------------------------------------------------


def test_no_process_is_left_when_the_one_that_holds_the_machine_is_killed(tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    code = (
        "import sys, time; from pathlib import Path; from tests.machine.systemd.machine import Machine\n"
        f"machine = Machine(Path({str(work)!r})); machine.boot(); print(machine.pid, flush=True); time.sleep(100)"
    )
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        first = int(holder.stdout.readline())
        namespace = Path(f"/proc/{first}/ns/pid").readlink()
        assert len(_in_namespace(namespace)) > 1
        holder.send_signal(signal.SIGKILL)
    wait_for(lambda: not _in_namespace(namespace), "the end of every process of the machine")


def _in_namespace(namespace: Path) -> list[str]:
    found = []
    for path in Path("/proc").iterdir():
        try:
            if path.name.isdigit() and os.readlink(path / "ns/pid") == str(namespace):
                found.append(path.name)
        except OSError:
            continue
    return found
