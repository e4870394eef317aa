from tests.fixtures.nats import nats

__all__ = ["nats"]
