"""The commented configuration: all of it, and nothing but what the sections say."""

from __future__ import annotations

import re

import msgspec
import pytest

from transferd.config import CacheSection, Config, from_tree
from transferd.config.loading import TUNING
from transferd.config.template import template
from transferd.runtime.compat import tomllib


def test_as_printed_it_is_the_default_configuration() -> None:
    text = template()
    assert "# ranks = 2" in text
    assert from_tree(tomllib.loads(text)) == Config()


def test_every_setting_is_there_with_its_default() -> None:
    """Remove the mark of every setting that has a value, and the result is still the default."""
    sections = [part for part in template().split("\n\n") if "\n# [" not in part]  # without those that may be absent
    sections += [part.replace("\n# [cache]", "\n[cache]") for part in template().split("\n\n") if "\n# [cache]" in part]
    tree = tomllib.loads(re.sub(r"^# (\w+ = (?!.*# \(an example\)))", r"\1", "\n\n".join(sections), flags=re.MULTILINE))
    default = Config(cache=CacheSection())
    assert msgspec.to_builtins(from_tree(tree), enc_hook=str) == msgspec.to_builtins(default, enc_hook=str)
    assert set(tree) == {field.name for field in msgspec.structs.fields(Config)}
    tuned = [key for key in TUNING if key.startswith("server.")]
    fields = msgspec.structs.fields(type(Config().server))
    assert len(tree["server"]) == len(fields) - len(["curve"]) - len(tuned)


def test_comments_stand_beside_their_settings() -> None:
    assert "# client_timeout = 5.0  # a client that is silent for this long counts as gone" in template()
    assert "lane_depth" not in template(), "nobody sets what stands in [tuning]"
    assert "# tasks = 8192  # roughly how many tasks are remembered" in template()
    assert "# [storage.attention_store.peers.NAME]\n# endpoint =" in template()
    assert "# [server.curve]\n# secret_key_file =" in template()


def test_chosen_settings_are_in_the_template() -> None:
    config = from_tree(tomllib.loads(template({"cache.ranks": 4, "storage.file.capacity": "7GiB"})))
    assert (config.geometry.ranks, config.storage.file.capacity) == (4, 7 * 1024**3)


def test_a_setting_that_does_not_exist_is_no_choice() -> None:
    with pytest.raises(ValueError, match=r"cache\.rank"):
        template({"cache.rank": 4})
