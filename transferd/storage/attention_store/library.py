"""The installed attentionstore_sdk package, and its calls as FastDeploy makes them.

The SDK is proprietary and its builds differ: the CUDA build has an AttentionType and takes more arguments.
The only public source about it is FastDeploy's attention_store.py.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transferd.errors import ConfigError, StorageError

PACKAGE = "attentionstore_sdk"


@dataclass(frozen=True)
class Library:
    """The parts of the package that we use. attention_type: None in builds for devices other than CUDA."""

    sdk: type
    tokens: type
    error: type[Exception]
    in_device_memory: Any
    attention_type: Any


def load_library() -> Library:
    """Import the package. Raises ConfigError if it is missing or of an unknown version."""
    try:
        sdk = importlib.import_module(f"{PACKAGE}.sdk")
        media = importlib.import_module(f"{PACKAGE}.api.common.common_pb2")
        error = importlib.import_module(f"{PACKAGE}.utils.err")
        library = Library(
            sdk.AttentionStoreSDK, sdk.Tokens, error.AttentionStoreSDKError, media.MEDIA_HBM, _attention_type()
        )
    except ImportError as problem:
        what = f"needs the Python package {PACKAGE}, which is not installed or fails to load: {problem}"
        raise ConfigError("storage.attention_store.driver", what, "sdk") from problem
    except AttributeError as problem:
        what = f"the installed {PACKAGE} has an unsupported version: {problem}"
        raise ConfigError("storage.attention_store.driver", what, "sdk") from problem
    return library


def _attention_type() -> Any:
    try:
        return importlib.import_module(f"{PACKAGE}.client.client").AttentionType
    except (ImportError, AttributeError):
        return None


@dataclass(frozen=True, kw_only=True)
class Shard:
    """The SDK's description of one rank."""

    namespace: str
    pod_name: str
    model_version: str
    rank: int
    ranks: int
    layers: int
    block_size: int
    key_bytes: int
    value_bytes: int
    device: int | str
    dp_id: int


class SdkSession:
    """One rank's SDK object. Every method blocks; the rank's executors call them. Raises StorageError."""

    def __init__(self, library: Library, shard: Shard) -> None:
        self._library = library
        self._layer_ids = list(range(shard.layers))
        self._block_size = shard.block_size
        names = (shard.namespace, shard.pod_name, shard.model_version)
        shape = (shard.rank, shard.ranks, shard.layers, shard.block_size, shard.key_bytes)
        with _translated(library, "initialisation"):
            if library.attention_type is not None:
                self._sdk = library.sdk(
                    *names,
                    *shape,
                    shard.value_bytes,
                    shard.device,
                    shard.dp_id,
                    attention_type=library.attention_type.MHA,
                    enable_as_kv_rw=True,
                    gpu_count=0,
                )
            else:
                self._sdk = library.sdk(*names, *shape, shard.device, shard.dp_id)

    def match(self, tokens: Sequence[int], start: int, timeout: float) -> int:
        with _translated(self._library, "match"):
            return int(self._sdk.match(self._tokens(tokens), start, timeout))

    def read(
        self, tokens: Sequence[int], start: int, keys: list[int], values: list[int], blocks: list[int], timeout: float
    ) -> int:
        """Read blocks and return how many arrived. keys, values: the address of each layer's tensor."""
        more: dict[str, Any] = {} if self._library.attention_type is None else {"remote_addrs": None}
        with _translated(self._library, "read"):
            args = (self._layer_ids, self._tokens(tokens), start, keys, values, blocks, timeout)
            return int(self._sdk.read(*args, **more))

    def write(
        self, tokens: Sequence[int], start: int, keys: list[int], values: list[int], blocks: list[int], timeout: float
    ) -> int:
        """Write blocks and return how many the store took."""
        more: dict[str, Any] = {} if self._library.attention_type is None else {"h2h_copy": False, "params": None}
        with _translated(self._library, "write"):
            args = (self._layer_ids, self._tokens(tokens), start, keys, values, blocks, timeout)
            return int(self._sdk.write(*args, **more))

    def flush_token_index(self, tokens: Sequence[int], start: int, *, resident: bool) -> None:
        here = self._library.in_device_memory
        old, new = (None, here) if resident else (here, None)
        with _translated(self._library, "flush_token_index"):
            self._sdk.flush_token_index(self._layer_ids, self._tokens(tokens), start, old, new)

    def _tokens(self, tokens: Sequence[int]) -> Any:
        return self._library.tokens(list(tokens), self._block_size)


class _translated:  # noqa: N801 - used as a clause of `with`
    """Turns the library's exceptions into StorageError."""

    def __init__(self, library: Library, call: str) -> None:
        self._library = library
        self._call = call

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception):
            what = "" if isinstance(error, self._library.error) else f"{type(error).__name__}: "
            raise StorageError(f"AttentionStore, {self._call}: {what}{error}") from error
