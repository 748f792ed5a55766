"""SGLang's real server over the adapter and a real daemon, by log probabilities and by bytes.

What is right comes from a server without storage: its answers, and the sha256 of each page that it has computed.
"""

from __future__ import annotations

import concurrent.futures
import json
import os
import random
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.machine.faults.resources import in_own_mounts
from tests.machine.with_sglang.serving import (
    ADMIN_KEY,
    COMPUTED,
    KILL,
    LOADED,
    PAGE,
    ROOT,
    STORED,
    Answer,
    Server,
    Storage,
    of_linker,
    of_transferd,
    serving,
    started,
    tiny_adapter,
    tiny_model,
)
from tests.support.waits import wait_until
from transferd import SyncClient
from transferd.client import launch

pytestmark = pytest.mark.timeout(3000)

SEED = 48
DEVICE = ("--max-total-tokens", "2048")  # tokens of KV on the device: all of PROMPTS, or a few conversations
CAPACITY = 2 * 1024**2  # of a store that fills up
WITHIN_S = 120.0
TRACE = Path(os.environ.get("TRANSFERD_TEST_TRACE", ROOT.parent / "shared" / "traces" / "conversation_trace.jsonl"))
REQUESTS = int(os.environ.get("TRANSFERD_TEST_REQUESTS", "300"))
MOST_IDS = 30  # of a request of the trace, that it fits the model; each is two pages here
TOGETHER = 3


def prompts() -> list[list[int]]:
    """The last one begins as the first one does. The tokens of an answer fill no page."""
    draw = random.Random(SEED)
    made = [[draw.randrange(3, 500) for _ in range(length)] for length in (300, 170, 330, 250, 219)]
    return [*made, made[0][:150] + made[1][:100]]


PROMPTS = prompts()
PAGES = len({tuple(one[:end]) for one in PROMPTS for end in range(PAGE, len(one), PAGE)})


@dataclass(frozen=True, slots=True)
class Right:
    """cold, warm: answers to PROMPTS at the first time and at the second. pages: sha256 of each page by SGLang's key.

    conversations: answers to the requests of the trace.
    """

    cold: list[Answer]
    warm: list[Answer]
    pages: dict[str, str]
    conversations: list[Answer]


@pytest.fixture(scope="module")
def model() -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="ts."))
    yield tiny_model(directory / "model")
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="module")
def right(model: Path) -> Right:
    with serving(model.parent, model, "NoStorage", *DEVICE) as server:
        cold, warm = ([server.ask(prompt) for prompt in PROMPTS] for _ in range(2))
        wait_until(lambda: len(server.noted(COMPUTED)) >= PAGES, "SGLang stores no more", within=WITHIN_S)
        return Right(cold, warm, dict(server.noted(COMPUTED)), together(server, conversations()))


@pytest.fixture(scope="module")
def running(model: Path) -> Iterator[Server]:
    """A server for several tests."""
    place = Path(tempfile.mkdtemp(prefix="ts."))
    with serving(place, model, "WitnessHiCache", *DEVICE) as server:
        yield server
    shutil.rmtree(place, ignore_errors=True)


@pytest.fixture
def stocked(right: Right, running: Server) -> Server:
    """It has stored the pages of PROMPTS, and no others, and has none of them in its own caches."""
    running.forget()
    running.clear()
    running.forget_notes()
    assert [running.ask(prompt) for prompt in PROMPTS] == right.cold
    stored(running)
    running.forget()
    return running


def stored(server: Server, pages: int = PAGES) -> None:
    wait_until(lambda: len(set(server.noted(STORED))) >= pages, "SGLang stores no more", within=WITHIN_S)


def as_computed(server: Server, right: Right, what: str) -> int:
    """How many pages were moved, each with the bytes that a server without storage has computed."""
    moved = server.noted(what)
    assert [(key, digest) for key, digest in moved if right.pages[key] != digest] == []
    return len(moved)


def as_stored(server: Server) -> tuple[int, int]:
    """How many pages were stored and how many loaded, after a check of every loaded one against what was stored."""
    contents: dict[str, set[str]] = {}
    for key, digest in server.noted(STORED):
        contents.setdefault(key, set()).add(digest)
    loaded = server.noted(LOADED)
    assert [key for key, digest in loaded if digest not in contents.get(key, ())] == []
    return len(contents), len(loaded)


def next_daemon(server: Server, ended: int) -> None:
    """Wait until another one serves."""
    wait_until(
        lambda: server.daemon() != ended and "using the daemon" in server.log.rpartition("started one")[2],
        "no daemon was started again",
        within=WITHIN_S,
    )


def stats(server: Server) -> dict[str, Any]:
    (socket,) = server.place.glob("transferd-sglang-*/*.sock")
    with SyncClient(f"ipc://{socket}", await_ready=False) as client:
        found: dict[str, Any] = client.stats()
    return found


