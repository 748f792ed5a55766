"""Is the copy hidden behind a wire? Tasks against raw Mooncake calls, over TCP at a limited rate.

On plain loopback the processor is the wire: sender, receiver, and the library's own waiting loop take all of
two cores, so whatever is done besides costs time. A network card moves bytes by itself. Here loopback is
slowed down to a rate (a network namespace of its own, `tc tbf`), which leaves the processor time to gather the
next chunk while one is on its way.

Needs root, unshare, ip and tc; changes nothing outside its namespace.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from transferd.cli.bench.harness import Row, machine, print_report, report
from transferd.cli.bench.mooncake import subjects
from transferd.cli.bench.storage import measure

GBITS = (4, 8, 12)
NEEDED = ("unshare", "ip", "tc")


def rows_at(gbit: int) -> list[dict[str, Any]]:
    """Measured in a namespace of its own. Raises CalledProcessError with what it printed."""
    command = ["unshare", "--net", sys.executable, __file__, "--inside", str(gbit)]
    here = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=300, env=os.environ | here)
    rows: list[dict[str, Any]] = json.loads(done.stdout)
    return rows


def inside(gbit: int) -> list[Row]:
    """Slow down this namespace's loopback, then measure memory that another process lends."""
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    shaper = ["tbf", "rate", f"{gbit}gbit", "burst", "4mb", "limit", "64mb"]
    subprocess.run(["tc", "qdisc", "add", "dev", "lo", "root", *shaper], check=True)
    with tempfile.TemporaryDirectory(prefix="transferd-bench-") as directory, subjects(Path(directory)) as pools:
        (remote,) = [pool for pool in pools if pool.section["mooncake"]["global_segment_size"] == 0]
        write, read, *_ = measure(remote)
    return [replace(row, name=f"{name}, {gbit} Gbit/s") for name, row in (("write", write), ("read", read))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--format", choices=["text", "json"], default="text")
    parser.add_argument("--inside", type=int, metavar="GBIT", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside is not None:
        print(json.dumps([row.tree() for row in inside(arguments.inside)]))
        return
    missing = [name for name in NEEDED if shutil.which(name) is None]
    if missing or os.geteuid() != 0:
        raise SystemExit(f"needs root, and {', '.join(missing) or 'nothing else'}")
    before = machine()
    tree = report("mooncake_wire", before, []) | {"rows": [row for gbit in GBITS for row in rows_at(gbit)]}
    print_report(tree, arguments.format)


if __name__ == "__main__":
    main()
