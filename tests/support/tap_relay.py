"""Carry packets between two TAP devices in network namespaces, with delay and loss: the process behind `impairment.py`.

    python tap_relay.py NAMESPACE DEVICE NAMESPACE DEVICE MTU SEED

A namespace is a file such as /proc/4711/ns/net. The program makes the devices, which are gone when it ends, and prints
a line when they are there. Each line that it reads is JSON, `[there, back]`, with the settings of the way from the
first device to the second and of the way back; it applies them and answers with one line, the counts of both ways until
then. It ends at the end of its input.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import heapq
import json
import os
import random
import select
import socket
import struct
import sys
import time

TUNSETIFF = 0x400454CA
IFF_TAP, IFF_NO_PI = 0x0002, 0x1000
SIOCSIFMTU, SIOCSIFTXQLEN = 0x8922, 0x8943
CLONE_NEWNET = 0x40000000
ETHERNET_HEADER = 18  # with a VLAN tag
IPV4 = b"\x08\x00"  # the type of a packet, in its header
BATCH = 64  # packets of one way before the other one's turn
QUEUE = 10_000  # packets that wait in the kernel for this process


class Way:
    """Packets from one device to the other. held: those on their way, by their time of arrival."""

    def __init__(self, source: int, sink: int, seed: str) -> None:
        self.source, self.sink = source, sink
        self._random = random.Random(seed)
        self._held: list[tuple[float, int, bytes]] = []
        self.delay = self.jitter = self.loss = self.reorder = 0.0
        self.passed = self.lost = self.early = 0
        self._number = 0

    def read(self, size: int) -> None:
        """Take what the device has, one batch of it."""
        for _ in range(BATCH):
            try:
                packet = os.read(self.source, size)
            except BlockingIOError:
                return
            if packet[12:14] != IPV4:  # ARP: a lost one would be "no route to host", which no long way answers
                self._write(packet)
            elif self.loss and self._random.random() < self.loss:
                self.lost += 1
            elif not self.delay:
                self._write(packet)
            elif self.reorder and self._random.random() < self.reorder:
                self.early += 1
                self._write(packet)
            else:
                wait = self.delay + (self._random.uniform(-self.jitter, self.jitter) if self.jitter else 0.0)
                self._number += 1
                heapq.heappush(self._held, (time.monotonic() + wait, self._number, packet))

    def deliver(self) -> float | None:
        """Write what is due. Returns when the next packet is."""
        while self._held:
            if self._held[0][0] > time.monotonic():
                return self._held[0][0]
            self._write(heapq.heappop(self._held)[2])
        return None

    def set(self, *, delay: float, jitter: float, loss: float, reorder: float) -> dict[str, int]:
        """From now on. What is on its way already arrives as before. Returns the counts so far."""
        self.delay, self.jitter, self.loss, self.reorder = delay, jitter, loss, reorder
        return {"passed": self.passed, "lost": self.lost, "early": self.early}

    def _write(self, packet: bytes) -> None:
        with contextlib.suppress(OSError):  # the device is down
            os.write(self.sink, packet)
        self.passed += 1


def tap(namespace: str, device: str, mtu: int) -> int:
    """Make the device in the namespace, and stay there. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(namespace, "rb") as there:
        if libc.setns(there.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}: {os.strerror(ctypes.get_errno())}")
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    name = device.encode()
    fcntl.ioctl(tun, TUNSETIFF, struct.pack("16sH22x", name, IFF_TAP | IFF_NO_PI))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, SIOCSIFMTU, struct.pack("16si20x", name, mtu))
        fcntl.ioctl(control, SIOCSIFTXQLEN, struct.pack("16si20x", name, QUEUE))
    return tun


def carry(ways: tuple[Way, Way], size: int) -> None:
    """Until the end of the input."""
    poll = select.epoll()
    for fd in (sys.stdin.fileno(), *(way.source for way in ways)):
        poll.register(fd, select.EPOLLIN)
    by_source = {way.source: way for way in ways}
    while True:
        due = [at for at in (way.deliver() for way in ways) if at is not None]
        for fd, _ in poll.poll(max(0.0, min(due) - time.monotonic()) if due else None):
            if fd in by_source:
                by_source[fd].read(size)
                continue
            line = sys.stdin.readline()
            if not line:
                return
            counts = [way.set(**settings) for way, settings in zip(ways, json.loads(line), strict=True)]
            print(json.dumps(counts), flush=True)


def main() -> None:
    here, one, there, other, mtu, seed = sys.argv[1:]
    first, second = tap(here, one, int(mtu)), tap(there, other, int(mtu))
    gc.disable()  # nothing here makes cycles
    print("ready", flush=True)
    carry((Way(first, second, f"{seed} there"), Way(second, first, f"{seed} back")), int(mtu) + ETHERNET_HEADER)


if __name__ == "__main__":
    main()
