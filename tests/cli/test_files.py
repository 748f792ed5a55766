"""`transferd files`, from this tree; tests/test_wheel.py has it from a wheel."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [Path(sys.executable).with_name("transferd"), "files", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_everything_is_written_and_the_unit_runs_this_program(tmp_path: Path) -> None:
    done = run(tmp_path / "new" / "out", "--format", "json")
    assert (done.returncode, done.stderr) == (0, "")
    written = {Path(name) for name in json.loads(done.stdout)["written"]}
    assert written == {path for path in (tmp_path / "new" / "out").rglob("*") if path.is_file()}
    for path in written:
        name = path.relative_to(tmp_path / "new" / "out")
        ours, theirs = path.read_text(), (ROOT / name).read_text()
        if name.suffix == ".service":
            program = Path(sys.executable).with_name("transferd")
            assert re.search(rf"\nExecStart={program} (serve|pool lend) --config", ours)
            ours = ours.replace(f"ExecStart={program} ", "ExecStart=/usr/bin/transferd ")
        assert ours == theirs
    assert {"transferd.service", "transferd.sysusers.conf", "transferd.tmpfiles.conf", "gpu.conf", "alerts.yml"} <= {
        path.name for path in written
    }


def test_a_changed_file_is_not_overwritten_without_force(tmp_path: Path) -> None:
    assert run(tmp_path).returncode == 0
    assert run(tmp_path).returncode == 0, "a second time changes nothing"
    changed, absent = tmp_path / "systemd" / "transferd.toml", tmp_path / "deploy" / "prometheus" / "alerts.yml"
    changed.write_text("# ours\n")
    absent.unlink()
    done = run(tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"these differ from the files of this version: {changed}; --force overwrites them" in done.stderr
    assert changed.read_text() == "# ours\n"
    assert not absent.exists(), "nothing is written if something is refused"
    assert run(tmp_path, "--force").returncode == 0
    assert changed.read_bytes() == (ROOT / "systemd" / "transferd.toml").read_bytes()


def test_a_directory_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = run(tmp_path / "file" / "out")
    assert done.returncode == 2
    assert "cannot write: Not a directory" in done.stderr
    assert len(done.stderr.splitlines()) == 1
