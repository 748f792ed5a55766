"""A token bucket: bursts up to its bound, then its rate."""

from __future__ import annotations

import random

from transferd.runtime.bucket import Bucket


def test_a_burst_is_taken_at_once_and_then_one_for_each_token_that_came_in() -> None:
    bucket = Bucket(rate=2.0, burst=3.0)
    assert [bucket.take(0.0) for _ in range(5)] == [True, True, True, False, False]
    assert not bucket.take(0.49)
    assert bucket.take(0.5)
    assert [bucket.take(1.5) for _ in range(3)] == [True, True, False]


def test_a_long_rest_fills_it_up_to_the_burst_and_no_further() -> None:
    bucket = Bucket(rate=10.0, burst=2.0)
    assert [bucket.take(1e6) for _ in range(3)] == [True, True, False]


def test_whoever_asks_however_often_gets_no_more_than_burst_and_rate() -> None:
    for seed in range(20):
        chance = random.Random(seed)
        bucket, now, taken = Bucket(rate=5.0, burst=7.0), 0.0, 0
        for _ in range(500):
            now += chance.expovariate(20.0)
            taken += bucket.take(now)
            assert taken <= 7.0 + 5.0 * now + 1e-6, seed
        assert taken >= 7.0 + 5.0 * now - 7.0 - 1.0, f"{seed}: refused what had come in"
