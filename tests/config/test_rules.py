"""Rules between settings: each combination that cannot work names the key to change, and its neighbours pass."""

from __future__ import annotations

from typing import Any

import pytest

from transferd.config import CacheSection, from_tree
from transferd.config.rules import LEAST_CLIENT_TIMEOUT_S, MOST_MESSAGE, check_cache, namespace_of, pod_name_of
from transferd.errors import ConfigError
from transferd.runtime.address import LONGEST_SOCKET_PATH

GPU = "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"


@pytest.mark.parametrize(
    ("cache", "key"),
    [
        ({"ranks": 2, "devices": [0]}, "cache.devices"),
        ({"ranks": 1, "devices": [GPU], "device": "paddle"}, "cache.devices"),
        ({"ranks": 1, "devices": ["GPU-1"], "device": "cuda"}, "cache.devices"),
        ({"mtp_blocks": 64}, "cache.mtp_blocks"),
        ({"mtp_layers": 1, "mtp_blocks": 63, "device_blocks": 64}, "cache.mtp_blocks"),
        ({"ranks": 2, "group_ranks": 3, "first_rank": 2}, "cache.group_ranks"),
        ({"ranks": 2, "first_rank": 1}, "cache.group_ranks"),
    ],
)
def test_a_cache_that_cannot_be_is_refused_by_its_key(cache: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_cache(CacheSection(**cache))
    assert refused.value.args[0].startswith(f"{key}: ")


@pytest.mark.parametrize(
    "cache",
    [
        {"ranks": 2, "devices": [1, 0]},
        {"ranks": 1, "devices": [GPU], "device": "cuda"},
        {"ranks": 1, "devices": [GPU.removeprefix("GPU-").replace("-", "")], "device": "package.tiers:Mine"},
        {"mtp_layers": 1, "mtp_blocks": 64, "device_blocks": 64},
        {"ranks": 2, "group_ranks": 4, "first_rank": 2},
    ],
)
def test_the_nearest_cache_that_can_be_is_taken(cache: dict[str, Any]) -> None:
    section = CacheSection(**cache)
    check_cache(section)
    assert len(section.device_of_rank) == section.ranks


LONGEST = "ipc:///" + "p" * (LONGEST_SOCKET_PATH - 1)


@pytest.mark.parametrize(
    ("server", "key"),
    [
        ({"endpoint": []}, "server.endpoint"),
        ({"endpoint": "ipc://"}, "server.endpoint"),
        ({"endpoint": LONGEST + "p"}, "server.endpoint"),
        ({"endpoint": "tcp://127.0.0.1"}, "server.endpoint"),
        ({"endpoint": "tcp://127.0.0.1:65536"}, "server.endpoint"),
        ({"endpoint": "tcp://node:5555"}, "server.endpoint"),
        ({"endpoint": ["ipc:///a", "tcp://[::]:1"]}, "server.endpoint"),
        ({"observer_endpoint": "tcp://0.0.0.0:1"}, "server.observer_endpoint"),
        ({"endpoint": "tcp://127.0.0.1:1", "allowed_uids": [0]}, "server.endpoint"),
        ({"observer_endpoint": "tcp://127.0.0.1:1", "observer_uids": [0]}, "server.observer_endpoint"),
        ({"client_timeout": LEAST_CLIENT_TIMEOUT_S - 0.1}, "server.client_timeout"),
        ({"max_message": MOST_MESSAGE + 1}, "tuning.server.max_message"),
        ({"socket_mode": "0888"}, "server.socket_mode"),
        ({"observer_mode": "66"}, "server.observer_mode"),
    ],
)
def test_a_server_that_would_be_open_or_unreachable_is_refused_by_its_key(server: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as refused:
        from_tree({"server": server})
    assert refused.value.args[0].startswith(f"{key}: ")


@pytest.mark.parametrize(
    "server",
    [
        {"endpoint": LONGEST},
        {"endpoint": ["tcp://127.0.0.1:65535", "tcp://[::1]:*", "tcp://localhost:0"]},
        {"endpoint": "tcp://node:5555", "curve": {"secret_key_file": "/k"}},
        {"endpoint": "ipc:///a", "allowed_uids": [0], "observer_endpoint": "ipc:///b", "observer_uids": [1]},
        {"client_timeout": LEAST_CLIENT_TIMEOUT_S, "max_message": MOST_MESSAGE, "socket_mode": "600"},
    ],
)
def test_the_nearest_server_that_is_closed_and_reachable_is_taken(server: dict[str, Any]) -> None:
    first = server.get("endpoint", "ipc:///run/transferd/transferd.sock")
    assert from_tree({"server": server}).server.endpoints == ([first] if isinstance(first, str) else first)


@pytest.mark.parametrize(
    ("tree", "key"),
    [
        ({"engines": {"devices": []}}, "engines.devices"),
        ({"storage": {"backend": "none", "admit": "second use"}}, "storage.admit"),
        ({"storage": {"backend": "attention_store", "admit": "second use"}}, "storage.admit"),
        ({"storage": {"file": {"path": []}}}, "storage.file.path: expected a directory"),
        ({"storage": {"file": {"path": ["/a", ""]}}}, "storage.file.path: expected a directory"),
        ({"storage": {"file": {"path": ["/a", "/b", "/x/../a"]}}}, "storage.file.path: names a directory twice"),
        ({"storage": {"file": {"path": ["/a/b", "/a"]}}}, "storage.file.path: one directory is inside"),
        ({"storage": {"file": {"path": ["/", "/a"]}}}, "storage.file.path: one directory is inside"),
        ({"storage": {"file": {"path": ["/a", "/b"], "capacity": ["1GiB"] * 3}}}, "storage.file.capacity"),
        ({"storage": {"model": ""}}, "storage.model"),
        ({"storage": {"version_file": "/v", "generation": "g"}}, "storage.generation"),
        ({"metrics": {"listen": "host"}}, "metrics.listen"),
        ({"traces": {"endpoint": "ftp://x"}}, "traces.endpoint"),
        ({"traces": {"endpoint": "http:///x"}}, "traces.endpoint"),
        ({"pd": {"listen": ""}}, "pd.listen"),
        ({"events": {"endpoint": "tcp://*"}}, "events.endpoint"),
        ({"storage": {"attention_store": {"peers": {"n": {"endpoint": "x"}}}}}, "storage.attention_store.peers.n"),
        ({"events": {"endpoint": "ipc:///e", "replay_endpoint": "ipc://"}}, "events.replay_endpoint"),
    ],
)
def test_other_combinations_name_their_key(tree: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as refused:
        from_tree(tree)
    assert refused.value.args[0].startswith(key)


@pytest.mark.parametrize(
    ("storage", "problem"),
    [
        ({"levels": ["memory", "memory"]}, r"storage\.levels: names a level twice \('memory'\)"),
        ({"levels": ["memory", "none"]}, r"storage\.levels: expected backends that store blocks by keys"),
        ({"levels": ["memory", "file"], "backend": "memory"}, r"storage\.backend: conflicts with storage\.levels"),
        ({"levels": ["memory", "file"], "level": {"pool": {}}}, r"storage\.level\.pool: is no level"),
        ({"levels": ["memory", "file"], "level": {"memory": {"write": "back"}}}, r"level\.memory\.write: the first"),
        ({"levels": ["memory", "file"], "level": {"memory": {"promote": 1}}}, r"level\.memory\.promote: there is no"),
        ({"levels": ["memory", "object"], "object": {"url": "/x"}}, r"storage\.object\.url: expected"),
    ],
)
def test_levels_that_make_no_sense_are_refused(storage: dict[str, object], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        from_tree({"cache": {}, "storage": storage})


@pytest.mark.parametrize(
    "storage",
    [
        {"levels": ["memory", "file"], "level": {"file": {"write": "back", "promote": 1}}},
        {"levels": ["package.storage:Mine", "object"], "object": {"url": "s3://bucket"}},
        {"levels": ["object"], "object": {"url": "az://container/p/q", "endpoint": "http://127.0.0.1:1/"}},
        {"file": {"path": ["/ab", "/a"], "capacity": ["1GiB", "2GiB"]}},
        {"file": {"path": ["/a", "/b"], "capacity": "1GiB"}},
        {"backend": "package.storage:Mine", "scrub_rate": "1MiB"},
    ],
)
def test_the_nearest_storage_that_makes_sense_is_taken(storage: dict[str, Any]) -> None:
    taken = from_tree({"cache": {}, "storage": storage}).storage
    assert taken.levels == storage.get("levels", [])


@pytest.mark.parametrize(
    ("cache", "key"),
    [
        ({"attention": "mla"}, "cache.windows: requires cache.attention"),
        ({"layers": 2}, "cache.windows: requires one layer"),
        ({"ownership": "create"}, "cache.windows: requires cache.ownership"),
    ],
)
def test_windows_need_pages_of_one_layer_that_an_engine_offers(cache: dict[str, Any], key: str) -> None:
    good: dict[str, Any] = {"windows": True, "attention": "pages", "layers": 1, "ownership": "attach"}
    check_cache(CacheSection(**good))
    with pytest.raises(ConfigError) as refused:
        check_cache(CacheSection(**(good | cache)))
    assert refused.value.args[0].startswith(key)


@pytest.mark.parametrize(
    ("model", "namespace"), [("demo", "demo"), ("/models/llama/", "llama"), ("org/llama", "llama"), ("/", "/")]
)
def test_a_namespace_is_the_last_part_of_the_models_name(model: str, namespace: str) -> None:
    assert namespace_of(model) == namespace


def test_a_pod_that_several_engines_share_has_a_name_for_each_of_them() -> None:
    names = [pod_name_of(None, role, dp_id) for role in ("prefill", "decode") for dp_id in (0, 1)]
    assert len(set(names)) == 4
    assert names[0] == "default_pod_prefill_0"
    assert pod_name_of("mine", "prefill", 1, shared=False) == "mine"


@pytest.mark.parametrize("key", ["url", "endpoint"])
def test_credentials_in_a_url_are_refused_and_not_repeated(key: str) -> None:
    section = {"url": "s3://bucket/x"} | {key: "s3://me:secret@bucket/x?sig=secret"}
    with pytest.raises(ConfigError, match=rf"storage\.object\.{key}: .*without credentials") as refused:
        from_tree({"storage": {"backend": "object", "object": section}})
    assert "secret" not in str(refused.value)
