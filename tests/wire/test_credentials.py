"""Who may connect: groups by name or number, and the uid in a peer's address."""

from __future__ import annotations

import pytest

from transferd.errors import ConfigError
from transferd.wire.credentials import resolve_group, uid_of


def test_a_group_is_given_by_name_or_number_or_not_at_all() -> None:
    assert resolve_group("server.group", "1234") == 1234
    assert resolve_group("server.group", "root") == 0
    assert resolve_group("server.group", "") == -1


@pytest.mark.parametrize("group", ["²", "no such group", "-1"])
def test_a_group_that_is_neither_is_named_with_its_key(group: str) -> None:
    with pytest.raises(ConfigError, match=r"server\.group: no such group") as refusal:
        resolve_group("server.group", group)
    assert group in str(refusal.value)


@pytest.mark.parametrize(("address", "uid"), [("localhost:1000:1000:42", 1000), ("127.0.0.1:5", None), ("", None)])
def test_the_uid_of_a_peer_is_known_where_the_kernel_says_it(address: str, uid: int | None) -> None:
    assert uid_of(address) == uid
