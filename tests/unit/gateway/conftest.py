"""Fixtures of the gateway's tests."""

from tests.fixtures.nats import narrow, nats  # noqa: F401 - a fixture is used by being here
