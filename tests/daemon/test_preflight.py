"""What check-config accepts, the daemon starts with, on this machine; it does little work and touches nothing."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import resource
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from transferd.client.heartbeat import HEARTBEAT_S
from transferd.config import from_tree, load, to_tree
from transferd.config.environment import fold
from transferd.config.generation import generation_of
from transferd.config.rules import LEAST_CLIENT_TIMEOUT_S
from transferd.config.sections import CurveSection
from transferd.config.toml import to_toml
from transferd.daemon import preflight
from transferd.daemon.daemon import Daemon
from transferd.daemon.preflight import build, examine
from transferd.errors import ConfigError
from transferd.runtime.descriptors import CAP_CHOWN
from transferd.wire import credentials
from transferd.wire.curve import server_side

CALLS = 5_000_000  # of functions: half a second on one core of a server, and 2 s on one that is shared by four


@contextlib.contextmanager
def at_most(calls: int) -> Iterator[None]:
    """Fail what calls more functions than that, C functions included."""
    made = 0

    def count(*_: object) -> None:
        nonlocal made
        made += 1

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        yield
    finally:
        sys.setprofile(before)
        assert made // 2 <= calls, "each call is counted when it begins and when it ends"


# Around the bounds of everything that is counted, and far beyond them; and what fits a small machine.
COUNTS = st.sampled_from([0, 1, 2, 3, 7, 64, 4096, 4097, 2**20, 10**8, 2**31 - 1, 2**31, 2**62, 2**64, -1])
SMALL = st.integers(1, 4)
SIZES = st.sampled_from(
    ["0", "1", "64KiB", "1MiB", "8MiB", "1GiB", "2GiB", "1TiB", "1EiB", "2EiB", 4611686018427387904]
)
SECONDS = st.sampled_from([0.0, 0.3, 1.0, 2.4, 2.5, 5.0, 1e9, float("inf"), float("nan")])
USERS = st.sampled_from([[], ["root"], [0], ["nosuchuser"], [-1], [2**40]])
LISTEN = st.sampled_from(["", "127.0.0.1:0", "127.0.0.1:99999", "192.0.2.7:0", "[::1]:0", "nonsense", ":0"])


@st.composite
def trees(draw: st.DrawFn) -> dict[str, Any]:
    """A configuration of the daemon, mostly small, with a few settings drawn from anything."""

    def some(**choices: st.SearchStrategy[Any]) -> dict[str, Any]:
        chosen = draw(st.sets(st.sampled_from(sorted(choices)), max_size=2))
        return {name: draw(choices[name]) for name in sorted(chosen)}

    tree: dict[str, Any] = {
        "cache": {"ranks": draw(SMALL), "layers": draw(SMALL), "device_blocks": 4, "host_blocks": 2},
        "host": {"staging": "2MiB"},
        "storage": {"backend": draw(st.sampled_from(["file", "memory", "none", "attention_store", "nonsense"]))},
        "server": some(
            max_message=SIZES,
            max_inflight_bytes=SIZES,
            client_timeout=SECONDS,
            deadline_slack=SECONDS,
            shutdown_timeout=SECONDS,
            max_queued_tasks=COUNTS,
            max_connections=COUNTS,
            max_results=COUNTS,
            lane_depth=COUNTS,
            allowed_uids=USERS,
            observer_uids=USERS,
            socket_group=st.sampled_from(["", "0", "nosuchgroup"]),
            socket_mode=st.sampled_from(["0660", "660", "9", "0777"]),
        ),
        "metrics": {"listen": draw(LISTEN)},
        "recorder": {"directory": ""} | some(tasks=COUNTS, keep=COUNTS),
    }
    tree["cache"] |= some(
        ranks=COUNTS,
        layers=COUNTS,
        kv_heads=COUNTS,
        head_dim=COUNTS,
        block_size=COUNTS,
        device_blocks=COUNTS,
        host_blocks=COUNTS,
        mtp_layers=COUNTS,
        attention=st.sampled_from(["gqa", "mla", "dsa", "nonsense"]),
        dtype=st.sampled_from(["bfloat16", "uint8", "block_wise_fp8"]),
    )
    tree["host"] |= some(staging=SIZES)
    tree["storage"] |= some(
        model=st.sampled_from(["demo", "", "a/b", "\0", "x" * 5000]),
        generation=st.sampled_from(["", "g", "x" * 5000, "\0"]),
        key_schema=st.sampled_from(["transferd", "fastdeploy"]),
        scrub_rate=SIZES,
        memory=st.fixed_dictionaries({"capacity": SIZES}),
    )
    tree["events"] = some(
        endpoint=st.sampled_from(["", "tcp://127.0.0.1:*", "tcp://127.0.0.1:70000", "ipc://@"]),
        buffer=COUNTS,
        buffer_bytes=SIZES,
        max_blocks=COUNTS,
    )
    return tree


async def lives(tree: dict[str, Any]) -> None:
    """Open a daemon of this configuration, and stop it."""
    daemon = Daemon(from_tree(tree))
    try:
        await daemon.open()
        assert daemon.not_ready == ""
    finally:
        await daemon.stop(lambda: 5.0)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
@given(tree=trees())
@example(tree={"server": {"max_message": 4611686018427387904}})
@example(tree={"cache": {"layers": 100_000_000}})
@example(tree={"cache": {"device_blocks": 10_000_000}})
@example(tree={"server": {"allowed_uids": ["nosuchuser"]}})
@example(tree={"server": {"curve": {"secret_key_file": "/nope"}}})
@example(tree={"server": {"client_timeout": 0.3}})
def test_a_daemon_starts_with_each_configuration_that_check_config_accepts(tree: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory(prefix="transferd-preflight-") as directory:
        whole: dict[str, Any] = {"metrics": {"listen": ""}, "recorder": {"directory": ""}} | tree
        whole["server"] = {"endpoint": f"ipc://{directory}/s"} | whole.get("server", {})
        whole["storage"] = whole.get("storage", {}) | {"file": {"path": f"{directory}/blocks", "capacity": "16MiB"}}
        try:
            with at_most(CALLS):  # whatever the numbers are
                config = from_tree(whole)
                plan = build(config)
                examine(config, plan)
        except ConfigError as refusal:
            assert "\n" not in str(refusal), "one line"  # noqa: PT017 - or it is accepted
            return
        finally:
            assert os.listdir(directory) == [], "it has touched nothing"
        if plan.sizes.memory <= 256 * 2**20:  # more is accepted where there is more, and would take its time here
            asyncio.run(lives(whole))


@pytest.mark.parametrize(
    "text",
    [
        "[cache]\nlayers = 100000000\n",
        "[cache]\nranks = 256\nlayers = 4096\nmtp_layers = 4096\nattention = 'dsa'\n",
        "[" * 100_000,
        "a" + ".a" * 60_000 + " = 1\n",
        "x = " + "[" * 50_000 + "\n",
        "x = " + "9" * 200_000 + "\n",
        "\0" * 1000,
        "x = 1\n" * 200_000,
        "".join(f"k{i}{'.a' * 60} = 1\n" for i in range(1900)),
        "".join(f"a{i} = {i}\n" for i in range(15_000)),
        "x = [" + "1," * 100_000 + "]\n",
        "[[a]]\n" * 40_000,
    ],
    ids=["layers", "all layers", "tables", "dots", "lists", "digits", "zeros", "long", "many dots", "many keys",
         "a long list", "many tables"],
)  # fmt: skip
def test_check_config_does_little_whatever_the_file_holds(tmp_path: Path, text: str) -> None:
    """So that it ends within 2 s: what it does is counted, because the time it takes depends on who else is at work."""
    file = tmp_path / "t.toml"
    file.write_text(text)
    with contextlib.suppress(ConfigError), at_most(CALLS):
        config = load(file, env={})
        examine(config, build(config))


def test_a_fifo_device_or_directory_as_a_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", Path("/dev/zero"), tmp_path):
        with pytest.raises(ConfigError, match="cannot be read"):
            load(path, env={})
        with pytest.raises(ConfigError, match=r"storage\.version_file: cannot be read"):
            generation_of(path)
        with pytest.raises(ConfigError, match=r"server\.curve\.secret_key_file"):
            server_side(CurveSection(secret_key_file=str(path)))


def test_an_obstacle_at_the_path_of_a_socket_or_store_is_named(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for path in (tmp_path / "fifo", tmp_path / "loop"):
        config = from_tree({"server": {"endpoint": f"ipc://{path}"}})
        with pytest.raises(ConfigError, match=r"server\.endpoint: .* is not a socket"):
            examine(config, build(config))
        config = from_tree({"storage": {"backend": "file", "file": {"path": str(path / "below")}}})
        with pytest.raises(ConfigError, match=r"storage\.file\.path: .* is not a directory"):
            examine(config, build(config))


@pytest.mark.parametrize("at", ["store", "above the store", "socket", "lock file"])
def test_a_path_that_this_user_may_not_write_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    """As it is for another user than root, or on a read-only mount: os.access knows of both."""
    may = os.access
    denied = {"store": "blocks", "above the store": "", "socket": "run", "lock file": "run/s.lock"}[at]
    (tmp_path / "run").mkdir()
    (tmp_path / "run/s.lock").touch()
    if at == "store":
        (tmp_path / "blocks").mkdir()
    tree: dict[str, Any] = {
        "server": {"endpoint": f"ipc://{tmp_path}/run/s"},
        "storage": {"backend": "file", "file": {"path": str(tmp_path / "blocks")}},
    }
    examine(from_tree(tree), build(from_tree(tree)))
    monkeypatch.setattr(os, "access", lambda path, how: Path(path) != tmp_path / denied and may(path, how))
    key = "storage.file.path" if "store" in at else "server.endpoint"
    told = "cannot create the lock file" if at == "lock file" else "this user may not write in"
    assert refusal(tree).startswith(f"{key}: {told} {tmp_path / denied}")


def test_another_programs_socket_is_refused_and_a_daemons_own_is_not(tmp_path: Path) -> None:
    tree = {"server": {"endpoint": f"ipc://{tmp_path}/s"}}
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(tmp_path / "s"))
        other.listen(1)
        assert refusal(tree).startswith("server.endpoint: is in use by another program")
        (tmp_path / "s.lock").touch()  # which every daemon of ours has
        examine(from_tree(tree), build(from_tree(tree)))


def test_too_few_descriptors_are_refused_and_no_limit_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 1024))
    monkeypatch.setattr(resource, "setrlimit", lambda *_: pytest.fail("it is only asked"))
    assert refusal({}).startswith("RLIMIT_NOFILE: the limit must be at least 2048 file descriptors")


def test_followed_nodes_that_leave_too_few_descriptors_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    peers = {f"node-{i}": {"endpoint": "tcp://127.0.0.1:1"} for i in range(200)}
    tree = {"storage": {"attention_store": {"peers": peers}}}
    limit = 200 * 24
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, limit))
    examine(from_tree(tree), build(from_tree(tree)))
    limit -= 1
    assert refusal(tree).startswith("storage.attention_store.peers: 200 nodes take 1200 descriptors, more than")


@pytest.mark.parametrize("key", ["socket_group", "observer_group"])
def test_a_group_that_this_user_may_not_give_is_refused(monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    group = max(os.getegid(), *os.getgroups(), 0) + 1
    tree = {"server": {key: str(group), "endpoint": "ipc:///nowhere/s"}}
    monkeypatch.setattr(credentials, "has_capability", lambda _: False)
    assert refusal(tree).startswith(f"server.{key}: this user may not give the socket to that group")
    own = {"server": {key: str(os.getegid())}}
    examine(from_tree(own), build(from_tree(own)))
    monkeypatch.setattr(credentials, "has_capability", lambda number: number == CAP_CHOWN)
    examine(from_tree(tree), build(from_tree(tree)))


@pytest.mark.parametrize("problem", [errno.EACCES, errno.EADDRINUSE])
def test_a_low_port_is_refused_only_where_the_right_is_missing(monkeypatch: pytest.MonkeyPatch, problem: int) -> None:
    class Privileged(socket.socket):
        def bind(self, address: Any, /) -> None:
            if 0 < address[1] < 1024:
                raise OSError(problem, os.strerror(problem))
            super().bind(address)

    monkeypatch.setattr(socket, "socket", Privileged)
    for listen in ("127.0.0.1:80", "127.0.0.1:1023"):
        tree = {"metrics": {"listen": listen}}
        if problem == errno.EACCES:
            assert refusal(tree).startswith("metrics.listen: cannot bind: Permission denied")
        else:
            examine(from_tree(tree), build(from_tree(tree)))
    examine(from_tree({"metrics": {"listen": "127.0.0.1:1024"}}), build(from_tree({})))


@pytest.mark.parametrize(
    "text",
    [f"x = 0x{'f' * 5000}\n", f"x = '{'x' * 100_000}'\n", f"{'k' * 100_000} = 1\n", "x = [" + "1," * 50_000 + "]\n"],
    ids=["digits", "text", "key", "list"],
)
def test_an_unknown_key_is_reported_in_a_short_line(tmp_path: Path, text: str) -> None:
    file = tmp_path / "t.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match="unknown key") as caught:
        load(file, env={})
    assert len(str(caught.value)) < 700


@pytest.mark.parametrize(("each", "segments"), [(False, 1), (True, 4)])
def test_what_each_rank_lends_to_a_pool_counts_as_memory(each: bool, segments: int) -> None:
    pool = {
        "master_server_addr": "h:1",
        "segment_per_rank": each,
        "global_segment_size": "1GiB",
        "local_buffer_size": 0,
    }
    config = from_tree({"cache": {"ranks": 4}, "storage": {"backend": "mooncake", "mooncake": pool}})
    assert build(config).sizes.pool == segments * 1024**3


def test_the_effective_configuration_is_printed_with_variables(tmp_path: Path) -> None:
    env = {
        "MOONCAKE_MASTER_SERVER_ADDR": "10.0.0.1:50051",
        "MOONCAKE_PROTOCOL": "RDMA",
        "TRANSFERD_STORAGE__BACKEND": "mooncake",
    }
    config = load(env=env)
    mooncake = config.storage.mooncake
    assert (mooncake.master_server_addr, mooncake.protocol) == ("10.0.0.1:50051", "rdma")
    again = tmp_path / "again.toml"
    again.write_text(to_toml(to_tree(config)))
    assert load(again, env={}) == config, "what is printed is the whole of it"
    tokens = load(overrides=["storage.backend=attention_store", "storage.model=org/m"], env={"AS_POD_NAME": "p"})
    section = tokens.storage.attention_store
    assert (section.pod_name, section.namespace, section.model_version) == ("p_mixed_0", "m", "v0")


def test_a_variable_of_storage_that_is_not_configured_is_no_error() -> None:
    env = {"MOONCAKE_PROTOCOL": "carrier pigeon", "AS_WRITE_SLICE_TIMEOUT": "soon", "MOONCAKE_CONFIG_PATH": "/nope"}
    assert load(env=env) == load(env={})


def test_a_section_that_is_not_a_table_is_refused() -> None:
    for tree in ({"pd": 3}, {"storage": 3}, {"storage": {"backend": "mooncake", "mooncake": 3}}):
        fold(tree, {"MOONCAKE_MASTER": "m:1"})
        with pytest.raises(ConfigError, match="expected `object`, got `int`"):
            from_tree(tree)


def test_the_least_client_timeout_is_two_and_a_half_heartbeats() -> None:
    assert LEAST_CLIENT_TIMEOUT_S == 2.5 * HEARTBEAT_S
    with pytest.raises(ConfigError, match=r"^server\.client_timeout: must be at least 2\.5: .*\(0\.3\)$"):
        from_tree({"server": {"client_timeout": 0.3}})


def refusal(tree: dict[str, Any]) -> str:
    config = from_tree(tree)
    with pytest.raises(ConfigError) as refused:
        examine(config, build(config))
    return str(refused.value)


def test_sizes_are_held_against_the_memory_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    tree: dict[str, Any] = {"cache": {"host_blocks": 1000}, "storage": {"backend": "none"}}
    examine(from_tree(tree), build(from_tree(tree)))
    monkeypatch.setattr(preflight, "memory_total", lambda: 128 * 2**20)
    assert refusal(tree).startswith("cache.host_blocks: the daemon needs ")
    shm = os.statvfs("/dev/shm")
    blocks = shm.f_blocks * shm.f_frsize // 131072 + 1
    assert refusal({"cache": {"device_blocks": blocks}}).startswith("cache.device_blocks: the ranks need ")


def test_engines_that_register_may_take_what_the_daemon_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "memory_total", lambda: 2**30)
    config = from_tree({"cache": {}, "storage": {"backend": "none"}})
    sizes = build(config).sizes
    assert preflight.host_memory(config, sizes) == (2**30 - sizes.memory,) * 2
    config = from_tree({"engines": {"host_memory": "1GiB", "host_memory_each": "256MiB"}})
    assert preflight.host_memory(config, sizes) == (2**30, 2**28)


def test_a_package_that_is_missing_is_said_before_a_master_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    tree = {"storage": {"backend": "mooncake", "mooncake": {"master_server_addr": "192.0.2.1:1"}}}
    assert refusal(tree) == "storage.backend: needs the Python package mooncake, which is not installed ('mooncake')"
    assert refusal({"cache": {}, "pd": {"mode": "direct"}}).startswith("pd.mode: needs the Python package mooncake")


def test_addresses_are_held_against_this_machine() -> None:
    assert refusal({"metrics": {"listen": "192.0.2.7:9464"}}).startswith("metrics.listen: cannot bind: ")
    assert refusal({"events": {"endpoint": "tcp://192.0.2.7:5557"}}).startswith("events.endpoint: cannot bind: ")
    assert refusal({"server": {"endpoint": "ipc:///dev/null/s"}}).startswith("server.endpoint: /dev/null is not a dir")
    with socket.create_server(("127.0.0.1", 0)) as taken:  # by the daemon whose file is checked, for one
        config = from_tree({"metrics": {"listen": f"127.0.0.1:{taken.getsockname()[1]}"}})
        examine(config, build(config))


def test_the_command_prints_sizes_that_are_still_toml_and_refuses_in_one_line(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "transferd",
        "check-config",
        "--set",
        "storage.backend=none",
        "--set",
        "cache.ranks=2",
    ]
    env = {name: value for name, value in os.environ.items() if not name.startswith("TRANSFERD_")}
    shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60, env=env).stdout
    assert "# A block of one rank has 131072 bytes." in shown
    again = tmp_path / "again.toml"
    again.write_text(shown)
    assert load(again, env={}).storage.backend == "none"
    command += ["--set", f"cache.host_blocks={2**31 - 1}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, env=env)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("cache.host_blocks: the daemon needs ")
