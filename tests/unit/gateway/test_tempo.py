"""How quick both sides of a move are, by what they tell."""

from __future__ import annotations

import pytest

from sllm_gateway.pace import LATE_S, SLOW_S, STRETCH
from sllm_gateway.tempo import MESSAGES_S, QUICK, Tempo

NOW = 100.0


def test_when_the_first_output_of_a_source_was_begun_is_not_known() -> None:
    tempo = Tempo(NOW)
    tempo.source(1, NOW + 0.001)
    assert tempo.interval == 0.0
    tempo.source(1, NOW + 0.501)
    assert tempo.interval == pytest.approx(0.5)


def test_outputs_that_come_together_share_the_time() -> None:
    tempo = Tempo(NOW)
    tempo.source(1, NOW)
    tempo.source(4, NOW + 2.0)
    assert tempo.interval == pytest.approx(0.5)


def test_a_round_is_timed_once() -> None:
    tempo = Tempo(NOW)
    tempo.computed(NOW + 9.0)
    assert tempo.round == 0.0, "it had been fed nothing"
    tempo.fed(NOW + 10.0)
    tempo.computed(NOW + 10.5)
    tempo.computed(NOW + 99.0)
    assert tempo.round == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("interval", "lasts"),
    [
        (0.003, sum(STRETCH)),
        (0.99 * LATE_S / 3, sum(STRETCH)),
        (1.01 * LATE_S / 3, sum(STRETCH[:2])),
        (1.01 * LATE_S / 2, QUICK),  # one output lasts less
        (SLOW_S, QUICK),
        (10 * SLOW_S, QUICK),
    ],
)
def test_messages_are_slow_where_a_reserve_does_not_hide_them(interval: float, lasts: float) -> None:
    for share, slow in ((0.99, False), (1.01, True)):
        tempo = Tempo(NOW)
        tempo.fed(NOW)
        tempo.computed(NOW + share * lasts * interval - MESSAGES_S)
        assert not tempo.messages_slow, "no interval is known"
        assert tempo.drawn_meanwhile == 0
        tempo.source(1, NOW)
        tempo.source(1, NOW + interval)
        assert tempo.messages_slow is slow


def test_how_many_tokens_a_round_takes() -> None:
    tempo = Tempo(NOW)
    tempo.fed(NOW)
    tempo.computed(NOW + 1.0)
    tempo.source(1, NOW)
    tempo.source(1, NOW + 0.4)
    assert tempo.drawn_meanwhile == 3
