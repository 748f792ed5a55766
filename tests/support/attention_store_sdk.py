"""A double of Baidu's attentionstore_sdk: the calls that FastDeploy makes, over memory of this process.

The SDK is proprietary, so this is written from what FastDeploy's attention_store.py calls and how it
treats the answers. It is strict about arguments, since a double that takes anything proves nothing:

* sessions of one pool (namespace, model version) share what they store; nothing crosses pools;
* a block is found by all tokens up to its end; `match` and `read` answer with leading blocks, and a
  block counts only when each layer of the shard is there;
* bytes really move, between addresses that the caller gives;
* a block that the index says is in some pod's device memory counts for `match`, not for `read`.

    with installed(AttentionStoreDouble()) as double: ...   # import attentionstore_sdk finds it
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

PACKAGE = "attentionstore_sdk"
MEDIA_HBM = 1
HELD_S = 20.0  # a bound, never waited out


class AttentionStoreSDKError(Exception):
    """What the SDK raises."""


class Tokens:
    """A token path, in blocks of `block_token_size`."""

    def __init__(self, token_ids: list[int], block_token_size: int) -> None:
        if type(token_ids) is not list or not all(type(token) is int for token in token_ids):
            raise TypeError("token_ids must be a list of ints")
        self.token_ids = token_ids
        self.block_token_size = block_token_size

    @property
    def blocks(self) -> list[tuple[int, ...]]:
        """Each full block's identity: all tokens up to its end."""
        size = self.block_token_size
        return [tuple(self.token_ids[: end * size]) for end in range(1, len(self.token_ids) // size + 1)]


class AttentionStoreDouble:
    """The service behind all sessions, and the hand of a test.

    stored: (pool, shard, block) -> key and value bytes of each layer. in_hbm: (pool, block) -> pods.
    before: called in the session's thread before each call is served, with its name; may raise or wait.
    most: blocks that one read or write moves at most. not_ready: how many calls are answered
    "cuda memory not ready" first. cuda: which build this is. calls: (name, shard, timeout), in order.
    paths: how many tokens each read and write was given.
    """

    def __init__(self, *, cuda: bool = True, not_ready: int = 0) -> None:
        self.cuda = cuda
        self.not_ready = not_ready
        self.most: int | None = None
        self.before: Callable[[str], None] = lambda _: None
        self.stored: dict[tuple[tuple[str, str], int, tuple[int, ...]], list[tuple[bytes, bytes]]] = {}
        self.in_hbm: dict[tuple[tuple[str, str], tuple[int, ...]], set[str]] = {}
        self.calls: list[tuple[str, int, float | None]] = []
        self.paths: list[int] = []
        self.sessions: list[_Session] = []
        self._lock = threading.Lock()

    def serve(self, name: str, shard: int, timeout: float | None = None) -> None:
        """Every call passes here first."""
        with self._lock:
            self.calls.append((name, shard, timeout))
            if self.not_ready > 0:
                self.not_ready -= 1
                raise AttentionStoreSDKError("match failed: cuda memory not ready")
        self.before(name)

    def modules(self) -> dict[str, types.ModuleType]:
        """The package's modules, by full name."""
        double = self

        class AttentionStoreSDK(_Session):
            """The class as callers import it: of this double's service."""

            def __init__(self, *args: Any, **more: Any) -> None:
                super().__init__(double, *args, **more)

        contents: dict[str, dict[str, Any]] = {
            "": {},
            ".sdk": {"AttentionStoreSDK": AttentionStoreSDK, "Tokens": Tokens},
            ".api": {},
            ".api.common": {},
            ".api.common.common_pb2": {"MEDIA_HBM": MEDIA_HBM},
            ".utils": {},
            ".utils.err": {"AttentionStoreSDKError": AttentionStoreSDKError},
            ".client": {},
        }
        if self.cuda:
            contents[".client.client"] = {"AttentionType": types.SimpleNamespace(MHA="MHA")}
        modules = {}
        for name, content in contents.items():
            module = types.ModuleType(f"{PACKAGE}{name}")
            module.__path__ = []
            vars(module).update(content)
            modules[module.__name__] = module
        return modules


@contextlib.contextmanager
def installed(double: AttentionStoreDouble) -> Iterator[AttentionStoreDouble]:
    """For as long as this lasts, `import attentionstore_sdk` finds the double."""
    modules = double.modules()
    sys.modules.update(modules)
    try:
        yield double
    finally:
        for name in modules:
            del sys.modules[name]


class _Session:
    """AttentionStoreSDK: one shard's view."""

    def __init__(
        self,
        double: AttentionStoreDouble,
        namespace: str,
        pod_name: str,
        model_version: str,
        shard_id: int,
        shard_num: int,
        layer_num: int,
        block_token_size: int,
        bytes_per_shard_layer_per_block: int,
        *rest: int,
        **more: Any,
    ) -> None:
        if double.cuda:
            value_bytes, device_id, dp_id = rest
            assert more == {"attention_type": "MHA", "enable_as_kv_rw": True, "gpu_count": 0}, more
        else:
            device_id, dp_id = rest
            value_bytes = bytes_per_shard_layer_per_block
            assert not more, more
        assert 0 <= shard_id < shard_num
        self.names = (namespace, pod_name, model_version)
        self.pool, self.pod = (namespace, model_version), pod_name
        self.shard, self.layers, self.block_token_size = shard_id, layer_num, block_token_size
        self.key_bytes, self.value_bytes = bytes_per_shard_layer_per_block, value_bytes
        self.device_id, self.dp_id = device_id, dp_id
        self._double = double
        double.sessions.append(self)
        double.sessions.sort(key=lambda one: one.shard)  # ranks open theirs at the same time, in threads

    def match(self, tokens: Tokens, start_match_block_idx: int, timeout: float) -> int:
        self._double.serve("match", self.shard, timeout)
        blocks = self._blocks(tokens, start_match_block_idx)
        held = self._double.in_hbm
        return _leading(blocks, lambda block: bool(self._stored(block) or held.get((self.pool, block))))

    def read(
        self,
        layer_ids: list[int],
        tokens: Tokens,
        start_read_block_idx: int,
        k_data_ptrs: list[int],
        v_data_ptrs: list[int],
        gpu_block_ids: list[int],
        timeout: float,
        **more: Any,
    ) -> int:
        assert more == ({"remote_addrs": None} if self._double.cuda else {}), more
        self._double.serve("read", self.shard, timeout)
        blocks = self._moved(layer_ids, tokens, start_read_block_idx, k_data_ptrs, v_data_ptrs, gpu_block_ids)
        count = _leading(blocks, lambda block: self._stored(block) is not None)
        for block, at in zip(blocks[:count], gpu_block_ids, strict=False):
            for layer, (key, value) in enumerate(self._stored(block) or []):
                ctypes.memmove(k_data_ptrs[layer] + at * self.key_bytes, key, self.key_bytes)
                ctypes.memmove(v_data_ptrs[layer] + at * self.value_bytes, value, self.value_bytes)
        return count

    def write(
        self,
        layer_ids: list[int],
        tokens: Tokens,
        start_write_block_idx: int,
        k_data_ptrs: list[int],
        v_data_ptrs: list[int],
        gpu_block_ids: list[int],
        timeout: float,
        **more: Any,
    ) -> int:
        assert more == ({"h2h_copy": False, "params": None} if self._double.cuda else {}), more
        self._double.serve("write", self.shard, timeout)
        blocks = self._moved(layer_ids, tokens, start_write_block_idx, k_data_ptrs, v_data_ptrs, gpu_block_ids)
        for block, at in zip(blocks, gpu_block_ids, strict=False):
            self._double.stored[self.pool, self.shard, block] = [
                (
                    ctypes.string_at(k_data_ptrs[layer] + at * self.key_bytes, self.key_bytes),
                    ctypes.string_at(v_data_ptrs[layer] + at * self.value_bytes, self.value_bytes),
                )
                for layer in layer_ids
            ]
        return len(blocks)

    def flush_token_index(
        self, layer_ids: list[int], tokens: Tokens, start_block_idx: int, old_media: int | None, new_media: int | None
    ) -> None:
        assert layer_ids == list(range(self.layers))
        assert (old_media, new_media) in ((None, MEDIA_HBM), (MEDIA_HBM, None))
        self._double.serve("flush_token_index", self.shard)
        for block in self._blocks(tokens, start_block_idx):
            pods = self._double.in_hbm.setdefault((self.pool, block), set())
            if new_media == MEDIA_HBM:
                pods.add(self.pod)
            else:
                pods.discard(self.pod)

    def _stored(self, block: tuple[int, ...]) -> list[tuple[bytes, bytes]] | None:
        return self._double.stored.get((self.pool, self.shard, block))

    def _blocks(self, tokens: Tokens, start: int) -> list[tuple[int, ...]]:
        assert isinstance(tokens, Tokens)
        assert tokens.block_token_size == self.block_token_size
        assert start >= 0
        return tokens.blocks[start:]

    def _moved(
        self,
        layer_ids: list[int],
        tokens: Tokens,
        start: int,
        keys: list[int],
        values: list[int],
        gpu_block_ids: Sequence[int],
    ) -> list[tuple[int, ...]]:
        assert layer_ids == list(range(self.layers))
        assert len(keys) == len(values) == self.layers
        assert type(gpu_block_ids) is list
        self._double.paths.append(len(tokens.token_ids))
        blocks = self._blocks(tokens, start)[: len(gpu_block_ids)]
        return blocks if self._double.most is None else blocks[: self._double.most]


def _leading(blocks: Sequence[tuple[int, ...]], there: Callable[[tuple[int, ...]], bool]) -> int:
    return next((i for i, block in enumerate(blocks) if not there(block)), len(blocks))


class Held:
    """Holds one kind of call in its thread until `go`."""

    def __init__(self, double: AttentionStoreDouble, name: str) -> None:
        self.begun, self.go = threading.Event(), threading.Event()
        double.before = self._before
        self._name = name

    def _before(self, name: str) -> None:
        if name == self._name:
            self.begun.set()
            assert self.go.wait(HELD_S)
