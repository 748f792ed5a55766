"""What two FastDeploy engines must have in common to read each other's blocks, as far as a plugin can see.

The plugin sees the command of a transfer process, the model's directory, and the engine's own command line.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transferd.adapters.common import fingerprint
from transferd.adapters.common.fingerprint import Facts, configuration, configured, short
from transferd.adapters.fastdeploy.arguments import TransferArguments
from transferd.runtime.clock import SYSTEM_CLOCK

log = logging.getLogger(__name__)

WEIGHTS_VARIABLE = "TRANSFERD_WEIGHTS"
ATTENTION_VARIABLE = "FD_ATTENTION_BACKEND"
# Arguments of FastDeploy's own command that change what a model computes and are in no transfer process's command.
ARGUMENTS = ("--quantization", "--load-choices", "--load-strategy", "--rope-scaling", "--model-impl", "--config")


def facts(first: TransferArguments) -> Facts:
    """The facts about a group's model. Logs one line about facts that cannot be seen, and the variable to set."""
    said = _facts(first.model_path, first.dtype, first.default_dtype, first.longest)
    if first.mtp_layers:
        said["draft"] = short(first.speculative)
    return said


def object_facts(config: Any) -> tuple[str, Facts]:
    """A worker's model and the facts about its objects, with the V1 cache manager. config: FastDeploy's CacheConfig.

    The worker's own command line says what the configuration of the cache does not. The tensor-parallel size is one of
    the facts, because an object's name has only the rank.
    """
    path = str(_argument("--model") or getattr(config.model_cfg, "model", "") or "model")
    said = _facts(
        path, str(config.cache_dtype), str(_argument("--dtype") or "auto"), int(_argument("--max_model_len") or 0)
    )
    said["tensor parallel"] = int(_argument("--tensor_parallel_size") or 1)
    said["block size"] = int(config.block_size)
    if draft := _argument("--speculative_config"):
        said["draft"] = short(draft)
    return Path(path).name or "model", said


def _facts(path: str, kv_dtype: str, dtype: str, longest: int) -> Facts:
    asserted = os.environ.get(WEIGHTS_VARIABLE, "")
    found = fingerprint.look(path, asserted=asserted)
    life, started = SYSTEM_CLOCK.fresh_id(), fingerprint.process_started()
    whole = configured(Path(path))
    if not asserted and (not found.digest or not _by_command()):
        unseen = "options that a program passes to FastDeploy's classes" if found.digest else f"the weights in {path!r}"
        what = "%s are not seen, so engines that differ in them share blocks: set %s, and change it with them"
        log.warning(what, unseen, WEIGHTS_VARIABLE)
    said: Facts = {
        "engine": f"fastdeploy {_version()}",
        "KV dtype": kv_dtype,
        "dtype": dtype,
        "attention": os.environ.get(ATTENTION_VARIABLE, "default"),
        "arguments": _arguments(sys.argv),
        "weights": fingerprint.weights_fact(found, asserted, life, started),
    }
    return said | configuration(whole, whole.get("text_config") or whole, longest)


def _by_command() -> bool:
    """Whether FastDeploy was started by its own command, whose options are seen, and not by another program."""
    return bool(_argument("--model")) or sys.argv[0].endswith(("api_server.py", "worker_process.py"))


def _argument(name: str) -> str:
    """The value of an option in this process's command line, or ""."""
    wanted = name.replace("_", "-")
    return next((value for option, value in _options(sys.argv) if option == wanted), "")


def _options(command: list[str]) -> Iterator[tuple[str, str]]:
    """Each word of a command as an option, with its value. FastDeploy takes _ for -."""
    for word, following in zip(command, [*command[1:], ""], strict=True):
        option, equals, value = word.partition("=")
        yield option.replace("_", "-"), value if equals else following


def _version() -> str:
    """FastDeploy's major and minor version: attention may arrange keys and values differently in each release."""
    version = str(getattr(sys.modules.get("fastdeploy"), "__version__", "unknown"))
    return ".".join(version.split(".")[:2])


def _arguments(command: list[str]) -> list[str]:
    """Those of ARGUMENTS that are in this command, with their values."""
    return sorted(
        f"{name} {value}"[:200] + (f", {_contents(value)}" if name == "--config" else "")
        for name, value in _options(command)
        if name in ARGUMENTS
    )


def _contents(path: str) -> str:
    """A digest of a file of arguments, which differs if the file was replaced."""
    try:
        return short(Path(path).read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return fingerprint.NOT_SEEN
