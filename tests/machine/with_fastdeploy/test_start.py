"""How an engine comes to its daemon: started with it, found and compared, refused in one line; and how it ends."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastdeploy import envs
from fastdeploy.cache_manager import prefix_cache_manager

from tests.machine.with_fastdeploy.engine import CREATES_FOR_HOST, Engine, Shape, engine, wait_for
from tests.machine.with_fastdeploy.test_tiers import prompts
from transferd.adapters.fastdeploy import plugin
from transferd.adapters.fastdeploy.arguments import SCRIPT
from transferd.adapters.fastdeploy.companion import Companion
from transferd.adapters.fastdeploy.engine_queue import queue_for
from transferd.client.launch import running
from transferd.errors import ConfigError, TransferError


def test_a_daemon_that_was_started_ends_with_the_engine(place: Path) -> None:
    with engine(tp=2) as made:
        daemon, keeper = made.daemon.process, made.processes[-1]
        assert daemon.poll() is None
        for one in (daemon, keeper):  # FastDeploy ends its transfer processes by their group
            assert os.getpgid(one.pid) == one.pid
    assert daemon.poll() == 0
    assert keeper.poll() == 0


def test_a_daemon_that_somebody_stops_is_started_again(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    with engine() as made:
        before = made.daemon.process
        before.terminate()
        assert before.wait(30) == 0
        wait_for(lambda: made.daemon.process is not before and made.queue.connected)
        made.run(prompts(1)[0])
        made.settle()
    ended = [one.message for one in caplog.records if "ended (exit code 0)" in one.message]
    assert len(ended) == 1, "with its own last line"
    assert "stopped" in ended[0]


def test_an_engine_that_is_killed_takes_its_daemon_along(place: Path) -> None:
    code = (
        "import os, sys\n"
        "from tests.machine.with_fastdeploy.engine import Engine, Shape\n"
        "made = Engine(Shape(backend='file', cpu_blocks=0))\n"
        "made.start()\n"
        "print(made.daemon.pid, flush=True)\n"
        "for one in made.signals.values(): one.clear()\n"
        "os.kill(os.getpid(), 9)\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False)
    assert run.returncode == -9, run.stderr[-2000:]
    said = re.search(r"transferd at ipc://\S+ serves 1 ranks of port \d+; it logs to (\S+)", run.stderr)
    assert said, "docs/fastdeploy.md says so"
    assert "pages are served" in Path(said[1]).read_text(), "with the port of /metrics"
    pid = int(run.stdout.split()[-1])
    wait_for(lambda: not Path(f"/proc/{pid}").exists())


def test_a_daemon_that_runs_is_used_and_stays(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = Shape(tp=2, backend="file", gpu_blocks=16, cpu_blocks=0)
    with running(configuration_of(shape), place, name="systemd") as daemon:
        monkeypatch.setenv("TRANSFERD_ENDPOINT", daemon.endpoint)
        for _ in range(2):
            with engine(**vars(shape)) as made:
                assert made.endpoint == daemon.endpoint
                for tokens in prompts(3):
                    made.run(tokens)
                assert made.run(prompts(1)[0])["storage_match_token_num"] == 40
                made.settle()
            assert daemon.process.poll() is None


def test_a_daemon_that_is_configured_otherwise_is_one_clear_error(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(configuration_of(Shape(tp=2, backend="file")), place, name="systemd") as daemon:
        monkeypatch.setenv("TRANSFERD_ENDPOINT", daemon.endpoint)
        with (
            pytest.raises(ConfigError, match=r"cache.host_blocks is 24, FastDeploy needs 7") as caught,
            engine(tp=2, backend="file", cpu_blocks=7),
        ):
            pass
        assert "\n" not in str(caught.value)


def test_without_the_variable_nothing_of_transferd_is_imported(place: Path) -> None:
    """Installed or not: FastDeploy loads no plugin that FD_PLUGINS does not name."""
    code = (
        "import sys, fastdeploy.engine.common_engine as module\n"
        "print(module.EngineCacheQueue.__module__, [name for name in sys.modules if name.startswith('transferd')])"
    )
    variables = {name: value for name, value in os.environ.items() if name != "FD_PLUGINS"}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, env=variables)
    assert run.stdout.splitlines()[-1:] == ["fastdeploy.inter_communicator.engine_cache_queue []"], run.stderr[-2000:]


def test_the_v1_cache_manager_is_told_apart_where_this_version_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked of FastDeploy itself: a version that does not know the variable starts its transfer processes."""
    package = importlib.import_module(plugin.PACKAGE)
    monkeypatch.setattr(package, plugin.QUEUE, package.engine_cache_queue.EngineCacheQueue)
    monkeypatch.setenv(plugin.V1_MANAGER, "1")
    plugin.register()
    assert (package.EngineCacheQueue is queue_for) is not hasattr(envs, plugin.V1_MANAGER)
    sys.meta_path[:] = [one for one in sys.meta_path if not isinstance(one, plugin._Awaited)]  # test_v1.py does that


