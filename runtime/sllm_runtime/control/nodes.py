"""Commands to nodes. Each carries the term; each is idempotent, and only the node's report says what it did."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final

import msgspec

from sllm_runtime.control.vault import Vault
from sllm_runtime.control.view import Instance
from sllm_runtime.platform.bus import Bus
from sllm_runtime.platform.state import StateStore
from sllm_runtime.protocol.errors import SecretNotFound, StartFailed, Unavailable
from sllm_runtime.protocol.limits import LONG_POLL_S, MAX_MESSAGE, RPC_TIMEOUT_S
from sllm_runtime.protocol.node import (
    KeepModels,
    ModelCommand,
    Ok,
    PrepareModel,
    PrepareReply,
    PullModel,
    StartInstance,
    StopInstance,
)
from sllm_runtime.protocol.records import ModelRecord, Term, VersionRecord
from sllm_runtime.protocol.secrets import Secrets
from sllm_runtime.protocol.subjects import TERM_KEY, node_command
from sllm_runtime.protocol.timeline import SANDBOX

COMMAND_S: Final = 2.0
SOURCES_BYTES: Final = MAX_MESSAGE // 4
"""Of all adapters of a start."""
VALIDATE_S: Final = 45.0
"""Longest wait for a check of all of a model's bytes; it goes on in the node and is asked for again."""


class Nodes:
    """The nodes, as far as they can be commanded. Errors are what the node raised, or ``Unavailable``,
    ``DeadlineExceeded``."""

    def __init__(self, bus: Bus, store: StateStore, term: int, vault: Vault) -> None:
        self._bus, self._store, self._term, self._vault = bus, store, term, vault

    async def start(
        self,
        instance: Instance,
        version: VersionRecord,
        model: ModelRecord | None,
        adapters: Mapping[str, ModelRecord],
        secrets: Secrets,
        proofs: tuple[str, ...] = (),
    ) -> None:
        """Begin ``instance``; ``proofs`` are of others of its version. Raises what the node answers: ``NoCapacity``,
        ``StaleTerm`` …"""
        command = StartInstance(
            term=self._term,
            instance=instance.record.instance,
            function=version.function,
            version=version.version,
            manifest=version.manifest,
            bundle=version.bundle,
            bundle_bytes=version.bundle_bytes,
            model=model,
            adapters=_lean(adapters),
            gpus=instance.gpus,
            secrets=secrets,
            content=version.content,
            proofs=proofs,
        )
        await self._bus.call(node_command(instance.record.node, "start"), command, Ok, timeout_s=COMMAND_S)

    async def secrets(self, version: VersionRecord) -> Secrets:
        """What its instances are started with. Raises ``StartFailed`` where one is gone; ``Unavailable``."""
        try:
            async with asyncio.timeout(RPC_TIMEOUT_S):
                return await self._vault.read(version.manifest.secrets)
        except SecretNotFound as error:
            raise StartFailed(error.message, field=error.field, stage=SANDBOX) from error
        except TimeoutError as error:  # its node is not to blame, which was asked for nothing
            text = f"secrets cannot be read: no answer within {RPC_TIMEOUT_S:g} s"
            raise Unavailable(text) from error

    async def stop(self, node: str, instance: str, reason: str, grace_s: float, *, resume: bool = False) -> None:
        """End an instance after its running calls, at most ``grace_s`` seconds from now. ``resume``: what still runs
        then may go on elsewhere."""
        command = StopInstance(term=self._term, instance=instance, reason=reason, grace_s=grace_s, resume=resume)
        await self._bus.call(node_command(node, "stop"), command, Ok, timeout_s=COMMAND_S)

    async def prepare(self, node: str, uri: str, digest: str | None = None) -> PrepareReply:
        """One long poll for a model on the node's SSD."""
        command = PrepareModel(term=self._term, uri=uri, digest=digest, wait_s=LONG_POLL_S)
        timeout = LONG_POLL_S + RPC_TIMEOUT_S
        return await self._bus.call(node_command(node, "prepare"), command, PrepareReply, timeout_s=timeout)

    async def pull(self, node: str, model: ModelRecord) -> PrepareReply:
        """One long poll for all of a model on the node's disk."""
        command = PullModel(term=self._term, model=model, wait_s=LONG_POLL_S)
        timeout = LONG_POLL_S + RPC_TIMEOUT_S
        return await self._bus.call(node_command(node, "pull"), command, PrepareReply, timeout_s=timeout)

    async def keep(self, node: str, models: tuple[str, ...]) -> None:
        """The models that are to lie on the node's SSD."""
        command = KeepModels(term=self._term, models=models)
        await self._bus.call(node_command(node, "keep"), command, Ok, timeout_s=COMMAND_S)

    async def model(self, node: str, verb: str, digest: str) -> str:
        """``validate`` or ``delete`` a model there; the node's note."""
        command = ModelCommand(term=self._term, verb=verb, digest=digest, wait_s=VALIDATE_S)
        timeout = VALIDATE_S + RPC_TIMEOUT_S
        return (await self._bus.call(node_command(node, "model"), command, Ok, timeout_s=timeout)).note

    async def deposed(self) -> bool:
        """Whether another controller has been elected since."""
        term = await self._store.get(TERM_KEY, Term, direct=False)
        return term is not None and term.term != self._term


def _lean(adapters: Mapping[str, ModelRecord]) -> dict[str, ModelRecord]:
    """``adapters`` with as many sources each, the newest ones, as one message takes; where each was registered first
    stays."""
    most = max((len(each.sources) for each in adapters.values()), default=0)
    while most:
        kept = (place for each in adapters.values() for place in each.sources[-most:])
        if sum(len(place.encode()) for place in kept) <= SOURCES_BYTES:
            break
        most -= 1
    return {
        name: msgspec.structs.replace(each, sources=each.sources[max(len(each.sources) - most, 0) :])
        for name, each in adapters.items()
    }
