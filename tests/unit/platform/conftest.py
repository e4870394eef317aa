from tests.fixtures.nats import narrow, nats

__all__ = ["narrow", "nats"]
