from __future__ import annotations

import subprocess
import sys

# Garbage in cycles whose finalizers let other threads run, a collector that runs every ten allocations, and a thread
# that starts and ends others: CPython 3.11.7 stands still in the first few calls of sys._current_frames().
SCRIPT = """
import faulthandler, gc, threading, time
from transferd.runtime.threads import current_frames

faulthandler.dump_traceback_later(60, exit=True)

class Garbage:
    def __init__(self):
        self.itself = self
    def __del__(self):
        time.sleep(0.001)

def churn():
    while not over.is_set():
        thread = threading.Thread(target=int)
        thread.start()
        thread.join()

over = threading.Event()
many = [threading.Thread(target=over.wait) for _ in range(30)]
for thread in [*many, threading.Thread(target=churn)]:
    thread.start()
gc.set_threshold(10)
for _ in range(100):
    Garbage()
    assert threading.get_ident() in current_frames()
    assert gc.isenabled()
over.set()
print("done")
"""


def test_asking_where_threads_are_never_stops_them() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "done\n", done.stderr[-2000:]
