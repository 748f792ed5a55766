"""What listens on the network, under the packaged unit: each feature, with the drop-in that its page names."""

from __future__ import annotations

import json
import subprocess
from importlib.util import find_spec

import pytest
import zmq

from tests.machine.systemd.installed import TCP, UNIT, UNIX, Installed
from tests.machine.systemd.machine import SITE, wait_for

OUTSIDE = "192.0.2.7"  # an address that is not loopback's
CLIENTS = "/etc/transferd/clients"


@pytest.fixture
def outside(installed: Installed) -> Installed:
    installed.run("ip", "link", "set", "lo", "up")
    installed.run("ip", "address", "replace", f"{OUTSIDE}/32", "dev", "lo")
    return installed


def fetch(daemon: Installed, url: str) -> str:
    """The page, or "" when nobody answers within two seconds."""
    code = f"import urllib.request; print(urllib.request.urlopen({url!r}, timeout=2).read().decode())"
    return daemon.run(daemon.machine.python, "-c", code, check=False).stdout.strip()


def test_tcp_on_loopback_and_kv_events_run_under_the_unit_as_it_is(outside: Installed) -> None:
    outside.configure(
        server=f'endpoint = ["{UNIX}", "{TCP}"]',
        events='endpoint = "tcp://127.0.0.1:5557"\nreplay_endpoint = "tcp://127.0.0.1:5558"',
    )
    outside.start()
    try:
        done = outside.engine("roundtrip", TRANSFERD_ENDPOINT=TCP)
        assert json.loads(done.stdout) == {"ranks": 2, "ok": True, "same": True}
        told = json.loads(outside.engine("events", "tcp://127.0.0.1:5557").stdout)
        assert "BlockStored" in told["types"]
        assert fetch(outside, "http://127.0.0.1:9464/readyz") == "ready"
    finally:
        outside.stop()
        outside.configure()


def test_other_machines_reach_it_with_the_drop_in_for_the_network_and_not_without(outside: Installed) -> None:
    outside.configure(metrics='listen = "0.0.0.0:9464"')
    try:
        outside.start()
        assert fetch(outside, "http://127.0.0.1:9464/readyz") == "ready"
        assert fetch(outside, f"http://{OUTSIDE}:9464/readyz") == ""
        outside.stop()
        with outside.packaged_drop_in("network"):
            outside.start()
            assert fetch(outside, f"http://{OUTSIDE}:9464/readyz") == "ready"
    finally:
        outside.stop()
        outside.configure()


def test_keys_are_added_and_revoked_by_a_reload(outside: Installed) -> None:
    server, engine, other = zmq.curve_keypair(), zmq.curve_keypair(), zmq.curve_keypair()
    endpoint = f"tcp://{OUTSIDE}:7800"
    outside.machine.put("/etc/transferd/daemon.secret", server[1].decode(), 0o640)
    outside.run("chgrp", "transferd", "/etc/transferd/daemon.secret")
    outside.run("rm", "-rf", CLIENTS)
    outside.machine.put(f"{CLIENTS}/engine", engine[0].decode())
    outside.configure(server=f'endpoint = ["{UNIX}", "{endpoint}"]')
    outside.machine.put(
        "/tmp/curve",
        f'[server.curve]\nsecret_key_file = "/etc/transferd/daemon.secret"\nclient_keys_dir = "{CLIENTS}"\n',
    )
    outside.run("sh", "-c", "cat /tmp/curve >> /etc/transferd/transferd.toml")

    def pings(pair: tuple[bytes, bytes]) -> bool:
        keys = [key.decode() for key in (server[0], *pair)]
        return outside.engine("ping", endpoint, *keys, check=False).returncode == 0

    try:
        with outside.packaged_drop_in("network"):
            outside.start()
            assert (pings(engine), pings(other)) == (True, False)
            outside.machine.put(f"{CLIENTS}/other", other[0].decode())
            outside.run("rm", f"{CLIENTS}/engine")
            outside.run("systemctl", "reload", UNIT)
            wait_for(lambda: '"event": "reloaded"' in outside.log(), "the reload")
            assert (pings(engine), pings(other)) == (False, True)
            refused = json.loads(outside.run("transferd", "stats", "--format", "json").stdout)["refused"]
            assert refused["unknown_key"] >= 2
            assert OUTSIDE in next(line for line in outside.log().splitlines() if "unknown_key" in line)
            outside.run("chmod", "644", "/etc/transferd/daemon.secret")
            outside.drop_in("once", "[Service]\nRestart=no\n")
            assert outside.run("systemctl", "restart", UNIT, check=False).returncode != 0
            assert "server.curve.secret_key_file: is readable by every user" in outside.log()
    finally:
        outside.remove_drop_in("once")
        outside.configure()


needs_mooncake = pytest.mark.skipif(find_spec("mooncake") is None, reason="mooncake is not installed")


@needs_mooncake
def test_a_pool_and_direct_transfers_run_under_the_unit(outside: Installed) -> None:
    """With everything on loopback the unit is enough; with the network's drop-in, other machines are reached."""
    outside.machine.put("/usr/bin/mooncake_master", f'#!/bin/sh\nexec {SITE}/mooncake/mooncake_master "$@"\n', 0o755)
    command = outside.machine.inside("transferd", "pool", "master", "--listen", "127.0.0.1:50051")
    outside.configure(storage='backend = "mooncake"', pd='mode = "direct"\nlisten = "127.0.0.1:7801"')
    outside.machine.put("/tmp/pool", '[storage.mooncake]\nmaster_server_addr = "127.0.0.1:50051"\n')
    outside.run("sh", "-c", "cat /tmp/pool >> /etc/transferd/transferd.toml")
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as master:
        try:
            outside.start()
            done = outside.engine("roundtrip")
            assert json.loads(done.stdout) == {"ranks": 2, "ok": True, "same": True}
            report = json.loads(outside.run("transferd", "stats", "--format", "json").stdout)
            assert (report["storage"]["backend"], report["pd"]["mode"]) == ("mooncake", "direct")
        finally:
            outside.stop()
            outside.configure()
            master.terminate()


def test_the_drop_in_for_gpus_starts_where_there_is_no_group_render(outside: Installed) -> None:
    outside.run("groupdel", "render", check=False)
    with outside.packaged_drop_in("gpu"):
        outside.start()
        assert outside.ping()
