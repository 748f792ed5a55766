"""What FastDeploy's plugin sees of a model: real files behind the command of a transfer process, and real daemons."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.adapters.test_fastdeploy_arguments import command
from tests.support import weights
from transferd import SyncClient, WriteStorageTask
from transferd.adapters.common import fingerprint
from transferd.adapters.fastdeploy import identity
from transferd.adapters.fastdeploy.arguments import configuration, read_command
from transferd.adapters.fastdeploy.companion import Companion, find_or_start
from transferd.blocks.fingerprint import differences, refusal
from transferd.client.launch import running
from transferd.errors import ConfigError

FILES = "--kvcache_storage_backend file --create_cache_tensor"


@pytest.fixture(autouse=True)
def outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TRANSFERD_ENDPOINT", "TRANSFERD_WEIGHTS", "FD_ATTENTION_BACKEND", "TRANSFERD_CACHE__DEVICE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "argv", ["api_server"])
    start = time.time() + 3600
    monkeypatch.setattr(fingerprint, "process_started", lambda: start)  # what the tests write is what is in memory


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return weights.model(tmp_path / "a" / "model", 1)


def facts(model: Path, **values: Any) -> dict[str, Any]:
    found = identity.facts(read_command(command(model=model, **values)))
    assert not refusal(found)
    return found


def test_the_same_command_over_the_same_files_has_the_same_facts(model: Path) -> None:
    assert facts(model) == facts(model) == facts(Path(f"{model}/"))
    assert facts(model)["rope theta"] == 10000.0


def test_weights_written_anew_and_another_directory_of_the_name_differ(tmp_path: Path, model: Path) -> None:
    before = facts(model)
    other = weights.model(tmp_path / "b" / "model", 1)
    assert [one.partition(" ")[0] for one in differences(before, facts(other))] == ["weights"]
    weights.model(model, 2)
    assert [one.partition(" ")[0] for one in differences(before, facts(model))] == ["weights"]


def test_a_different_configuration_is_described_in_words(model: Path) -> None:
    before = facts(model)
    (model / "config.json").write_text(json.dumps(weights.CONFIG | {"rope_theta": 1e6}), encoding="ascii")
    assert "rope theta 10000.0 / 1000000.0" in differences(before, facts(model))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({}, {"dtype": "block_wise_fp8"}),
        ({"spec": '{"method": "mtp", "model": "/a"}'}, {"spec": '{"method": "mtp", "model": "/b"}'}),
    ],
)
def test_each_argument_that_changes_a_block_differs(model: Path, first: Any, second: Any) -> None:
    assert facts(model, **first) != facts(model, **second)


def test_the_engines_own_command_line_and_environment_count(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = facts(model)
    monkeypatch.setattr(sys, "argv", ["api_server", "--port", "1", "--quantization", "wint4"])
    spaced = facts(model)
    assert spaced["arguments"] == ["--quantization wint4"]
    monkeypatch.setattr(sys, "argv", ["api_server", "--quantization=wint4", "--port", "2"])
    assert facts(model) == spaced != before
    monkeypatch.setenv("FD_ATTENTION_BACKEND", "FLASH_ATTN")
    assert facts(model) != spaced


def test_the_contents_of_a_file_of_arguments_count(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = tmp_path / "arguments.yaml"
    monkeypatch.setattr(sys, "argv", ["api_server", "--config", str(written)])
    seen = []
    for text in ("quantization: wint8", "quantization: wint4"):
        written.write_text(text)
        seen.append(facts(model))
    written.unlink()
    assert seen[0] != seen[1]
    assert facts(model)["arguments"] == [f"--config {written}, not seen"]


def test_weights_that_the_operator_names_may_be_copied(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    copy = weights.model(tmp_path / "b" / "model", 1)
    os.utime(copy / "model-00001-of-00002.safetensors", (7, 7))
    monkeypatch.setenv("TRANSFERD_WEIGHTS", "step 7")
    with caplog.at_level("WARNING"):
        assert facts(model) == facts(copy)
        assert not caplog.messages
        monkeypatch.delenv("TRANSFERD_WEIGHTS")
        facts(tmp_path / "none")
    (line,) = caplog.messages
    assert "TRANSFERD_WEIGHTS" in line
    assert str(tmp_path / "none") in line


# --- daemons --------------------------------------------------------------------------------------


def asked(model: Path) -> dict[str, Any]:
    group = [read_command(command(rank=rank, device=rank, model=model, storage=FILES)) for rank in range(2)]
    return configuration(group, device="shm")


@contextmanager
def served(model: Path, port: int) -> Iterator[SyncClient]:
    """The daemon that an engine of this model starts."""
    found: Companion = find_or_start(asked(model), port=port, data_parallel_id=1, fingerprint=facts(model))
    try:
        with SyncClient(found.endpoint) as client:
            for rank in range(2):
                client.attach(rank)
            yield client
    finally:
        found.close()


def test_an_engine_never_gets_blocks_of_other_weights_from_the_store(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("FILE_BACKEND_STORAGE_DIR", str(tmp_path / "store"))
    monkeypatch.setattr("transferd.adapters.common.packaged.DEFAULT_ENDPOINT", f"ipc://{tmp_path}/packaged")
    other = weights.model(tmp_path / "b" / "model", 2)
    with served(model, 9101) as client:
        assert client.submit(WriteStorageTask(task_id="w", keys=["k"], gpu_block_ids=[1])).status == "ok"
        assert client.match(["k"]) == 1
    with served(model, 9101) as client:
        assert client.match(["k"]) == 1, "the same weights after a restart"
    with served(other, 9102) as client:
        assert client.match(["k"]) == 0, "another directory of this name"
    weights.model(model, 3)
    with served(model, 9101) as client:
        assert client.match(["k"]) == 0, "trained anew in place"


def test_a_running_daemon_of_another_model_is_refused_in_words(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ours, wanted = facts(model), asked(model)

    def found(running_facts: dict[str, Any]) -> Companion:
        (tmp_path / "d").mkdir(exist_ok=True)
        sections = {**wanted, "cache": {**wanted["cache"], "fingerprint": running_facts}, "metrics": {"listen": ""}}
        with running(sections, tmp_path / "d") as daemon:
            monkeypatch.setenv("TRANSFERD_ENDPOINT", daemon.endpoint)
            return find_or_start(wanted, port=9100, data_parallel_id=1, fingerprint=ours)

    with caplog.at_level("WARNING"):
        assert found(ours).process is None
        assert found({"weights": ours["weights"], "the operator's own": 1}).process is None
        assert not [message for message in caplog.messages if "cache.fingerprint" in message]
        assert found({}).process is None
    (line,) = [message for message in caplog.messages if "cache.fingerprint" in message]
    assert "has no cache.fingerprint" in line
    assert "rope theta" in line
    with pytest.raises(ConfigError, match=r"rope theta 10000\.0 / 1000000\.0") as refused:
        found(ours | {"rope theta": 1e6})
    assert "\n" not in str(refused.value)
