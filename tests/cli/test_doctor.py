"""`transferd doctor`: a sound machine, and one that is sick in each way once."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import OF_A_BUSY_MACHINE, transferd
from transferd import SyncClient
from transferd.cli.asking import AskedDaemon, Format
from transferd.cli.doctor import checks, report
from transferd.cli.doctor.checks import CHECKS, Diagnosis, Level, Patient
from transferd.cli.doctor.machine import NO_LIMIT, Machine
from transferd.client.launch import DaemonProcess, start
from transferd.config import from_tree
from transferd.daemon.preflight import build
from transferd.observability.concerns import Watch, find
from transferd.observability.report import Report, StorageReport, read
from transferd.runtime.descriptors import LEAST
from transferd.runtime.limits import ControlGroup
from transferd.runtime.version import VERSION

GIB = 1024**3
HUGE = "/sys/kernel/mm/transparent_hugepage/enabled"


class Sound(Machine):
    """A machine on which everything is as it should be; a test makes it sick by giving one answer itself."""

    def __init__(self, **answers: Any) -> None:
        files = {
            "/proc/driver/nvidia/version": "NVRM version: 580.1\nGCC",
            HUGE: "always [madvise] never",
            "/proc/sys/kernel/numa_balancing": "0",
        }  # fmt: skip
        listings = {"/proc/driver/nvidia/gpus": ["a", "b"], "/sys/devices/system/node": ["node0", "node1", "online"]}
        self._files: dict[str, str | None] = files | answers.pop("files", {})
        self._entries: dict[str, list[str]] = listings | answers.pop("entries", {})
        self.answers: dict[str, Any] = {
            "limit": lambda _: NO_LIMIT, "hard_limit": lambda _: 65536, "may_lock_any_memory": lambda: False,
            "has_no_thread_limit": lambda: False, "space": lambda _: (100 * GIB, 90 * GIB), "writable": lambda _: True,
            "file_system": lambda _: "ext4", "tasks_of_user": lambda: 10, "package": lambda _: None,
            "module": lambda _: True, "user": lambda: 998, "variable": lambda _: "", "direct_io": lambda _: "",
            "connects": lambda *_: "", "clock_synchronized": lambda: True, "fewest_pids": lambda: None,
        } | answers  # fmt: skip
        for name, answer in self.answers.items():
            setattr(self, name, answer)

    def text(self, path: str) -> str | None:
        return self._files.get(path)

    def entries(self, path: str) -> list[str]:
        return self._entries.get(path, [])


def examine(machine: Machine, tree: dict[str, Any] | None = None) -> dict[str, Diagnosis]:
    config = from_tree({"cache": {}} | (tree or {"storage": {"file": {"path": "/nowhere/blocks"}}}))
    return {finding.name: finding for finding in checks.local(Patient(machine, config, build(config)))}


CUDA = {"cache": {"device": "cuda"}}
POOL = {"storage": {"backend": "mooncake", "mooncake": {"master_server_addr": "10.0.0.1:50051"}}}


@pytest.mark.parametrize("tree", [None, CUDA, POOL])
def test_a_sound_machine_has_nothing_but_ok(tree: dict[str, Any] | None) -> None:
    findings = examine(Sound(), tree)
    assert len(findings) == len(CHECKS)
    assert {finding.level for finding in findings.values()} == {Level.OK}, findings
    assert not any(finding.remedy for finding in findings.values())


SICK: list[tuple[str, Level, Machine, dict[str, Any] | None, str]] = [
    ("plugins", Level.WARN, Sound(variable=lambda _: "x, transferd"), None, "has a blank beside transferd"),
    ("memlock", Level.WARN, Sound(limit=lambda _: 8 * 2**20), None, "this user may pin 8.0 MiB"),
    ("engines", Level.WARN, Sound(), {"engines": {"host_memory": "4096TiB"}}, "there is room for"),
    ("hugepages", Level.WARN, Sound(files={HUGE: "always madvise [never]"}), None, "transparent huge pages are off"),
    ("/dev/shm", Level.FAIL, Sound(space=lambda _: (64 * 2**20, 2**20)), None, "16.0 MiB needed, 1.0 MiB free"),
    ("numa", Level.WARN, Sound(files={"/proc/sys/kernel/numa_balancing": "1"}), None, "2 nodes"),
    ("store", Level.FAIL, Sound(writable=lambda _: False), None, "/ cannot be written by this user"),
    ("store", Level.FAIL, Sound(space=lambda path: (90 * GIB, 2**20 if "nowhere" in path else GIB)), None,
     "1.0 MiB are free"),
    ("store", Level.WARN, Sound(space=lambda _: (50 * GIB, 40 * GIB)), None, "64.0 GiB do not fit"),
    ("store", Level.WARN, Sound(file_system=lambda _: "nfs4"), None, "is on nfs4"),
    ("store", Level.WARN, Sound(file_system=lambda _: "tmpfs"), None, "does not outlive a reboot"),
    ("recorder", Level.WARN, Sound(writable=lambda _: False), None, "no dump of the flight recorder"),
    ("threads", Level.FAIL, Sound(limit=lambda name: 11 if name == "NPROC" else NO_LIMIT), None,
     "1 more can start (ulimit -u)"),
    ("threads", Level.FAIL, Sound(fewest_pids=lambda: ControlGroup(Path("/sys/fs/cgroup/unit"), 100, 10)), None,
     "10 more can start (/sys/fs/cgroup/unit/pids.max)"),
    ("descriptors", Level.FAIL, Sound(hard_limit=lambda _: 256), None, "at most 256"),
    ("descriptors", Level.WARN, Sound(hard_limit=lambda _: LEAST),
     {"server": {"max_connections": LEAST}, "storage": {"file": {"path": "/nowhere/blocks"}}}, "fewer clients"),
    ("gpu", Level.FAIL, Sound(files={"/proc/driver/nvidia/version": None}), CUDA, "no NVIDIA driver"),
    ("gpu", Level.FAIL, Sound(module=lambda name: name != "cuda.bindings.nvrtc"), CUDA, "nvrtc is missing"),
    ("gpu", Level.FAIL, Sound(entries={"/proc/driver/nvidia/gpus": ["a"]}), CUDA, "1 GPUs, and 2 ranks"),
    ("gpu", Level.WARN, Sound(entries={"/tmp/nvidia-mps": ["control"]}), CUDA, "MPS listens in /tmp"),
    ("cuda ipc", Level.WARN, Sound(), CUDA | {"server": {"allowed_uids": [1000]}}, "engines are 1000"),
    ("cuda ipc", Level.FAIL, Sound(), CUDA | {"server": {"allowed_uids": ["no-such-user"]}}, "no such user"),
    ("cuda ipc", Level.WARN, Sound(user=lambda: 0), CUDA, "this is root"),
    ("mooncake", Level.FAIL, Sound(module=lambda _: False), POOL, "the Python package mooncake is missing"),
    ("mooncake", Level.FAIL, Sound(package=lambda name: "0.3.12.post1" if "non-cuda" in name else None), POOL,
     "mooncake-transfer-engine-non-cuda 0.3.12.post1 is older than 0.3.13"),
    ("mooncake", Level.FAIL, Sound(connects=lambda *_: "Connection refused"), POOL, "no master at 10.0.0.1:50051"),
    ("clock", Level.WARN, Sound(clock_synchronized=lambda: False), None, "does not follow a time server"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "level", "machine", "tree", "told"), SICK, ids=lambda value: str(value)[:24])
def test_each_sickness_is_found_alone_and_has_a_remedy(
    name: str, level: Level, machine: Machine, tree: dict[str, Any] | None, told: str
) -> None:
    findings = examine(machine, tree)
    assert told in findings[name].found
    assert findings[name].level is level
    assert findings[name].remedy
    assert "\n" not in findings[name].remedy


@pytest.mark.parametrize(("listens", "told"), [(["control"], "; MPS runs"), ([], "; no MPS: kernels of engine and")])
def test_the_doctor_reports_mps_without_a_warning(listens: list[str], told: str) -> None:
    finding = examine(Sound(entries={"/run/nvidia-mps": listens}), CUDA)["gpu"]
    assert told in finding.found
    assert finding.level is Level.OK


def test_the_doctor_reports_direct_io_on_or_off(tmp_path: Path) -> None:
    assert "takes it; storage.file.direct_io is false" in examine(Sound())["direct I/O"].found
    refusing = Sound(direct_io=lambda _: "Invalid argument")
    assert "refuses it (Invalid argument)" in examine(refusing)["direct I/O"].found
    assert examine(refusing)["direct I/O"].level is Level.OK
    wanted = examine(refusing, {"storage": {"file": {"direct_io": True}}})["direct I/O"]
    assert (wanted.level, wanted.remedy) == (Level.FAIL, "set storage.file.direct_io to false")
    assert "direct_io is true" in examine(Sound(), {"storage": {"file": {"direct_io": True}}})["direct I/O"].found
    assert Machine().direct_io("/proc/self") != ""
    assert Machine().direct_io(str(tmp_path)) in ("", "Invalid argument")
    assert list(tmp_path.iterdir()) == []


def test_engines_of_the_daemons_user_can_share_device_memory() -> None:
    tree = CUDA | {"server": {"allowed_uids": [998]}}
    assert "as server.allowed_uids says" in examine(Sound(), tree)["cuda ipc"].found


def test_a_socket_that_this_user_may_not_open_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "obstacle_at", lambda path: f"permission denied: {path} allows group transferd")
    finding = examine(Machine(), {"server": {"endpoint": f"ipc://{tmp_path}/s"}})["socket"]
    assert (finding.level, finding.remedy.startswith("add this user to that group")) == (Level.FAIL, True)


def test_a_configuration_that_this_machine_cannot_run_is_a_failure(tmp_path: Path) -> None:
    first, *_ = report.examine(Sound(), None, ["server.allowed_uids=['no-such-user']"])
    assert (first.name, first.level) == ("configuration", Level.FAIL)
    assert "server.allowed_uids: no such user" in first.found


def test_this_machine_answers_every_question() -> None:
    machine = Machine()
    assert machine.limit("NOFILE") > 0
    assert machine.tasks_of_user() >= 1
    assert machine.file_system(os.path.realpath("/dev/shm")) == "tmpfs"
    assert machine.file_system("/proc/self") == "proc"
    whole, free = machine.space("/no/such/directory")
    assert whole >= free > 0
    assert machine.existing("/no/such/directory") == "/"
    assert machine.module("json")
    assert not machine.module("no_such.module")
    assert machine.package("pytest")
    assert machine.package("no-such-package") is None
    assert machine.clock_synchronized() in (True, False)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        assert machine.connects("127.0.0.1", port) == ""
    assert machine.connects("127.0.0.1", port) == "Connection refused"


@pytest.mark.one_loop
def test_the_command_examines_a_daemon_that_answers(daemon: DaemonProcess, engine: SyncClient) -> None:
    done = transferd("doctor", "--config", str(daemon.config_file), "--format", "json")
    findings = {one["name"]: one for one in json.loads(done.stdout)}
    assert set(findings["daemon"]) == {"name", "level", "found", "remedy"}
    found = findings["daemon"]["found"]
    assert found.endswith("all is well") or found.startswith(tuple(OF_A_BUSY_MACHINE.values()))
    assert findings[f"engine {os.getpid()}"]["level"] == "ok", "the fixture's client: this process"
    assert (done.returncode, done.stderr) == (int("fail" in {one["level"] for one in findings.values()}), "")
    text = transferd("doctor", "--config", str(daemon.config_file)).stdout
    rows = [line.split(maxsplit=2) for line in text.splitlines() if not line.startswith(" ")]
    levels = [one["level"] for one in findings.values()]
    at = list(findings).index("daemon")
    assert rows[at][1] == "daemon"
    assert rows[at][0] in ("ok", "warn")
    levels[at] = rows[at][0]  # by now the machine may be busy, or not any more
    assert [row[0] for row in rows] == levels


def _asked(endpoint: str, timeout: float) -> AskedDaemon:
    return AskedDaemon(endpoint, timeout, None, None, Format.TEXT)


@pytest.mark.one_loop
def test_a_daemon_that_is_absent_is_a_warning_and_one_that_is_not_ready_a_failure(tmp_path: Path) -> None:
    [nobody] = report.running(_asked(f"ipc://{tmp_path}/none", 0.2), "shm")
    assert (nobody.level, "there is no such socket" in nobody.found) == (Level.WARN, True)
    waiting = start({"cache": {"device_blocks": 2, "ownership": "attach"}}, tmp_path, wait=False)
    try:
        with SyncClient(waiting.endpoint, connect_timeout=60.0, await_ready=False):
            [finding] = report.running(_asked(waiting.endpoint, 60.0), "shm")
    finally:
        waiting.stop()
    assert finding.level is Level.FAIL
    assert "ranks 0, 1 without memory" in finding.found


def test_a_daemon_of_another_version_is_a_warning(engine: SyncClient) -> None:
    finding = report.daemon(read(engine.stats() | {"version": "0.0.1"}))
    assert (finding.level, "the daemon is 0.0.1" in finding.found) == (Level.WARN, True)


@pytest.mark.parametrize("version", [VERSION, "0.0.1"])
@pytest.mark.parametrize(("critical", "level"), [(False, Level.WARN), (True, Level.FAIL)])
def test_concerns_are_listed_whatever_the_version_and_critical_ones_fail(
    version: str, critical: bool, level: Level
) -> None:
    storage = StorageReport(backend="file", breaker="open" if critical else "closed")
    sick = Report(ready=True, version=version, log_dropped=3, storage=storage)
    watch = Watch()
    watch.look(find(sick), 0.0)
    sick.concerns = watch.concerns(0.0)
    finding = report.daemon(sick)
    assert finding.level is level
    assert "3 log lines were lost" in finding.found
    assert ("storage file does not answer" in finding.found) is critical
    assert ("the daemon is 0.0.1" in finding.found) is (version != VERSION)
