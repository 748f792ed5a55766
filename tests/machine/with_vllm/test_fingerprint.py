"""Engines of other models, weights and adapters under vLLM's own scheduler and configuration, over one real store."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from vllm.lora.request import LoRARequest

from tests.machine.with_vllm import play
from tests.machine.with_vllm.dry import DryEngine, prompts
from tests.machine.with_vllm.pool import Pool, keys
from tests.machine.with_vllm.test_scheduler import both, rest, whole
from tests.support import weights
from tests.support.tiny_llama import TINY
from transferd.adapters.common import fingerprint

pytestmark = pytest.mark.timeout(900)

ASKED = prompts(9, 200, 170)


@pytest.fixture(autouse=True)
def started(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Call it to be an engine's process that starts now: what was written before is what it has in memory."""

    def now() -> None:
        start = time.time() + 1  # a file's times count in ticks of the kernel
        monkeypatch.setattr(fingerprint, "process_started", lambda: start)

    now()
    return now


def computed(place: Path, kind: str, lora: Any = None, **more: Any) -> list[int]:
    """How many tokens an engine that starts and ends computes of each prompt."""
    with DryEngine(place, kind, blocks=128, **more) as engine:
        return engine.run(ASKED, lora=lora)


def keeps_apart(first: Sequence[int], second: Sequence[int], again: Sequence[int]) -> None:
    """The second engine found nothing of the first one; a third one like the second found everything."""
    assert first == whole(ASKED)
    assert second == whole(ASKED), "blocks of an engine with another model"
    assert again == rest(ASKED)


OTHERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "theta": ({}, {"hf_overrides": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}}),
    "scaling": ({}, {"hf_overrides": {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}}),
    "KV dtype skip": ({}, {"kv_cache_dtype_skip_layers": ["0"]}),
    "seed of made-up weights": ({"seed": 0}, {"seed": 1}),
    "attention": ({}, {"attention_config": {"flash_attn_version": 2}}),
    "any other key of the configuration": ({}, {"hf_overrides": {"rms_norm_eps": 1e-6}}),
}


@both
@pytest.mark.parametrize("name", OTHERS)
def test_engines_with_other_settings_keep_apart(place: Path, kind: str, name: str) -> None:
    one, two = OTHERS[name]
    keeps_apart(
        computed(place, kind, options=one), computed(place, kind, options=two), computed(place, kind, options=two)
    )


def real(place: Path, name: str, seed: int) -> Path:
    return weights.model(place / name / "model", seed, config=TINY)


@both
def test_weights_written_anew_in_place_find_nothing(place: Path, kind: str, started: Callable[[], None]) -> None:
    options = {"load_format": "auto"}
    model = real(place, "a", 1)
    first = computed(place, kind, model=model, options=options)
    assert computed(place, kind, model=model, options=options) == rest(ASKED), "the same weights after a restart"
    real(place, "a", 2)
    started()
    keeps_apart(first, *(computed(place, kind, model=model, options=options) for _ in range(2)))


@both
def test_two_directories_of_one_name_keep_apart(
    place: Path, kind: str, monkeypatch: pytest.MonkeyPatch, started: Callable[[], None]
) -> None:
    options = {"load_format": "auto"}
    counts = []
    for name, seed in (("a", 1), ("b", 2), ("b", 2)):
        directory = place / name
        if not directory.exists():
            real(place, name, seed)
            for file in (directory / "model").iterdir():
                os.utime(file, (0, 0))  # as in an image that is built reproducibly
            started()
        monkeypatch.chdir(directory)
        counts.append(computed(place, kind, model=Path("model"), options=options))
    keeps_apart(*counts)


