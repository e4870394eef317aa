"""Messages of the version before and the one after: unknown fields are ignored, added ones have defaults."""

import msgspec
import pytest

from sllm_runtime.protocol import codec, ctl, events, frames, node, records, worker
from sllm_runtime.protocol.events import KINDS, Kind
from sllm_runtime.protocol.states import InstanceState, MigrationState, VersionState

MESSAGES: tuple[msgspec.Struct, ...] = (
    ctl.Acquire(function="f", version=1, gateway="g1", waiting=2),
    ctl.Acquired(pending="because"),
    ctl.Reply(),
    events.Event(kind="instance.ready", at=1.0, component="controller"),
    frames.Opened(status="accepted"),
    frames.CallHead(
        call="c", epoch=1, instance="i", function="f", version=1, kind="fn", stream=True, body_bytes=0, timeout_s=1.0,
        idle_timeout_s=1.0, seed=1,
    ),
    node.InstanceStatus(instance="i", function="f", version=1, state=InstanceState.READY),
    node.StopInstance(term=1, instance="i", reason="x"),
    records.InstanceRecord(instance="i", function="f", version=1, node="n1", state=InstanceState.READY),
    records.Term(term=1, controller="c"),
    records.Lease(term=1, controller="c"),
    worker.ToWorker(body=worker.Stop(grace_s=1.0)),
)  # fmt: skip


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_field_that_a_later_version_added_is_ignored(message: msgspec.Struct) -> None:
    """By what travels as a map, and by what travels as an array, where new fields stand at the end."""
    raw = msgspec.msgpack.decode(codec.pack(message))
    if isinstance(raw, dict):
        later: object = raw | {"of_a_later_version": {"any": ["thing"]}}
    else:
        whole = len(message.__struct_fields__) + bool(message.__struct_config__.tag)
        assert len(raw) == whole
        later = [*raw, "of a later version"]
    assert codec.unpack(type(message), msgspec.msgpack.encode(later)) == message


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_fields_with_defaults_may_be_missing(message: msgspec.Struct) -> None:
    """As one of an earlier version sends it, which did not have them yet."""
    raw = msgspec.msgpack.decode(codec.pack(message))
    needed = {field.encode_name for field in msgspec.structs.fields(message) if field.required}
    if not isinstance(raw, dict):
        return
    earlier = {key: value for key, value in raw.items() if key in needed}
    read = codec.unpack(type(message), msgspec.msgpack.encode(earlier))
    assert all(getattr(read, name) == getattr(message, name) for name in needed)


@pytest.mark.parametrize(
    ("of", "states"), [("instance", InstanceState), ("migration", MigrationState), ("version", VersionState)]
)
def test_every_state_has_its_kind_of_event(
    of: str, states: type[InstanceState | MigrationState | VersionState]
) -> None:
    for state in states:
        assert Kind.of_state(of, state) in KINDS
