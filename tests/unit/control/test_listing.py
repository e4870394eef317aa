"""Lists of any length: pages on the bus, whole on HTTP."""

from collections.abc import Iterator
from dataclasses import replace

import httpx
import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from sllm_gateway.app import running
from sllm_gateway.settings import GatewaySettings
from sllm_invoker.report import fitted
from sllm_runtime.control import listing, registry
from sllm_runtime.control.view import Node, View
from sllm_runtime.protocol import codec, ctl
from sllm_runtime.protocol.http import API
from sllm_runtime.protocol.limits import MAX_MESSAGE
from sllm_runtime.protocol.manifest import Manifest
from sllm_runtime.protocol.node import NodeRecord
from sllm_runtime.protocol.records import FunctionRecord, ModelRecord, VersionRecord
from sllm_runtime.protocol.states import VersionState
from tests.fixtures.nats import GATEWAY, Nats
from tests.unit.control.bench import controller_of
from tests.unit.control.world import FakeNode, manifest, version

MANY = 1000


def many_functions(count: int, description: str = "") -> View:
    """``count`` functions with a retired and an active version each (of which a list shows the active one)."""
    functions, versions = {}, {}
    for number in range(count):
        described = manifest(f"f{number}", description=description)
        name = described.name
        functions[name] = FunctionRecord(function=name, active=2, last_version=2, previous=(1,))
        versions[name, 1] = msgspec.structs.replace(version(described, 1), state=VersionState.RETIRED)
        versions[name, 2] = msgspec.structs.replace(version(described, 2), state=VersionState.ACTIVE)
    return View(functions=functions, versions=versions)


def large_manifest(name: str, nbytes: int) -> Manifest:
    schema = {"type": "object", "description": "x" * nbytes}
    handler = {"entry": "app:f", "kind": "function", "streams": False, "input_schema": schema}
    return Manifest.model_validate({"name": name, "handler": handler})


async def test_a_thousand_functions_and_the_history_of_large_versions(nats: Nats) -> None:
    """The real controller and a real gateway: everything is there, in messages that are no larger than they may be."""
    view = many_functions(MANY, "d" * 1500)
    wide = large_manifest("wide", 200_000)
    numbers = range(1, registry.KEEP_RETIRED + 2)
    history = {("wide", n): msgspec.structs.replace(version(wide, n), state=VersionState.RETIRED) for n in numbers}
    wide_record = FunctionRecord(function="wide", active=None, last_version=numbers[-1])
    async with controller_of(nats) as controller:
        # Not through ``change``: what is listed is read from the view, and need not be stored for that.
        controller.loop.view = replace(
            view, functions={**view.functions, "wide": wide_record}, versions={**view.versions, **history}
        )
        gateway_settings = GatewaySettings.load(nats.env(GATEWAY), gateway=GATEWAY)
        async with running(await nats.bus(GATEWAY), gateway_settings) as gateway:
            transport = httpx.ASGITransport(gateway)
            async with httpx.AsyncClient(transport=transport, base_url="http://g", verify=False) as http:
                found = (await http.get(f"{API}/functions")).json()["functions"]
                one = (await http.get(f"{API}/functions/wide")).json()
    assert [each["name"] for each in found] == sorted([*view.functions, "wide"])
    assert all(len(each["versions"]) == 1 and each["active"] == 2 for each in found if each["name"] != "wide")
    assert [each["version"] for each in one["versions"]] == list(numbers)


def pages(view: View, name: str | None) -> list[ctl.FunctionInfo]:
    """All pages as a gateway asks for them, each checked to fit a message."""
    pieces: list[ctl.FunctionInfo] = []
    after = ""
    while True:
        page = listing.functions(view, after) if name is None else listing.function(view, name, after)
        assert len(codec.pack(page)) < MAX_MESSAGE
        pieces += page.functions if isinstance(page, ctl.FunctionList) else [page]
        if not page.next:
            return pieces
        assert page.next > after
        after = page.next


@given(sizes=st.lists(st.lists(st.sampled_from([10, 60_000, 250_000]), min_size=1, max_size=4), max_size=5))
@settings(max_examples=30, deadline=None)
def test_nothing_is_lost_or_repeated_over_pages(sizes: list[list[int]]) -> None:
    """Names that are beginnings of each other, manifests up to the largest."""
    names = ["a", "a-", "a-1", "a1", "ab"]
    functions: dict[str, FunctionRecord] = {}
    versions: dict[tuple[str, int], VersionRecord] = {}
    for name, of_versions in zip(names, sizes, strict=False):
        functions[name] = FunctionRecord(function=name, active=None, last_version=len(of_versions))
        for number, nbytes in enumerate(of_versions, 1):
            versions[name, number] = version(large_manifest(name, nbytes), number)
    view = View(functions=functions, versions=versions)
    listed = ctl.joined(pages(view, None))
    assert [info.record.function for info in listed] == sorted(functions)
    assert [len(info.versions) for info in listed] == [1] * len(functions)  # none is active: the newest
    for name in functions:
        (info,) = ctl.joined(pages(view, name))
        assert info.versions == view.versions_of(name)


class Looked(tuple[str, ...]):
    """What a node has, and how often that was looked at."""

    times = 0

    def __contains__(self, digest: object) -> bool:
        Looked.times += 1
        return super().__contains__(digest)

    def __iter__(self) -> Iterator[str]:
        Looked.times += 1
        return super().__iter__()


def test_what_nodes_have_is_gone_through_once_a_page_however_many_models_there_are() -> None:
    digests = [f"sha256:{number:064}" for number in range(2 * MANY)]
    records = {each: ModelRecord(digest=each, uri="/m", nbytes=1, partitions=(1,), created=1.0) for each in digests}
    node = FakeNode("n1", 1.0, 0).report()
    status = msgspec.structs.replace(node, models=Looked(digests[::2]), resident=tuple(digests[:2]))
    uses = msgspec.structs.replace(version(manifest("chat")), model=digests[0], adapters={"fr": digests[3]})
    view = View(models=records, nodes={"n1": Node(NodeRecord(node="n1"), status)}, versions={("chat", 1): uses})
    found, after, asked = list[ctl.ModelInfo](), "", 0
    while after or not asked:
        page = listing.models(view, after)
        found, after, asked = [*found, *page.models], page.next, asked + 1
    assert [each.record.digest for each in found] == digests
    assert [len(each.nodes) for each in found] == [1, 1] + [1, 0] * (MANY - 1)
    assert {each.record.digest: each.used_by for each in found if each.used_by} == {
        digests[0]: ("chat:v1",), digests[3]: ("chat:v1",)
    }  # fmt: skip
    assert 1 < asked < 10
    assert Looked.times <= asked


def test_a_node_that_has_filled_its_report_is_listed() -> None:
    """And with it all others."""
    models = tuple(f"sha256:{number:064}" for number in range(9 * MANY))
    full = fitted(msgspec.structs.replace(FakeNode("n2", 1.0, 0).report(), models=models))
    assert full.untold
    reports = {"n1": FakeNode("n1", 1.0, 0).report(), "n2": full, "n3": FakeNode("n3", 1.0, 0).report()}
    view = View(nodes={name: Node(NodeRecord(node=name), status) for name, status in reports.items()})
    found, after = list[str](), ""
    while after or not found:
        page = listing.nodes(view, after, 0.0)
        assert len(codec.pack(ctl.Reply(value=msgspec.Raw(codec.pack(page))))) <= MAX_MESSAGE
        found, after = [*found, *(each.record.node for each in page.nodes)], page.next
    assert found == ["n1", "n2", "n3"]
