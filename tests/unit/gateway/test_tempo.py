"""How quick both sides of a move are, by what they tell."""

from __future__ import annotations

import pytest

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


@pytest.mark.parametrize(("interval", "slow"), [(0.0, False), (1.0, True), (0.51, True), (0.53, False)])
def test_messages_are_slow_beside_an_interval(interval: float, slow: bool) -> None:
    tempo = Tempo(NOW)
    tempo.fed(NOW)
    tempo.computed(NOW + QUICK * 0.52 - MESSAGES_S if interval < 1.0 else NOW + QUICK)
    if interval:
        tempo.source(1, NOW)
        tempo.source(1, NOW + interval)
    assert tempo.messages_slow is slow
