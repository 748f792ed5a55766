"""What all stories under simulation share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support import log_lines


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """The daemon logs every fault; hundreds of stories of them help nobody."""
    with log_lines.quiet():
        yield
