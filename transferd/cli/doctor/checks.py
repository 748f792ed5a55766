"""The checks. Each inspects one thing and returns one finding; machine.py does the looking.

`fail`: the daemon cannot start or serve as configured. `warn`: it runs, but more slowly or less safely.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from transferd.blocks.layout import build_layout
from transferd.cli.doctor.machine import NO_LIMIT, Machine
from transferd.config import Config, FileStorageSection
from transferd.daemon.preflight import SHARED_MEMORY, Plan, host_memory
from transferd.errors import ConfigError
from transferd.observability.units import size
from transferd.runtime.address import host_and_port
from transferd.runtime.compat import StrEnum
from transferd.runtime.descriptors import LEAST as LEAST_DESCRIPTORS
from transferd.runtime.descriptors import OTHERS
from transferd.runtime.limits import memory_total
from transferd.runtime.threads import LEAST as THREADS
from transferd.runtime.version import VERSION
from transferd.storage.registry import backends_of
from transferd.storage.room import DiskState, misfit
from transferd.wire.credentials import hidden_uid, resolve_uids, users_problem
from transferd.wire.obstacle import obstacle_at

GIB = 1024**3
LARGE_BLOCK = 1024**2  # such a load is no faster from memory than from the page cache
ENGINES = ("fastdeploy-gpu", "fastdeploy-xpu", "vllm", "paddlepaddle", "paddlepaddle-gpu")
MOONCAKES = tuple(f"mooncake-transfer-engine{kind}" for kind in ("", "-non-cuda", "-cuda13"))
PLUGINS = "FD_PLUGINS"  # FastDeploy's list
NETWORK_FILE_SYSTEMS = ("nfs", "nfs4", "cifs", "smb3", "fuse.sshfs", "ceph", "9p")
PASSING_FILE_SYSTEMS = ("tmpfs", "ramfs", "overlay")


class Level(StrEnum):
    """How serious a finding is."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The result of one check. remedy: what to do, in one line; "" if there is nothing to do."""

    name: str
    level: Level
    found: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Patient:
    """The object of the examination: a machine, and the configuration that it should run."""

    machine: Machine
    config: Config
    plan: Plan

    @property
    def directories(self) -> list[FileStorageSection]:
        """The settings of each directory that the store would keep objects in."""
        return [one for kind in backends_of(self.config) for one in kind.directories(self.config.storage)]


def ok(name: str, found: str) -> Diagnosis:
    return Diagnosis(name, Level.OK, found)


def warn(name: str, found: str, remedy: str) -> Diagnosis:
    return Diagnosis(name, Level.WARN, found, remedy)


def fail(name: str, found: str, remedy: str) -> Diagnosis:
    return Diagnosis(name, Level.FAIL, found, remedy)


def local(patient: Patient) -> Iterator[Diagnosis]:
    """Every check that needs no daemon, in the order in which they are shown."""
    for check in CHECKS:
        yield check(patient)


def versions(patient: Patient) -> Diagnosis:
    engines = [f"{name} {found}" for name in ENGINES if (found := patient.machine.package(name))]
    return ok("versions", f"transferd {VERSION}; beside it {', '.join(engines) or 'no engine'}")


def plugins(patient: Patient) -> Diagnosis:
    """FastDeploy looks for each name of its list as it stands, so a blank hides a plugin, and FastDeploy is silent."""
    listed = patient.machine.variable(PLUGINS).split(",")
    if "transferd" in listed:
        return ok("plugins", f"{PLUGINS} names transferd")
    if "transferd" in map(str.strip, listed):
        what = f"{PLUGINS}={','.join(listed)!r} has a blank beside transferd: FastDeploy does not find the plugin"
        return warn("plugins", what, f"export {PLUGINS}={','.join(map(str.strip, listed))}")
    return ok("plugins", f"{PLUGINS} does not name transferd here; only FastDeploy reads it")


def memlock(patient: Patient) -> Diagnosis:
    needed = patient.plan.sizes.host + patient.plan.sizes.staging
    limit = NO_LIMIT if patient.machine.may_lock_any_memory() else patient.machine.limit("MEMLOCK")
    if limit >= needed:
        return ok("memlock", f"{size(needed)} of host memory can be pinned")
    what = f"{size(needed)} of host memory should be pinned, but this user may pin {size(limit)}: copies are slower"
    return warn("memlock", what, "set LimitMEMLOCK=infinity in the unit, or ulimit -l unlimited")