@both
def test_weights_that_change_under_a_running_engine_are_its_own(
    place: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody knows which of the two it has in memory."""
    options, model = {"load_format": "auto"}, real(place, "a", 1)
    monkeypatch.setattr(fingerprint, "process_started", lambda: 0.0)
    for file in model.iterdir():
        os.utime(file, (0, 0))  # the time of a change stays
    assert computed(place, kind, model=model, options=options) == whole(ASKED)
    assert computed(place, kind, model=model, options=options) == whole(ASKED)


@both
def test_weights_that_the_operator_names_may_be_copied(place: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"load_format": "auto"}
    counts = []
    for name in ("a", "b"):  # the same numbers at other times and places
        real(place, name, 1)
        monkeypatch.chdir(place / name)
        counts.append(computed(place, kind, model=Path("model"), options=options, weights="step 7"))
    assert counts == [whole(ASKED), rest(ASKED)]
    assert computed(place, kind, model=Path("model"), options=options, weights="step 8") == whole(ASKED)


LORA = {"enable_lora": True, "max_lora_rank": 8}


def test_an_adapter_that_was_trained_anew_finds_nothing(place: Path, started: Callable[[], None]) -> None:
    path = weights.adapter(place / "adapter", 1)
    started()

    def ask() -> list[int]:
        return computed(place, "connector", LoRARequest("tuned", 1, str(path)), options=LORA)

    first = ask()
    assert ask() == rest(ASKED)
    weights.adapter(path, 2)
    started()
    keeps_apart(first, ask(), ask())
    assert computed(place, "connector", options=LORA) == whole(ASKED), "the base model finds nothing of an adapter"


def test_an_adapter_that_changes_under_an_engine_is_neither_stored_nor_loaded(place: Path) -> None:
    path = weights.adapter(place / "adapter", 1)
    with DryEngine(place, "connector", blocks=128, options=LORA) as engine:
        assert engine.run(ASKED[:1], lora=LoRARequest("tuned", 1, str(path))) == whole(ASKED[:1])
        weights.adapter(path, 2)
        engine.forget()
        assert engine.run(ASKED[:1], lora=LoRARequest("tuned", 1, str(path))) == whole(ASKED[:1])
        engine.forget()
        assert engine.run(ASKED[:1], lora=LoRARequest("tuned", 1, str(path))) == whole(ASKED[:1])


def test_a_tier_with_adapters_shares_nothing_unless_they_are_named(
    place: Path, caplog: pytest.LogCaptureFixture, started: Callable[[], None]
) -> None:
    path = weights.adapter(place / "adapter", 1)
    tuned = LoRARequest("tuned", 1, str(path))
    with caplog.at_level("WARNING", "vllm.transferd"):
        assert computed(place, "tier", tuned, options=LORA) == whole(ASKED)
    assert any('"loras"' in message for message in caplog.messages)
    weights.adapter(path, 2)
    assert computed(place, "tier", tuned, options=LORA) == whole(ASKED)
    counts = [computed(place, "tier", tuned, options=LORA, loras=name) for name in ("a", "b", "b")]
    keeps_apart(*counts)


def test_a_tiers_rows_of_one_and_two_ranks_keep_apart_whatever_vllm_says(place: Path) -> None:
    """vLLM calls such a layout independent of parallelism; but a row has all layers of one rank before the next one."""
    wanted = keys("a", 3)
    with Pool(tp=1, agnostic=True) as pool:
        pool.store(wanted)
    with Pool(tp=2, agnostic=True) as pool:
        assert pool.load(wanted) == [False] * 3
        pool.store(wanted)
    for ranks in (1, 2):
        with Pool(tp=ranks, agnostic=True) as pool:
            assert pool.load(wanted) == [True] * 3


def test_a_tier_that_cannot_see_the_configuration_shares_nothing(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    wanted = keys("a", 3)
    with caplog.at_level("WARNING", "vllm.transferd"):
        with Pool(weights="") as pool:
            pool.store(wanted)
        with Pool(weights="") as pool:
            assert pool.load(wanted) == [False] * 3
    assert all('"weights"' in message for message in caplog.messages if "out of reach" in message)
    assert sum("out of reach" in message for message in caplog.messages) == 2


def test_what_cannot_be_seen_is_one_line_with_its_setting(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = play.tiny_model(place / "empty")
    with caplog.at_level("WARNING", "vllm.transferd"):
        computed(place, "connector", model=model, options={"load_format": "auto"})
    (line,) = [message for message in caplog.messages if "not seen" in message]
    assert '"weights"' in line
    assert str(model) in line
