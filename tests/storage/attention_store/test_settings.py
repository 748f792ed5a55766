"""[storage.attention_store]: keys, variables and defaults, and names that follow from other settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.storage.token_harness import tree
from transferd.config import from_tree
from transferd.config.environment import fold
from transferd.config.sections import AttentionStoreSection
from transferd.errors import ConfigError


def test_keys_count_before_variables_and_variables_before_defaults(tmp_path: Path) -> None:
    env = {
        "AS_NAMESPACE": "ns",
        "AS_POD_NAME": "pod",
        "AS_MODEL_VERSION": "v9",
        "AS_WRITE_SLICE_BLOCK_NUM": "7",
        "AS_WRITE_SLICE_TIMEOUT": "2.5",
        "AS_WRITE_TOTAL_TIMEOUT": "60",
        "FD_AS_ONLY_FLUSH": "1",
    }

    def effective(env: dict[str, str], **section: Any) -> AttentionStoreSection:
        whole = tree(tmp_path, **section)
        fold(whole, env)
        return from_tree(whole).storage.attention_store

    nothing = effective({})
    assert (nothing.namespace, nothing.pod_name, nothing.model_version) == ("demo", "default_pod_mixed_0", "v0")
    assert (nothing.slice_blocks, nothing.slice_timeout, nothing.total_timeout) == (100, 10.0, None)
    assert nothing.only_flush is False
    variables = effective(env)
    assert (variables.namespace, variables.pod_name, variables.model_version) == ("ns", "pod_mixed_0", "v9")
    assert (variables.slice_blocks, variables.slice_timeout, variables.total_timeout) == (7, 2.5, 60.0)
    assert variables.only_flush is True
    keys = effective(env, pod_name="mine", slice_blocks=3, only_flush=False, namespace="n")
    assert (keys.pod_name, keys.slice_blocks, keys.only_flush, keys.namespace) == ("mine", 3, False, "n")
    one_engine = effective({"AS_POD_NAME": "pod", "ENABLE_EP_DP_IN_FD": "0"})
    assert one_engine.pod_name == "pod"


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("FD_AS_ONLY_FLUSH", "yes"),
        ("ENABLE_EP_DP_IN_FD", "2"),
        ("AS_WRITE_SLICE_BLOCK_NUM", "0"),
        ("AS_WRITE_SLICE_BLOCK_NUM", "1.5"),
        ("AS_WRITE_SLICE_TIMEOUT", "-1"),
        ("AS_WRITE_TOTAL_TIMEOUT", "nan"),
        ("AS_WRITE_TOTAL_TIMEOUT", "soon"),
    ],
)
def test_a_variable_that_makes_no_sense_is_named(tmp_path: Path, variable: str, text: str) -> None:
    with pytest.raises(ConfigError, match=f"^{variable}: "):
        fold(tree(tmp_path), {variable: text})
