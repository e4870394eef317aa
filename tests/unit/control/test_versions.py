"""Versions and routes as pure changes of the view, and the view that a new controller makes of the store."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sllm_runtime.control import registry, restore
from sllm_runtime.control.changes import Write, writes
from sllm_runtime.control.instances import path
from sllm_runtime.control.view import View
from sllm_runtime.protocol.errors import Conflict
from sllm_runtime.protocol.records import (
    FunctionRecord,
    InstanceRecord,
    LearnedRecord,
    PoolRecord,
    Popularity,
    ProofsRecord,
    Route,
    RouteEntry,
    VersionRecord,
)
from sllm_runtime.protocol.states import INSTANCE, InstanceState, VersionState, check, final
from tests.unit.control.world import ERROR, deployed, manifest, version

CHAT = manifest("chat")


def three_versions() -> View:
    view = View()
    for number in (1, 2, 3):
        view = deployed(view, CHAT, number)
    return view


def test_rollback_goes_back_one_by_one() -> None:
    view = registry.rollback(three_versions(), "chat", None)
    assert view.functions["chat"].active == 2
    view = registry.rollback(view, "chat", None)
    assert view.functions["chat"].active == 1
    with pytest.raises(Conflict, match="no version to go back to"):
        registry.rollback(view, "chat", None)


def test_rollback_to_a_number_and_forth_again() -> None:
    view = registry.rollback(three_versions(), "chat", 1)
    assert view.versions["chat", 1].state is VersionState.ACTIVE
    assert view.versions["chat", 3].state is VersionState.RETIRED
    view = registry.rollback(view, "chat", 3)
    assert view.functions["chat"].active == 3
    assert [v.state for v in view.versions_of("chat")].count(VersionState.ACTIVE) == 1


def test_failed_versions_do_not_pile_up() -> None:
    view = deployed(View(), CHAT, 1)
    for number in range(2, 20):
        view = registry.create(view, version(CHAT, number), None)
        view = registry.discard(view, ("chat", number), ERROR)
    assert len(view.versions) <= 2 + registry.KEEP_FAILED
    assert view.versions["chat", 19].error == ERROR
    assert registry.unreachable(view, ["sha256:b", "sha256:x"]) == ["sha256:x"]


def test_the_last_five_that_failed_are_kept_and_no_more() -> None:
    """As docs/control.md says, at any time: not one more until the next deployment comes."""
    view = deployed(View(), CHAT, 1)
    for number in range(2, 12):
        view = registry.create(view, version(CHAT, number), None)
        view = registry.discard(view, ("chat", number), ERROR)
        failed = [each.version for each in view.versions_of("chat") if each.state is VersionState.FAILED]
        assert failed == list(range(max(2, number - 4), number + 1))
    view = registry.create(view, version(CHAT, 12), None)
    view = registry.withdraw(view, ("chat", 12), ERROR)
    assert [each.version for each in view.versions_of("chat")] == [1, *range(7, 12)], "called back it takes no place"


def test_old_versions_are_forgotten_but_never_the_active_one() -> None:
    view = View()
    for number in range(1, registry.KEEP_RETIRED + 10):
        view = registry.prune(deployed(view, CHAT, number), "chat")
    assert len(view.versions) == registry.KEEP_RETIRED + 1
    view = registry.rollback(view, "chat", min(number for _, number in view.versions))
    oldest = view.functions["chat"].active
    view = registry.prune(view, "chat")
    assert oldest is not None
    assert ("chat", oldest) in view.versions


def test_content_depends_on_all_of_it() -> None:
    one = registry.content(CHAT, "sha256:b", None)
    assert one == registry.content(manifest("chat"), "sha256:b", None)
    others = {
        registry.content(CHAT, "sha256:c", None),
        registry.content(CHAT, "sha256:b", "sha256:m"),
        registry.content(CHAT, "sha256:b", None, {"fr": "sha256:m"}),
        registry.content(manifest("chat", keep_alive=1), "sha256:b", None),
    }
    assert len({one, *others}) == 5


def stored(*versions: VersionRecord, active: int | None, deleting: bool = False) -> restore.Stored:
    name = "chat"
    function = FunctionRecord(function=name, active=active, last_version=len(versions), deleting=deleting)
    entry = RouteEntry(instance="i1", node="n1", version=1, concurrency=1)
    route = Route(function=name, version=1, manifest=CHAT, active=True, entries=(entry,))
    instance = InstanceRecord(
        instance="i1", function=name, version=1, node="n1", state=InstanceState.READY, fingerprint="fp"
    )
    lost = msgspec.structs.replace(instance, instance="i9", version=9)
    return restore.Stored(
        functions={name: function},
        versions={f"{name}.{v.version}": v for v in versions},
        models={},
        nodes={},
        instances={"instances.i1": instance, "instances.i9": lost},
        routes={"routes.chat.1": route},
        learned=LearnedRecord(),
        proofs={
            f"proofs.{name}.{number}": ProofsRecord(function=name, version=number, proofs=("p",)) for number in (1, 9)
        },
        popularity=Popularity(),
        pool=PoolRecord(),
    )


def test_a_route_that_was_not_written_to_the_end_is_made_whole() -> None:
    """The function's record is the commit: what it names is active, whatever the versions say."""
    old = msgspec.structs.replace(version(CHAT, 1), state=VersionState.ACTIVE)
    new = version(CHAT, 2)
    records = stored(old, new, active=2)
    before = restore.as_stored(records, 0.0)
    view = restore.repaired(before)
    assert view.versions["chat", 1].state is VersionState.RETIRED
    assert view.versions["chat", 2].state is VersionState.ACTIVE
    assert {write.key for write in writes(before, view, {}, {}) if write.record is not None} == {
        "versions.chat.1",
        "versions.chat.2",
    }
    assert [write for write in writes(before, view, {}, {}) if write.record is None] == [Write("proofs.chat.9", None)]
    assert view.learned.proofs == {("chat", 1): ("p",)}, "there is no ninth version"
    assert view.instances["i1"].ready
    assert view.instances["i1"].record.fingerprint == "fp"
    assert [write.key for write in restore.unreferenced(records, view)] == ["instances.i9"]