def engines(patient: Patient) -> Diagnosis:
    """The memory that registering engines may take, besides the daemon's own."""
    most, each = host_memory(patient.config, patient.plan.sizes)
    there = max(0, memory_total() - patient.plan.sizes.memory)
    what = f"{size(most)} of host memory for all that register, {size(each)} for each"
    if most <= there:
        return ok("engines", what)
    remedy = f"set engines.host_memory to {there} or less"
    return warn("engines", f"{what}; beside the daemon's own there is room for {size(there)}", remedy)


def hugepages(patient: Patient) -> Diagnosis:
    mode = patient.machine.text("/sys/kernel/mm/transparent_hugepage/enabled")
    if mode is None or "[never]" not in mode:
        return ok("hugepages", f"transparent huge pages: {mode or 'this kernel has none'}")
    remedy = "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
    return warn("hugepages", "transparent huge pages are off: large host pools cost more TLB misses", remedy)


def shared_memory(patient: Patient) -> Diagnosis:
    needed = patient.plan.sizes.shared
    if not needed:
        return ok(SHARED_MEMORY, "not needed: the daemon keeps no device cache there")
    _, free = patient.machine.space(SHARED_MEMORY)
    if free >= needed:
        return ok(SHARED_MEMORY, f"{size(needed)} needed, {size(free)} free")
    remedy = (
        f"mount -o remount,size=… {SHARED_MEMORY} (containers: --shm-size), stop what fills it, or fewer device_blocks"
    )
    return fail(SHARED_MEMORY, f"{size(needed)} needed, {size(free)} free (a running daemon counts)", remedy)


def numa(patient: Patient) -> Diagnosis:
    nodes = [name for name in patient.machine.entries("/sys/devices/system/node") if name.startswith("node")]
    if len(nodes) > 1 and patient.machine.text("/proc/sys/kernel/numa_balancing") not in (None, "0"):
        what = f"{len(nodes)} nodes, and the kernel moves pages between them while they are copied"
        return warn("numa", what, "sysctl kernel.numa_balancing=0")
    return ok("numa", f"{len(nodes) or 1} node{'s' if len(nodes) > 1 else ''}")


def store(patient: Patient) -> Diagnosis:
    if not (sections := patient.directories):
        return ok("store", f"no directory: the backend is {patient.config.storage.title}")
    each = [_store_at(patient.machine, section, section.paths[0]) for section in sections]
    if problem := memory_above_files(patient.config):
        each.append(warn("store", problem, "set storage.file.direct_io = true, or drop the memory level"))
    return max(each, key=lambda one: list(Level).index(one.level))


def memory_above_files(config: Config) -> str:
    """Why a memory level is useless; "" if it may help, or if the size of a block is not known yet."""
    kinds = backends_of(config)
    below = kinds[1].directories(config.storage) if len(kinds) > 1 else []
    if not below or kinds[0].slots_at_once != 0 or below[0].direct_io or config.cache is None:
        return ""
    block = build_layout(config.cache).block_bytes
    if block < LARGE_BLOCK:
        return ""
    what = f"blocks of {size(block)} come from the page cache as fast as from the memory level"
    return f"{what}, and lie in memory twice (docs/levels.md)"


def _store_at(machine: Machine, section: FileStorageSection, path: str) -> Diagnosis:
    there = machine.existing(path)
    if not machine.writable(there):
        remedy = f"run the doctor as the daemon's user, or give it the directory (chown, StateDirectory=): {path}"
        return fail("store", f"{there} cannot be written by this user", remedy)
    whole, free = machine.space(path)
    if free < min(GIB, section.capacity):
        return fail(
            "store", f"{size(free)} are free in {there}", "free space there, or choose another storage.file.path"
        )
    if problem := misfit(section.capacity, section.reserve, DiskState(total=whole, free=free)):
        return warn("store", f"storage.file.capacity: {problem}", "lower storage.file.capacity, or use a larger disk")
    kind = machine.file_system(there)
    if kind in NETWORK_FILE_SYSTEMS:
        return warn("store", f"{there} is on {kind}: a server that hangs holds up tasks", "use a local disk")
    if kind in PASSING_FILE_SYSTEMS:
        return warn("store", f"{there} is on {kind}: it does not outlive a reboot, or this container", "use a disk")
    return ok("store", f"{size(free)} free of {size(whole)} on {kind or 'its file system'}, for {section.capacity}")


