"""A manifest that is taken can be sent, stored and read again, whatever somebody wrote in it."""

import json
from typing import Any

import pytest
from pydantic import ValidationError

from sllm_runtime.protocol import codec
from sllm_runtime.protocol.manifest import Manifest
from sllm_runtime.protocol.quantities import LONGEST_S, MOST_BYTES

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
