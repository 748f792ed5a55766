"""Why look-ups miss, and where keys have gone: each reason is caused, in a real daemon where one can have it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.storage.harness import Harness, Memory, memory_config
from tests.support.gated_storage import gated, stack
from transferd import ReadStorageTask, SyncClient, WriteStorageTask
from transferd.blocks.formats import object_format
from transferd.blocks.layout import build_layout
from transferd.cli import main as cli
from transferd.cli.replay.trace import read_trace
from transferd.client.launch import running
from transferd.config import from_tree
from transferd.daemon import traffic as module
from transferd.daemon.preflight import build_engine
from transferd.daemon.traffic import KeyHistory, KeyTraffic
from transferd.observability import key_trace, logs
from transferd.observability.key_trace import KEPT_S, KeyTrace
from transferd.observability.recorder import Recorder
from transferd.observability.report import MISSED_FOR
from transferd.runtime.clock import SYSTEM_CLOCK
from transferd.storage.admission import SecondUse
from transferd.storage.base import STORED
from transferd.storage.lru import Use
from transferd.storage.memory import MemoryStorage
from transferd.storage.queues import EngineOwner
from transferd.wire import protocol as wire

pytestmark = pytest.mark.one_loop

Run = Callable[..., str]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command in this process; returns what it prints."""
    monkeypatch.setattr(logs, "configure", lambda *_: None)  # this process has its own

    def command(*arguments: str) -> str:
        monkeypatch.setattr("sys.argv", ["transferd", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert not ended.value.code
        return capsys.readouterr().out

    return command


def test_a_daemon_says_where_a_block_has_gone_and_why_look_ups_miss(tmp_path: Path, run: Run) -> None:
    cache = {"ranks": 1, "layers": 1, "kv_heads": 1, "head_dim": 8, "block_size": 4, "device_blocks": 8}
    cache["host_blocks"] = 0
    tree: dict[str, Any] = {"cache": cache, "storage": {"backend": "memory"}}
    slot = build_engine(from_tree(tree)).objects.slot_bytes
    tree["storage"]["memory"] = {"capacity": 3 * slot}
    with running(tree, tmp_path) as process, SyncClient(process.endpoint) as client:
        client.attach(0)

        def write(task_id: str, *keys: str) -> None:
            task = WriteStorageTask(task_id=task_id, keys=list(keys), gpu_block_ids=list(range(1, 1 + len(keys))))
            assert client.submit(task).status == "ok"

        def misses() -> dict[str, int]:
            found: dict[str, int] = client.stats()["engines"]["default"]["missed_for"]
            return found

        write("w1", "old")
        assert client.match(["old", "nowhere"]) == 1
        assert misses() == {"never_stored": 1}
        (there,) = client.why("old")
        assert (there["there"], there["ranks"], there["serves"]) == ({"memory": 1}, 1, True)
        assert [(one["what"], one["engine"]) for one in there["history"]] == [("stored", "default")]
        write("w2", "a", "b", "c")
        assert client.exists(["old"]) == [False]
        assert misses() == {"never_stored": 1, "evicted": 1}
        (level,) = client.stats()["storage"]["levels"]
        (mine,) = level["holdings"]
        assert (mine["engine"], mine["objects"], mine["evicted"]) == ("default", 3, {"default": 1})
        (gone,) = client.why("old")
        (evicted,) = gone["history"]
        assert gone["there"] == {}
        assert (evicted["what"], evicted["engine"], evicted["stored_by"]) == ("evicted", "default", "default")
        assert evicted["stored_s"] >= 0
        assert (
            client.submit(ReadStorageTask(task_id="lost", keys=["a", "old"], gpu_block_ids=[1, 2])).status == "partial"
        )
        (line,) = (
            line for line in run("explain", "lost", "--endpoint", process.endpoint).splitlines() if "missed" in line
        )
        assert " block=1 why=evicted level=memory by=default ago_s=" in line
        client.purge(keys=["a"])
        client.match(["a"])
        client.set_generation("next")
        client.match(["b"])
        assert misses() == {"never_stored": 1, "evicted": 1, "purged": 1, "other_identity": 1}
        assert [(row["generation"], row["serves"]) for row in client.why("b")] == [("", False)]
        assert client.why("b", "nobody") == []

        what_if = client.stats()["engines"]["default"]["what_if"]
        assert [(row["level"], row["times"], row["capacity"]) for row in what_if] == [
            ("memory", times, int(times * 3 * slot)) for times in module.SIZES
        ]
        text = run("why", "old", "--endpoint", process.endpoint)
        assert "to make room for engine default" in text
        text = run("why", "miss", "--endpoint", process.endpoint)
        assert "other identity" in text
        text = run("why", "slow", "--endpoint", process.endpoint)
        assert "write" in text
        rows = json.loads(run("why", "slow", "--endpoint", process.endpoint, "--format", "json"))["tasks"]
        (slow,) = (row for row in rows if row["kind"] == "write")
        assert slow["tasks"] == 2
        assert slow["seconds_p99_s"] >= slow["storage_p99_s"] > 0
        assert "what if" in run("stats", "--endpoint", process.endpoint)

        assert client.record() == {"last": 0, "lost": 0, "requests": []}, "nothing was kept before"
        long = [f"r{number}" for number in range(300)]
        client.match(long)
        client.match(long[:256])
        client.match(["short"])
        file = tmp_path / "trace.jsonl"
        text = run("record", str(file), "--seconds", "0", "--endpoint", process.endpoint)
        assert text.startswith(f"2 look-ups in {file}")
        first, second = read_trace(file)
        assert first.hash_ids == second.hash_ids, "an id for each 512 tokens, which are 128 blocks"
        assert len(set(first.hash_ids)) == 2
        assert (first.timestamp, first.input_length, second.input_length) == (0.0, 1200, 1024)
        assert "r127" not in file.read_text()
        assert [row[1:3] for row in client.record(1)["requests"]] == [["default", 1024], ["default", 4]]


CONFIG = from_tree({"cache": {"ranks": 2, "layers": 1, "kv_heads": 1, "head_dim": 8, "block_size": 4}})
FORMAT = object_format(CONFIG.storage, build_layout(CONFIG.geometry))
NBYTES = FORMAT.slot_bytes


def an_engine(name: str = "e") -> Any:
    """Its coordinator."""
    contexts = [SimpleNamespace(object_rank=rank, format=FORMAT, block_size=4) for rank in range(2)]
    ranks = [SimpleNamespace(context=context) for context in contexts]
    served = SimpleNamespace(generation="g")
    return SimpleNamespace(engine=name, workers=ranks, dispatcher=served, recorder=Recorder())


def names(key: str) -> list[str]:
    return [FORMAT.names("g", FORMAT.ids([key]), rank)[0] for rank in range(2)]


async def test_levels_that_are_out_ranks_that_lack_a_block_and_blocks_that_were_not_admitted() -> None:
    remote = gated(MemoryStorage(memory_config(100 * NBYTES)), "object", asks=True)
    store, admission = stack(MemoryStorage(memory_config(100 * NBYTES)), remote), SecondUse(100.0, lambda: 0.0)
    await store.open()
    opened = Harness(store, Memory(4096))
    store.register(opened.memory)
    traffic, engine = KeyTraffic(store, SYSTEM_CLOCK, admission), an_engine()

    def missed(key: str) -> dict[str, int]:
        before = traffic.missed_for("e")
        traffic.looked_up(engine, [key], 0)
        return {why: n - before.get(why, 0) for why, n in traffic.missed_for("e").items() if n != before.get(why, 0)}

    assert await opened.put((names("half")[1], bytes(NBYTES))) == [STORED]
    assert missed("half") == {"incomplete": 1}
    admission.admits([(FORMAT.space, "g", FORMAT.ids(["once"])[0])], Use())
    assert missed("once") == {"not_admitted": 1}
    assert missed("new") == {"never_stored": 1}
    store.all_levels[1].drained = True
    assert missed("new") == {"level_out": 1}
    store.all_levels[1].drained = False
    traffic.looked_up(engine, ["new"], None)
    assert missed("new") == {"never_stored": 1}
    await store.quarantine(names("half")[1])
    traffic.left("e")
    assert traffic.missed_for("e") == {}
    store.unregister(opened.memory)
    await store.close()
    opened.release()


async def test_misses_are_those_of_the_last_hour(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    traffic = KeyTraffic(None, SimpleNamespace(monotonic=lambda: now[0]), None)  # type: ignore[arg-type]
    for minute in (0, 0, 59, 60):
        now[0] = minute * 60.0
        traffic.looked_up(an_engine(), ["k"], 0)
    assert traffic.missed_for("e") == {"never_stored": 2}
    now[0] = 119 * 60.0
    assert traffic.missed_for("e") == {"never_stored": 1}


def test_a_history_has_the_last_event_of_a_place_and_forgets_the_oldest() -> None:
    now = [0.0]
    history = KeyHistory(lambda: now[0], most=4)
    memory, file = history.at("memory"), history.at("file")
    memory("k", "stored", EngineOwner("a"))
    file("k", "stored", EngineOwner("a"))
    now[0] = 5.0
    memory("k", "evicted", EngineOwner("b"))
    found = history.of("k")
    assert (found["memory"].what, found["memory"].engine, found["memory"].at) == ("evicted", "b", 5.0)
    assert found["memory"].before is not None
    assert (found["memory"].before.engine, found["memory"].before.at) == ("a", 0.0)
    assert (found["file"].what, found["file"].before) == ("stored", None)
    for number in range(10):
        memory(str(number), "stored", None)
    assert set(history.of("k")) == {"file"}
    assert history.of("9")["memory"].engine == ""


def test_a_trace_is_kept_for_a_reader_alone_and_says_what_it_has_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(key_trace, "MOST_IDS", 3)
    monkeypatch.setattr(key_trace, "ANSWERED", 2)
    trace = KeyTrace(lambda: now[0])
    trace.looked_up("e", ["before"], 512)
    assert trace.read(0)["requests"] == []
    for number in range(5):
        trace.looked_up("e", [f"{number}"], 512)
    found = trace.read(0)
    assert (found["last"], found["lost"], len(found["requests"])) == (4, 0, 2)
    found = trace.read(4)
    assert (found["last"], found["lost"], len(found["requests"])) == (5, 0, 1)
    for number in range(5):
        trace.looked_up("e", [f"{number}"], 512)
    assert trace.read(5)["lost"] == 2
    now[0] += KEPT_S + 1
    trace.looked_up("e", ["late"], 512)
    assert trace.read(7)["requests"] == [], "the reader was away for too long"


def test_each_reason_is_one_that_the_report_names_and_the_command_explains() -> None:
    from transferd.cli.why import REASONS

    assert set(REASONS) == set(MISSED_FOR)
    assert wire.Why in wire.CONTROLS


async def test_a_miss_looks_in_few_other_places_however_many_engines_and_generations_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is asked on the loop, for each look-up that misses."""
    traffic = KeyTraffic(None, SYSTEM_CLOCK, None)
    for number in range(200):
        engine = an_engine(f"e{number}")
        engine.dispatcher.generation = f"g{number // 2}"  # two engines of each: they name the same objects
        traffic.looked_up(engine, ["k"], None)
    asked: list[Any] = []
    real = KeyTraffic._names

    def names(self: KeyTraffic, *about: Any) -> list[str]:
        asked.append(about)
        return real(self, *about)

    monkeypatch.setattr(KeyTraffic, "_names", names)
    traffic.looked_up(engine, ["absent"], 0)
    assert traffic.missed_for(engine.engine) == {"never_stored": 1}
    assert len(asked) == 1 + module.MOST_OTHERS
    assert len({generation for _, generation, *_ in asked}) == len(asked)
