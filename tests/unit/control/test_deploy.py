"""Deployments: a version takes the route once it has started, and a failure leaves nothing half done."""

import asyncio
import hashlib
from typing import Any

import msgspec
import pytest

from sllm_runtime.platform import bundles
from sllm_runtime.protocol import ctl, subjects
from sllm_runtime.protocol.errors import (
    Conflict,
    ErrorBody,
    InvalidBundle,
    PythonMismatch,
    SllmError,
    StaleTerm,
    StartFailed,
    Unsatisfiable,
    UnsupportedModel,
    VersionNotFound,
)
from sllm_runtime.protocol.records import FunctionRecord, InstanceRecord, Route, VersionRecord
from sllm_runtime.protocol.states import InstanceState, VersionState
from tests.fixtures.waiting import until
from tests.unit.control.bench import Bench, has_events, manifest, stored_events
from tests.unit.control.scripted_node import digest_of


async def test_a_deployed_function_has_a_route_and_an_instance(bench: Bench) -> None:
    deployed = await bench.gateway.deploy(manifest(model="/models/tiny"))

    assert deployed.version is not None
    assert deployed.version.state is VersionState.ACTIVE
    assert deployed.version.model == digest_of("/models/tiny")
    (start,) = {command.instance: command for command in bench.node.starts}.values()
    assert start.model is not None
    assert start.model.digest == deployed.version.model
    acquired = await bench.gateway.acquire()
    assert acquired.route is not None
    (entry,) = acquired.route.entries
    assert (entry.instance, entry.node, entry.fingerprint) == (start.instance, "n1", "cpu")
    assert [span.name for span in entry.spans] == ["sandbox", "weights"]
    route = await bench.stored(subjects.route_key("chat", 1), Route)
    assert route.active
    assert route.manifest == manifest(model="/models/tiny")
    instance = await bench.stored(subjects.instance_key(start.instance), InstanceRecord)
    assert instance.state is InstanceState.READY
    assert (instance.fingerprint, instance.capabilities) == ("cpu", ("engine:cpu",))


@pytest.mark.parametrize("leads", [True, False])
async def test_who_is_not_sure_to_lead_removes_no_bundle(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, leads: bool
) -> None:
    """It was stopped while a deployment or a deletion went on: the next leader may have a version with that bundle."""
    loop, gateway = bench.controller.loop, bench.gateway
    await gateway.deploy(manifest("old", keep_alive=0), b"of the old one")
    (name,) = bench.live()
    bench.node.put(name, InstanceState.READY, idle_s=100.0)
    await bench.none_left()
    (old,) = (record.bundle for record in loop.view.versions.values())
    new = await gateway.upload(b"of the new one")
    bench.node.problem = StaleTerm("term 1 is over")
    monkeypatch.setattr(loop, "_may_act", lambda: leads)
    with pytest.raises(StaleTerm):
        await gateway.deploy(manifest(model="/models/tiny"), b"of the new one")
    assert (await gateway.ask("delete", ctl.Delete(function="old"))).note == "deleted"
    assert [await bundles.exists(gateway.bus, bundle) for bundle in (old, new)] == [not leads] * 2


async def test_the_same_content_makes_no_new_version(bench: Bench) -> None:
    await bench.gateway.deploy(manifest())
    again = await bench.gateway.deploy(manifest())

    assert again.unchanged
    assert again.version is not None
    assert again.version.version == 1


async def test_a_new_version_takes_the_route_after_it_started_and_an_equal_old_one_at_once(bench: Bench) -> None:
    await bench.gateway.deploy(manifest())
    second = await bench.gateway.deploy(manifest(), b"other")

    assert second.version is not None
    assert second.version.version == 2
    assert not (await bench.stored(subjects.route_key("chat", 1), Route)).active
    assert (await bench.stored(subjects.route_key("chat", 2), Route)).active
    assert (await bench.stored(subjects.version_key("chat", 1), VersionRecord)).state is VersionState.RETIRED
    starts = len(bench.node.starts)
    back = await bench.gateway.deploy(manifest())
    assert back.unchanged
    assert back.version is not None
    assert back.version.version == 1
    assert (await bench.stored(subjects.function_key("chat"), FunctionRecord)).active == 1
    assert len(bench.node.starts) == starts


async def _replaced(bench: Bench) -> None:
    """Version 1 has given its route to version 2, and holds no instance any more."""
    await bench.gateway.deploy(manifest())
    (first,) = bench.live()
    await bench.gateway.deploy(manifest(), b"other")
    bench.node.put(first, InstanceState.STOPPED)
    await until(lambda: bench.live() and first not in bench.live(), what="the old instance is gone")


