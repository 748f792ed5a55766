"""What is seen of weights: real files, written anew, copied, linked into Hugging Face's cache, damaged."""

from __future__ import annotations

import enum
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support import weights
from transferd.adapters.common import fingerprint
from transferd.adapters.common.fingerprint import NOT_SEEN, Adapters, look, plain, weights_fact

COMMIT, OTHER_COMMIT = "a" * 40, "b" * 40


def same_times(model: Path) -> None:
    """As in an image that is built reproducibly."""
    for file in model.rglob("*"):
        os.utime(file, (0, 0))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return weights.model(tmp_path / "model", 1)


def test_the_same_files_are_the_same_weights(model: Path) -> None:
    assert look(str(model)) == look(f"{model}/") == look(f"{model}/../model")
    assert (look(str(model)).files, look(str(model)).where) == (2, str(model))


def test_weights_written_anew_in_place_differ(model: Path) -> None:
    """The same names, sizes and headers."""
    before = look(str(model))
    sizes = {file.name: file.stat().st_size for file in model.iterdir()}
    weights.model(model, 2)
    assert {file.name: file.stat().st_size for file in model.iterdir()} == sizes
    assert look(str(model)).digest != before.digest


def test_a_copy_that_took_over_all_times_differs_by_its_numbers(tmp_path: Path, model: Path) -> None:
    same_times(model)
    before = look(str(model))
    weights.model(model, 2)
    same_times(model)
    assert look(str(model)).digest != before.digest


@pytest.mark.parametrize(
    "change",
    [
        lambda model: (model / "config.json").write_text('{"rope_theta": 1}'),
        lambda model: (model / "modeling_own.py").write_text("x = 1"),
        lambda model: (model / "hf_quant_config.json").write_text("{}"),
        lambda model: weights.safetensors(model / "model-00003-of-00002.safetensors", ["a"], 3),
        lambda model: weights.safetensors(model / "rank0" / "model.safetensors", ["a"], 3),
        lambda model: (model / "model-00001-of-00002.safetensors").unlink(),
        lambda model: os.utime(model / "model-00001-of-00002.safetensors", (5, 5)),
        lambda model: (model / "model-00001-of-00002.safetensors").rename(model / "a.safetensors"),
    ],
)
def test_each_change_of_a_file_that_counts_is_seen(model: Path, change: Any) -> None:
    (model / "rank0").mkdir()
    before = look(str(model))
    change(model)
    assert look(str(model)).digest != before.digest


def test_files_that_keys_cover_or_no_engine_reads_do_not_count(model: Path) -> None:
    before = look(str(model))
    for name in ("tokenizer.json", "tokenizer_config.json", "README.md", ".cache.json", "generation_config.json"):
        (model / name).write_text("{}")
    assert look(str(model)).digest == before.digest


def test_two_directories_differ_even_with_the_same_files(tmp_path: Path, model: Path) -> None:
    shutil.copytree(model, tmp_path / "b" / "model")  # with its times
    ours, theirs = look(str(model)), look(str(tmp_path / "b" / "model"))
    assert ours.digest == theirs.digest
    assert weights_fact(ours, "", "l", time.time() + 9) != weights_fact(theirs, "", "l", time.time() + 9)


def test_named_weights_may_be_copied_but_not_be_other_tensors(tmp_path: Path, model: Path) -> None:
    copy = weights.model(tmp_path / "b" / "model", 1)
    os.utime(copy / "model-00001-of-00002.safetensors", (7, 7))
    assert look(str(model), asserted="step 7") == look(str(copy), asserted="step 7")
    assert look(str(model), asserted="step 7") != look(str(copy), asserted="step 8")
    weights.safetensors(copy / "model-00001-of-00002.safetensors", ["another"], 1)
    assert look(str(model), asserted="step 7") != look(str(copy), asserted="step 7")


def test_a_repository_is_its_commit_on_every_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for node in ("a", "b"):
        weights.cached(tmp_path / node, "lab/model", COMMIT, 1)
    ours, theirs = (look("lab/model", cache=str(tmp_path / node)) for node in ("a", "b"))
    assert ours == theirs
    assert ours.where == f"lab/model at {COMMIT}"
    assert not ours.changed
    assert look("lab/model", revision=COMMIT, cache=str(tmp_path / "a")) == ours
    weights.cached(tmp_path / "a", "lab/model", OTHER_COMMIT, 2)
    assert look("lab/model", cache=str(tmp_path / "a")) != ours, "main has moved"
    assert look("lab/model", revision=COMMIT, cache=str(tmp_path / "a")) == ours
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "b"))
    assert look("lab/model") == ours


def test_a_snapshot_that_was_written_through_its_links_is_files_like_any(tmp_path: Path) -> None:
    snapshot = weights.cached(tmp_path, "lab/model", COMMIT, 1)
    before = look("lab/model", cache=str(tmp_path))
    file = snapshot / "model-00001-of-00002.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    later = time.time_ns() + 10**9
    os.utime(file, ns=(later, later))
    after = look("lab/model", cache=str(tmp_path))
    assert after != before
    assert after.where == str(snapshot)


