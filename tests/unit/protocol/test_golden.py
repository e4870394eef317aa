"""What the version before wrote is read today, and says the same: every message and record of it, with every field.

``tests/golden/before.json`` was written by that version's own code (``tests/golden/write.py``). A field that is gone,
renamed, of another type, or in another place of what travels as an array, is found here.
"""

from __future__ import annotations

import base64
import importlib
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sllm_runtime.protocol import codec
from sllm_runtime.protocol.errors import ProtocolError
from sllm_runtime.protocol.limits import PROTOCOL_VERSION
from sllm_runtime.protocol.records import Record
from tests.golden.write import says, structs

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "before.json").read_text())
MESSAGES: dict[str, dict[str, Any]] = GOLDEN["messages"]


def kind_of(name: str) -> type[msgspec.Struct]:
    module, _, kind = name.rpartition(".")
    found: type[msgspec.Struct] = getattr(importlib.import_module(f"sllm_runtime.protocol.{module}"), kind)
    return found


def holds(now: Any, before: Any) -> bool:
    """Whether all that was said before is said now, and in its place; more may be."""
    if isinstance(before, dict):
        return isinstance(now, dict) and all(key in now and holds(now[key], each) for key, each in before.items())
    if isinstance(before, list):
        pairs = zip(now, before, strict=False) if isinstance(now, list) and len(now) >= len(before) else None
        return pairs is not None and all(holds(*pair) for pair in pairs)
    return bool(now == before)


@pytest.mark.parametrize("name", sorted(MESSAGES))
def test_what_the_version_before_wrote_is_read_and_says_the_same(name: str) -> None:
    golden = MESSAGES[name]
    read = codec.unpack(kind_of(name), base64.b64decode(golden["msgpack"]))
    assert holds(says(read), golden["says"])
    assert codec.unpack(kind_of(name), codec.pack(read)) == read


RECORDS = sorted(name for name in MESSAGES if issubclass(kind_of(name), Record))


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_of_the_schema_before_is_read_as_it_lies_in_the_store(name: str) -> None:
    """As JSON, with the number that a version before this one would have written."""
    before = MESSAGES[name]["says"] | {"schema": PROTOCOL_VERSION - 1}
    read = codec.from_json(kind_of(name), msgspec.json.encode(before))
    assert holds(says(read), before)


def test_every_message_of_the_version_before_is_looked_at() -> None:
    assert GOLDEN["protocol_version"] in (PROTOCOL_VERSION, PROTOCOL_VERSION - 1)
    assert MESSAGES.keys() <= dict(structs()).keys(), "none has gone"
    assert {"records.VersionRecord", "records.InstanceRecord", "records.Route", "records.Term"} <= set(RECORDS)


def test_a_field_that_changed_would_be_found() -> None:
    golden = MESSAGES["node.StopInstance"]
    told = msgspec.msgpack.decode(base64.b64decode(golden["msgpack"]))
    assert not holds(golden["says"] | {"reason": "another"}, golden["says"])
    assert not holds({key: value for key, value in golden["says"].items() if key != "grace_s"}, golden["says"])
    with pytest.raises(ProtocolError, match="grace_s"):
        codec.unpack(kind_of("node.StopInstance"), msgspec.msgpack.encode(told | {"grace_s": "soon"}))