async def test_an_equal_old_one_that_holds_no_instance_takes_the_route_once_one_has_started(bench: Bench) -> None:
    """Who has a commit reverted deploys what was there before: no caller waits for that start, as for any other."""
    await _replaced(bench)
    starts, loop = len(bench.node.starts), bench.controller.loop
    bench.node.behave = lambda command: InstanceState.STARTING  # it takes its time
    deploying = asyncio.create_task(bench.gateway.deploy(manifest()))
    await until(lambda: len(bench.node.starts) > starts, what="one of version 1 is started")
    assert loop.view.functions["chat"].active == 2
    assert not deploying.done()
    bench.node.put(bench.node.starts[-1].instance, InstanceState.READY)
    back = await deploying
    assert back.unchanged
    assert back.version is not None
    assert back.version.version == 1
    assert loop.view.functions["chat"].active == 1
    assert not loop.view.trials


async def test_an_equal_old_one_that_cannot_start_any_more_leaves_the_route_where_it_is(bench: Bench) -> None:
    await _replaced(bench)
    error = ErrorBody(code="start_failed", message="the schema is newer", status=503, stage="setup")
    bench.node.behave = lambda command: error
    with pytest.raises(StartFailed, match="the schema is newer"):
        await bench.gateway.deploy(manifest())
    view = bench.controller.loop.view
    assert view.functions["chat"].active == 2
    assert {key: record.state for key, record in view.versions.items()} == {
        ("chat", 1): VersionState.RETIRED,
        ("chat", 2): VersionState.ACTIVE,
    }
    assert not view.trials


async def test_a_first_version_that_fails_leaves_nothing(bench: Bench) -> None:
    error = ErrorBody(code="start_failed", message="ImportError: no module named nope", status=503, stage="import")
    bench.node.behave = lambda command: error

    with pytest.raises(StartFailed, match="no module named nope") as raised:
        await bench.gateway.deploy(manifest())

    assert raised.value.stage == "import"
    assert await bench.stored(subjects.function_key("chat"), FunctionRecord) is None
    assert await bench.stored(subjects.version_key("chat", 1), VersionRecord) is None
    assert await bench.stored(subjects.route_key("chat", 1), Route) is None
    digest = f"sha256:{hashlib.sha256(b'bundle').hexdigest()}"
    await until(lambda: _absent(bench, digest), what="the bundle is removed")
    await bench.none_left()
    assert len({command.instance for command in bench.node.starts}) == 1


async def test_a_first_version_that_fails_is_told_with_its_error(bench: Bench) -> None:
    """Who follows the events sees a function that came, what became of its version and why, and that both went."""
    error = ErrorBody(code="start_failed", message="ImportError: no module named nope", status=503, stage="import")
    bench.node.behave = lambda command: error
    with pytest.raises(StartFailed):
        await bench.gateway.deploy(manifest())
    await until(lambda: has_events(bench, {"function.deleted"}), what="the events are stored")
    told = [each for each in await stored_events(bench) if each.kind.startswith(("function.", "version."))]
    assert [(each.kind, each.version) for each in told] == [
        ("function.created", None),
        ("version.preparing", 1),
        ("version.failed", 1),
        ("version.deleted", 1),
        ("function.deleted", None),
    ]
    assert told[2].message == error.message


async def _absent(bench: Bench, digest: str) -> bool:
    return not await bundles.exists(bench.gateway.bus, digest)


async def test_a_later_version_that_fails_keeps_the_route_of_the_one_before(bench: Bench) -> None:
    await bench.gateway.deploy(manifest())
    error = ErrorBody(code="out_of_memory", message="setup took 3 GiB", status=503, stage="setup")
    bench.node.behave = lambda command: error

    with pytest.raises(StartFailed, match="setup took 3 GiB"):
        await bench.gateway.deploy(manifest(), b"other")

    failed = await bench.stored(subjects.version_key("chat", 2), VersionRecord)
    assert failed.state is VersionState.FAILED
    assert failed.error == error
    kept = await bench.stored(subjects.route_key("chat", 1), Route)
    assert kept.active
    assert kept.created == (await bench.stored(subjects.version_key("chat", 1), VersionRecord)).created > 0
    assert await bench.stored(subjects.route_key("chat", 2), Route) is None
    with pytest.raises(VersionNotFound, match="v1"):
        await bench.gateway.acquire(version=2)


ADAPTED = {"engine": True, "model": "/m", "adapters": {"it": "/it", "fr": "/fr"}}
RANKED = {"engine": True, "model": "/m", "parallelism": {"tensor": 2}}