def direct_io(patient: Patient) -> Diagnosis:
    """Whether direct I/O works. Reported either way, because the file store works without it."""
    if not (sections := patient.directories):
        return ok("direct I/O", f"no directory: the backend is {patient.config.storage.title}")
    wanted = sections[0].direct_io
    for section in sections:
        there = patient.machine.existing(section.paths[0])
        problem = patient.machine.direct_io(there)
        if problem and wanted:
            return fail("direct I/O", f"{there} refuses it ({problem})", "set storage.file.direct_io to false")
    answer = f"refuses it ({problem})" if problem else "takes it"
    return ok("direct I/O", f"{there} {answer}; storage.file.direct_io is {'true' if wanted else 'false'}")


def recorder(patient: Patient) -> Diagnosis:
    """Whether dumps can be written: after a crash it would be too late to find out."""
    directory = patient.config.recorder.directory
    if not directory:
        return ok("recorder", "no dumps: recorder.directory is empty")
    there = patient.machine.existing(directory)
    if not patient.machine.writable(there):
        remedy = f"run the doctor as the daemon's user, or give it the directory (chown): {directory}"
        return warn("recorder", f"{there} cannot be written by this user: no dump of the flight recorder", remedy)
    return ok("recorder", f"dumps go to {directory}")


def cuda_ipc(patient: Patient) -> Diagnosis:
    """Whether daemon and engines can map each other's device memory, as far as that is known without an engine."""
    cache = patient.config.cache
    if cache is None:
        return ok("cuda ipc", "not known yet: engines register (there is no [cache])")
    if cache.device != "cuda":
        return ok("cuda ipc", f'not used: cache.device = "{cache.device}"')
    own, remedy = patient.machine.user(), "run daemon and engine as one user (User= in the unit)"
    try:
        engines = resolve_uids("server.allowed_uids", patient.config.server.allowed_uids)
    except ConfigError as error:
        return fail("cuda ipc", str(error), "correct server.allowed_uids")
    others = sorted(set(engines or ()) - {own})
    if others:
        named = ", ".join(map(str, others))
        what = f"this is user {own}, engines are {named}: the driver may refuse memory of another user"
        return warn("cuda ipc", what, remedy)
    if own == 0:
        return warn("cuda ipc", "this is root, the daemon of the unit is not", "run the doctor as the daemon's user")
    who = (
        "as server.allowed_uids says"
        if engines
        else "if the engine is that user as well (server.allowed_uids is empty)"
    )
    return ok("cuda ipc", f"memory is shared within user {own}, {who}")


def threads(patient: Patient) -> Diagnosis:
    machine = patient.machine
    limits = {
        "ulimit -u": NO_LIMIT if machine.has_no_thread_limit() else machine.limit("NPROC") - machine.tasks_of_user()
    }
    if (group := machine.fewest_pids()) is not None:
        limits[f"{group.path}/pids.max"] = group.left
    name, left = min(limits.items(), key=lambda item: item[1])
    if left >= THREADS:
        return ok("threads", "no limit" if left == NO_LIMIT else f"{left} more can start")
    remedy = "raise TasksMax= of the unit, pids.max of the cgroup, or ulimit -u"
    return fail("threads", f"{max(0, left)} more can start ({name}), and the daemon needs {THREADS}", remedy)


def descriptors(patient: Patient) -> Diagnosis:
    limit, wanted = patient.machine.hard_limit("NOFILE"), patient.config.server.max_connections + OTHERS
    remedy = "raise LimitNOFILE= of the unit, or ulimit -Hn"
    if limit < LEAST_DESCRIPTORS:
        return fail("descriptors", f"at most {limit}, and the daemon needs {LEAST_DESCRIPTORS}", remedy)
    if limit // 2 < wanted:  # half of a low limit stays free (runtime/descriptors.py)
        return warn("descriptors", f"at most {limit}: fewer clients than server.max_connections fit", remedy)
    return ok("descriptors", "no limit" if limit == NO_LIMIT else f"{limit}, {wanted} wanted")


def users(patient: Patient) -> Diagnosis:
    """Whether a daemon that runs like this command can tell the users of its clients apart."""
    server = patient.config.server
    problem = users_problem([*server.endpoints, server.observer_endpoint])
    if hidden_uid() is None:
        return ok("users", problem or "the kernel names the user of each client")
    return warn("users", problem, "give daemon and engines one user namespace: PrivateUsers=no, or the same --userns")


