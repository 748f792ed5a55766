"""What the names may be that an engine gives."""

from __future__ import annotations

import pytest

from transferd.config.names import ENGINE, GENERATION, MODEL, TOKEN, Named
from transferd.errors import ConfigError


@pytest.mark.parametrize(
    ("named", "good", "bad"),
    [
        (ENGINE, ["a", "llama-0", "7", "a/b:c@d.e_f", "x" * 64], ["", "-a", "a b", "ü", "x" * 65, 7, None, "a\n"]),
        (TOKEN, ["", "s" * 64], ["s" * 65, b"s", "\n"]),
        (MODEL, ["/models/llama 3", "模型", "m" * 1024], ["m" * 1025, 1.0]),
        (GENERATION, ["", "RL-STEP03", "g" * 256], ["g" * 257, "a\tb", None]),
    ],
)
def test_a_name_that_a_daemon_would_refuse_is_refused_where_it_is_read(
    named: Named, good: list[object], bad: list[object]
) -> None:
    for name in good:
        named.check("a.key", name)
    for name in bad:
        with pytest.raises(ConfigError, match=r"a\.key: .* is text of at most \d+ .*"):
            named.check("a.key", name)


def test_a_secret_is_not_shown() -> None:
    with pytest.raises(ConfigError) as refused:
        TOKEN.check("token", "hush" * 20, secret=True)
    assert "hush" not in str(refused.value)