@pytest.mark.parametrize(
    ("fields", "error", "text"),
    [
        ({"gpu": "H100"}, Unsatisfiable, "n1, lacks 1 x H100"),
        ({"memory": "1TB"}, Unsatisfiable, "of memory"),
        ({"cpu": 99}, Unsatisfiable, "99 CPUs"),
        ({"labels": {"zone": "moon"}}, Unsatisfiable, "label zone=moon"),
        ({"requirements": ["flask"]}, Unsatisfiable, "container driver for requirements flask .*SLLM_SANDBOX=podman"),
        ({"parallelism": {"tensor": 2, "pipeline": 2}}, Unsatisfiable, "leave one of them out"),
        ({"parallelism": {"pipeline": 17}}, Unsatisfiable, "at most 16 processes, 17 are asked for"),
        ({"parallelism": {"pipeline": 2}}, Unsatisfiable, "needs engine=True"),
        ({**ADAPTED, "parallelism": {"tensor": 2}}, Unsatisfiable, "ranks run no adapters, and fr, it are named"),
        ({**RANKED, "gpu": "H100"}, Unsatisfiable, "each tensor rank has a GPU of its own; ask for gpu=KIND:2"),
        ({**RANKED, "gpu_memory": "1GiB"}, Unsatisfiable, "ask for gpu=KIND:2"),
        ({**RANKED, "gpu": "H100:2"}, Unsatisfiable, "n1, lacks 2 x H100"),
        (
            {**RANKED, "gpu": "H100", "parallelism": {"pipeline": 2}},
            Unsatisfiable,
            "each stage has a GPU of its own; ask",
        ),
        ({**RANKED, "gpu": "H100:2", "parallelism": {"pipeline": 2}}, Unsatisfiable, "n1, lacks 2 x H100"),
        ({"handler": {"python": "3.9"}, "image": "mine:1"}, Unsatisfiable, "container driver for image mine:1"),
        ({"handler": {"python": "3.9"}}, PythonMismatch, "pickled by Python 3.9, the nodes run 3.11"),
    ],
)
async def test_what_no_node_can_ever_run_is_refused(
    bench: Bench, fields: dict[str, Any], error: type[SllmError], text: str
) -> None:
    with pytest.raises(error, match=text):
        await bench.gateway.deploy(manifest(**fields))

    assert bench.node.starts == []
    assert bench.controller.loop.view.functions == {}


async def test_what_is_kept_and_not_acted_on_is_said(bench: Bench) -> None:
    assert (await bench.gateway.deploy(manifest())).notes == ()
    for unchanged in (False, True):
        deployed = await bench.gateway.deploy(manifest(slo={"ttft": "1s"}))
        assert deployed.unchanged is unchanged
        assert deployed.notes == ("slo: it is kept with the version, and nothing acts on it yet",)


async def test_minimums_that_no_node_has_room_for_are_said(bench: Bench) -> None:
    first = await bench.gateway.deploy(manifest(cpu=3.0, min_instances=2, max_instances=2))
    assert first.notes == (), "six of eight CPUs"
    (note,) = (await bench.gateway.deploy(manifest("other", cpu=2.0, min_instances=2, max_instances=2))).notes
    assert note.startswith("min_instances: the nodes have room for 3 of the 4 instances")
    assert "2 of other among them" in note


async def test_a_bundle_that_is_not_there_is_refused(bench: Bench) -> None:
    deploy = ctl.Deploy(request="r", manifest=manifest(), bundle=digest_of("nothing"), bundle_bytes=3)
    with pytest.raises(InvalidBundle, match="not stored"):
        await bench.gateway.ask("deploy", deploy)


async def test_a_model_that_cannot_run_is_refused_by_name(bench: Bench) -> None:
    bench.node.problem = UnsupportedModel("architecture RwkvForCausalLM cannot run here")
    with pytest.raises(UnsupportedModel, match="RwkvForCausalLM"):
        await bench.gateway.deploy(manifest(model="/models/rwkv"))
    assert bench.controller.loop.view.functions == {}


