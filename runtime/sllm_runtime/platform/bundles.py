"""Bundles in the JetStream object store, by digest. Written through acknowledged publishes, read by gets; by nodes,
which have no right to those, part by part through a gateway.

Only the stream's leader surely has what was stored a moment ago, so it is asked what there is; any replica answers a
direct get. The layout is that of every NATS object store (chunks ``$O.<bucket>.C.<nuid>``, meta
``$O.<bucket>.M.<name>``), so the ``nats`` tool reads it too.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

import nats.errors
import nats.js.errors
from nats.js.api import StreamState
from nats.nuid import NUID

from sllm_runtime.platform.bus import Bus
from sllm_runtime.platform.owned import each
from sllm_runtime.platform.streams import BUNDLE_STREAM, STORE_FAILED, WRONG_SEQUENCE
from sllm_runtime.platform.watch import snapshot
from sllm_runtime.protocol.errors import (
    BodyTooLarge,
    DigestMismatch,
    InvalidRequest,
    NotFound,
    SllmError,
    StoreFull,
    Unavailable,
)
from sllm_runtime.protocol.limits import KIB, MAX_BUNDLE, MIB
from sllm_runtime.protocol.node import BundlePart, ReadBundle
from sllm_runtime.protocol.quantities import show_bytes
from sllm_runtime.protocol.subjects import BUNDLES, is_token

Ask = Callable[[ReadBundle], Awaitable[BundlePart]]
"""Gives a part of a bundle: ``part``, or a gateway that a node asks."""
_CHUNK: Final = 256 * KIB
_AT_ONCE: Final = 8
_SOON_S: Final = 1.0
"""A link that takes longer for what is asked at once is asked for one part at a time: each has 5 s."""
_LOOK: Final = 4 * MIB
"""After so many bytes an upload looks again what is left for it: others go on at once."""
_PAUSES_S: Final = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6)
"""Between questions for what is not there: a replica that lags has it soon."""
_MAKE_ROOM: Final = (
    "delete functions that nobody needs, or old versions with them, or raise SLLM_BUNDLE_BYTES; the server of `sllm up`"
    " takes no more than its disk had room for when it began"
)
_SWEPT: Final = "the bundle cannot be stored: parts of it were removed while it stood still; send it again"
STILL_S: Final = 60.0
"""An upload that goes on stores something at least this often, however slowly it comes; else its gateway ends it."""


@dataclass(frozen=True, slots=True)
class _Described:
    """A bundle's description: its message's number, and its parts."""

    number: int
    nuid: str
    size: int
    chunks: int


@dataclass(frozen=True, slots=True)
class _Written:
    """Parts that are stored and not described yet."""

    size: int
    chunks: int
    last: int
    """Number of the last one's message."""


def _meta(digest: str) -> str:
    return f"$O.{BUNDLES}.M.{base64.urlsafe_b64encode(digest.encode()).decode()}"


def _chunks(nuid: str) -> str:
    return f"$O.{BUNDLES}.C.{nuid}"


async def store(
    bus: Bus,
    digest: str,
    chunks: AsyncIterator[bytes],
    limit: int = MAX_BUNDLE,
    clock: Callable[[], float] = time.monotonic,
    *,
    most: int = 0,
) -> int:
    """Keep what ``chunks`` brings under ``digest`` (``sha256:<hex>``). Returns its bytes.

    ``chunks`` must bring something at least every STILL_S / 2: what comes slowly is stored in small parts, so that a
    ``sweep`` sees it grow. Nothing is left behind when this raises: ``DigestMismatch``, ``BodyTooLarge`` above
    ``limit`` bytes, ``StoreFull`` (also where all bundles, with what other uploads have sent so far, have ``most``
    bytes; 0: no matter how many), ``Unavailable``, or what ``chunks`` raises. But where it ends without an answer
    about the description the bundle may be stored; if it is not, its parts are left to the sweep.
    """
    nuid = bytes(NUID().next()).decode()
    try:
        written = await _write(bus, nuid, digest, chunks, limit, most, clock)
        old = await _info(bus, digest)
        await _complete(bus, nuid, written, most)
    except BaseException:
        await _purge(bus, _chunks(nuid))
        raise
    await _name(bus, digest, nuid, written)
    if old is not None:
        await _purge(bus, _chunks(old.nuid))
    return written.size


