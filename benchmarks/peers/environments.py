"""Environments for peers: throw-away ones under build/peers, and those of our checks. None is ever made in .venv."""

from __future__ import annotations

import hashlib
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.machine.with_fastdeploy import check as fastdeploy_check
from tests.machine.with_lmcache.check import LMCACHE
from tests.machine.with_sglang.check import SGLANG
from tests.machine.with_vllm import check as vllm_check
from tests.machine.with_vllm.check import TORCH_INDEX, attempt

ROOT = Path(__file__).resolve().parents[2]
HERE = ROOT / "build" / "peers"


@dataclass(frozen=True, slots=True)
class Environment:
    """What to install, as the arguments of one `pip install` after the other. room: bytes of disk that it needs."""

    name: str
    steps: tuple[tuple[str, ...], ...]
    room: int

    def python(self) -> tuple[str, str]:
        """Its interpreter, made if it is not there; or "" and why it cannot be had."""
        place = HERE / self.name
        python = place / "bin" / "python"
        stamp = place / f".ready-{hashlib.sha256(repr(self.steps).encode()).hexdigest()[:12]}"
        if stamp.exists():
            return str(python), ""
        HERE.mkdir(parents=True, exist_ok=True)
        if (free := shutil.disk_usage(HERE).free) < self.room:
            return "", f"it needs {self.room >> 30} GiB of disk, and {free >> 30} GiB are free"
        print(f"{self.name}: installing", file=sys.stderr, flush=True)
        why_not = attempt([sys.executable, "-m", "venv", "--clear", str(place)])
        for step in self.steps:
            if not why_not and attempt(install := [str(python), *PIP, *step]):  # pip's settings may not lead to torch
                why_not = attempt([*install, "--retries", "0", "--extra-index-url", TORCH_INDEX])
        if why_not:
            return "", why_not
        stamp.touch()
        return str(python), ""


PIP = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check")
NIXL = Environment("nixl", (("numpy",), ("--no-deps", "nixl==1.5.1", "nixl-cu12==1.5.1")), 2**30)

Interpreter = Callable[[], tuple[str, str]]  # its path, or "" and why there is none


def own() -> tuple[str, str]:
    """The interpreter that runs this, for transferd and for what needs numpy alone."""
    return sys.executable, ""


def vllm() -> tuple[str, str]:
    """TRANSFERD_VLLM_PYTHON, or the environment of `make vllm-check`."""
    why_not = "" if vllm_check.found() else vllm_check.environment()
    return ("", why_not) if why_not else (vllm_check.found(), "")


def lmcache() -> tuple[str, str]:
    """TRANSFERD_LMCACHE_PYTHON, or the environment of `make lmcache-check`."""
    return LMCACHE.interpreter()


def sglang() -> tuple[str, str]:
    """TRANSFERD_SGLANG_PYTHON, or the environment of `make sglang-check`."""
    return SGLANG.interpreter()


def fastdeploy() -> tuple[str, str]:
    """The environment of `make fastdeploy-check`, if FastDeploy's source is here."""
    if not fastdeploy_check.archives():
        return "", f"FastDeploy's source is not here; {fastdeploy_check.SOURCE_VARIABLE} says where it is"
    why_not = "" if fastdeploy_check.stamp().exists() else fastdeploy_check.environment()
    return ("", why_not) if why_not else (str(fastdeploy_check.PYTHON), "")
