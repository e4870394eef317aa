"""A manifest that is taken can be sent, stored and read again, whatever somebody wrote in it."""

import json
from typing import Any

import msgspec
import pytest
from pydantic import ValidationError

from sllm_runtime.protocol import codec
from sllm_runtime.protocol.http import ModelRegisterRequest
from sllm_runtime.protocol.manifest import Manifest
from sllm_runtime.protocol.quantities import LONGEST_S, MOST_BYTES
from sllm_runtime.protocol.records import VersionRecord

HANDLER = {"entry": "m:f", "kind": "function", "streams": False}


def read(field: str, text: str) -> Manifest:
    """As a gateway reads a manifest in which ``field`` has the JSON ``text``."""
    return Manifest.model_validate_json(f'{{"name": "f", "handler": {json.dumps(HANDLER)}, "{field}": {text}}}')


@pytest.mark.parametrize("text", ["Infinity", "-Infinity", "NaN", "1e999", "9" * 400, f'"{"9" * 400}"', "3153600001"])
@pytest.mark.parametrize("field", ["keep_alive", "timeout", "idle_timeout", "startup_timeout", "queue_timeout"])
def test_no_duration_is_without_end(field: str, text: str) -> None:
    with pytest.raises(ValidationError) as wrong:
        read(field, text)
    assert wrong.value.errors()[0]["loc"][0] == field
    for aim in ("ttft", "tbt"):
        with pytest.raises(ValidationError):
            read("slo", f'{{"{aim}": {text}}}')


@pytest.mark.parametrize("field", ["memory", "gpu_memory"])
@pytest.mark.parametrize("text", ["18446744073709551616", "9" * 400, f'"{"9" * 400}"', '"1025TiB"', "1e999"])
def test_no_size_is_beyond_what_64_bits_hold(field: str, text: str) -> None:
    with pytest.raises(ValidationError) as wrong:
        read(field, text)
    assert wrong.value.errors()[0]["loc"] == (field,)


@pytest.mark.parametrize("text", ["18446744073709551616", "-9223372036854775809", "9" * 400])
def test_numbers_of_a_schema_are_ones_that_travel(text: str) -> None:
    for schema in (f'{{"default": {text}}}', f'{{"properties": {{"seed": {{"enum": [1, [{text}]]}}}}}}'):
        with pytest.raises(ValidationError) as wrong:
            read("handler", json.dumps(HANDLER)[:-1] + f', "input_schema": {schema}}}')
        assert wrong.value.errors()[0]["loc"] == ("handler", "input_schema")


def test_the_largest_of_all_come_back_as_they_are() -> None:
    schema = {"properties": {"seed": {"minimum": -(2**63), "maximum": 2**64 - 1, "default": True}}}
    largest: dict[str, Any] = {
        "keep_alive": LONGEST_S,
        "idle_timeout": LONGEST_S,
        "memory": MOST_BYTES,
        "gpu_memory": "1024TiB",
        "handler": {**HANDLER, "input_schema": schema},
    }
    manifest = Manifest.model_validate({"name": "f", **largest})
    assert codec.from_json(Manifest, codec.to_json(manifest)) == manifest
    assert codec.unpack(Manifest, codec.pack(manifest)) == manifest


@pytest.mark.parametrize(
    ("given", "kept"), [("null", ()), ('"L4"', ("L4",)), ('["L4", "H100:2"]', ("L4", "H100:2")), ("[]", ())]
)
def test_gpus_come_in_several_forms(given: str, kept: tuple[str, ...]) -> None:
    assert read("gpu", given).gpu == kept


@pytest.mark.parametrize("given", ["1", "true", "[1]", '[["L4"]]', '{"L4": 1}', '"H100:0"'])
def test_what_is_no_gpu_is_refused_by_its_name(given: str) -> None:
    with pytest.raises(ValidationError) as wrong:
        read("gpu", given)
    assert wrong.value.errors()[0]["loc"] == ("gpu",)


