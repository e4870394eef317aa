"""Secrets of controllers on several machines: in the state, where others read of them no more than their names."""

import base64
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from sllm_runtime.control.daemon import ControllerSettings
from sllm_runtime.control.sealed_vault import Keyring, SealedVault
from sllm_runtime.control.vault import DirectoryVault
from sllm_runtime.platform.state import StateStore
from sllm_runtime.protocol.errors import Conflict, InvalidArgument, InvalidRequest, SecretNotFound, Unavailable
from sllm_runtime.protocol.records import SecretRecord
from sllm_runtime.protocol.secrets import MAX_SECRET, MAX_STORED, SEALING_KEY_BYTES
from sllm_runtime.protocol.subjects import secret_key
from tests.fixtures.nats import CONTROLLER, CONTROLLER_2, GATEWAY, Nats

VALUE = b"hunter2 \xff\0"
OLD, NEW = (base64.urlsafe_b64encode(bytes([fill]) * SEALING_KEY_BYTES).decode() for fill in (1, 2))


def keyring(directory: Path, *keys: str) -> Keyring:
    (directory / "key").write_text("".join(f"{key}\n" for key in keys))
    return Keyring.read(directory / "key")


@pytest.fixture
async def store(nats: Nats) -> AsyncIterator[StateStore]:
    store = await nats.store()
    await store.elect(CONTROLLER)
    yield store
    await store.close()


async def test_who_leads_next_has_them(nats: Nats, store: StateStore, tmp_path: Path) -> None:
    first = SealedVault(store, keyring(tmp_path, OLD), wall=lambda: 7.0)
    assert await first.names() == ()
    await first.put("token", b"before")
    assert (await first.put("token", VALUE)).stored == 7.0
    await first.put("a-b_C9", b"x")

    other = await nats.store(CONTROLLER_2)
    await other.elect(CONTROLLER_2)
    second = SealedVault(other, keyring(tmp_path, OLD))
    assert [each.name for each in await second.names()] == ["a-b_C9", "token"]
    assert (await second.read(("token", "a-b_C9"))).values == {"token": VALUE, "a-b_C9": b"x"}
    with pytest.raises(Unavailable, match="token was not stored: another controller leads now"):
        await first.put("token", b"of a deposed one")
    with pytest.raises(Unavailable, match="token was not deleted: another controller leads now"):
        await first.remove("token")
    await second.remove("token")
    with pytest.raises(SecretNotFound, match="no secret token; `sllm secret set token`"):
        await second.remove("token")
    with pytest.raises(SecretNotFound, match="no secrets token, c;"):
        await second.read(("token", "a-b_C9", "c"))
    await other.close()


async def test_who_else_reads_the_state_reads_no_value(nats: Nats, store: StateStore, tmp_path: Path) -> None:
    vault = SealedVault(store, keyring(tmp_path, OLD))
    await vault.put("one", VALUE)
    gateway = await StateStore.open(await nats.bus(GATEWAY), create=False)
    first = await gateway.get(secret_key("one"), SecretRecord)
    assert first is not None
    assert VALUE not in msgspec.json.encode(first) + first.sealed
    await vault.put("one", VALUE)
    second = await gateway.get(secret_key("one"), SecretRecord)
    assert second is not None
    assert second.sealed != first.sealed, "nor whether it is the same"


@pytest.mark.parametrize("name", ["", "..", "a/b", "a.b", "*", ">", "9", "a" * 64, "ä"])
async def test_what_is_no_name_is_no_key(store: StateStore, tmp_path: Path, name: str) -> None:
    vault = SealedVault(store, keyring(tmp_path, OLD))
    for asked in (vault.put(name, b"x"), vault.read((name,)), vault.remove(name)):
        with pytest.raises(InvalidArgument, match="no secret's name"):
            await asked


async def test_they_are_bounded(store: StateStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vault = SealedVault(store, keyring(tmp_path, OLD))
    for value in (b"", b"x" * (MAX_SECRET + 1)):
        with pytest.raises(InvalidArgument, match="a secret has 1 byte to 16"):
            await vault.put("token", value)
    largest = bytes(range(256)) * (MAX_SECRET // 256)
    await vault.put("token", largest)
    assert (await vault.read(("token",))).values == {"token": largest}
    monkeypatch.setattr("sllm_runtime.control.vault.MAX_STORED", 1)
    await vault.put("token", b"in place of another")
    with pytest.raises(Conflict, match="there are 1 secrets already"):
        await vault.put("another", b"x")
    assert MAX_STORED > 1


async def test_one_key_follows_another(store: StateStore, tmp_path: Path) -> None:
    await SealedVault(store, keyring(tmp_path, OLD)).put("token", VALUE)
    both = SealedVault(store, keyring(tmp_path, NEW, OLD))
    assert (await both.read(("token",))).values == {"token": VALUE}
    with pytest.raises(Unavailable, match=r"sealed with key \w{8}, this controller has \w{8}; add that key"):
        await SealedVault(store, keyring(tmp_path, NEW)).read(("token",))
    await both.put("token", VALUE)
    assert (await SealedVault(store, keyring(tmp_path, NEW)).read(("token",))).values == {"token": VALUE}


async def test_a_record_that_somebody_changed_is_refused(store: StateStore, tmp_path: Path) -> None:
    keys = keyring(tmp_path, OLD)
    vault = SealedVault(store, keys)
    other = keys.seal("other", VALUE, 1.0)
    await store.put(secret_key("token"), msgspec.structs.replace(other, name="token"))
    with pytest.raises(Unavailable, match="secret token is not what was stored: it is other"):
        await vault.read(("token",))
    changed = bytes([other.sealed[-1] ^ 1])
    await store.put(secret_key("other"), msgspec.structs.replace(other, sealed=other.sealed[:-1] + changed))
    with pytest.raises(Unavailable, match="secret other is not what was stored: key"):
        await vault.read(("other",))


@pytest.mark.parametrize("text", ["", "c2hvcnQ=\n", f"{OLD}\nc2hvcnQ=\n", "é\n", "===\n"])
async def test_a_key_that_is_none_is_told_at_the_start(store: StateStore, tmp_path: Path, text: str) -> None:
    (tmp_path / "key").write_text(text)
    settings = ControllerSettings.load({"SLLM_SECRETS_KEY": str(tmp_path / "key")})
    with pytest.raises(InvalidRequest, match="SLLM_SECRETS_KEY"):
        settings.vault(store)


async def test_without_a_key_they_are_files(store: StateStore, tmp_path: Path) -> None:
    assert isinstance(ControllerSettings.load({"SLLM_SECRETS": str(tmp_path)}).vault(store), DirectoryVault)
    (tmp_path / "key").write_text(OLD)
    assert isinstance(ControllerSettings.load({"SLLM_SECRETS_KEY": str(tmp_path / "key")}).vault(store), SealedVault)
