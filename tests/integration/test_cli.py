"""The command line as a user meets it: exit codes, one line for a mistake, JSON alone on stdout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from transferd.cli import main as cli
from transferd.client.launch import running, start
from transferd.observability import logs


def transferd(*arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("TRANSFERD_")}
    return subprocess.run(
        [sys.executable, "-m", "transferd", *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env=clean | (env or {}),
    )


def test_version_in_both_formats() -> None:
    assert transferd("version").stdout.startswith("transferd ")
    assert set(json.loads(transferd("version", "--format", "json").stdout)) == {"version", "commit"}
    assert transferd("--version").stdout == transferd("version").stdout


def test_config_init_prints_a_file_that_is_accepted(tmp_path: Path) -> None:
    store = tmp_path / "not there yet" / "blocks"
    done = transferd("config", "init", "--store", str(store))
    assert (done.returncode, done.stderr) == (0, "")
    file = tmp_path / "t.toml"
    file.write_text(done.stdout)
    checked = transferd("check-config", "--config", str(file), "--set", "cache.device=shm", "--format", "json")
    tree = json.loads(checked.stdout)
    assert tree["storage"]["file"]["path"] == str(store)
    assert tree["storage"]["file"]["capacity"].endswith("iB")


def test_check_config_prints_the_effective_configuration(tmp_path: Path) -> None:
    file = tmp_path / "t.toml"
    file.write_text("[cache]\nranks = 4\n")
    done = transferd("check-config", "--config", str(file), "--set", "host.staging=8MiB", "--format", "json")
    assert done.returncode == 0
    tree = json.loads(done.stdout)
    assert (tree["cache"]["ranks"], tree["host"]["staging"]) == (4, "8MiB")
    assert "ranks = 4" in transferd("check-config", "--config", str(file)).stdout


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--set", "cache.rank=1"], "cache.rank: unknown key; did you mean ranks? (1)"),
        (["--set", "cache.attention=linear"], "cache.attention: expected one of"),
        (
            ["--set", "cache.ownership=attach", "--set", "cache.device=tests.support.simulation.device:SimDevice"],
            "cache.ownership: the tests.support.simulation.device:SimDevice device cannot attach to an engine's "
            'memory: set "create", so that the daemon allocates it',
        ),
        (["--set", "cache.device=tpu"], "cache.device: expected one of"),
        (["--set", "storage.backend=tape"], "storage.backend: expected one of"),
        (
            ["--set", "host.staging=1KiB", "--set", "cache.ranks=2"],
            "host.staging: must be at least 270336 bytes: one block each for read, write (1024)",
        ),
        (["--config", "/nonexistent.toml"], "/nonexistent.toml: cannot be read"),
    ],
)
@pytest.mark.parametrize("verb", ["check-config", "serve"])
def test_a_bad_configuration_is_one_line_and_exit_2(verb: str, arguments: list[str], line: str) -> None:
    done = transferd(verb, *arguments)
    assert done.returncode == 2
    (only,) = done.stderr.strip().splitlines()
    assert only.startswith(line)
    assert done.stdout == ""


def test_an_unwritable_directory_and_a_port_in_use_are_one_line_and_exit_2(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    common = [
        "--set",
        f"server.endpoint=ipc://{tmp_path}/s",
        "--set",
        "cache.device_blocks=2",
        "--set",
        "metrics.listen=",
    ]
    done = transferd("serve", *common, "--set", f"storage.file.path={tmp_path}/file/blocks", "--set", "log.level=error")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith("storage.file.path: ")


def test_the_command_line_loads_no_numpy_before_its_verb_does() -> None:
    """`serve` must hold its signals before numpy's own threads are made."""
    code = "import sys, transferd.cli.main; print(sorted({'numpy', 'zmq', 'prometheus_client'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("arguments", ["serve --no-such-option", "no-such-verb", "ping --timeout soon", "replay /no"])
def test_bad_usage_is_one_line_with_what_was_given_and_exit_2(arguments: str) -> None:
    done = transferd(*arguments.split())
    (only,) = done.stderr.splitlines()
    assert f"(in: {arguments}; `transferd " in only
    assert only.endswith("--help` says what there is)")
    assert (done.returncode, done.stdout) == (2, "")


def test_without_arguments_the_help_is_shown_whole() -> None:
    done = transferd()
    assert done.returncode == 2
    assert "Set up and run" in done.stdout + done.stderr