async def _write(
    bus: Bus, nuid: str, digest: str, chunks: AsyncIterator[bytes], limit: int, most: int, clock: Callable[[], float]
) -> _Written:
    sha, total, count, last, rest, stored = hashlib.sha256(), 0, 0, 0, bytearray(), clock()
    left, looked = limit, -_LOOK
    async for chunk in chunks:
        if most and total - looked >= _LOOK:
            left, looked = most - (await _state(bus)).bytes + total - len(rest), total
        sha.update(chunk)
        total += len(chunk)
        if total > limit:
            raise BodyTooLarge(f"the bundle is larger than {limit} bytes; leave files out by .sllmignore")
        if total > left:
            raise _full(left)
        rest += chunk
        while len(rest) >= _CHUNK or (rest and clock() - stored >= STILL_S / 2):
            last = await _publish(bus, _chunks(nuid), bytes(rest[:_CHUNK]))
            del rest[:_CHUNK]
            count, stored = count + 1, clock()
    if rest:
        last = await _publish(bus, _chunks(nuid), bytes(rest))
        count += 1
    found = f"sha256:{sha.hexdigest()}"
    if found != digest:
        raise DigestMismatch(f"the bundle's bytes have {found}, not {digest}; send it again")
    return _Written(total, count, last)


async def _complete(bus: Bus, nuid: str, written: _Written, most: int) -> None:
    """Raises unless all parts are there and, with those of all others, fit: of uploads that go on at once each counts
    the others' parts, so that none is described beyond ``most``."""
    state = await _state(bus, _chunks(nuid))
    if _count(state, nuid) != written.chunks:
        raise Unavailable(_SWEPT)
    if most and state.bytes > most:
        raise _full(most - state.bytes + written.size)


def _full(left: int) -> StoreFull:
    return StoreFull(f"the bundle cannot be stored: {show_bytes(max(left, 0))} are left for it; {_MAKE_ROOM}")


async def _name(bus: Bus, digest: str, nuid: str, written: _Written) -> None:
    """Store the description: from here on the parts are a bundle, in place of an earlier one. Not once they are gone,
    as those of a gateway that was stopped until they were swept."""
    headers = {
        "Nats-Rollup": "sub",
        "Nats-Expected-Last-Subject-Sequence": str(written.last),
        "Nats-Expected-Last-Subject-Sequence-Subject": _chunks(nuid),
    }
    try:
        await _publish(bus, _meta(digest), _describe(digest, nuid, written.size, written.chunks), headers)
    except SllmError as error:
        # Without an answer it may be stored, and needs its parts; if it is not, they are swept.
        if isinstance(error.__cause__, nats.js.errors.APIError):
            await _purge(bus, _chunks(nuid))
        raise


async def _state(bus: Bus, subject: str | None = None) -> StreamState:
    """What all bundles take, with the parts of ``subject``. Raises ``Unavailable``."""
    try:
        return (await bus.jetstream.stream_info(BUNDLE_STREAM, subjects_filter=subject)).state
    except nats.errors.Error as error:
        raise Unavailable(f"bundles cannot be listed: {error or type(error).__name__}") from error


def _count(state: StreamState, nuid: str) -> int:
    return (state.subjects or {}).get(_chunks(nuid), 0)


def _describe(digest: str, nuid: str, total: int, count: int) -> bytes:
    raw = base64.urlsafe_b64encode(bytes.fromhex(digest.removeprefix("sha256:"))).decode()
    info = {
        "name": digest,
        "bucket": BUNDLES,
        "nuid": nuid,
        "size": total,
        "chunks": count,
        "digest": f"SHA-256={raw}",
        "mtime": datetime.now(UTC).isoformat(),
        "options": {"max_chunk_size": _CHUNK},
    }
    return json.dumps(info).encode()


