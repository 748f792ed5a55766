"""Loads by layer: each layer waits for its part of the blocks, while the layers before it are computed."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import xxhash

from tests.machine.with_vllm import dry, play
from tests.machine.with_vllm.dry import TOKENS, DryEngine, DryRank, Share, flip, hashes, object_with, objects, prompts
from tests.machine.with_vllm.engine import Engine, witnessed
from transferd.blocks.formats import FOOTER_BYTES

NAMES = tuple(f"model.layers.{i}.self_attn.attn" for i in range(7))
WRONG = 0x5A  # what a step computes from bytes that are not there
# A byte in each part of an object, beside its borders, and in the footer: of the key and of the seals.
PLACES = [dry.PAGE * layers + more for layers in (0, 2, 4) for more in (0, 700, 2 * dry.PAGE - 1)]
PLACES += [7 * dry.PAGE - 1, 7 * dry.PAGE + 40, 7 * dry.PAGE + 52, 7 * dry.PAGE + 105, 7 * dry.PAGE + 113]


class LayerRank(DryRank):
    """A worker that looks at each layer when vLLM would read it.

    steps: those that have loaded blocks themselves. begun, ended: called when such a step begins its loads, and when
    it has been computed. waits: whether the layers wait.
    """

    steps = 0
    waits = True

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.begun: Callable[[], None] = lambda: None
        self.ended: Callable[[], None] = lambda: None
        self.wrong: list[Share] = []

    def step(self, output: Any, compute: Callable[[DryRank], None]) -> Any:
        self.wrong.clear()
        told = super().step(output, compute)
        for share in self.wrong:
            assert told.invalid_block_ids & set(share.block_ids[0]), "nobody says that these bytes were wrong"
        if output.has_sync_kv_loads:
            self.steps += 1
            self.ended()
        return told


class LayerEngine(DryEngine):
    def _compute(self, rank: DryRank, shares: list[Share]) -> None:
        assert isinstance(rank, LayerRank)
        if rank.connector._get_connector_metadata().news.loads:
            rank.begun()
        for number, layer in enumerate(NAMES):
            if rank.waits:
                rank.connector.wait_for_layer_load(layer)
            for share in shares:
                if not share.request.is_finished():
                    self._compute_layer(rank, share, number)

    def _compute_layer(self, rank: LayerRank, share: Share, number: int) -> None:
        names, ids, page = share.request.block_hashes, share.block_ids[0], rank.bytes[number]
        for i, name in enumerate(names[: share.begin // TOKENS]):
            if (page[ids[i]] != rank.content(name)[number]).any() and share not in rank.wrong:
                rank.wrong.append(share)
        end = share.end // TOKENS
        for i in range(share.begin // TOKENS, end):
            page[ids[i]] = WRONG if share in rank.wrong else rank.content(names[i])[number]
        if share.end % TOKENS:
            page[ids[end]] = dry.STALE


@pytest.fixture
def engine(place: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LayerEngine]:
    monkeypatch.setattr(dry, "LAYERS", NAMES)
    dry._content.cache_clear()
    with LayerEngine(place, "connector", blocks=250, rank_class=LayerRank, by_layer=True) as made:
        yield made
    dry._content.cache_clear()


def alone(engine: DryEngine, asked: list[list[int]]) -> list[int]:
    """Play these one after another; how many tokens of each were computed."""
    return [engine.run([prompt])[0] for prompt in asked]


def whole(asked: list[list[int]]) -> list[int]:
    return [len(prompt) + 1 for prompt in asked]


def rest(asked: list[list[int]]) -> list[int]:
    return [(len(prompt) - 1) % TOKENS + 2 for prompt in asked]


def rank_of(engine: DryEngine) -> LayerRank:
    (rank,) = engine.ranks
    assert isinstance(rank, LayerRank)
    return rank


def test_a_request_alone_is_computed_while_it_loads_and_several_are_not(engine: LayerEngine) -> None:
    asked = prompts(1, 300, 200, 33)
    assert alone(engine, asked) == whole(asked)
    engine.forget()
    assert alone(engine, asked) == rest(asked)
    assert rank_of(engine).steps == 3
    engine.forget()
    assert engine.run(asked) == rest(asked)
    assert rank_of(engine).steps <= 4, "the first, which came alone, at most"


def test_layers_that_wait_see_their_part_before_the_rest_is_there(engine: LayerEngine) -> None:
    """The link reports all parts of a load, in order, and the last of them with the result."""
    asked = prompts(2, 1500)
    alone(engine, asked)
    engine.forget()
    seen: list[int] = []
    loads = rank_of(engine).connector._working.loads
    note = loads._note

    def noted(where: Any, name: str, value: Any) -> None:
        if where is loads._there:
            seen.append(value)
        note(where, name, value)

    loads._note = noted
    assert alone(engine, asked) == rest(asked)
    assert seen == [2, 4]


@pytest.mark.parametrize("bad", [0, 4, 8])
def test_damage_anywhere_is_computed_with_what_follows_it_and_stored_again(
    engine: LayerEngine, place: Path, bad: int
) -> None:
    asked = prompts(3, 300)
    alone(engine, asked)
    name = hashes(engine, asked[0])[bad]
    taken_back = 0
    for at in PLACES:
        engine.forget()
        flip(object_with(place, rank_of(engine).content(name)), at)
        taken_back += recomputes(engine, asked[0], bad)
        engine.forget()
        assert alone(engine, asked) == rest(asked), f"it is stored again, after damage at {at}"
    assert taken_back


def recomputes(engine: LayerEngine, prompt: list[int], bad: int) -> bool:
    """Play a prompt that has a bad block: it and what follows is computed. Whether a step was taken back for that.

    If not, the daemon's scrub has found the damage first.
    """
    after = [len(prompt) + 1 - bad * TOKENS]
    of_step = (len(prompt) - 1) % TOKENS + 1
    computed = alone(engine, [prompt])
    assert computed in (after, [after[0] + of_step])
    return computed != after


@pytest.mark.parametrize("length", [0, 100, 3 * dry.PAGE, 7 * dry.PAGE + FOOTER_BYTES - 1])
def test_a_truncated_or_missing_object_is_computed(engine: LayerEngine, place: Path, length: int) -> None:
    asked = prompts(4, 300)
    alone(engine, asked)
    engine.forget()
    path = object_with(place, rank_of(engine).content(hashes(engine, asked[0])[5]))
    if length:
        with path.open("r+b") as file:
            file.truncate(length)
    else:
        path.unlink()
    recomputes(engine, asked[0], 5)
    engine.forget()
    assert alone(engine, asked) == rest(asked)


def test_objects_of_earlier_versions_are_loaded_as_a_whole(engine: LayerEngine, place: Path) -> None:
    asked = prompts(5, 300)
    alone(engine, asked)
    engine.forget()
    for path in objects(place):
        without_parts(path)
    assert alone(engine, asked) == rest(asked)
    assert rank_of(engine).steps == 1


def without_parts(path: Path) -> None:
    """Make an object what it was before parts had seals."""
    data = bytearray(path.read_bytes())
    footer = len(data) - FOOTER_BYTES
    assert any(data[footer + 104 : footer + 120]), "it had seals"
    data[footer + 52 : footer + 56] = bytes(4)
    data[footer + 104 : footer + 120] = bytes(16)
    data[footer + 120 :] = xxhash.xxh3_64_intdigest(bytes(data[footer : footer + 120])).to_bytes(8, "little")
    path.write_bytes(data)


def test_a_request_that_is_aborted_in_a_step_whose_load_fails_leaves_no_wrong_block(
    engine: LayerEngine, place: Path
) -> None:
    """vLLM caches the blocks of a step before it is computed, and takes steps back only for requests that still run."""
    asked = prompts(6, 300)
    alone(engine, asked)
    engine.forget()
    flip(object_with(place, rank_of(engine).content(hashes(engine, asked[0])[4])), 5 * dry.PAGE)
    (longer,) = prompts(7, 100)
    name = engine.add(asked[0] + longer)
    rank_of(engine).ended = lambda: engine.abort(name)
    engine.finish()
    rank_of(engine).ended = lambda: None
    engine.run([asked[0] + longer])  # it checks every byte that it stands on
    engine.forget()
    engine.run([asked[0] + longer])


def test_a_daemon_killed_during_a_load_costs_time_and_no_byte(engine: LayerEngine) -> None:
    asked = prompts(8, 1500)
    alone(engine, asked)
    engine.forget()
    rank, boots = rank_of(engine), engine.boots
    rank.begun = engine.kill_daemon
    alone(engine, asked)
    assert rank.steps == 1
    rank.begun = lambda: None
    engine.served_again(boots)
    alone(engine, asked)
    engine.forget()
    assert alone(engine, asked) == rest(asked)


def test_blocks_are_computed_if_vllm_does_not_wait_for_its_layers(engine: LayerEngine) -> None:
    asked = prompts(9, 300)
    alone(engine, asked)
    engine.forget()
    rank_of(engine).waits = False
    assert recomputes(engine, asked[0], 0)
    rank_of(engine).waits = True
    engine.forget()
    assert alone(engine, asked) == rest(asked)


@pytest.mark.parametrize("seed", range(3))
def test_any_order_of_requests_aborts_and_damage(engine: LayerEngine, place: Path, seed: int) -> None:
    """Each step checks every byte that it stands on; see LayerRank."""
    draw = random.Random(seed)
    heads = prompts(100 + seed, 300, 450)
    names: list[str] = []
    rank_of(engine).ended = lambda: engine.abort(draw.choice(names)) if draw.random() < 0.2 else None
    for _ in range(40):
        head = draw.choice(heads)
        names.append(engine.add(head[: draw.randrange(40, len(head))] + prompts(draw.randrange(9), 40)[0]))
        for _ in range(draw.randrange(4)):
            engine.step()
        if draw.random() < 0.3:
            engine.finish()
            engine.forget()
            if found := objects(place):
                with contextlib.suppress(FileNotFoundError):  # the daemon has just put a damaged one aside
                    flip(draw.choice(found), draw.choice(PLACES))
    engine.finish()
    assert rank_of(engine).steps


# --- the real engine --------------------------------------------------------------------------------


@pytest.mark.timeout(900)
def test_a_damaged_layer_in_the_middle_is_recomputed(place: Path) -> None:
    model = str(play.tiny_model(place / "six", num_hidden_layers=6))
    asked = prompts(10, 200, 300, 170)
    options: dict[str, Any] = {"model": model, "alone": True, "extra": {"by_layer": True}}
    plain = Engine(place, "none", [asked], model=model).result()[0]
    engine = Engine(place, "connector", [asked, asked, asked, asked], wait=True, **options)
    engine.played(1)
    engine.go_on()
    engine.played(2)
    files = objects(place)
    assert len(files) == 20
    for path in files[::7]:
        flip(path, path.stat().st_size // 2)
    engine.go_on()
    engine.played(3)
    engine.go_on()
    engine.played(4)
    engine.go_on()
    rounds = engine.result()
    wanted = [answer["tokens"] for answer in plain]
    assert [[answer["tokens"] for answer in answers] for answers in rounds] == [wanted] * 4
    assert [answer["cached"] for answer in rounds[1]] == [answer["cached"] for answer in rounds[3]] == [192, 288, 160]
    assert "by_layer is not in use" not in engine.log
    _, loaded = witnessed(place)
    assert loaded == 20 + 17 + 20
