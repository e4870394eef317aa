"""When certificates expire. Python's own ``ssl`` tells that of authorities and of a peer that it has checked alone."""

from __future__ import annotations

import base64
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

_PEM: Final = re.compile(r"-----BEGIN CERTIFICATE-----([A-Za-z0-9+/=\s]+)-----END CERTIFICATE-----")
_VERSION: Final = 0xA0
_TWO_DIGITS: Final = 0x17
"""Tag of a time whose year has two digits: from 1950 to 2049 (RFC 5280)."""


def expires(certificate: bytes) -> float:
    """When this one (DER) does, in seconds since 1970. Raises ``ValueError`` for what is none."""
    try:
        _, at, _ = _element(certificate, 0)
        _, at, _ = _element(certificate, at)
        tag, _, end = _element(certificate, at)
        at = end if tag == _VERSION else at
        for _ in ("serial number", "signature", "issuer"):
            _, _, at = _element(certificate, at)
        _, at, _ = _element(certificate, at)  # validity
        _, _, at = _element(certificate, at)  # not before
        tag, at, end = _element(certificate, at)
    except IndexError as error:
        raise ValueError("no certificate: it ends too early") from error
    text = certificate[at:end].decode("ascii")
    if tag == _TWO_DIGITS:
        text = ("19" if text[:2] >= "50" else "20") + text
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC).timestamp()


def first_expires(file: Path) -> float | None:
    """When the first of those in ``file`` (PEM) does; None if there is none."""
    try:
        found = _PEM.findall(file.read_text())
        return min((expires(base64.b64decode(each)) for each in found), default=None)
    except (OSError, ValueError):
        return None


def _element(data: bytes, at: int) -> tuple[int, int, int]:
    """Tag of the element (DER) at ``at``, and where its content begins and ends."""
    tag, length, begin = data[at], data[at + 1], at + 2
    if length & 0x80:
        size = length & 0x7F
        length, begin = int.from_bytes(data[begin : begin + size]), begin + size
    return tag, begin, begin + length
