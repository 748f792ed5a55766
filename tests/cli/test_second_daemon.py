"""A second daemon with the same file: the refusal names the first one, not a port that it happens to have taken."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import transferd
from transferd.cli.pool.master import free_port
from transferd.client.launch import running

pytestmark = pytest.mark.one_loop


def test_the_refusal_names_the_daemon_that_serves_already(tmp_path: Path) -> None:
    tree = {"cache": {"device_blocks": 4, "host_blocks": 0}, "metrics": {"listen": f"127.0.0.1:{free_port()}"}}
    with running(tree, tmp_path) as daemon:
        refused = transferd("serve", "--config", str(tmp_path / "daemon.toml"))
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.splitlines()[-1].startswith("server.endpoint: ")
    assert str(daemon.process.pid) in refused.stderr
