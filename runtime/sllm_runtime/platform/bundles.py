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
from datetime import UTC, datetime
from typing import Any, Final

import nats.errors
import nats.js.errors
from nats.nuid import NUID

from sllm_runtime.platform.bus import Bus
from sllm_runtime.platform.streams import BUNDLE_STREAM, STORE_FAILED
from sllm_runtime.platform.watch import snapshot
from sllm_runtime.protocol.errors import BodyTooLarge, DigestMismatch, InvalidRequest, NotFound, StoreFull, Unavailable
from sllm_runtime.protocol.limits import KIB, MAX_BUNDLE
from sllm_runtime.protocol.node import BundlePart, ReadBundle
from sllm_runtime.protocol.quantities import show_bytes
from sllm_runtime.protocol.subjects import BUNDLES, is_token

Ask = Callable[[ReadBundle], Awaitable[BundlePart]]
"""Gives a part of a bundle: ``part``, or a gateway that a node asks."""
_CHUNK: Final = 256 * KIB
_PAUSES_S: Final = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6)
"""Between questions for what is not there: a replica that lags has it soon."""
_MAKE_ROOM: Final = (
    "delete functions that nobody needs, or old versions with them, or raise SLLM_BUNDLE_BYTES where its disk has room"
)
STILL_S: Final = 60.0
"""An upload that goes on stores something at least this often, however slowly it comes; else its gateway ends it."""


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
    ``limit`` bytes, ``StoreFull`` (also where all bundles have ``most`` bytes; 0: no matter how many),
    ``Unavailable``, or what ``chunks`` raises.
    """
    nuid = bytes(NUID().next()).decode()
    left = most - await _stored(bus) if most else limit
    try:
        total, count = await _write(bus, nuid, digest, chunks, limit, left, clock)
        old = await _info(bus, digest)
        await _publish(bus, _meta(digest), _describe(digest, nuid, total, count), {"Nats-Rollup": "sub"})
    except BaseException:
        await _purge(bus, _chunks(nuid))
        raise
    if old is not None and old.get("nuid"):
        await _purge(bus, _chunks(old["nuid"]))
    return total


async def _write(
    bus: Bus, nuid: str, digest: str, chunks: AsyncIterator[bytes], limit: int, left: int, clock: Callable[[], float]
) -> tuple[int, int]:
    sha, total, count, rest, stored = hashlib.sha256(), 0, 0, bytearray(), clock()
    async for chunk in chunks:
        sha.update(chunk)
        total += len(chunk)
        if total > limit:
            raise BodyTooLarge(f"the bundle is larger than {limit} bytes; leave files out by .sllmignore")
        if total > left:
            raise StoreFull(f"the bundle cannot be stored: {show_bytes(max(left, 0))} are left for it; {_MAKE_ROOM}")
        rest += chunk
        while len(rest) >= _CHUNK or (rest and clock() - stored >= STILL_S / 2):
            await _publish(bus, _chunks(nuid), bytes(rest[:_CHUNK]))
            del rest[:_CHUNK]
            count, stored = count + 1, clock()
    if rest:
        await _publish(bus, _chunks(nuid), bytes(rest))
        count += 1
    found = f"sha256:{sha.hexdigest()}"
    if found != digest:
        raise DigestMismatch(f"the bundle's bytes have {found}, not {digest}; send it again")
    return total, count


async def _stored(bus: Bus) -> int:
    """Bytes that all bundles take."""
    try:
        return (await bus.jetstream.stream_info(BUNDLE_STREAM)).state.bytes
    except nats.errors.Error as error:
        raise Unavailable(f"the bundle cannot be stored: {error or type(error).__name__}") from error


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


async def _publish(bus: Bus, subject: str, data: bytes, headers: dict[str, str] | None = None) -> None:
    try:
        await bus.jetstream.publish(subject, data, headers=headers)
    except nats.js.errors.APIError as error:
        if error.err_code == STORE_FAILED:
            raise StoreFull(f"the bundle cannot be stored: {error.description}; {_MAKE_ROOM}") from error
        raise Unavailable(f"the bundle cannot be stored: {error.description}") from error
    except nats.errors.Error as error:
        raise Unavailable(f"the bundle cannot be stored: {error or type(error).__name__}") from error


async def _purge(bus: Bus, subject: str) -> None:
    try:
        await bus.jetstream.purge_stream(BUNDLE_STREAM, subject=subject)
    except nats.errors.Error as error:
        raise Unavailable(f"parts of a bundle could not be removed: {error or type(error).__name__}") from error


async def _info(bus: Bus, digest: str, *, direct: bool = False) -> dict[str, Any] | None:
    """The bundle's description; ``None`` if there is none. Raises ``Unavailable``."""
    try:
        message = await bus.jetstream.get_last_msg(BUNDLE_STREAM, _meta(digest), direct=direct)
    except nats.js.errors.NotFoundError:
        return None
    except nats.errors.Error as error:
        raise Unavailable(f"bundles cannot be read: {error or type(error).__name__}") from error
    info: dict[str, Any] = json.loads(message.data or b"{}")
    return None if info.get("deleted") else info


async def exists(bus: Bus, digest: str) -> bool:
    """Whether a whole bundle of this digest is stored. Raises ``Unavailable``."""
    return await _info(bus, digest) is not None


async def size(bus: Bus, digest: str) -> int | None:
    """Bytes of the bundle; ``None`` if there is none. Raises ``Unavailable``."""
    info = await _info(bus, digest)
    return None if info is None else int(info["size"])


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
        nuid, parts = str(info["nuid"]), int(info["chunks"])
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
    first = latest = await ask(ReadBundle(digest=digest))
    data = bytearray()
    for number in range(max(first.parts, 1)):
        if number:
            latest = await ask(ReadBundle(digest=digest, nuid=first.nuid, after=latest.number))
        if latest.data is None:  # not here yet, or replaced by an equal one while it was read
            return None
        data += latest.data
        if len(data) > nbytes:
            break
    return bytes(data)


async def delete(bus: Bus, digest: str) -> None:
    """Remove a bundle; nothing happens if there is none. Raises ``Unavailable``."""
    info = await _info(bus, digest)
    if info is not None:
        await _purge(bus, _meta(digest))
        await _purge(bus, _chunks(str(info["nuid"])))


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
    prefix = f"$O.{BUNDLES}.C."
    try:
        info = await bus.jetstream.stream_info(BUNDLE_STREAM, subjects_filter=prefix + ">")
    except nats.errors.Error as error:
        raise Unavailable(f"bundles cannot be listed: {error or type(error).__name__}") from error
    named = {prefix + str(bundle.get("nuid")) for bundle in await _all(bus)}
    unnamed = {subject: count for subject, count in (info.state.subjects or {}).items() if subject not in named}
    for subject in [subject for subject, count in unnamed.items() if before.get(subject) == count]:
        await _purge(bus, subject)
        del unnamed[subject]
    return unnamed