def test_a_first_deployment_that_was_broken_off_is_forgotten() -> None:
    view = restore.repaired(restore.as_stored(stored(version(CHAT, 1), active=None), 0.0))
    assert view.functions == {}
    assert view.versions == {}
    assert view.instances == {}


def test_a_deletion_that_was_broken_off_goes_on() -> None:
    record = msgspec.structs.replace(version(CHAT, 1), state=VersionState.ACTIVE)
    view = restore.repaired(restore.as_stored(stored(record, active=1, deleting=True), 0.0))
    assert view.functions["chat"].deleting
    assert "i1" in view.instances


@given(old=st.sampled_from(InstanceState), new=st.sampled_from(InstanceState))
def test_every_reported_state_is_reached_by_allowed_steps_or_not_at_all(old: InstanceState, new: InstanceState) -> None:
    state = old
    for step in path(old, new):
        state = check(INSTANCE, state, step)
    if final(INSTANCE, new) and not final(INSTANCE, old):
        assert final(INSTANCE, state), "an end is never ignored"
    elif state != old:
        assert state == new


def test_what_had_the_route_until_a_deployment_can_be_gone_back_to() -> None:
    """Also where it is the oldest of all: somebody had gone back to it."""
    view = View()
    for number in range(1, registry.KEEP_RETIRED + 2):
        view = registry.prune(deployed(view, CHAT, number), "chat")
    view = registry.rollback(view, "chat", 1)
    view = registry.prune(deployed(view, CHAT, registry.KEEP_RETIRED + 2), "chat")
    assert registry.rollback(view, "chat", None).functions["chat"].active == 1