async def _publish(bus: Bus, subject: str, data: bytes, headers: dict[str, str] | None = None) -> int:
    """The message's number."""
    try:
        return (await bus.jetstream.publish(subject, data, headers=headers)).seq
    except nats.js.errors.APIError as error:
        if error.err_code in WRONG_SEQUENCE:
            raise Unavailable(_SWEPT) from error
        if error.err_code == STORE_FAILED:
            raise StoreFull(f"the bundle cannot be stored: {error.description}; {_MAKE_ROOM}") from error
        raise Unavailable(f"the bundle cannot be stored: {error.description}") from error
    except nats.errors.Error as error:
        raise Unavailable(f"the bundle cannot be stored: {error or type(error).__name__}") from error


async def _purge(bus: Bus, subject: str, below: int | None = None) -> None:
    """Remove all messages of ``subject``, or those with a number below this."""
    try:
        await bus.jetstream.purge_stream(BUNDLE_STREAM, seq=below, subject=subject)
    except nats.errors.Error as error:
        raise Unavailable(f"parts of a bundle could not be removed: {error or type(error).__name__}") from error


async def _info(bus: Bus, digest: str, *, direct: bool = False) -> _Described | None:
    """The bundle's description; ``None`` if there is none. Raises ``Unavailable``."""
    try:
        message = await bus.jetstream.get_last_msg(BUNDLE_STREAM, _meta(digest), direct=direct)
    except nats.js.errors.NotFoundError:
        return None
    except nats.errors.Error as error:
        raise Unavailable(f"bundles cannot be read: {error or type(error).__name__}") from error
    info: dict[str, Any] = json.loads(message.data or b"{}")
    if not info or info.get("deleted"):
        return None
    return _Described(message.seq or 0, str(info["nuid"]), int(info["size"]), int(info["chunks"]))


async def exists(bus: Bus, digest: str) -> bool:
    """Whether a whole bundle of this digest is stored, with all its parts. Raises ``Unavailable``."""
    return await size(bus, digest) is not None


async def size(bus: Bus, digest: str) -> int | None:
    """Bytes of the bundle; ``None`` if there is none, or not with all its parts. Raises ``Unavailable``."""
    before, info = None, await _info(bus, digest)
    while info is not None and info != before:  # else parts are missing, and not since an equal one has replaced it
        if _count(await _state(bus, _chunks(info.nuid)), info.nuid) == info.chunks:
            return info.size
        before, info = info, await _info(bus, digest)
    return None


async def part(bus: Bus, asked: ReadBundle, *, direct: bool = False) -> BundlePart:
    """A part of a bundle, for a node. ``direct``: by direct get alone. Raises ``NotFound``, ``InvalidRequest``,
    ``Unavailable``."""
    nuid, parts = asked.nuid, 0
    if not is_token(asked.digest.removeprefix("sha256:")) or (nuid and not is_token(nuid)):
        raise InvalidRequest("a bundle is named by its digest, and a copy of it by its number")
    if not nuid:
        info = await _info(bus, asked.digest, direct=direct)
        if info is None:
            raise NotFound(f"bundle {asked.digest} is not stored; deploy the function again")
        nuid, parts = info.nuid, info.chunks
        if not parts:
            return BundlePart(nuid=nuid, parts=0, data=b"")
    try:
        message = await bus.jetstream.get_msg(
            BUNDLE_STREAM, asked.after + 1, subject=_chunks(nuid), direct=True, next=True
        )
    except nats.js.errors.NotFoundError:
        return BundlePart(nuid=nuid, parts=parts)
    except nats.errors.Error as error:
        raise Unavailable(f"a bundle cannot be read: {error or type(error).__name__}") from error
    return BundlePart(nuid=nuid, parts=parts, number=message.seq or 0, data=message.data or b"")


