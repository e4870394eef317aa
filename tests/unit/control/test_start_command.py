"""What a node is told of a start fits one message, however often its adapters were registered from elsewhere."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from sllm_runtime.control import registry
from sllm_runtime.control.nodes import Nodes
from sllm_runtime.control.view import Instance, View
from sllm_runtime.platform.outbox import encode
from sllm_runtime.protocol.node import Ok, StartInstance
from sllm_runtime.protocol.records import ModelRecord
from sllm_runtime.protocol.secrets import Secrets
from tests.unit.control.world import manifest, version

ADAPTERS, RELEASES = 256, 20


def place(number: int, release: int) -> str:
    return f"s3://models/{'team/' * 12}release-{release:06}/adapters/customer-{number:06}"


async def test_adapters_with_many_sources_fit_the_command() -> None:
    """Each release of a pipeline puts the same adapters at a place of its own."""
    sent = list[StartInstance]()

    class Bus:
        async def call(self, subject: str, command: StartInstance, _reply: type, *, timeout_s: float) -> Ok:
            encode(command, subject)
            sent.append(command)
            return Ok()

    class Vault:
        async def read(self, _names: object) -> Secrets:
            return Secrets()

    digests = {f"customer-{number:06}": f"sha256:{number:064x}" for number in range(ADAPTERS)}
    view = View()
    for release in range(RELEASES):
        for number, digest in enumerate(digests.values()):
            uri = place(number, release)
            found = ModelRecord(digest=digest, uri=uri, nbytes=9, partitions=(9,), sources=(uri,), adapter="org/base")
            view = registry.know(view, found)
    last = {name: place(number, RELEASES - 1) for number, name in enumerate(digests)}
    made = version(manifest("chat", model="/base", engine=True, adapters=last))
    records = {name: view.models[digest] for name, digest in digests.items()}
    instance = cast(Instance, SimpleNamespace(record=SimpleNamespace(instance="i", node="n"), gpus=()))
    nodes = Nodes(cast(Any, Bus()), cast(Any, None), 1, cast(Any, Vault()))
    await nodes.start(instance, made, None, records, await nodes.secrets(made))
    (command,) = sent
    for number, adapter in enumerate(command.adapters.values()):
        assert adapter.sources[-1] == place(number, RELEASES - 1), "the newest places stay"