def test_what_cannot_be_served_ends_the_start_with_one_line(place: Path) -> None:
    if importlib.util.find_spec("fastdeploy.cache_manager.routing_cache_manager") is None:
        pytest.skip("this FastDeploy tells its transfer processes nothing of routing replay (#7390)")
    replay = SimpleNamespace(enable_routing_replay=True, to_json_string=lambda: '{"enable_routing_replay": true}')
    with pytest.raises(ConfigError, match="routing"), engine(routing=replay):
        pass


@pytest.mark.parametrize("named", [None, "one", "{port}", "{dp}"])
def test_two_groups_of_a_node_reach_their_own_ranks(
    place: Path, monkeypatch: pytest.MonkeyPatch, named: str | None
) -> None:
    """Data parallelism: each group registers its engine, at one daemon unless the operator names two.

    Where the daemon creates the memory, each group has a daemon of its own.
    """
    if named == "one" and CREATES_FOR_HOST:
        pytest.skip("in this FastDeploy the daemon creates, for one group")
    shared = named in (None, "one") and not CREATES_FOR_HOST
    if named is not None:
        monkeypatch.setenv("TRANSFERD_ENDPOINT", f"ipc://{place}/{named}.sock")
    common = {"tp": 2, "groups": 2, "gpu_blocks": 24, "cpu_blocks": 48}
    with engine(dp=0, devices=[0, 1], **common) as one, engine(dp=1, devices=[2, 3], **common) as other:
        assert (one.endpoint == other.endpoint) is shared
        if named is not None:
            names = [named.format(port=made.cache_port, dp=made.shape.dp) for made in (one, other)]
            assert [one.endpoint, other.endpoint] == [f"ipc://{place}/{name}.sock" for name in names]
        mine, theirs = prompts(4), [[token + 500 for token in tokens] for tokens in prompts(4)]
        for _ in range(2):
            for first, second in zip(mine, theirs, strict=True):
                one.run(first)
                other.run(second)
        one.settle()
        other.settle()
        engines = one.queue.client.stats()["engines"]
        assert [
            engines[made.queue.group._engine]["dp_rank"] for made in (one, other) if made.endpoint == one.endpoint
        ] == ([0, 1] if shared else [0])


def test_engines_of_a_node_share_one_store_and_find_it_again(place: Path) -> None:
    """Prefill and decode, or two engines: what one has stored the other loads; so does a later one, at another port."""
    shape: dict[str, Any] = {"role": "prefill", "backend": "file", "gpu_blocks": 16, "cpu_blocks": 0}
    (tokens,) = prompts(1)
    with engine(**shape) as one, engine(**shape | {"role": "decode"}) as other:
        assert one.endpoint == other.endpoint
        assert one.run(tokens)["storage_match_token_num"] == 0
        one.settle()
        assert other.run(tokens)["storage_match_token_num"] == 40
        daemon = one.daemon.process
        boot = other.queue.client.boot_id
        one.queue.cleanup()  # it has started the daemon, which stays for the other
        other.manager.reset()
        assert other.run(tokens)["storage_match_token_num"] == 40
        assert (other.queue.client.boot_id, daemon.poll()) == (boot, None)
    assert daemon.wait(30) == 0, "the last one has left"
    with engine(**shape) as later:
        assert later.run(tokens)["storage_match_token_num"] == 40
    (directory,) = place.glob("transferd-fastdeploy-*/*")
    assert {file.suffix for file in directory.iterdir()} <= {"", ".toml", ".log", ".sock", ".lock"}


def test_a_daemon_that_creates_the_memory_finds_its_store_again(place: Path) -> None:
    """Its engine has another port at each start; two engines at once have a store each."""
    old = place / "transferd-fastdeploy-0" / "8004"  # named after a port, as once
    (old / "blocks").mkdir(parents=True)
    (tokens,) = prompts(1)
    for found in (0, 40):
        with engine(backend="file", cpu_blocks=0) as made, engine(backend="file", cpu_blocks=0) as another:
            assert made.run(tokens)["storage_match_token_num"] == found
            assert made.endpoint != another.endpoint
    assert not old.exists()


