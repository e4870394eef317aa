"""Where the embedded server listens."""

import socket

import pytest

from sllm_runtime.platform.nats_server import free_port, threads


def test_a_free_port_is_none_that_a_connection_or_another_server_could_be_given() -> None:
    """Linux gives those from 32768 on, macOS from 49152."""
    assert max(free_port() for _ in range(100)) < 32_768


def test_a_port_that_is_taken_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    found: set[int] = set()
    while len(found) < 2:
        found.add(free_port())
    first, second = found
    numbers = iter([first - 20_000, second - 20_000])
    with socket.create_server(("127.0.0.1", first)):
        monkeypatch.setattr("secrets.randbelow", lambda _: next(numbers))
        assert free_port() == second


def test_the_server_leaves_most_of_a_machine_to_others() -> None:
    assert [threads(cores) for cores in (1, 2, 4, 8, 64)] == [1, 1, 1, 2, 16]
