"""FastDeploy's handle files: written as its operators read them, read as its operators write them."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest

from tests.support.paddle_ops import publish
from transferd.errors import EngineGone
from transferd.tiers.fastdeploy import read, segment_name

HANDLE = bytes(range(1, 65))
NAME = segment_name("key", 12, 3, 7)


@pytest.mark.parametrize(
    ("plane", "name"),
    [
        ("key", "key_caches_12_rank3.device7"),
        ("value", "value_caches_12_rank3.device7"),
        ("key_scale", "key_cache_scales_12_rank3.device7"),
        ("value_scale", "value_cache_scales_12_rank3.device7"),
        ("indexer", "indexer_caches_12_rank3.device7"),
    ],
)
def test_names_are_fastdeploys(plane: str, name: str) -> None:
    assert segment_name(plane, 12, 3, 7) == name


def test_links_that_somebody_laid_out_are_not_followed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_bytes(struct.pack("<Q64s", 0, HANDLE))
    (tmp_path / NAME).symlink_to(precious)
    with pytest.raises(EngineGone, match="symbolic link"):
        read(NAME, tmp_path)


@pytest.mark.parametrize("kind", ["fifo", "directory"])
def test_opening_a_path_that_is_no_file_does_not_wait(tmp_path: Path, kind: str) -> None:
    os.mkfifo(tmp_path / NAME) if kind == "fifo" else (tmp_path / NAME).mkdir()
    with pytest.raises(EngineGone):
        read(NAME, tmp_path)


def test_a_published_handle_is_read(tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(struct.pack("<Q64s", 1, HANDLE) + bytes(4024))  # as a whole page
    assert read(NAME, tmp_path) == HANDLE


def test_a_publication_replaces_that_of_a_dead_engine(tmp_path: Path) -> None:
    publish(NAME, bytes([9]) * 64, tmp_path)
    publish(NAME, HANDLE, tmp_path)
    assert read(NAME, tmp_path) == HANDLE


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "has not published"),
        (b"", "has only 0 bytes"),
        (bytes(71), "has only 71 bytes"),
        (bytes(72), "still empty"),
    ],
)
def test_a_missing_or_incomplete_object_is_one_line_with_its_name(
    tmp_path: Path, content: bytes | None, said: str
) -> None:
    if content is not None:
        (tmp_path / NAME).write_bytes(content)
    with pytest.raises(EngineGone, match=said) as caught:
        read(NAME, tmp_path)
    assert NAME in str(caught.value)
    assert "\n" not in str(caught.value)
