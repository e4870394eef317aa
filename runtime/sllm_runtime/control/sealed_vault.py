"""Secrets of a platform whose controllers stand on several machines: records of the state, sealed with a key that
controllers alone have. So whichever of them leads has all, and who else reads the state learns names and sizes."""

from __future__ import annotations

import base64
import binascii
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import msgspec
from nacl.exceptions import CryptoError
from nacl.secret import SecretBox

from sllm_runtime.control.vault import bounded, checked, not_there, room_for
from sllm_runtime.platform.state import StateStore
from sllm_runtime.protocol.ctl import SecretInfo
from sllm_runtime.protocol.errors import InvalidRequest, SecretNotFound, StaleTerm, Unavailable
from sllm_runtime.protocol.records import SecretRecord
from sllm_runtime.protocol.secrets import SEALING_KEY_BYTES, Secrets
from sllm_runtime.protocol.subjects import SECRET_KEYS, secret_key


class _Content(msgspec.Struct, frozen=True, array_like=True):
    """What is sealed: the name too, so that no record can be put in another's place."""

    name: str
    value: bytes


@dataclass(frozen=True, repr=False)
class Keyring:
    """``current`` seals; all of ``boxes`` open, by the names of their keys, so that one key can follow another."""

    current: str
    boxes: dict[str, SecretBox]

    @classmethod
    def read(cls, path: Path) -> Keyring:
        """Of a file with a key in each line (base64), the current one first. Raises ``InvalidRequest``."""
        try:
            keys = [base64.urlsafe_b64decode(line) for line in path.read_text().split()]
        except (OSError, ValueError, binascii.Error) as error:
            raise InvalidRequest(f"SLLM_SECRETS_KEY: {path} cannot be read: {error}") from error
        if not keys or any(len(key) != SEALING_KEY_BYTES for key in keys):
            raise InvalidRequest(
                f"SLLM_SECRETS_KEY: {path} has to have {SEALING_KEY_BYTES} random bytes in base64 in each line; "
                "`python -m sllm_runtime.platform.cluster_keys new DIR` makes controller/secrets-key"
            )
        boxes = {sha256(key).hexdigest()[:8]: SecretBox(key) for key in keys}
        return cls(next(iter(boxes)), boxes)

    def seal(self, name: str, value: bytes, now: float) -> SecretRecord:
        """A record of it, stored at ``now``."""
        sealed = self.boxes[self.current].encrypt(msgspec.msgpack.encode(_Content(name, value)))
        return SecretRecord(name=name, key=self.current, sealed=bytes(sealed), stored=now)

    def open(self, name: str, record: SecretRecord) -> bytes:
        """The value. Raises ``Unavailable`` naming the key, where it cannot be had."""
        box = self.boxes.get(record.key)
        if box is None:
            text = f"secret {name} is sealed with key {record.key}, this controller has {', '.join(self.boxes)}"
            raise Unavailable(f"{text}; add that key to SLLM_SECRETS_KEY, or store the secret again")
        try:
            content = msgspec.msgpack.decode(box.decrypt(record.sealed), type=_Content)
        except (CryptoError, msgspec.MsgspecError) as error:
            text = f"secret {name} is not what was stored: key {record.key} does not open it; store it again"
            raise Unavailable(text) from error
        if content.name != name:
            raise Unavailable(f"secret {name} is not what was stored: it is {content.name}; store it again")
        return content.value


class SealedVault:
    """A ``Vault`` in the state: under the leader's fence, acknowledged by as many servers as the rest of it."""

    def __init__(self, store: StateStore, keys: Keyring, wall: Callable[[], float] = time.time) -> None:
        self._store, self._keys, self._wall = store, keys, wall

    async def put(self, name: str, value: bytes) -> SecretInfo:
        """As ``Vault``."""
        checked(name)
        bounded(value)
        if await self._get(name) is None:
            room_for(len(await self._records()))
            await self._store.require_room()
        record = self._keys.seal(name, value, self._wall())
        try:
            await self._store.put(secret_key(name), record)
        except StaleTerm as error:
            raise Unavailable(f"secret {name} was not stored: another controller leads now; try again") from error
        return _info(record)

    async def names(self) -> tuple[SecretInfo, ...]:
        """As ``Vault``."""
        return tuple(sorted(map(_info, (await self._records()).values()), key=lambda info: info.name))

    async def read(self, names: Iterable[str]) -> Secrets:
        """As ``Vault``."""
        found = {name: await self._get(checked(name)) for name in names}
        missing = [name for name, record in found.items() if record is None]
        if missing:
            raise SecretNotFound(not_there(*missing), field="secrets")
        return Secrets({name: self._keys.open(name, record) for name, record in found.items() if record is not None})

    async def remove(self, name: str) -> None:
        """As ``Vault``."""
        if await self._get(checked(name)) is None:
            raise SecretNotFound(not_there(name))
        try:
            await self._store.delete(secret_key(name))
        except StaleTerm as error:
            raise Unavailable(f"secret {name} was not deleted: another controller leads now; try again") from error

    async def _get(self, name: str) -> SecretRecord | None:
        # Of the stream's leader: a replica that lags would say that there is none.
        return await self._store.get(secret_key(name), SecretRecord, direct=False)

    async def _records(self) -> dict[str, SecretRecord]:
        return await self._store.list(SECRET_KEYS, SecretRecord)


def _info(record: SecretRecord) -> SecretInfo:
    return SecretInfo(name=record.name, stored=record.stored)
