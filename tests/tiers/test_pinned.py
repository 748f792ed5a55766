"""Host memory: pinned as its device likes it, given back once, and usable where pinning is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from structlog.testing import capture_logs

from transferd.blocks.layout import build_layout
from transferd.config import CacheSection
from transferd.errors import TierError
from transferd.tiers import pinned
from transferd.tiers.numa import node_of_pci, prefer_node
from transferd.tiers.pinned import HostPool, HostRegion


class Pins:
    """A device's pinning that keeps book, or refuses."""

    def __init__(self, refusal: str = "", node: int | None = None, unpin_error: str = "") -> None:
        self.refusal = refusal
        self.node = node
        self.unpin_error = unpin_error
        self.calls: list[tuple[str, int, int]] = []

    def pin(self, address: int, nbytes: int) -> str:
        self.calls.append(("pin", address, nbytes))
        return self.refusal

    def unpin(self, address: int, nbytes: int) -> None:
        self.calls.append(("unpin", address, nbytes))
        if self.unpin_error:
            raise TierError(self.unpin_error)


@pytest.fixture(autouse=True)
def _not_warned_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned, "_warned", False)


def test_memory_is_pinned_once_as_a_whole_and_unpinned_once() -> None:
    pins = Pins()
    region = HostRegion(5000, pins)
    address = region.address
    assert region.pinned
    assert region.degraded == ""
    region.close()
    region.close()
    assert pins.calls == [("pin", address, 8192), ("unpin", address, 8192)]


def test_where_pinning_is_refused_the_memory_works_says_why_and_warns_once() -> None:
    pins = Pins("the driver does not want to")
    with capture_logs() as logs:
        regions = [HostRegion(4096, pins) for _ in range(3)]
    for region in regions:
        assert not region.pinned
        assert region.degraded == "the driver does not want to"
        region.view[:4] = b"abcd"
        assert bytes(region.view[:5]) == b"abcd\0"
        region.close()
    assert [call for call, *_ in pins.calls] == ["pin"] * 3, "what was not pinned is not unpinned"
    assert [(entry["log_level"], entry["reason"]) for entry in logs] == [("warning", "the driver does not want to")]


def test_memory_that_cannot_be_unpinned_is_unmapped_all_the_same_and_the_error_told() -> None:
    region = HostRegion(4096, Pins(unpin_error="context gone"))
    view = region.view
    with pytest.raises(TierError, match="context gone"):
        region.close()
    with pytest.raises(ValueError, match="released"):
        view[0]
    region.close()


def test_a_pool_is_pinned_as_its_device_says() -> None:
    pins = Pins()
    pool = HostPool(build_layout(CacheSection(layers=1, host_blocks=4)), 0, pins)
    assert pool.statistics()["pinned"] is True
    pool.close()
    assert [call for call, *_ in pins.calls] == ["pin", "unpin"]


def test_a_node_is_asked_for_and_its_absence_changes_nothing() -> None:
    for node in (0, 1000):
        region = HostRegion(4096, Pins(node=node))
        region.view[:1] = b"x"
        region.close()


def test_the_kernel_is_asked_for_a_node_before_the_first_page_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    monkeypatch.setattr(pinned, "prefer_node", lambda *_: order.append("prefer"))
    monkeypatch.setattr(pinned, "_populate", lambda _: order.append("populate"))
    HostRegion(4096, Pins(node=0)).close()
    assert order == ["prefer", "populate"]


def test_a_refused_node_is_named() -> None:
    region = HostRegion(4096, Pins())
    assert "EINVAL" in prefer_node(region.address + 1, 4096, 0), "not at a page's start"
    assert prefer_node(region.address, 4096, 5000).startswith("mbind is not supported on ")
    region.close()


@pytest.mark.parametrize(("text", "node"), [("1\n", 1), ("0\n", 0), ("-1\n", None), ("", None), ("one", None)])
def test_a_devices_node_is_what_the_kernel_says(tmp_path: Path, text: str, node: int | None) -> None:
    device = tmp_path / "0000:17:00.0"
    device.mkdir()
    (device / "numa_node").write_text(text)
    assert node_of_pci("0000:17:00.0", tmp_path) == node
    assert node_of_pci("0000:99:00.0", tmp_path) is None