def test_port_and_dp_stand_for_a_groups_own_in_the_stores_path(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FILE_BACKEND_STORAGE_DIR", f"{place}/store-{{dp}}")
    for dp in (0, 1):
        with engine(dp=dp, backend="file", cpu_blocks=0) as made:
            made.run(prompts(1)[0])
            assert (place / f"store-{dp}").is_dir()


def test_a_daemon_that_ends_at_once_is_told_with_its_own_last_line(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits minutes for a process that is dead."""
    monkeypatch.setenv("FILE_BACKEND_STORAGE_DIR", "/proc/no-such-place")
    with (
        pytest.raises(TransferError, match=r"the transferd daemon ended \(exit code \d\): .*no-such-place") as caught,
        engine(backend="file"),
    ):
        pass
    assert "\n" not in str(caught.value)


def test_a_daemon_that_ends_after_its_first_answer_is_told_at_once(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A daemon listens before it has its storage, so it may answer and end before the group's client connects."""
    answers = Companion.await_answer

    def answers_and_ends(self: Companion) -> None:
        answers(self)
        assert self.process is not None
        self.process.process.kill()
        self.process.process.wait()

    monkeypatch.setattr(Companion, "await_answer", answers_and_ends)
    with pytest.raises(TransferError, match=r"the transferd daemon ended \(exit code -9\): "), engine(backend="file"):
        pass


def test_a_daemon_that_waits_for_a_pool_in_vain_is_told_when_it_ends(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It listens before its storage is there, so it answers, and ends later."""
    monkeypatch.setenv("MOONCAKE_MASTER_SERVER_ADDR", "127.0.0.1:1")
    monkeypatch.setenv("TRANSFERD_STORAGE__MOONCAKE__CONNECT_TIMEOUT", "3")
    with (
        pytest.raises(TransferError, match=r"the transferd daemon ended \(exit code \d\): .*127\.0\.0\.1:1"),
        engine(backend="mooncake"),
    ):
        pass


def test_a_group_that_is_sent_to_another_groups_daemon_is_refused(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Daemons that create memory: each on its own, as two engines that an operator gave the same endpoint."""
    monkeypatch.setenv("TRANSFERD_ENDPOINT", f"ipc://{place}/one.sock")
    monkeypatch.setattr("transferd.adapters.fastdeploy.companion.FREE_TIMEOUT_S", 0.2)
    common: dict[str, Any] = {"tp": 2, "backend": "file"}
    with engine(dp=0, devices=[0, 1], **common):
        with (
            pytest.raises(ConfigError, match=r"cache.devices is \[0, 1\], FastDeploy needs \[2, 3\]"),
            engine(dp=1, devices=[2, 3], **common),
        ):
            pass
        with pytest.raises(ConfigError, match="another engine uses its cache"), engine(devices=[0, 1], **common):
            pass


def test_an_engine_without_cpu_cache_and_storage_needs_no_daemon(place: Path) -> None:
    made = Engine(Shape(cpu_blocks=0))
    made.signals["cache_ready_signal"].value[:] = 1
    try:
        made.manager.launch_cache_manager(
            cache_config=made.config.cache_config, tensor_parallel_size=1, device_ids=["0"], pod_ip="127.0.0.1",
            engine_worker_queue_port=made.port, ipc_suffix=made.port, create_cache_tensor=False,
        )  # fmt: skip
        assert made.queue.group.endpoint is None
        made.queue.clear_transfer_task()
        made.run(prompts(1)[0])
        assert not list(place.glob("transferd-fastdeploy-*/*"))
    finally:
        made.close()


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
def test_prefill_and_decode_share_what_the_messager_created(place: Path, late: bool) -> None:
    """Splitwise: the cache messager creates and publishes, before the daemon is there or after."""
    for role in ("prefill", "decode"):
        with engine(tp=2, role=role, backend="file", gpu_blocks=16, cpu_blocks=16, late=late) as made:
            assert made.queue.group._engine in made.queue.client.stats()["engines"]
            for tokens in prompts(3):
                made.run(tokens)
            made.settle()


def configuration_of(shape: Shape) -> dict[str, object]:
    """What an operator writes down for this engine (docs/fastdeploy.md)."""
    from tests.machine.with_fastdeploy.engine import BLOCK_SIZE, DIM, HEADS, LAYERS

    return {
        "cache": {
            "ranks": shape.tp, "device": "shm", "ownership": "create" if shape.creates else "attach",
            "layers": LAYERS, "kv_heads": HEADS, "head_dim": DIM, "block_size": BLOCK_SIZE,
            "device_blocks": shape.gpu_blocks, "host_blocks": shape.cpu_blocks,
        },
        "storage": {"backend": shape.backend, "model": shape.model},
    }  # fmt: skip


def test_every_argument_of_a_transfer_process_is_in_the_docs() -> None:
    script = Path(prefix_cache_manager.__file__).with_name(SCRIPT).read_text(encoding="utf-8")
    flags = set(re.findall(r'add_argument\(\s*"(--\w+)"', script))
    assert len(flags) > 20
    page = (Path(__file__).parents[3] / "docs" / "fastdeploy_details.md").read_text(encoding="utf-8")
    assert flags <= set(re.findall(r"`(--\w+)`", page))


def test_every_variable_that_a_transfer_process_reads_is_in_the_docs() -> None:
    """Those that it reads by its environment, and by FastDeploy's envs."""
    place = Path(prefix_cache_manager.__file__).parent
    factory = place / "transfer_factory"
    files = [place / SCRIPT, place / "cache_messager.py", *factory.glob("*.py"), *factory.glob("*_store/*_store.py")]
    read = re.compile(r"""(?:environ\.get\(|getenv\(|environ\[)\s*["'](\w+)|envs\.([A-Z]\w+)""")
    names = {one or other for file in files for one, other in read.findall(file.read_text(encoding="utf-8"))}
    assert {"MOONCAKE_PROTOCOL", "FD_CACHE_PROC_EXIT_TIMEOUT"} <= names
    page = (Path(__file__).parents[3] / "docs" / "fastdeploy_details.md").read_text(encoding="utf-8")
    assert names <= set(re.findall(r"`(\w+)`", page))


GROUPS = """
import multiprocessing, os, socket, struct, sys
from tests.machine.with_fastdeploy import engine as base
from tests.machine.with_fastdeploy.test_tiers import prompts


def served_by(endpoint):
    # The pid of the process that listens there.
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(endpoint.removeprefix("ipc://"))
        return struct.unpack("3i", client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]


def group(dp, groups, orders, answers):
    # One of FastDeploy's data-parallel groups, in a process that its engine forks.
    with base.engine(dp=dp, groups=groups, devices=[dp], gpu_blocks=24, cpu_blocks=48, late=False) as made:
        answers.send(("endpoint", made.endpoint))
        asked = [[token + 1000 * dp for token in tokens] for tokens in prompts(4)]
        while True:
            orders.recv()
            found = [made.run(tokens)["cpu_match_token_num"] for tokens in asked]
            made.settle()
            answers.send((made.queue.client.boot_id, sum(found), served_by(made.endpoint)))


def main(groups):
    context = multiprocessing.get_context("fork")
    pipes, processes = [], []
    for dp in range(groups):
        (orders, order), (answer, answers) = context.Pipe(duplex=False), context.Pipe(duplex=False)
        process = context.Process(target=group, args=(dp, groups, orders, answers), daemon=True)
        process.start()
        answers.close()
        pipes.append((order, answer))
        processes.append(process)

    def ask(dp):
        pipes[dp][0].send("go")
        return pipes[dp][1].recv()

    endpoints = {pipe[1].recv() for pipe in pipes}
    assert len(endpoints) == 1, endpoints
    for _ in range(2):  # the second round finds what the first has pushed off the device
        said = [ask(dp) for dp in range(groups)]
    assert all(found > 0 for _, found, _ in said), said
    ((boot, daemon),) = {(boot, pid) for boot, _, pid in said}
    for victim in range(groups - 1):
        processes[victim].kill()
        processes[victim].join()
        for dp in range(victim + 1, groups):
            now, found, _ = ask(dp)
            assert (now, found > 0) == (boot, True), f"group {dp} after the end of {victim}: {found} found"
    processes[-1].kill()
    processes[-1].join()
    print("daemon", daemon, flush=True)


main(int(sys.argv[1]))
"""


@pytest.mark.skipif(CREATES_FOR_HOST, reason="in this FastDeploy the daemon creates, for one group")
@pytest.mark.parametrize("groups", [2, 8])
def test_whichever_group_is_killed_the_others_lose_nothing(place: Path, groups: int) -> None:
    """Data parallelism as FastDeploy forks it; each process is killed in turn, and every byte of the others checked."""
    run = subprocess.run(
        [sys.executable, "-c", GROUPS, str(groups)], capture_output=True, text=True, timeout=290, check=False
    )
    assert run.returncode == 0, run.stderr[-3000:]
    pid = int(run.stdout.split()[-1])
    wait_for(lambda: not Path(f"/proc/{pid}").exists())


def test_what_the_plugin_says_is_beside_fastdeploys_own_logs(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In an engine's process, which has no other handlers; kept as FastDeploy keeps its logs."""
    code = (
        "import logging\n"
        "from tests.machine.with_fastdeploy.engine import engine\n"
        "with engine(backend='file', cpu_blocks=0): pass\n"
        "logging.getLogger('transferd.adapters.fastdeploy').handlers[-1].backup_count == 3 or exit(7)\n"
    )
    monkeypatch.setenv("FD_LOG_DIR", str(place / "logs"))
    monkeypatch.setenv("FD_LOG_BACKUP_COUNT", "3")
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    told = "".join(file.read_text() for file in (place / "logs").glob("transferd.log*") if not file.is_symlink())
    assert "serves 1 ranks of port" in told
    assert "are stored in file" in told
    assert "serves 1 ranks of port" in run.stderr, "and on standard error, as before"