def gpu(patient: Patient) -> Diagnosis:
    machine, cache = patient.machine, patient.config.cache
    if cache is None:
        return ok("gpu", "not known yet: engines register (there is no [cache])")
    if cache.device != "cuda":
        return ok("gpu", f'not used: cache.device = "{cache.device}"')
    driver = machine.text("/proc/driver/nvidia/version")
    if driver is None:
        return fail(
            "gpu", "no NVIDIA driver is loaded, or this container has none", "install it, or run with --gpus all"
        )
    for module in ("cuda.bindings", "cuda.bindings.nvrtc"):
        if not machine.module(module):
            return fail("gpu", f"the Python module {module} is missing", "pip install 'transferd[cuda]'")
    there = len(machine.entries("/proc/driver/nvidia/gpus"))
    if there <= max((device for device in cache.device_of_rank if isinstance(device, int)), default=0):
        return fail("gpu", f"{there} GPUs, and {cache.ranks} ranks name more", "correct cache.ranks or cache.devices")
    release = driver.splitlines()[0]
    if "control" in machine.entries("/run/nvidia-mps"):
        return ok("gpu", f"{there} GPUs; {release}; MPS runs")
    if "control" in machine.entries("/tmp/nvidia-mps"):
        remedy = "start it with CUDA_MPS_PIPE_DIRECTORY=/run/nvidia-mps, as gpu.conf has it, and the engine likewise"
        return warn("gpu", f"{there} GPUs; MPS listens in /tmp, which the unit hides (PrivateTmp=)", remedy)
    return ok("gpu", f"{there} GPUs; {release}; no MPS: kernels of engine and daemon take turns")


def bucket(patient: Patient) -> Diagnosis:
    """Whether an object can be stored, loaded and removed with the credentials of this environment."""
    found = [kind.try_out(patient.config.storage) for kind in backends_of(patient.config)]
    problem = next((one for one in found if one is not None), None)
    if problem is None:
        return ok("bucket", "not used")
    if problem:
        remedy = "check the network, storage.object and the credentials; run the doctor with the daemon's environment"
        return fail("bucket", problem, remedy)
    return ok("bucket", f"{patient.config.storage.object.url}: an object was stored, loaded and removed")


def mooncake_problem(machine: Machine) -> str:
    """Why the Python package mooncake is of no use; "" if it is."""
    if not machine.module("mooncake"):
        return "the Python package mooncake is missing"
    for name in MOONCAKES:
        found = machine.package(name)
        if found and [int(part) for part in re.findall(r"\d+", found)] < [0, 3, 13]:
            return f"{name} {found} is older than 0.3.13"
    return ""


def mooncake(patient: Patient) -> Diagnosis:
    if not patient.plan.sizes.pool:
        return ok("mooncake", "not used")
    if problem := mooncake_problem(patient.machine):
        return fail("mooncake", problem, "pip install 'transferd[mooncake]'")
    address = patient.config.storage.mooncake.master_server_addr
    target = host_and_port(address)
    if "://" in address or target is None:
        return ok("mooncake", f"{address}: found through its own directory, which the doctor does not query")
    problem = patient.machine.connects(*target)
    if problem:
        return fail(
            "mooncake", f"no master at {address}: {problem}", "start it (`transferd pool master`), or open the firewall"
        )
    return ok("mooncake", f"a master listens at {address}")


def clock(patient: Patient) -> Diagnosis:
    if patient.machine.clock_synchronized() is False:
        what = "the clock does not follow a time server: log lines of several nodes cannot be compared"
        return warn("clock", what, "start chrony or systemd-timesyncd on the host")
    return ok("clock", "synchronized, as far as the kernel says")


def socket(patient: Patient) -> Diagnosis:
    """The permissions of an existing socket. Whether a daemon answers there is another check (report.py)."""
    for endpoint in patient.config.server.endpoints:
        path = endpoint.removeprefix("ipc://")
        # Do not connect if that would work: the daemon would count and log a silent connection as a failed handshake.
        closed = endpoint.startswith("ipc:///") and not os.access(path, os.W_OK)
        problem = obstacle_at(path) if closed else ""
        if problem.startswith("permission denied"):
            return fail(
                "socket", f"{endpoint}: {problem}", "add this user to that group (usermod -aG), and log in again"
            )
        if endpoint.startswith("ipc:///") and not os.path.lexists(path):
            absent = path if os.path.isdir(os.path.dirname(path)) else os.path.dirname(path)
            return ok("socket", f"{endpoint}: {absent} is not there yet; a start makes it")
    return ok("socket", ", ".join(patient.config.server.endpoints))


CHECKS: tuple[Callable[[Patient], Diagnosis], ...] = (
    versions, plugins, memlock, engines, hugepages, shared_memory, numa, store, direct_io, recorder, threads,
    descriptors, socket, users, gpu, cuda_ipc, mooncake, bucket, clock,
)  # fmt: skip
