"""Keys as files: the right modes, nothing overwritten, and a daemon and a command that use them."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest
from zmq.utils import z85

from tests.cli.conftest import transferd
from transferd.cli.keygen import make_keys
from transferd.client.launch import start
from transferd.config.sections import CurveSection
from transferd.errors import ConfigError
from transferd.wire.curve import ClientCurve, server_side


def mode(path: str) -> int:
    return stat.S_IMODE(os.stat(path).st_mode)


def test_files_have_the_modes_that_the_daemon_asks_for(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        keys = make_keys(tmp_path / "new" / "keys", "one")
    finally:
        os.umask(before)
    assert mode(keys.server_secret) == mode(keys.client_secret) == 0o640
    assert mode(keys.server_public) == mode(keys.client_public) == 0o644
    _, allowed = server_side(CurveSection(secret_key_file=keys.server_secret, client_keys_dir=keys.clients_dir))
    client = ClientCurve.load(Path(keys.client_secret), Path(keys.server_public))
    assert allowed == frozenset({z85.decode(client.public_key)})


def test_a_second_client_gets_a_pair_and_the_daemon_keeps_its_own(tmp_path: Path) -> None:
    first = make_keys(tmp_path, "one")
    before = Path(first.server_secret).read_bytes()
    second = make_keys(tmp_path, "two")
    assert (first.server_made, second.server_made) == (True, False)
    assert Path(second.server_secret).read_bytes() == before
    assert sorted(os.listdir(tmp_path / "clients")) == ["one.public", "two.public"]


@pytest.mark.parametrize("name", ["", "server", "..", "a/b", "a\nb"])
def test_a_name_that_no_file_should_have_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="--client"):
        make_keys(tmp_path, name)


def test_keygen_overwrites_no_file(tmp_path: Path) -> None:
    keys = make_keys(tmp_path, "one")
    with pytest.raises(ConfigError, match="already exists"):
        make_keys(tmp_path, "one")
    os.unlink(keys.server_public)
    with pytest.raises(ConfigError, match="only one key of this pair exists"):
        make_keys(tmp_path, "two")


def test_a_directory_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    done = transferd("keygen", str(tmp_path / "file" / "keys"))
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)


def test_one_key_without_the_other_says_which_is_missing(tmp_path: Path) -> None:
    keys = make_keys(tmp_path, "one")
    done = transferd("ping", "--endpoint", "tcp://127.0.0.1:1", "--key-file", keys.client_secret)
    assert (done.returncode, done.stderr.startswith("--server-key-file: ")) == (2, True)


@pytest.mark.one_loop
def test_commands_ask_a_daemon_that_asks_for_keys(tmp_path: Path) -> None:
    keys = make_keys(tmp_path / "keys", "one")
    stranger = make_keys(tmp_path / "other", "one")
    curve = {"secret_key_file": keys.server_secret, "client_keys_dir": keys.clients_dir}
    ipc = f"ipc://{tmp_path}/s"
    server = {"endpoint": [ipc, "tcp://127.0.0.1:*"], "curve": curve}
    daemon = start({"cache": {"device_blocks": 2}, "server": server}, tmp_path, wait=False)
    try:
        assert transferd("ping", "--ready", "--timeout", "60", "--endpoint", ipc).returncode == 0
        _, endpoint = json.loads(transferd("stats", "--format", "json", "--endpoint", ipc).stdout)["endpoint"]
        known = os.environ | {
            "TRANSFERD_CURVE_KEY_FILE": keys.client_secret,
            "TRANSFERD_CURVE_SERVER_KEY_FILE": keys.server_public,
        }
        for verb in ("ping", "stats"):
            assert transferd(verb, "--endpoint", endpoint, env=known).returncode == 0
        unknown = known | {"TRANSFERD_CURVE_KEY_FILE": stranger.client_secret}
        # It waits for a key that is let in, as one may be added, and says why at the end.
        done = transferd("ping", "--timeout", "10", "--endpoint", endpoint, env=unknown)
        assert done.returncode == 1
        assert "refuses this client's key" in done.stderr
        assert transferd("ping", "--endpoint", ipc, env=known).returncode == 0
    finally:
        daemon.stop()