async def test_adapters_are_registered_and_started_with(bench: Bench) -> None:
    tuned = {"fr": "/adapters/fr", "de": "/adapters/de"}
    deployed = await bench.gateway.deploy(manifest(model="/models/tiny", engine=True, adapters=tuned))
    assert deployed.version is not None
    assert deployed.version.adapters == {name: digest_of(place) for name, place in tuned.items()}
    (start,) = {command.instance: command for command in bench.node.starts}.values()
    assert {name: adapter.digest for name, adapter in start.adapters.items()} == deployed.version.adapters
    assert start.weights == 3 * 2**20, "they are counted, too"
    with pytest.raises(Conflict, match="needed by chat:v1"):
        await bench.gateway.ask("model", ctl.ModelRef(digest=digest_of("/adapters/fr"), verb="delete"))
    more = await bench.gateway.deploy(manifest(model="/models/tiny", engine=True, adapters={"fr": "/adapters/fr"}))
    assert more.version is not None
    assert (more.version.version, more.unchanged) == (2, False)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"model": "/models/tiny", "adapters": {"fr": "/models/other"}}, "adapter 'fr': /models/other is a model"),
        ({"model": "/adapters/fr"}, "/adapters/fr is a LoRA adapter of base"),
    ],
)
async def test_a_base_is_no_adapter_and_an_adapter_no_base(bench: Bench, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedModel, match=words):
        await bench.gateway.deploy(manifest(engine=True, **fields))
    assert bench.controller.loop.view.functions == {}


async def test_a_deployment_is_joined_by_its_request(bench: Bench) -> None:
    bench.node.behave = lambda command: InstanceState.STARTING
    digest = await bench.gateway.upload(b"bundle")
    deploy = ctl.Deploy(request="one", manifest=manifest(), bundle=digest, bundle_bytes=6, wait_s=0.3)

    first: ctl.Deployed = await bench.gateway.ask("deploy", deploy)
    assert first.progress is not None
    waiting = asyncio.create_task(bench.gateway.ask("deploy", msgspec.structs.replace(deploy, wait_s=5.0)))
    await until(lambda: bench.node.starts)
    bench.node.put(bench.node.starts[0].instance, InstanceState.READY)
    second: ctl.Deployed = await waiting

    assert second.version is not None
    assert second.version.version == 1
    third: ctl.Deployed = await bench.gateway.ask("deploy", deploy)
    assert third == second
    other = msgspec.structs.replace(deploy, manifest=manifest(description="other"))
    with pytest.raises(Conflict, match="another content"):
        await bench.gateway.ask("deploy", other)


async def test_two_deployments_of_one_function_take_turns(bench: Bench) -> None:
    first, second = await asyncio.gather(
        bench.gateway.deploy(manifest(), b"first"), bench.gateway.deploy(manifest(), b"second")
    )
    assert first.version is not None
    assert second.version is not None
    assert {first.version.version, second.version.version} == {1, 2}
    active = await bench.stored(subjects.function_key("chat"), FunctionRecord)
    assert active.active == 2


async def test_an_equal_old_one_that_gets_the_route_by_a_rollback_meanwhile_is_deployed(bench: Bench) -> None:
    """Who waits for capacity rolls back by hand: its deployment is not to end with an error then."""
    first = manifest(queue_timeout=3)
    await bench.gateway.deploy(first)
    (instance,) = bench.live()
    await bench.gateway.deploy(manifest(), b"other")
    bench.node.put(instance, InstanceState.STOPPED)
    await until(lambda: bench.live() and instance not in bench.live(), what="the old instance is gone")
    loop = bench.controller.loop
    await bench.gateway.ask("cordon", ctl.Cordon(node=bench.node.name, cordoned=True))
    deploying = asyncio.create_task(bench.gateway.deploy(first))
    await until(lambda: ("chat", 1) in loop.view.trials, what="version 1 is tried")
    await bench.gateway.ask("rollback", ctl.Rollback(function="chat"))
    assert loop.view.functions["chat"].active == 1
    back = await deploying
    assert back.version is not None
    assert back.version.version == 1


async def test_of_an_equal_old_one_that_is_called_back_nothing_is_left(bench: Bench) -> None:
    """Nobody waits for the instance that it began: as with a new version's, its room is others' at once."""
    await _replaced(bench)
    starts, loop = len(bench.node.starts), bench.controller.loop
    bench.node.behave = lambda command: InstanceState.STARTING  # it takes its time
    deploy = ctl.Deploy(
        request="r" * 32, manifest=manifest(), bundle=await bench.gateway.upload(b"bundle"), bundle_bytes=6, wait_s=20.0
    )
    deploying = asyncio.create_task(bench.gateway.ask("deploy", deploy))
    await until(lambda: len(bench.node.starts) > starts, what="one of version 1 is started")
    name = bench.node.starts[-1].instance
    await bench.gateway.ask("withdraw", ctl.Withdraw(request="r" * 32))
    with pytest.raises(SllmError):
        await deploying
    await until(lambda: all(each.record.instance != name or each.stop for each in loop.view.instances.values()), 10)