def test_ping_and_stats_against_a_daemon_and_against_nobody(tmp_path: Path) -> None:
    fits = {"file": {"capacity": "1GiB"}}  # on any disk, so that nothing is the matter
    with running({"cache": {"device_blocks": 2, "host_blocks": 2}, "storage": fits}, tmp_path) as daemon:
        env = {"TRANSFERD_ENDPOINT": daemon.endpoint}
        pong = json.loads(transferd("ping", "--format", "json", env=env).stdout)
        assert set(pong) == {"boot_id", "round_trip_ms"}
        done = transferd("stats", "--format", "json", "--endpoint", daemon.endpoint)
        assert json.loads(done.stdout)["boot_id"] == pong["boot_id"]
        text = transferd("stats", env=env).stdout
        assert f"boot {pong['boot_id'][:12]}" in text
        late = "the event loop is late" in text  # what a busy machine may add
        assert late or text.splitlines()[-1] == "all is well", text
        assert transferd("ping", "--ready", env=env).returncode == 0
        second = transferd("serve", "--config", str(daemon.config_file))
        assert second.returncode == 2
        assert second.stderr.splitlines()[-1].startswith("server.endpoint: ")
        assert json.loads(transferd("ping", "--format", "json", env=env).stdout)["boot_id"] == pong["boot_id"]
    gone = transferd("ping", "--timeout", "0.3", env=env)
    assert gone.returncode == 1
    assert "no daemon answered within 0.3 s" in gone.stderr.splitlines()[-1]


def test_ping_prints_an_answer_of_a_daemon_that_is_not_ready_and_says_why(tmp_path: Path) -> None:
    daemon = start({"cache": {"device_blocks": 2, "ownership": "attach"}}, tmp_path, wait=False)
    try:
        done = transferd("ping", "--timeout", "5", "--format", "json", "--endpoint", daemon.endpoint)
        while done.returncode:  # the process has not begun to listen
            done = transferd("ping", "--timeout", "5", "--format", "json", "--endpoint", daemon.endpoint)
        looked = transferd("ping", "--endpoint", daemon.endpoint)
        insisting = transferd("ping", "--ready", "--timeout", "5", "--endpoint", daemon.endpoint)
    finally:
        daemon.stop()
    assert (done.returncode, insisting.returncode) == (0, 1)
    assert set(json.loads(done.stdout)) == {"boot_id", "round_trip_ms"}
    assert "did not become ready within 5 s" in done.stderr.splitlines()[-1]
    assert "rank 0, 1" in done.stderr.splitlines()[-1]
    assert insisting.stderr.splitlines()[0].endswith(" (waiting up to 5 s)")
    (only,) = looked.stderr.splitlines()
    assert (looked.returncode, "is not ready: " in only, "rank 0, 1" in only) == (0, True, True)


def test_ping_finds_a_daemon_ready_that_waits_for_engines(tmp_path: Path) -> None:
    """Without [cache] no engine is ready, and /readyz says 200: engines can register."""
    with running({"storage": {"backend": "memory"}}, tmp_path) as daemon:
        done = transferd("ping", "--ready", "--timeout", "30", "--endpoint", daemon.endpoint)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith("boot ")


def test_no_answer_in_time_is_one_line_and_exit_1(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def late(**_: object) -> None:
        raise TimeoutError

    monkeypatch.setattr(cli, "app", late)
    monkeypatch.setattr(logs, "configure", lambda *_: None)  # this process has its own
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert logs.flush()
    assert (ended.value.code, capfd.readouterr().err) == (1, "the daemon did not answer in time\n")


def test_a_stale_socket_file_does_not_hinder_a_start(tmp_path: Path) -> None:
    for _ in range(2):
        with running({"cache": {"device_blocks": 2, "host_blocks": 2}}, tmp_path) as daemon:
            daemon.kill()
            assert (tmp_path / "daemon.sock").exists()


def test_replay_reports_what_the_contract_says(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": i, "input_length": 1, "output_length": 1, "hash_ids": [0, i % 5, 100 + i * i % 41]}
        for i in range(90)
    ]
    trace.write_text("\n".join(map(json.dumps, lines)))
    config = tmp_path / "own.toml"
    config.write_text(
        '[cache]\nlayers = 2\nblock_size = 16\ndevice_blocks = 12\nhost_blocks = 6\n[host]\nstaging = "1MiB"\n'
    )
    done = transferd(
        "replay", str(trace), "--ranks", "2", "--concurrency", "4", "--config", str(config), "--format", "json"
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["requests"] == 90
    assert report["verify_failures"] == 0
    assert set(report["hit_blocks"]) == {"device", "host", "storage", "none"}
    assert report["hit_blocks"]["host"] > 0
    assert report["hit_blocks"]["storage"] > 0
    assert set(report["statuses"]) == {"ok"}
    assert set(report["latency_ms"]) == {"read", "write", "swap_in", "swap_out"}
    assert {"tasks", "blocks_written", "blocks_read", "bytes", "seconds"} <= set(report)


def test_a_bad_trace_is_named_with_its_line(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"hash_ids": [1]}\n{"hash_ids": "x"}\n')
    done = transferd("replay", str(trace))
    assert done.returncode == 1
    assert f"{trace}:2: not a trace line" in done.stderr