def test_cold_warm_and_after_a_restart_of_each_side(place: Path, model: Path, right: Right) -> None:
    with serving(place, model, "WitnessHiCache", *DEVICE) as server:
        assert [server.ask(prompt) for prompt in PROMPTS] == right.cold
        stored(server)
        assert as_computed(server, right, STORED) == PAGES
        server.forget()
        assert [server.ask(prompt) for prompt in PROMPTS] == right.warm
        assert as_computed(server, right, LOADED) == PAGES
        os.kill(ended := server.daemon(), signal.SIGTERM)
        next_daemon(server, ended)
        server.forget()
        assert [server.ask(prompt) for prompt in PROMPTS] == right.warm
        assert as_computed(server, right, LOADED) == 2 * PAGES
        server.stop()  # and with it the daemon
    with serving(place, model, "WitnessHiCache", *DEVICE) as server:
        assert [server.ask(prompt) for prompt in PROMPTS] == right.warm
        assert as_computed(server, right, LOADED) == 3 * PAGES
        assert as_computed(server, right, STORED) == PAGES, "nothing is stored twice"


def together(server: Server, asked: Sequence[list[int]]) -> list[Answer]:
    with concurrent.futures.ThreadPoolExecutor(TOGETHER) as pool:
        return list(pool.map(server.ask, asked))


def test_daemons_killed_in_the_middle_cost_no_request_and_no_byte(stocked: Server, right: Right) -> None:
    draw = random.Random(SEED)
    killed = [(what, None) for what in (LOADED, STORED)] + [(LOADED, draw.random() * 0.02) for _ in range(6)]
    for number, (what, seconds) in enumerate(killed):
        print(f"round {number}: killed while pages are {what}, seconds {seconds}")
        order = [what, ended := stocked.daemon(), seconds]
        (stocked.notes / f"{KILL}.new").write_text(json.dumps(order), encoding="ascii")
        (stocked.notes / f"{KILL}.new").rename(stocked.notes / KILL)
        if what == LOADED:
            for answer, expected in zip(together(stocked, PROMPTS), right.warm, strict=True):
                assert answer.like(expected)
        else:
            stocked.ask([499 - token for token in PROMPTS[0]])
        next_daemon(stocked, ended)
        stocked.forget()
    said = stocked.log
    assert "of kv were not loaded" in said
    assert "of kv were not stored" in said
    as_computed(stocked, right, LOADED)
    before = len(stocked.noted(LOADED))
    assert [stocked.ask(prompt) for prompt in PROMPTS] == right.warm
    assert len(stocked.noted(LOADED)) == before + PAGES


def test_damaged_objects_are_computed_again(stocked: Server, right: Right) -> None:
    blocks = (stocked.place / "cache" / "transferd" / "sglang" / "blocks").rglob("*")
    files = sorted(one for one in blocks if one.is_file() and one.stat().st_size > 16 * 1024)
    assert len(files) == PAGES
    corrupt = stats(stocked)["storage"]["corrupt"]
    for file in files[:5]:
        damaged = bytearray(file.read_bytes())
        damaged[9000] ^= 0x40
        file.write_bytes(damaged)
    for prompt, expected in zip(PROMPTS, right.warm, strict=True):
        assert stocked.ask(prompt).like(expected)
    assert stats(stocked)["storage"]["corrupt"] - corrupt == 5
    assert as_computed(stocked, right, LOADED) <= PAGES - 5
    wait_until(
        lambda: len(stocked.noted(STORED)) >= PAGES + 5, "what was computed again is not stored", within=WITHIN_S
    )
    stocked.forget()
    before = len(stocked.noted(LOADED))
    assert [stocked.ask(prompt) for prompt in PROMPTS] == right.warm
    assert as_computed(stocked, right, LOADED) == before + PAGES


def test_two_servers_share_a_daemon_and_its_store_which_is_full(place: Path, model: Path, right: Right) -> None:
    first, second = (Server(place, model, of_transferd(capacity=CAPACITY), DEVICE) for _ in range(2))
    try:
        first.wait()
        second.wait()
        assert len(engines := stats(first)["engines"]) == 2, engines
        (starter,) = [server for server in (first, second) if server.runs_daemon()]
        other = second if starter is first else first
        assert [first.ask(prompt) for prompt in PROMPTS] == right.cold
        stored(first)
        assert [second.ask(prompt) for prompt in PROMPTS] == right.warm
        assert as_computed(second, right, LOADED) == PAGES
        draw = random.Random(SEED + 1)
        flood = [[draw.randrange(3, 500) for _ in range(320)] for _ in range(20)]
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            answers = list(pool.map(lambda server: together(server, flood), (first, second)))
        assert all(one.like(other) for one, other in zip(*answers, strict=True))
        store = stats(first)["storage"]
        assert store["evictions"] > 0
        assert store["bytes"] <= store["capacity"] == CAPACITY
        for server in (first, second):
            server.forget()
        for server in (first, second):
            for prompt, expected in zip(PROMPTS, right.warm, strict=True):
                assert server.ask(prompt).like(expected)
        starter.kill()  # the daemon stays, for the other one
        other.forget()
        for prompt, expected in zip(PROMPTS, right.warm, strict=True):
            assert other.ask(prompt).like(expected)
        assert not other.runs_daemon()
        as_stored(other)
    finally:
        first.kill()
        second.kill()


