"""What the kernel applies: the machine, the own control group and each parent, of both versions. And a real group."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.memory_group import memory_group
from transferd.runtime import limits
from transferd.runtime.limits import USUAL_MAPS, connect_limit, memory_left, memory_total, most_maps, pids_left

GIB, MIB = 1024**3, 1024**2


class Tree:
    """A machine of 64 GiB, 32 of them free, below a directory that stands for /."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.write("proc/meminfo", f"MemTotal: {64 * GIB // 1024} kB\nMemAvailable: {32 * GIB // 1024} kB\n")

    def write(self, path: str, text: object) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")

    def v2(self, path: str, root: str = "/") -> None:
        self.write("proc/self/cgroup", f"0::{path}")
        self.write("proc/self/mountinfo", f"30 20 0:28 {root} /sys/fs/cgroup rw - cgroup2 cgroup2 rw,nsdelegate")

    def v1(self, path: str) -> None:
        self.write("proc/self/cgroup", f"5:cpu,cpuacct:/\n4:memory:{path}\n3:pids:{path}\n0::/")
        mounts = (f"3{n} 20 0:3{n} / /sys/fs/cgroup/{name} rw - cgroup cgroup rw,{name}" for n, name in
                  enumerate(("cpu,cpuacct", "memory", "pids")))  # fmt: skip
        self.write("proc/self/mountinfo", "\n".join(mounts))


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tree:
    monkeypatch.setattr(limits, "ROOT", tmp_path)
    return Tree(tmp_path)


def test_without_control_groups_the_machine_counts(tree: Tree) -> None:
    assert (memory_total(), memory_left(), pids_left()) == (64 * GIB, 32 * GIB, None)


def test_a_unit_and_its_slice_are_seen_where_they_are(tree: Tree) -> None:
    """As under systemd: /sys/fs/cgroup itself has no memory.max."""
    tree.v2("/system.slice/transferd.service")
    tree.write("sys/fs/cgroup/system.slice/transferd.service/memory.max", 4 * GIB)
    tree.write("sys/fs/cgroup/system.slice/transferd.service/memory.current", GIB)
    assert (memory_total(), memory_left()) == (4 * GIB, 3 * GIB)
    tree.write("sys/fs/cgroup/system.slice/memory.max", 8 * GIB)
    tree.write("sys/fs/cgroup/system.slice/memory.current", 7 * GIB)
    assert (memory_total(), memory_left()) == (4 * GIB, GIB), "the parent has less left"
    tree.write("sys/fs/cgroup/system.slice/transferd.service/memory.max", "max")
    assert (memory_total(), memory_left()) == (8 * GIB, GIB)


def test_cached_files_count_as_free(tree: Tree) -> None:
    tree.v2("/unit")
    tree.write("sys/fs/cgroup/unit/memory.max", 4 * GIB)
    tree.write("sys/fs/cgroup/unit/memory.current", 4 * GIB)
    tree.write("sys/fs/cgroup/unit/memory.stat", f"anon 5\ninactive_file {2 * GIB}\nactive_file {GIB}\nshmem 7")
    assert memory_left() == 3 * GIB


def test_in_a_container_the_mount_is_the_own_group(tree: Tree) -> None:
    tree.v2("/")
    tree.write("sys/fs/cgroup/memory.max", 2 * GIB)
    tree.write("sys/fs/cgroup/memory.current", 0)
    assert memory_total() == memory_left() == 2 * GIB


@pytest.mark.parametrize("root", ["/docker/abc", "/"])
def test_a_container_in_the_hosts_namespace_of_groups(tree: Tree, root: str) -> None:
    """--cgroupns=host: the path is the host's; the mount may begin at our group or at the host's root."""
    tree.v2("/docker/abc", root)
    place = "sys/fs/cgroup" if root != "/" else "sys/fs/cgroup/docker/abc"
    tree.write(f"{place}/memory.max", GIB)
    tree.write(f"{place}/memory.current", 0)
    assert memory_total() == GIB


def test_version_1_and_its_way_of_saying_no_limit(tree: Tree) -> None:
    tree.v1("/a/b")
    place = "sys/fs/cgroup/memory/a"
    tree.write(f"{place}/b/memory.limit_in_bytes", 2**63 - 4096)
    tree.write(f"{place}/memory.limit_in_bytes", 400 * MIB)
    tree.write(f"{place}/memory.usage_in_bytes", 300 * MIB)
    tree.write(f"{place}/memory.stat", f"total_inactive_file {100 * MIB}\ninactive_file 1")
    assert (memory_total(), memory_left()) == (400 * MIB, 200 * MIB)
    tree.write("sys/fs/cgroup/pids/a/pids.max", 100)
    tree.write("sys/fs/cgroup/pids/a/pids.current", 90)
    group = pids_left()
    assert group is not None
    assert (group.left, group.path) == (10, tree.root / "sys/fs/cgroup/pids/a")


def test_more_than_there_is_counts_as_nothing_left(tree: Tree) -> None:
    tree.v2("/unit")
    tree.write("sys/fs/cgroup/unit/memory.max", GIB)
    tree.write("sys/fs/cgroup/unit/memory.current", 2 * GIB)
    assert memory_left() == 0


def test_the_number_of_maps(tree: Tree) -> None:
    assert most_maps() == USUAL_MAPS
    tree.write("proc/sys/vm/max_map_count", 262144)
    assert most_maps() == 262144


# --- a real group -----------------------------------------------------------------------------------


def test_what_does_not_fit_into_a_real_group_is_refused_and_nobody_is_killed() -> None:
    """Populates and shares more memory than its group may have; without the check the kernel kills it."""
    program = """
import mmap, sys
sys.stdin.readline()  # until it is in the group
from transferd.errors import TierError
from transferd.runtime.limits import memory_left, memory_total
from transferd.tiers.populate import populate
from transferd.tiers.segment import unnamed_segment
import ctypes
print(memory_total(), memory_left())
space = mmap.mmap(-1, 1024**3)
address = ctypes.addressof(ctypes.c_char.from_buffer(space))
for attempt in (lambda: populate(address, 1024**3), lambda: unnamed_segment(1024**3)):
    try:
        attempt()
    except TierError as error:
        print(error.reason, error)
populate(address, 16 * 1024**2)
print("served")
"""
    with memory_group(300 * MIB) as group:
        command = [sys.executable, "-c", program]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        group.take(child.pid)
        said, _ = child.communicate("go\n", timeout=60)
    assert child.returncode != -signal.SIGKILL, "the kernel killed it"
    first, *refused, last = said.splitlines()
    total, left = map(int, first.split())
    assert total == 300 * MIB
    assert 0 < left < 300 * MIB
    assert refused[0].startswith("no_room cannot allocate 1073741824 bytes of host memory: there is room for ")
    assert "cannot allocate 1073741824 bytes of shared memory" in refused[1]
    assert last == "served"


def test_the_kernel_gives_up_a_connection_after_so_many_tries(tree: Tree) -> None:
    assert connect_limit() == 127, "Linux's default"
    tree.write("proc/sys/net/ipv4/tcp_syn_retries", 2)
    assert connect_limit() == 7