@pytest.mark.parametrize("name", ["", "no/such", "lab/model/x", "/no/such", "\0", "s3://bucket/model", "a" * 5000])
def test_a_name_that_leads_nowhere_is_not_seen(name: str, tmp_path: Path) -> None:
    found = look(name, cache=str(tmp_path))
    assert str(found) == NOT_SEEN
    assert weights_fact(found, "", "life", 0.0) == NOT_SEEN
    assert weights_fact(found, "mine", "life", 0.0) == "mine (asserted)"


def test_odd_files_do_not_stop_the_engine(model: Path) -> None:
    (model / "broken.safetensors").symlink_to("nowhere")
    os.mkfifo(model / "pipe.safetensors")
    (model / "short.safetensors").write_bytes(b"abc")
    (model / "huge.safetensors").write_bytes(b"\xff" * 8 + b"x")
    (model / "empty.bin").touch()
    (model / "loop").symlink_to(model)
    (model / os.fsdecode(b"\xff.bin")).write_bytes(b"x")
    assert look(str(model)).files == 6
    assert look(str(model)) == look(str(model))


def test_one_file_is_a_model(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"GGUF" + bytes(100_000))
    before = look(str(tmp_path / "a.gguf"))
    assert before.files == 1
    (tmp_path / "b.gguf").write_bytes(b"x")
    assert look(str(tmp_path / "a.gguf")) == before


def test_files_that_changed_under_the_process_are_this_starts_alone(model: Path) -> None:
    found = look(str(model))
    early, late = found.changed - 1, found.changed + 1
    assert weights_fact(found, "", "l1", late) == weights_fact(found, "", "l2", late)
    assert weights_fact(found, "", "l1", early) != weights_fact(found, "", "l2", early)
    named = look(str(model), asserted="x")
    assert weights_fact(named, "x", "l1", early) == weights_fact(named, "x", "l2", early)


def test_a_process_knows_when_it_started() -> None:
    before = time.time()
    code = (
        "import time; from transferd.adapters.common.fingerprint import process_started as s; print(s(), time.time())"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    started, then = map(float, told.stdout.split())
    assert before - 0.1 <= started <= then


# --- adapters -------------------------------------------------------------------------------------


def test_an_adapter_trained_anew_has_another_salt(tmp_path: Path) -> None:
    path = str(weights.adapter(tmp_path / "lora", 1))
    told: list[str] = []

    def engine(life: str, asserted: str = "") -> Adapters:
        return Adapters(life, time.time() + 1, asserted, told.append)

    first = engine("1")
    salt = first.salt(path)
    assert salt
    assert engine("2").salt(path) == salt, "the same adapter after a restart"
    weights.adapter(tmp_path / "lora", 2)
    assert engine("3").salt(path) not in (salt, None)
    assert not told
    assert first.salt(path) is None
    assert first.salt(path) is None
    assert len(told) == 1, "once"
    assert engine("4", "mine").salt(path) == engine("5", "mine").salt(path)
    assert Adapters("6", 0.0, "", told.append).salt(path) != Adapters("7", 0.0, "", told.append).salt(path)


def test_an_adapter_without_files_is_one_engines_own(tmp_path: Path) -> None:
    told: list[str] = []
    salts = [Adapters(life, 0.0, "", told.append).salt(str(tmp_path / "none")) for life in "ab"]
    assert None not in salts
    assert salts[0] != salts[1]
    assert all('"loras"' in line for line in told)


# --- configurations -------------------------------------------------------------------------------


class Kind(enum.Enum):
    ONE = 1
    TWO = 2


class Section:
    def __init__(self, value: object) -> None:
        self.value, self._cache = value, object()


def test_a_configuration_is_equal_in_every_process_and_differs_with_every_value() -> None:
    values = [
        None,
        True,
        1,
        1.5,
        "a",
        [1],
        {"a": 1},
        {"a": 2},
        Kind.ONE,
        Kind.TWO,
        Section(1),
        Section(2),
        Section,
        Kind,
    ]
    texts = [fingerprint.short(value) for value in values]
    assert len(set(texts)) == len(values)
    assert fingerprint.short(Section(1)) == fingerprint.short(Section(1))
    assert fingerprint.short({1, 2, 3}) == fingerprint.short({3, 2, 1})
    assert " at 0x" not in str(plain(object()))
    assert plain(lambda: 1) == plain(lambda: 1)


def test_rope_that_depends_on_the_longest_sequence_names_it() -> None:
    def said(rope: Any, longest: int) -> dict[str, Any]:
        whole = {"rope_theta": 10000.0, "rope_scaling": rope, "transformers_version": str(longest)}
        return fingerprint.configuration(whole, whole, longest)

    for rope in (None, {"rope_type": "linear", "factor": 2.0}, {"type": "yarn"}, {"local": {"rope_type": "default"}}):
        assert said(rope, 1024) == said(rope, 2048)
    for rope in ({"rope_type": "longrope"}, {"type": "dynamic"}, {"local": {"rope_type": "su"}}):
        assert said(rope, 1024) != said(rope, 2048)
        assert said(rope, 1024) == said(rope, 1024)
