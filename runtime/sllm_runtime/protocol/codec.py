"""One encoding for each border: msgpack on NATS and sockets, JSON in the KV. Unknown fields are ignored."""

from __future__ import annotations

from functools import cache
from typing import Any, TypeVar, cast

import msgspec
from pydantic import BaseModel, ValidationError

from sllm_runtime.protocol.errors import ProtocolError
from sllm_runtime.protocol.limits import PROTOCOL_VERSION
from sllm_runtime.protocol.quantities import KEPT

T = TypeVar("T")


def _enc(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    raise TypeError(f"cannot encode {type(value).__name__}")


def _dec(type_: type, value: Any) -> Any:
    if isinstance(type_, type) and issubclass(type_, BaseModel):
        try:
            return type_.model_validate(value, context=KEPT)
        except ValidationError as error:
            raise ValueError(str(error)) from error
    raise TypeError(f"cannot decode {type_}")


_packer = msgspec.msgpack.Encoder(enc_hook=_enc)
_writer = msgspec.json.Encoder(enc_hook=_enc)


@cache
def _unpacker(type_: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(type_, dec_hook=_dec)


@cache
def _reader(type_: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(type_, dec_hook=_dec)


def prime(*types: Any) -> None:
    """Make the decoders for messages of ``types`` now: of one with many kinds that takes 2 ms."""
    for each in types:
        _unpacker(each)


def pack(value: Any) -> bytes:
    """``value`` as msgpack."""
    return _packer.encode(value)


def unpack(type_: type[T], data: bytes | memoryview) -> T:
    """The ``type_`` in msgpack ``data``. Raises ``ProtocolError`` if it is none."""
    try:
        value: T = _unpacker(cast(Any, type_)).decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ProtocolError(f"not a valid {getattr(type_, '__name__', type_)}: {error}") from error
    return value


def to_json(value: Any) -> bytes:
    """``value`` as JSON."""
    return _writer.encode(value)


def from_json(type_: type[T], data: bytes | memoryview | str) -> T:
    """The ``type_`` in JSON ``data``. Raises ``ProtocolError`` if it is none."""
    try:
        value: T = _reader(cast(Any, type_)).decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ProtocolError(f"not a valid {getattr(type_, '__name__', type_)}: {error}") from error
    return value


def served(record: T, name: str) -> T:
    """``record``, whose ``schema`` is this one or the one before. Raises ``ProtocolError``, which names it, for any
    other: what it means is not known."""
    schema = getattr(record, "schema", PROTOCOL_VERSION)
    if schema not in (PROTOCOL_VERSION, PROTOCOL_VERSION - 1):
        known = f"{PROTOCOL_VERSION - 1} and {PROTOCOL_VERSION}"
        raise ProtocolError(f"{name} has schema {schema}, {known} are read; run the version that wrote it")
    return record