@pytest.mark.parametrize(("write", "prefetch"), [("write_back", "timeout"), ("write_through_selective", "best_effort")])
def test_other_policies_answer_as_computed(place: Path, model: Path, write: str, prefetch: str) -> None:
    policies = ("--hicache-write-policy", write, "--hicache-storage-prefetch-policy", prefetch)
    draw = random.Random(SEED + 2)
    flood = [[draw.randrange(3, 500) for _ in range(320)] for _ in range(12)]
    with serving(place, model, "WitnessHiCache", *DEVICE, *policies) as server:
        computed = [server.ask(prompt) for prompt in PROMPTS]
        for _ in range(3):
            together(server, flood)  # so that SGLang evicts, and stores what it stores only then
            server.forget()
            answers = [server.ask(prompt) for prompt in PROMPTS]
            assert all(one.like(other) for one, other in zip(answers, computed, strict=True))
        stored_pages, loaded_pages = as_stored(server)
        print(f"{stored_pages} pages stored, {loaded_pages} loaded")
        assert stored_pages


@pytest.mark.parametrize("layout", ["layer_first", "page_first_direct", "page_head"])
def test_other_layouts_answer_as_computed(place: Path, model: Path, right: Right, layout: str) -> None:
    with serving(place, model, "WitnessHiCache", *DEVICE, "--hicache-mem-layout", layout) as server:
        assert [server.ask(prompt) for prompt in PROMPTS] == right.cold
        stored(server)
        server.forget()
        assert [server.ask(prompt) for prompt in PROMPTS] == right.warm
        assert as_stored(server) == (PAGES, PAGES)