BEFORE = """{"schema":1,"function":"chat","version":1,"manifest":{"gpu":[],"gpu_memory":2199023255552000,"cpu":1.0,
"memory":2199023255552000,"labels":{},"schema_version":1,"name":"chat","description":"","handler":{"entry":"m:f",
"kind":"function","streams":false,"input_schema":{"type":"object"},"python":null},"model":null,"adapters":{},
"model_loader":"auto","engine":false,"dtype":"auto","parallelism":{"tensor":1,"pipeline":1},"keep_alive":10000000000.0,
"min_instances":0,"max_instances":1,"concurrency":1,"timeout":300.0,"idle_timeout":3600000000.0,
"startup_timeout":4000000000.0,"queue_timeout":4000000000.0,"max_queue":256,"retries":0,"resumable":true,"priority":0,
"slo":{"ttft":4000000000.0,"tbt":null},"network":false,"env":{},"secrets":[],"requirements":[],"image":null},
"bundle":"sha256:b","bundle_bytes":1,"content":"c","model":null,"adapters":{},"state":"PREPARING","created":0.0,
"error":null}"""
"""As e4e3aa0, which had no upper limits, stored a function that was to stay for ever."""


@pytest.mark.parametrize("packed", [False, True])
def test_what_was_taken_before_there_were_limits_is_read_and_cut_to_them(packed: bool) -> None:
    if packed:
        read = codec.unpack(VersionRecord, msgspec.msgpack.encode(msgspec.json.decode(BEFORE)))
    else:
        read = codec.from_json(VersionRecord, BEFORE)
    kept = read.manifest
    durations = (kept.keep_alive, kept.idle_timeout, kept.startup_timeout, kept.queue_timeout, kept.slo.ttft)
    assert durations == (LONGEST_S,) * 5
    assert (kept.memory, kept.gpu_memory, kept.timeout) == (MOST_BYTES, MOST_BYTES, 300.0)
    assert codec.from_json(VersionRecord, codec.to_json(read)) == read
    with pytest.raises(ValidationError):  # who hands it in today is told
        Manifest.model_validate(msgspec.json.decode(BEFORE)["manifest"])


@pytest.mark.parametrize("place", ["\0", "/models/a\nb", "s3://models/\x1b[31m"])
def test_what_has_control_characters_is_no_place_of_a_model(place: str) -> None:
    """A NUL would be read as the directory of whoever reads it."""
    text = json.dumps(place)
    with pytest.raises(ValidationError, match="control characters"):
        read("model", text)
    with pytest.raises(ValidationError, match="control characters"):
        read("adapters", f'{{"one": {text}}}')
    with pytest.raises(ValidationError, match="control characters"):
        ModelRegisterRequest(uri=place)


@pytest.mark.parametrize(("named", "read_as"), [("L4\n", ("L4",)), (["T4", "H100:2\n"], ("T4", "H100:2"))])
def test_a_gpu_that_the_release_before_took_is_read_from_what_is_kept(named: Any, read_as: tuple[str, ...]) -> None:
    """aeac70b9 passed over a line end behind it (``$``), and started the function on an L4. Nobody leads where a
    version cannot be read (``control.restore``)."""
    said = {"name": "f", "handler": HANDLER, "gpu": named}
    with pytest.raises(ValidationError, match="is no GPU"):
        Manifest.model_validate(said)
    record = {
        "function": "f", "version": 1, "manifest": said, "bundle": "sha256:0", "bundle_bytes": 1, "content": "c",
        "schema": 1,
    }  # fmt: skip
    assert codec.from_json(VersionRecord, json.dumps(record)).manifest.gpu == read_as


@pytest.mark.parametrize("named", ["model", "adapters"])
def test_a_place_that_the_release_before_took_is_read_from_what_is_kept(named: str) -> None:
    """Line ends were passed over by whatever read it. Nobody leads where a version cannot be read
    (``control.restore``)."""
    place = "http://models.example/coder\n"
    of_adapters: dict[str, Any] = {"model": "m", "engine": True, "adapters": {"a": place}}
    places = {"model": place} if named == "model" else of_adapters
    said = {"name": "f", "handler": HANDLER, **places}
    with pytest.raises(ValidationError, match="control characters"):
        Manifest.model_validate(said)
    record = {
        "function": "f", "version": 1, "manifest": said, "bundle": "sha256:0", "bundle_bytes": 1, "content": "c",
        "schema": 1,
    }  # fmt: skip
    read = codec.from_json(VersionRecord, json.dumps(record)).manifest
    assert (read.model if named == "model" else read.adapters["a"]) == place.strip()
    assert Manifest.model_validate_json(read.model_dump_json()) == read


def test_an_empty_text_is_no_image() -> None:
    """The controller takes it for none, and so must the node: it would refuse what was placed there."""
    handler = {"entry": "m:f", "kind": "function", "streams": False}
    assert Manifest.model_validate({"name": "f", "handler": handler, "image": ""}).image is None
