"""What the version before wrote is read today, and says the same: every message and record of it, with every field.

``tests/golden/before.json`` was written by that version's own code (``tests/golden/write.py``), of the commit that is
``BEFORE`` of ``test_node_before.py``. ``since.json`` was written by that of commit 9652f90: it holds what has been
added since, which before.json says nothing of. A field that is gone, renamed, of another type, or in another place of
what travels as an array, is found here.

With a release, and with each change of PROTOCOL_VERSION, before.json is to be written anew by the code of the version
that is before it then (and ``BEFORE`` with it); since.json where much has been added.
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

FILES = ("before", "since")
GOLDEN = {name: json.loads((Path(__file__).parents[2] / "golden" / f"{name}.json").read_text()) for name in FILES}
MESSAGES: dict[str, dict[str, Any]] = {
    f"{file}:{name}": each for file, golden in GOLDEN.items() for name, each in golden["messages"].items()
}
"""``file:module.Class`` -> its bytes, and what they say."""


def kind_of(name: str) -> type[msgspec.Struct]:
    module, _, kind = name.partition(":")[2].rpartition(".")
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
    now = dict(structs()).keys()
    for golden in GOLDEN.values():
        assert golden["protocol_version"] in (PROTOCOL_VERSION, PROTOCOL_VERSION - 1)
        assert golden["messages"].keys() <= now, "none has gone"
    assert GOLDEN["before"]["messages"].keys() < GOLDEN["since"]["messages"].keys()
    for record in ("VersionRecord", "InstanceRecord", "Route", "Term"):
        assert f"before:records.{record}" in RECORDS
    assert {"since:records.LearnedRecord", "since:records.SecretRecord"} <= set(RECORDS)


def test_a_field_that_changed_would_be_found() -> None:
    golden = MESSAGES["before:node.StopInstance"]
    told = msgspec.msgpack.decode(base64.b64decode(golden["msgpack"]))
    assert not holds(golden["says"] | {"reason": "another"}, golden["says"])
    assert not holds({key: value for key, value in golden["says"].items() if key != "grace_s"}, golden["says"])
    with pytest.raises(ProtocolError, match="grace_s"):
        codec.unpack(kind_of("before:node.StopInstance"), msgspec.msgpack.encode(told | {"grace_s": "soon"}))
