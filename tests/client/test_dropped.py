"""Clients whose owner forgot them or forked: programs of their own against a real daemon, bounded in time."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from tests.support.wire_daemon import serving

# What a busy machine makes a good program say: its daemon is late; with -X dev, a step of its loop took long.
SLOW = re.compile(r".*\(still waiting\)|Executing <.*> took \d+\.\d+ seconds")

COMMON = """
import asyncio, gc, os, sys, threading, time, warnings
from transferd import Client, SwapOutTask, SyncClient, TransferError
endpoint = sys.argv[1]
# Since 3.12 Python warns of a fork beside other threads, which is what some of these programs are about.
warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)

def task(task_id):
    return SwapOutTask(task_id=f"{task_id}-{os.getpid()}-{time.monotonic_ns()}", gpu_block_ids=[1], cpu_block_ids=[2])

def until(condition):
    give_up = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.001)

def warned(caught):
    return sorted(str(w.message).split(" of ")[0] for w in caught if w.category is ResourceWarning)

def sockets():
    links = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if fd.isdigit() and
             os.path.islink(f"/proc/self/fd/{fd}")]
    return sum(link.startswith("socket:") for link in links)

def in_child(function):
    pid = os.fork()
    if not pid:
        code = 1
        try:
            function()
            sys.stdout.flush()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
"""


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    where = f"ipc://{tmp_path_factory.mktemp('dropped')}/d.sock"
    with serving(where):
        yield where


@pytest.fixture(params=["asyncio", "uvloop"])
def play(request: pytest.FixtureRequest, endpoint: str) -> Callable[..., str]:
    """Runs a program on either kind of loop. It may not hang, fail or complain; returns what it printed."""
    loops = (
        "" if request.param == "asyncio" else "import uvloop; asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())"
    )
    return lambda program, *options: _run(endpoint, COMMON + loops + program, *options)


def _run(endpoint: str, program: str, *options: str) -> str:
    command = [sys.executable, *options, "-c", program, endpoint]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    said = [line for line in done.stderr.splitlines() if not SLOW.fullmatch(line)]
    assert (said, done.returncode) == ([], 0), done.stdout
    return done.stdout


COLLECTED_AFTER_ITS_LOOP = """
gc.disable()

async def main():
    client = Client(endpoint)
    client.myself = client
    await client.connect()

with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    before = sockets()
    asyncio.run(main())
    collector = threading.Thread(target=gc.collect)
    collector.start()
    collector.join()
    print(warned(caught), sockets() - before)
"""

DROPPED_WHILE_ITS_LOOP_RUNS = """
async def main():
    before = sockets()
    client = Client(endpoint)
    await client.connect()
    waiting = await client.push(task("held"))
    if how == "cycle":
        client.myself = client
    del client
    if how == "cycle":
        await asyncio.to_thread(gc.collect)
    result = await waiting
    while sockets() > before + 2:  # a thread may have its own
        await asyncio.sleep(0.01)
    return result.error.code

for how in ("name", "cycle"):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        print(asyncio.run(main()), warned(caught))
"""

ALIVE_AT_EXIT = """
async def main():
    global client
    client = Client(endpoint)
    client.myself = client
    await client.connect()

asyncio.run(main())
other = SyncClient(endpoint)
other.myself = other
other.connect()
print("good")
"""

DROPPED_SYNC = """
def make():
    client = SyncClient(endpoint)
    client.connect()
    return client

def clients():
    return [thread for thread in threading.enumerate() if thread.name == "transferd-client"]

for how in ("name", "cycle"):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        client = make()
        waiting = client.push(task("held"))
        if how == "cycle":
            client.myself = client
        del client
        if how == "cycle":
            collector = threading.Thread(target=gc.collect)
            collector.start()
            collector.join()
        print(waiting.result(60).error.code, end=" ")
        until(lambda: not clients())
        print(warned(caught))
"""

NEVER_CONNECTED = """
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    Client(endpoint)
    SyncClient(endpoint)
    client = SyncClient(endpoint)
    client.connect()
    client.close()
    del client
    gc.collect()
    print(warned(caught))
"""


def test_one_collected_after_its_loop_warns_and_frees_its_socket(play: Callable[..., str]) -> None:
    assert play(COLLECTED_AFTER_ITS_LOOP) == "['unclosed client'] 0\n"


def test_one_dropped_while_its_loop_runs_ends_what_was_pending_there(play: Callable[..., str]) -> None:
    assert play(DROPPED_WHILE_ITS_LOOP_RUNS) == "closed ['unclosed client']\n" * 2


@pytest.mark.parametrize("options", [[], ["-X", "dev", "-W", "ignore::ResourceWarning"]], ids=str)
def test_a_program_ends_with_clients_that_nobody_closed(play: Callable[..., str], options: list[str]) -> None:
    assert play(ALIVE_AT_EXIT, *options) == "good\n"


def test_a_dropped_sync_client_warns_and_its_thread_ends(play: Callable[..., str]) -> None:
    assert play(DROPPED_SYNC) == "closed ['unclosed client']\n" * 2


def test_one_that_was_never_connected_or_was_closed_does_not_warn(play: Callable[..., str]) -> None:
    assert play(NEVER_CONNECTED) == "[]\n"


# --- forked children ------------------------------------------------------------------------------

FORKED_SYNC = """
client = SyncClient(endpoint)
client.connect()
held, begun = client.push(task("held")), client.start(task("held too"))
calls = {
    "pushed before": lambda: held.result(60), "started before": lambda: begun.result(60),
    "stats": client.stats, "ping": client.ping, "connect": client.connect, "wait_ready": client.wait_ready,
    "submit": lambda: client.submit(task("t")), "push": lambda: client.push(task("t")),
    "start": lambda: client.start(task("t")).result(), "match": lambda: client.match(["a"]),
    "cancel": lambda: client.cancel("t"), "attach": lambda: client.attach(0),
}

