"""When a dump is written: what the loop hears, what the thread hears, and that the loop does not wait for it."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pytest

from transferd.config.sections import RecorderSection
from transferd.errors import ConfigError, InvariantError
from transferd.observability import dump_thread
from transferd.observability.dump_file import read_dump, write_dump
from transferd.observability.dump_thread import MOST_FAILURES, DumpThread
from transferd.observability.recorder import Recorder
from transferd.runtime.signals import hold_dump_signals


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end waits for the dumps that a test reads, however busy the machine is."""
    monkeypatch.setattr(dump_thread, "END_S", 60.0)


@pytest.fixture(autouse=True)
def held() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    hold_dump_signals()
    yield
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def dumps(directory: Path, recorder: Recorder) -> DumpThread:
    return DumpThread(RecorderSection(directory=str(directory)), recorder, boot_id="b")


def reasons(directory: Path) -> list[str]:
    return sorted(path.stem.rpartition("-")[2] for path in directory.glob("*.jsonl"))


async def test_a_callback_that_raises_is_a_failure_with_its_story(tmp_path: Path) -> None:
    recorder = Recorder()
    with dumps(tmp_path, recorder):
        recorder.note("t", "slack used up")

        def broken() -> None:
            raise InvariantError("'t' cannot go from done to running\nits whole story")

        asyncio.get_running_loop().call_soon(broken)
        await asyncio.sleep(0)
    dump = read_dump(tmp_path)
    assert dump.header["reason"] == "failure"
    assert dump.header["problem"].startswith("InvariantError: 't' cannot go from done to running")
    assert [note.what for note in dump.notes] == ["slack used up", "failure"]


async def test_the_first_failures_of_a_life_are_kept_and_later_ones_only_noted(tmp_path: Path) -> None:
    recorder = Recorder()
    with dumps(tmp_path, recorder):
        for i in range(MOST_FAILURES + 5):
            recorder.failure("t", f"failure {i}")
    problems = sorted(read_dump(path).header["problem"] for path in tmp_path.glob("*.jsonl"))
    assert problems == [f"failure {i}" for i in range(MOST_FAILURES)]
    assert len(recorder.notes("t")) == MOST_FAILURES + 5


@pytest.mark.parametrize("asked", [False, True])
async def test_a_failure_during_a_dump_is_no_operators_signal_and_hides_none(
    asked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder, waits, sigwait = Recorder(), threading.Semaphore(0), signal.sigwait

    def interrupted(*args: Any, **options: Any) -> Path:
        monkeypatch.setattr("transferd.observability.dump_thread.write_dump", write_dump)
        recorder.failure("t", "the second")
        if asked:
            signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)  # not to pytest's other threads: they die of it
        return write_dump(*args, **options)

    def counted(signals: Collection[int]) -> int:
        waits.release()
        return sigwait(signals)

    monkeypatch.setattr("transferd.observability.dump_thread.write_dump", interrupted)
    monkeypatch.setattr("transferd.observability.dump_thread.signal.sigwait", counted)
    with dumps(tmp_path, recorder):
        recorder.failure("t", "the first")
        for _ in range(3 + asked):  # for the first, for the second that was written with it, for the operator's, idle
            assert await asyncio.to_thread(waits.acquire, timeout=30)
    assert reasons(tmp_path) == ["failure", "failure"] + ["signal"] * asked


async def test_the_end_by_an_exception_is_a_crash_and_the_exception_goes_its_way(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), dumps(tmp_path, Recorder()):
        raise ZeroDivisionError
    assert reasons(tmp_path) == ["crash"]
    assert "exception" in read_dump(tmp_path).header["threads"]


async def test_a_bad_configuration_and_a_good_end_leave_no_dump(tmp_path: Path) -> None:
    with pytest.raises(ConfigError), dumps(tmp_path, Recorder()):
        raise ConfigError("server.endpoint", "is in use")
    with dumps(tmp_path, Recorder()):
        pass
    assert reasons(tmp_path) == []


async def test_after_its_end_nothing_is_dumped_and_the_loops_handler_is_as_before(tmp_path: Path) -> None:
    recorder, loop = Recorder(), asyncio.get_running_loop()
    with dumps(tmp_path, recorder):
        assert loop.get_exception_handler() is not None
    assert loop.get_exception_handler() is None
    recorder.failure("t", "late")
    assert reasons(tmp_path) == []


async def test_a_dump_that_raises_anything_ends_neither_the_thread_nor_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder, took = Recorder(), threading.Event()

    def raising(*_: Any, **__: Any) -> Path:
        monkeypatch.setattr("transferd.observability.dump_thread.write_dump", write_dump)
        took.set()
        raise KeyError("a note of a kind that nobody knows")

    monkeypatch.setattr("transferd.observability.dump_thread.write_dump", raising)
    with dumps(tmp_path, recorder) as thread:
        recorder.failure("t", "the first")
        assert await asyncio.to_thread(took.wait, 30)
        recorder.failure("t", "the second")
        assert thread._thread is not None
        assert thread._thread.is_alive()
    assert read_dump(tmp_path).header["problem"] == "the second"
