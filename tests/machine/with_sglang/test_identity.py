"""What SGLang's own source says of the identities that docs/sglang.md promises; a new version makes this red."""

from __future__ import annotations

import inspect
from typing import Any

from sglang.srt.arg_groups.lora_hook import LoRARef
from sglang.srt.managers import schedule_batch, tokenizer_control_mixin
from sglang.srt.mem_cache.utils import get_storage_hash_str
from sglang.srt.server_args import ServerArgs

from transferd.adapters.sglang import arguments

TOKENS = list(range(32))


def test_every_argument_of_this_version_is_in_one_list() -> None:
    lists = (arguments.COUNT, arguments.APART, arguments.NO_MATTER)
    known = {name for one in lists for name in one}
    assert sum(map(len, lists)) == len(known), "an argument is in two lists"
    public = {name for name in ServerArgs.__struct_fields__ if not name.startswith("_")}
    assert public - known == set(), "nobody has said whether these change a page's bytes: arguments.py"
    assert known - public == set(), "SGLang has these no more"


def test_what_sglang_has_resolved_counts_and_not_what_was_typed() -> None:
    source = inspect.getsource(arguments.of_this_server)
    assert "resolved_server_args_dict" in source
    made = ServerArgs(model_path="dummy", dtype="auto")
    made.resolve_once()
    assert set(made.resolved_dict()) >= arguments.COUNT | arguments.APART


def page_hash(**of_request: Any) -> Any:
    class Key(list[Any]):
        extra_key = of_request.get("extra_key")
        cache_salt = of_request.get("cache_salt")

    return get_storage_hash_str(Key(TOKENS), None, page_size=16)


def test_a_pages_key_covers_the_requests_salt_and_the_adapters_identity() -> None:
    made = [page_hash(), page_hash(extra_key="a"), page_hash(cache_salt="a"), page_hash(extra_key="b")]
    assert len({tuple(one) for one in made}) == 4
    assert "extra_key or" in (source := inspect.getsource(schedule_batch.Req.__init__))
    assert "+ lora_id" in source, "the identity of an adapter is no part of the request's extra key any more"


def test_an_adapter_of_the_start_has_an_identity_by_name_and_path_and_a_later_one_by_its_load() -> None:
    first, again = (LoRARef.deterministic_id("mine", "/adapters/mine") for _ in range(2))
    assert first == again, "stable: so what the files contain must be a fact (identity._adapters)"
    assert len({LoRARef(lora_name="mine", lora_path="/adapters/mine").lora_id for _ in range(2)}) == 2
    for load in ("load_lora_adapter", "load_lora_adapter_from_tensors"):
        source = inspect.getsource(getattr(tokenizer_control_mixin.TokenizerControlMixin, load))
        assert "lora_id = new_adapter.lora_id" in source
        assert "deterministic_id" not in source, "stable now: its files must be a fact"