def test_two_ranks_each_store_and_load_their_own_heads(place: Path, model: Path) -> None:
    with serving(place, model, "WitnessHiCache", *DEVICE, "--tp-size", "2") as server:
        cold = [server.ask(prompt) for prompt in PROMPTS]
        stored(server)
        wait_until(lambda: len(server.noted(STORED)) == 2 * PAGES, "a rank stores no more", within=WITHIN_S)
        server.forget()
        warm = [server.ask(prompt) for prompt in PROMPTS]
        assert all(one.like(other) for one, other in zip(warm, cold, strict=True))
        assert [one.cached for one in warm] == [(len(prompt) - 1) // PAGE * PAGE for prompt in PROMPTS]
        assert as_stored(server) == (PAGES, 2 * PAGES)
        assert sorted(one["name"][-6:] for one in stats(server)["engines"]) == ["tp0-kv", "tp1-kv"]


def test_a_full_and_a_read_only_disk_cost_hits_and_no_request(place: Path, model: Path, right: Right) -> None:
    (blocks := place / "blocks").mkdir()
    tree = {"storage": {"backend": "file", "file": {"path": str(blocks), "capacity": "64MiB"}}}
    mounts = in_own_mounts(f"mount -t tmpfs -o size=640k tmpfs {blocks}")  # for about half of the pages

    def remount(how: str) -> None:
        command = ["nsenter", "--target", str(daemon.pid), "--mount", "mount", "-o", f"remount,{how}", str(blocks)]
        subprocess.run(command, check=True, timeout=10)

    def answers() -> int:
        """Ask again, with nothing in SGLang's caches. Returns how many pages were loaded."""
        server.forget()
        before = as_computed(server, right, LOADED)
        for prompt, expected in zip(PROMPTS, right.warm, strict=True):
            assert server.ask(prompt).like(expected)
        return as_computed(server, right, LOADED) - before

    with (
        launch.running(tree, place, prefix=mounts) as daemon,
        serving(place, model, "WitnessHiCache", *DEVICE, endpoint=daemon.endpoint) as server,
    ):
        assert [server.ask(prompt) for prompt in PROMPTS] == right.cold
        assert answers() < PAGES, "the disk was not full"
        remount("size=64m")
        wait_until(lambda: answers() == PAGES, "what had no room is not stored later", within=WITHIN_S)
        remount("ro")
        assert answers() == PAGES
        server.ask([499 - token for token in PROMPTS[0]])
        assert answers() == PAGES
        remount("rw")


def test_attached_at_run_time_to_private_host_pools(place: Path, model: Path, right: Right) -> None:
    without = Storage(["--enable-hierarchical-cache", "--hicache-mem-layout", "page_first"])
    server = Server(place, model, without, (*DEVICE, "--admin-api-key", ADMIN_KEY))
    try:
        server.wait()
        for turn in range(2):
            server.attach(of_transferd())
            assert "pages of kv are copied" in server.log
            assert [server.ask(prompt) for prompt in PROMPTS] == (right.warm if turn else right.cold)
            stored(server)
            server.forget()
            assert [server.ask(prompt) for prompt in PROMPTS] == right.warm
            assert as_computed(server, right, LOADED) == (2 * turn + 1) * PAGES
            server.forget()
            server.detach()
        assert as_computed(server, right, STORED) == PAGES, "nothing is stored twice"
    finally:
        server.kill()


def test_a_retrained_adapter_gets_nothing_of_the_old_one(place: Path, model: Path) -> None:
    prompts = PROMPTS[:2]
    where = tiny_adapter(place / "adapter", seed=1)
    loras = (*DEVICE, "--enable-lora", "--lora-paths", f"mine={where}", "--lora-backend", "torch_native")

    def answers(server: Server) -> list[Answer]:
        return [server.ask(prompt, adapter=name) for prompt in prompts for name in ("mine", None)]

    with serving(place, model, "WitnessHiCache", *loras) as server:
        old = answers(server)
        pages = sum((len(prompt) - 1) // PAGE for prompt in prompts)
        stored(server, 2 * pages)
        server.stop()
    with serving(place, model, "WitnessHiCache", *loras) as server:
        again = answers(server)
        assert all(one.like(other) for one, other in zip(again, old, strict=True))
        assert [one.cached for one in again] == [(len(prompt) - 1) // PAGE * PAGE for prompt in prompts for _ in "ab"]
        server.stop()
    tiny_adapter(where, seed=2)  # under the same name and path, as every training does
    with serving(place, model, "WitnessHiCache", *loras) as server:
        new = answers(server)
        assert [one.cached for one in new] == [0] * 4
        server.forget()
        server.clear()
        computed = answers(server)
    assert all(one.like(other) for one, other in zip(new, computed, strict=True))
    assert not new[0].like(old[0])
    assert new[1].like(old[1]), "without the adapter nothing has changed"


def test_the_external_linker_loads_what_an_earlier_server_has_computed(place: Path, model: Path, right: Right) -> None:
    for life in range(2):
        with started(place, model, of_linker(), DEVICE) as server:
            first = [server.ask(prompt) for prompt in PROMPTS]
            expected = right.warm if life else right.cold
            assert all(one.like(other) for one, other in zip(first, expected, strict=True))
            assert [one.cached for one in first] == [one.cached for one in expected]
            wait_until(lambda: stats(server)["storage"]["objects"] == PAGES, "SGLang stores no more", within=WITHIN_S)
            server.forget()
            again = [server.ask(prompt) for prompt in PROMPTS]
            assert all(one.like(other) for one, other in zip(again, right.warm, strict=True))
            assert [one.cached for one in again] == [one.cached for one in right.warm]
            server.stop()


def conversations() -> list[list[int]]:
    """Prompts that share prefixes as the trace's requests do. The trace is not in this repository: none without it."""
    made = []
    for line in TRACE.read_text(encoding="ascii").splitlines()[:REQUESTS] if TRACE.exists() else []:
        prompt: list[int] = []
        for number in json.loads(line)["hash_ids"][:MOST_IDS]:
            draw = random.Random(number)
            prompt += [draw.randrange(3, 500) for _ in range(2 * PAGE)]
        made.append([*prompt, 7])
    return made


@pytest.mark.skipif(not TRACE.exists(), reason=f"no trace at {TRACE}; TRANSFERD_TEST_TRACE names another one")
def test_conversations_are_right_to_the_byte(running: Server, right: Right) -> None:
    running.forget_notes()
    asked = conversations()
    answers = together(running, asked)
    wrong = [
        i for i, (one, expected) in enumerate(zip(answers, right.conversations, strict=True)) if not one.like(expected)
    ]
    assert wrong == []
    moved, found = as_stored(running)
    assert moved
    assert found
    tokens = sum(len(prompt) for prompt in asked)
    cached = [sum(one.cached for one in some) for some in (answers, right.conversations)]
    print(f"{len(asked)} requests, {tokens} tokens; not computed: {cached[0]}, without storage {cached[1]}; ", end="")
    print(f"{moved} pages stored, {found} loaded")
    assert cached[0] > cached[1]
