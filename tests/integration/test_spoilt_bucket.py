"""A daemon above a bucket whose answers are spoilt, or which refuses: what it believes, keeps and says."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("obstore", reason="needs pip install 'transferd[object]'")

from tests.integration.test_levels import BLOCKS, CACHE, KEYS, RANKS, filled, same, write
from tests.support.spoilt_s3 import Answer, Request, SpoiltS3, refusal, spoilt_s3
from tests.support.waits import wait_until
from transferd import ReadStorageTask, Status, SyncClient, TransferError
from transferd.client.launch import running

OBJECTS = RANKS * BLOCKS


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[SpoiltS3]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    with spoilt_s3() as server:
        yield server


def tree(bucket: SpoiltS3, *above: str, timeout: float = 20.0, **level: Any) -> dict[str, Any]:
    """timeout: of the bucket. A busy machine may stand still in any answer of ours."""
    kinds: dict[str, Any] = {"levels": [*above, "object"]} if above else {"backend": "object"}
    section = {"url": "s3://blocks/kv", "endpoint": bucket.endpoint, "region": "us-east-1", "timeout": timeout}
    return {
        "cache": CACHE | {"device_blocks": 2 * BLOCKS},
        "storage": kinds
        | {"model": "m", "object": section, "memory": {"capacity": "16MiB"}}
        | ({"level": {"object": level}} if level else {}),
    }


def read(client: SyncClient, task_id: str, **more: Any) -> Any:
    ids = list(range(BLOCKS, 2 * BLOCKS))
    return client.submit(ReadStorageTask(task_id=task_id, keys=KEYS, gpu_block_ids=ids, prefix=False, **more))


def flipped(body: bytes) -> bytes:
    return body[:100] + bytes([body[100] ^ 4]) + body[101:]


SPOILT: dict[str, Callable[[SpoiltS3, Answer], Answer]] = {
    "a flipped bit": lambda _, right: Answer(body=flipped(right.body)),
    "half a body": lambda _, right: Answer(body=right.body[: len(right.body) // 2]),
    "half a body of the right length": lambda _, right: Answer(
        body=right.body[: len(right.body) // 2], length=len(right.body)
    ),
    "a page of a proxy": lambda _, __: Answer(
        body=b"<html>please log in</html>", headers={"Content-Type": "text/html"}
    ),
    "gzip": lambda _, right: Answer(body=gzip.compress(right.body), headers={"Content-Encoding": "gzip"}),
    "a header that says gzip": lambda _, right: Answer(body=right.body, headers={"Content-Encoding": "gzip"}),
    "zeros": lambda _, right: Answer(body=bytes(len(right.body))),
    "another object's bytes": lambda server, right: Answer(
        body=next(one for one in server.objects.values() if one != right.body)
    ),
}


@pytest.mark.parametrize("spoilt", SPOILT)
def test_what_is_spoilt_on_its_way_is_read_again_and_removed_by_nobody(
    bucket: SpoiltS3, tmp_path: Path, spoilt: str
) -> None:
    """Each such answer sent a DELETE: 24 of 24 good objects of the whole fleet were gone after one read."""
    with running(tree(bucket), tmp_path) as daemon, SyncClient(daemon.endpoint) as client:
        kept = filled(client)
        assert write(client).status is Status.OK
        before = dict(bucket.objects)
        assert len(before) == OBJECTS
        seen: set[str] = set()

        def once(request: Request, right: Answer) -> Answer:
            if request.method != "GET" or request.key in seen or right.status != 200 or len(seen) >= 4:
                return right
            seen.add(request.key)
            return SPOILT[spoilt](bucket, right)

        bucket.spoil = once
        result = read(client, "r1")
        if spoilt == "half a body of the right length":  # an error of the call
            assert len(result.block_ids) >= BLOCKS - 4
        else:
            assert (result.status, len(result.block_ids)) == (Status.OK, BLOCKS)
            assert same(kept, client), "every byte"
        assert bucket.objects == before
        assert not bucket.asked["DELETE"]
        whole = spoilt in ("a header that says gzip", "half a body of the right length")
        faults = 0 if whole else len(seen)
        wait_until(lambda: client.stats()["storage"]["link_faults"] == faults, "the link is blamed")


@pytest.mark.parametrize("above", [(), ("memory",)], ids=["alone", "memory"])
@pytest.mark.parametrize("spoilt", ["a flipped bit", "half a body", "a page of a proxy", "zeros"])
def test_what_is_damaged_in_the_bucket_is_left_alone_and_then_overwritten(
    bucket: SpoiltS3, tmp_path: Path, above: tuple[str, ...], spoilt: str
) -> None:
    with running(tree(bucket), tmp_path / "a") as daemon, SyncClient(daemon.endpoint) as client:
        filled(client)
        assert write(client).status is Status.OK
    good = dict(bucket.objects)
    bad = sorted(good)[:6]
    for key in bad:
        bucket.objects[key] = SPOILT[spoilt](bucket, Answer(body=good[key])).body
    with running(tree(bucket, *above), tmp_path / "b") as daemon, SyncClient(daemon.endpoint) as client:
        kept = filled(client)
        result = read(client, "r1")
        assert result.status is Status.PARTIAL
        assert same_blocks(kept, client, result.block_ids)
        asked = bucket.asked["GET"]
        assert read(client, "r2").block_ids == result.block_ids
        assert asked <= bucket.asked["GET"] <= asked + OBJECTS - 6, "suspects are not asked for"
        assert not bucket.asked["DELETE"]
        assert client.stats()["storage"].get("link_faults", 0) == 0
        assert write(client, "w2").status is Status.OK
        wait_until(lambda: bucket.objects == good, "the bucket is whole again")
        assert any("x-amz-checksum-sha256" in one.headers for one in bucket.requests if one.method == "PUT")
        assert read(client, "r3").status is Status.OK
        assert same(kept, client)


def same_blocks(kept: Any, client: SyncClient, block_ids: list[int]) -> bool:
    caches = [client.attach(rank) for rank in range(RANKS)]
    return all(
        (mine[block - BLOCKS] == theirs[block]).all()
        for cache, copy in zip(kept, caches, strict=True)
        for plane in cache
        for mine, theirs in zip(cache[plane], copy[plane], strict=True)
        for block in block_ids
    )


def test_a_link_that_spoils_much_is_a_concern_and_nothing_is_loaded_over_it(bucket: SpoiltS3, tmp_path: Path) -> None:
    with running(tree(bucket, "memory"), tmp_path / "a") as daemon, SyncClient(daemon.endpoint) as client:
        filled(client)
        assert write(client).status is Status.OK
        wait_until(lambda: len(bucket.objects) == OBJECTS, "all is in the bucket")
    before, seen = dict(bucket.objects), set[str]()

    def once(request: Request, right: Answer) -> Answer:
        if request.method != "GET" or request.key in seen or right.status != 200:
            return right
        seen.add(request.key)
        return Answer(body=flipped(right.body))

    with running(tree(bucket, "memory"), tmp_path / "b") as daemon, SyncClient(daemon.endpoint) as client:
        kept = filled(client)
        bucket.spoil = once
        first = read(client, "r1")
        assert same_blocks(kept, client, first.block_ids)
        wait_until(lambda: concerns(client).get("link_spoils"), "it is said")
        assert "network card or proxy spoils" in concerns(client)["link_spoils"]
        asked = bucket.asked["GET"]
        result = read(client, "r2")
        assert bucket.asked["GET"] == asked, "the bucket is left alone"
        assert result.status in (Status.FAILED, Status.PARTIAL, Status.OK)
        assert bucket.objects == before


def concerns(client: SyncClient) -> dict[str, str]:
    return {one["name"]: one["text"] for one in client.stats()["concerns"]}


REFUSALS = {
    "400 ExpiredToken": refusal(400, "ExpiredToken"),
    "403 ExpiredToken": refusal(403, "ExpiredToken"),
    "403 AccessDenied": refusal(403, "AccessDenied"),
    "503 SlowDown": refusal(503, "SlowDown"),
    "429": refusal(429, "TooManyRequests"),
    "500": refusal(500, "InternalError"),
    "502 of a gateway": Answer(502, b"<html>bad gateway</html>"),
    "507": Answer(507),
    "no such bucket": refusal(404, "NoSuchBucket"),
}


@pytest.mark.parametrize("why", REFUSALS)
def test_a_bucket_that_refuses_for_a_while_loses_no_copy(bucket: SpoiltS3, tmp_path: Path, why: str) -> None:
    """Three refusals in a row were final: 64 of 64 copies lost in the 8 s in which credentials had expired."""
    config = tree(bucket, "memory", timeout=2.0)  # for so long a call that fails is repeated
    with running(config, tmp_path) as daemon, SyncClient(daemon.endpoint) as client:
        kept = filled(client)
        bucket.spoil = lambda request, right: right if request.key.endswith("transferd-probe") else REFUSALS[why]
        assert write(client).status is Status.OK
        wait_until(lambda: "level_refuses" in concerns(client) or "level_silent" in concerns(client), "it is said")
        tried = bucket.asked["PUT"]
        row = client.stats()["storage"]["levels"][1]
        assert row["pending_bytes"] > 0
        bucket.spoil = lambda _, right: right
        wait_until(lambda: len(bucket.objects) == OBJECTS, "all copies are made", within=60)
        assert client.stats()["storage"]["levels"][1]["lost"] == 0
        assert tried <= 4 * 3 * OBJECTS
        wait_until(lambda: not {"level_refuses", "level_silent"} & concerns(client).keys(), "it is over", within=30)
        client.drain_level("memory")
        tries = iter(range(10_000))
        wait_until(lambda: read(client, f"r{next(tries)}").status is Status.OK, "a busy machine may be late for a read")
        assert same(kept, client)


@pytest.mark.parametrize("status", [400, 403])
def test_credentials_that_have_expired_are_named_with_what_to_do(bucket: SpoiltS3, tmp_path: Path, status: int) -> None:
    with running(tree(bucket), tmp_path) as daemon, SyncClient(daemon.endpoint) as client:
        filled(client)
        bucket.spoil = lambda *_: refusal(status, "ExpiredToken", "The provided token has expired.")
        result = write(client)
        assert result.status is Status.FAILED
        assert result.error.code == "storage_denied"
        with pytest.raises(TransferError) as raised:
            client.match(KEYS)
        assert raised.value.reason == "storage_denied"
        assert "credentials" in str(raised.value)
        result = read(client, "r1")
        assert result.error.code == "storage_denied"
        assert "renew the daemon's credentials: they have expired" in result.error.message


def test_keys_come_from_the_files_of_awss_tools_and_new_ones_are_read(
    bucket: SpoiltS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_PROFILE", "work")
    file = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))

    def keys(name: str) -> None:
        file.write_text(f"[work]\naws_access_key_id = {name}\naws_secret_access_key = s\naws_session_token = {name}t\n")

    def only_new(request: Request, right: Answer) -> Answer:
        new = "Credential=NEW/" in request.headers["authorization"]
        return right if new else refusal(403, "ExpiredToken")

    keys("OLD")
    with running(tree(bucket), tmp_path) as daemon, SyncClient(daemon.endpoint) as client:
        filled(client)
        assert write(client, "w1").status is Status.OK
        assert all("Credential=OLD/" in one.headers["authorization"] for one in bucket.requests)
        assert bucket.requests[-1].headers["x-amz-security-token"] == "OLDt"
        bucket.spoil = only_new
        assert read(client, "r1").error.code == "storage_denied"
        keys("NEW")
        tries = iter(range(10_000))
        wait_until(lambda: read(client, f"again{next(tries)}").status is Status.OK, "it is read again", within=60)


def test_a_start_without_credentials_says_what_is_missing(
    bucket: SpoiltS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:9")
    with running(tree(bucket, "memory"), tmp_path) as daemon, SyncClient(daemon.endpoint) as client:
        filled(client)
        assert "no credentials in the environment or in ~/.aws" in daemon.log
        assert "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE" in daemon.log
        assert write(client).status is Status.OK, "memory takes them"