async def fetch(ask: Ask, digest: str, nbytes: int, pause: Callable[[float], Awaitable[None]] = asyncio.sleep) -> bytes:
    """The bundle's bytes, ``nbytes`` of them, checked. ``ask`` gives its parts, and is asked again for three seconds
    for what is missing. Raises ``NotFound``, ``DigestMismatch``, ``Unavailable``."""
    for wait_s in (*_PAUSES_S, None):
        try:
            data = await _read(ask, digest, nbytes)
        except NotFound:
            if wait_s is None:
                raise
            data = None
        if data is not None:
            return _checked(data, digest, nbytes)
        if wait_s is not None:
            await pause(wait_s)
    raise Unavailable(f"bundle {digest} changes while it is read; try again")


def _checked(data: bytes, digest: str, nbytes: int) -> bytes:
    found = f"sha256:{hashlib.sha256(data).hexdigest()}"
    if found != digest or len(data) != nbytes:
        raise DigestMismatch(f"the stored bundle has {found} and {len(data)} bytes, not {digest} and {nbytes}")
    return data


async def _read(ask: Ask, digest: str, nbytes: int) -> bytes | None:
    """Several parts are asked for at a time, at first one, and as long as they come soon twice as many: the next after
    each of so many numbers are all that follow the first, none beyond the last, and one twice where another upload's
    lie between: where that is most of them fewer are asked for, as each comes whole."""
    first = await ask(ReadBundle(digest=digest))
    found, at_once, data, new = 0, 1, bytearray(), [first]
    while True:
        if any(part.data is None for part in new):  # not here yet, or replaced by an equal one while it was read
            return None
        data += b"".join(part.data or b"" for part in new)
        found, last = found + len(new), new[-1].number
        if found >= first.parts or len(data) > nbytes:
            return bytes(data)
        began, parts = time.monotonic(), dict[int, BundlePart]()

        async def read(after: int, parts: dict[int, BundlePart] = parts) -> None:
            parts[after] = await ask(ReadBundle(digest=digest, nuid=first.nuid, after=after))

        asked = range(last, last + min(at_once, first.parts - found))
        await each(asked, read, at_once)
        new = list({parts[after].number: parts[after] for after in asked}.values())
        wider = 2 * (at_once if 3 * len(new) >= len(asked) else len(new))
        at_once = min(wider, _AT_ONCE) if time.monotonic() - began < _SOON_S else 1


async def delete(bus: Bus, digest: str, may: Callable[[], bool] = lambda: True) -> None:
    """Remove a bundle; nothing happens if there is none, nor to one that is uploaded meanwhile. ``may`` is asked right
    before each of the two steps; parts that the second leaves are swept. Raises ``Unavailable``."""
    info = await _info(bus, digest)
    if info is None or not may():
        return
    await _purge(bus, _meta(digest), info.number + 1)
    if may():
        await _purge(bus, _chunks(info.nuid))


async def names(bus: Bus) -> frozenset[str]:
    """Digests of all bundles. Raises ``Unavailable``."""
    return frozenset(str(info["name"]) for info in await _all(bus) if not info.get("deleted"))


async def _all(bus: Bus) -> list[dict[str, Any]]:
    try:
        metas = await snapshot(bus, BUNDLE_STREAM, f"$O.{BUNDLES}.M.>")
    except nats.errors.Error as error:
        raise Unavailable(f"bundles cannot be listed: {error or type(error).__name__}") from error
    return [json.loads(data) for data in metas.values()]


async def sweep(bus: Bus, before: dict[str, int]) -> dict[str, int]:
    """Remove what uploads left whose gateway died: parts no bundle names, as many as in ``before`` (the last sweep).

    Returns the parts that no bundle names now, for the next sweep; sweeps should be minutes apart, since an upload
    that goes on looks the same but grows (STILL_S). Raises ``Unavailable``.
    """
    state = await _state(bus, _chunks(">"))
    named = {_chunks(str(bundle.get("nuid"))) for bundle in await _all(bus)}
    unnamed = {subject: count for subject, count in (state.subjects or {}).items() if subject not in named}
    for subject in [subject for subject, count in unnamed.items() if before.get(subject) == count]:
        await _purge(bus, subject)
        del unnamed[subject]
    return unnamed
