"""From an index to its bytes and back; the bytes are the model's identity."""

from __future__ import annotations

import hashlib
from typing import Final

import msgspec

from sllm_runtime.protocol.checkpoint.checks import check_index
from sllm_runtime.protocol.checkpoint.names import is_hex
from sllm_runtime.protocol.checkpoint.records import INDEX_NAME, MAX_INDEX, CheckpointIndex
from sllm_runtime.protocol.errors import InvalidCheckpoint

_DECODER: Final = msgspec.json.Decoder(CheckpointIndex)


def encode_index(index: CheckpointIndex) -> bytes:
    """The canonical bytes of ``index``: the same index gives the same bytes everywhere."""
    return msgspec.json.encode(index) + b"\n"


def index_digest(data: bytes) -> str:
    """Identity of a model, ``sha256:<hex>`` of its index's bytes, which cover every other byte by digests."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def digest_hex(digest: str) -> str:
    """The hex part of a model's digest. Raises ``InvalidCheckpoint`` if ``digest`` is none."""
    kind, _, digits = digest.partition(":")
    if kind != "sha256" or not is_hex(digits, 64):
        raise InvalidCheckpoint(f"{digest!r} is not a model digest (sha256:<64 hex digits>)", field="model")
    return digits


def decode_index(data: bytes) -> CheckpointIndex:
    """The checked index in ``data``. Raises ``InvalidCheckpoint``, and nothing else, whatever the bytes are."""
    if len(data) > MAX_INDEX:
        raise InvalidCheckpoint(f"index of {len(data)} bytes is above the limit of {MAX_INDEX}", field=INDEX_NAME)
    index = decode_checked(data)
    check_index(index)
    return index


def decode_checked(data: bytes) -> CheckpointIndex:
    """The index in ``data``, none of whose numbers is checked again: from whoever used ``decode_index`` on these bytes.

    Raises ``InvalidCheckpoint`` for what is no index.
    """
    try:
        return _DECODER.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise InvalidCheckpoint(f"{INDEX_NAME} is not a checkpoint index: {error}", field=INDEX_NAME) from error