def child():
    codes = set()
    for name, call in calls.items():
        try:
            call()
        except TransferError as error:
            codes.add((type(error).__name__, "after a fork" in str(error)))
    client.close()
    with SyncClient(endpoint) as fresh:
        print(codes, client.connected, fresh.submit(task("fresh")).status)

def leaves():
    try:
        with client:
            pass
    except TransferError:
        print("left")

def drops():
    global client, calls, held, begun
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del client, calls, held, begun
        gc.collect()

for function in (child, leaves, drops):
    assert in_child(function) == 0
    print(client.submit(task("after")).status, held.done())
client.close()
"""

FORKED_SYNC_EXITS = """
import atexit
client = SyncClient(endpoint)
client.connect()
pid = os.fork()
if not pid:
    sys.exit(3)  # with everything that an interpreter does at its end
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
for i in range(3):
    print(client.submit(task(f"after-{i}")).status)
client.close()
"""

FORKED_AMID_CALLS = """
client = SyncClient(endpoint)
client.connect()
stop = False

def busy():
    while not stop:
        client.submit(task(f"{threading.get_ident()}-{time.monotonic_ns()}"))

threads = [threading.Thread(target=busy) for _ in range(4)]
for thread in threads:
    thread.start()

def child():
    try:
        client.stats()
    except TransferError:
        client.close()
        print("typed")

for _ in range(10):
    assert in_child(child) == 0
stop = True
for thread in threads:
    thread.join()
client.close()
"""

FORKED_ASYNC = """
async def main():
    async with Client(endpoint) as client:
        pushed = await client.push(task("held"))

        def step(coroutine):
            try:
                coroutine.send(None)
            except StopIteration:
                return "ended"
            except TransferError as error:
                return (type(error).__name__, "after a fork" in str(error))

        def child():
            # Both ways to go on in a child: in the coroutine that forked, and on a loop of one's own.
            calls = [client.stats, client.wait_ready, client.connect, lambda: client.submit(task("t")),
                     lambda: client.push(task("t")), lambda: client.cancel("t"), lambda: client.set_generation("g")]
            print({step(call()) for call in calls}, step(client.close()), client.connected)

        def own_loop():
            asyncio._set_running_loop(None)
            for call in (client.stats, lambda: client.submit(task("t"))):
                try:
                    asyncio.run(call())
                except TransferError as error:
                    print(type(error).__name__)

            async def fresh():
                async with Client(endpoint) as mine:
                    print((await mine.submit(task("fresh"))).status)
            asyncio.run(client.close())
            asyncio.run(fresh())
        assert in_child(child) == 0
        assert in_child(own_loop) == 0
        await asyncio.sleep(0)
        print((await client.submit(task("after"))).status, pushed.done())

asyncio.run(main())
"""

MULTIPROCESSING = """
import multiprocessing
client = SyncClient(endpoint)
client.connect()

def work(queue):
    try:
        client.stats()
    except TransferError as error:
        queue.put(type(error).__name__)
    client.close()

context = multiprocessing.get_context("fork")
queue = context.Queue()
process = context.Process(target=work, args=(queue,))
process.start()
print(queue.get(timeout=60))
process.join(60)
print(process.exitcode, client.submit(task("t")).status)
client.close()
"""

CONNECTED_IN_THE_CHILD = """
client = SyncClient(endpoint)  # as a server that forks its workers makes it

def child():
    with client:
        print(client.submit(task("t")).status)

assert in_child(child) == 0
with client:
    print(client.submit(task("t")).status)
assert in_child(child) == 0
"""


def test_in_a_forked_child_every_call_is_closed_and_the_parents_connection_stays(play: Callable[..., str]) -> None:
    child, *rest = play(FORKED_SYNC).splitlines()
    assert child == "{('Closed', True)} False ok"
    assert rest == ["ok False", "left", "ok False", "ok False"]


def test_a_forked_child_that_exits_leaves_the_parents_client_alone(play: Callable[..., str]) -> None:
    assert play(FORKED_SYNC_EXITS) == "ok\n" * 3


def test_a_fork_amid_the_calls_of_other_threads_is_the_same(play: Callable[..., str]) -> None:
    assert play(FORKED_AMID_CALLS) == "typed\n" * 10


def test_an_asyncio_client_in_a_forked_child_is_closed_too(play: Callable[..., str]) -> None:
    told = play(FORKED_ASYNC).splitlines()
    assert told == ["{('Closed', True)} ended False", "Closed", "Closed", "ok", "ok False"]


def test_multiprocessing_by_fork_ends(play: Callable[..., str]) -> None:
    assert play(MULTIPROCESSING) == "Closed\n0 ok\n"


def test_one_made_before_a_fork_and_not_connected_may_be_connected_after_it(play: Callable[..., str]) -> None:
    assert play(CONNECTED_IN_THE_CHILD) == "ok\n" * 3
