"""The platform's secrets: in files of their owner alone, told to nodes that start who names them and to nobody else."""

import asyncio
import errno
import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from sllm_runtime.control.vault import DirectoryVault
from sllm_runtime.protocol import ctl
from sllm_runtime.protocol.errors import Conflict, InvalidArgument, SecretNotFound, StartFailed, Unavailable
from sllm_runtime.protocol.secrets import MAX_SECRET, MAX_SECRETS, Secrets, secret_names
from sllm_runtime.protocol.states import InstanceState
from tests.fixtures.waiting import GIVE_UP_S, until
from tests.unit.control.bench import Bench, manifest

VALUE = b"hunter2 \xff\0"


async def test_a_value_is_kept_as_it_is_for_its_owner_alone(tmp_path: Path) -> None:
    vault = DirectoryVault(tmp_path / "home" / "secrets")
    assert await vault.names() == ()
    first = await vault.put("token", b"old")
    second = await vault.put("token", VALUE)
    await vault.put("a-b_C9", b"x")
    assert second.stored >= first.stored
    assert [each.name for each in await vault.names()] == ["a-b_C9", "token"]
    assert (await DirectoryVault(tmp_path / "home" / "secrets").read(("token",))).values == {"token": VALUE}
    files = list((tmp_path / "home" / "secrets").iterdir())
    assert {path.name for path in files} == {"token", "a-b_C9"}
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    assert stat.S_IMODE((tmp_path / "home" / "secrets").stat().st_mode) == 0o700
    await vault.remove("token")
    with pytest.raises(SecretNotFound, match="no secret token; `sllm secret set token`"):
        await vault.remove("token")


def files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def killed_as_it_stores(directory: Path, name: str, value: bytes) -> None:
    """A controller that is, once the value is written and before it has its name."""
    code = (
        "import asyncio, os, pathlib, signal, sys\n"
        "from sllm_runtime.control import vault\n"
        "vault.os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)\n"
        "directory, name, value = sys.argv[1:]\n"
        "asyncio.run(vault.DirectoryVault(pathlib.Path(directory)).put(name, value.encode()))\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(directory), name, value.decode()])
    assert done.returncode == -signal.SIGKILL


async def test_of_a_value_whose_controller_was_killed_as_it_stored_it_nothing_is_left(tmp_path: Path) -> None:
    """Once that name is stored or deleted; nobody else's is touched."""
    vault = DirectoryVault(tmp_path)
    for name in ("token", "gone", "other"):
        await asyncio.to_thread(killed_as_it_stores, tmp_path, name, b"of_" + name.encode())
        (tmp_path / f".new.7.{name}").write_bytes(b"of an earlier release")
    assert len(files(tmp_path)) == 6
    await vault.put("token", b"new")
    with pytest.raises(SecretNotFound):
        await vault.remove("gone")
    left = files(tmp_path)
    assert left.pop("token") == b"new"
    assert {name.rsplit(".", 1)[-1] for name in left} == {"other"}
    await asyncio.to_thread(killed_as_it_stores, tmp_path, "token", b"newer")
    await vault.remove("token")
    assert not any(name.endswith("token") for name in files(tmp_path))


@pytest.mark.parametrize("way", ["stored", "deleted"])
async def test_a_controller_that_was_stopped_as_it_stored_a_value_brings_it_not_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """Another one has stored or deleted it meanwhile: the older value takes no place of that."""
    old, new, sync = DirectoryVault(tmp_path), DirectoryVault(tmp_path), os.fsync
    await new.put("token", b"first")
    stopped, go = threading.Event(), threading.Event()

    def stop(file: int) -> None:
        monkeypatch.setattr(os, "fsync", sync)
        stopped.set()
        assert go.wait(GIVE_UP_S)

    monkeypatch.setattr(os, "fsync", stop)
    storing = asyncio.create_task(old.put("token", b"older"))
    await asyncio.to_thread(stopped.wait, GIVE_UP_S)
    if way == "stored":
        await new.put("token", b"newer")
    else:
        await new.remove("token")
    go.set()
    with pytest.raises(Unavailable, match="secret token was stored or deleted by another controller"):
        await storing
    assert files(tmp_path) == ({"token": b"newer"} if way == "stored" else {})


async def test_a_value_that_finds_no_room_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(Unavailable, match="No space left"):
        await DirectoryVault(tmp_path).put("token", b"x")
    assert files(tmp_path) == {}


async def test_what_was_acknowledged_outlives_a_power_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name too, and that it has none any more: until its directory is on the disk, neither is."""
    directory, sync = tmp_path / "secrets", os.fsync
    on_disk: list[set[str]] = []

    def synced(fd: int) -> None:
        sync(fd)
        if os.readlink(f"/proc/self/fd/{fd}") == str(directory):
            on_disk.append({path.name for path in directory.iterdir()})

    monkeypatch.setattr(os, "fsync", synced)
    vault = DirectoryVault(directory)
    await vault.put("token", VALUE)
    assert on_disk[-1:] == [{"token"}]
    await vault.remove("token")
    assert on_disk[-1:] == [set()]


async def test_a_file_system_that_syncs_no_directory_keeps_secrets_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """VirtualBox's shared folders, older CIFS: EINVAL. It is stored, and removed, by then."""
    sync = os.fsync

    def synced(fd: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        sync(fd)

    monkeypatch.setattr(os, "fsync", synced)
    vault = DirectoryVault(tmp_path)
    assert (await vault.put("token", VALUE)).name == "token"
    await vault.remove("token")


async def test_one_value_is_stored_at_a_time(tmp_path: Path) -> None:
    vault, values = DirectoryVault(tmp_path), [b"%d" % number * 1000 for number in range(8)]
    await asyncio.gather(*(vault.put("token", value) for value in values))
    assert files(tmp_path) in [{"token": value} for value in values]


@pytest.mark.parametrize("name", ["", "..", "../token", "a/b", "-x", "9", "a" * 64, "tok\n", ".new.1.x", "ä"])
async def test_what_is_no_name_is_no_path(tmp_path: Path, name: str) -> None:
    vault = DirectoryVault(tmp_path / "secrets")
    with pytest.raises(InvalidArgument, match="no secret's name"):
        await vault.put(name, b"x")
    with pytest.raises(InvalidArgument, match="no secret's name"):
        await vault.read((name,))
    with pytest.raises(InvalidArgument, match="no secret's name"):
        await vault.remove(name)
    assert not (tmp_path / "secrets").exists()


@pytest.mark.parametrize("value", [b"", b"x" * (MAX_SECRET + 1)])
async def test_a_value_is_bounded(tmp_path: Path, value: bytes) -> None:
    with pytest.raises(InvalidArgument, match="a secret has 1 byte to 16"):
        await DirectoryVault(tmp_path).put("token", value)


async def test_all_that_lack_are_named_at_once(tmp_path: Path) -> None:
    vault = DirectoryVault(tmp_path)
    await vault.put("b", b"x")
    with pytest.raises(SecretNotFound, match="no secrets a, c;"):
        await vault.read(("a", "b", "c"))


async def test_files_that_cannot_be_used_are_said_without_what_is_in_them(tmp_path: Path) -> None:
    (tmp_path / "token").mkdir()
    with pytest.raises(Unavailable, match=f"secrets in {tmp_path} cannot be used: Is a directory"):
        await DirectoryVault(tmp_path).read(("token",))


def test_values_are_in_no_text() -> None:
    assert "hunter" not in repr(Secrets({"token": VALUE}))
    assert "hunter" not in repr(ctl.PutSecret(name="token", value=VALUE))


def test_what_a_manifest_may_name() -> None:
    assert secret_names(("A", "b-c")) == ("A", "b-c")
    for wrong in (("a", "a"), ("a b",), tuple(f"s{number}" for number in range(MAX_SECRETS + 1))):
        with pytest.raises(ValueError, match=r"twice|no secret's name|at most 16"):
            secret_names(wrong)


async def test_who_names_a_secret_is_started_with_it(bench: Bench) -> None:
    put = ctl.PutSecret(name="token", value=VALUE)
    assert (await bench.gateway.ask("put_secret", put)).functions == ()
    await bench.gateway.deploy(manifest(secrets=("token",)))
    await bench.gateway.deploy(manifest("other"))
    given = {command.function: command.secrets.values for command in bench.node.starts}
    assert given == {"chat": {"token": VALUE}, "other": {}}
    (listed,) = (await bench.gateway.ask("secrets", ctl.Listing())).secrets
    assert (listed.name, listed.functions) == ("token", ("chat",))


async def test_a_secret_that_is_not_there_is_named_at_deploy(bench: Bench) -> None:
    with pytest.raises(SecretNotFound, match="no secret token; `sllm secret set token`") as told:
        await bench.gateway.deploy(manifest(secrets=("token",)))
    assert told.value.field == "secrets"
    assert bench.controller.loop.view.functions == {}


async def test_one_that_a_function_needs_stays_and_one_that_went_all_the_same_fails_its_start(bench: Bench) -> None:
    await bench.gateway.ask("put_secret", ctl.PutSecret(name="token", value=VALUE))
    await bench.gateway.deploy(manifest(secrets=("token",)))
    with pytest.raises(Conflict, match="needed by chat"):
        await bench.gateway.ask("delete_secret", ctl.SecretRef(name="token"))
    os.remove(bench.secrets / "token")
    bench.node.restart()
    await bench.none_left()
    found = await bench.gateway.acquire()
    assert found.error is not None
    told = found.error.to_error()
    assert isinstance(told, StartFailed)
    assert "no secret token" in told.message
    await bench.gateway.deploy(manifest())
    with pytest.raises(SecretNotFound):
        await bench.gateway.ask("delete_secret", ctl.SecretRef(name="token"))


async def test_one_that_a_deployment_under_way_needs_stays(bench: Bench) -> None:
    """Its first instance has it and starts; once the version has the route every other start needs it, too."""
    await bench.gateway.ask("put_secret", ctl.PutSecret(name="token", value=VALUE))
    bench.node.behave = lambda _: InstanceState.STARTING
    deploying = asyncio.create_task(bench.gateway.deploy(manifest(secrets=("token",))))
    await until(lambda: bool(bench.node.starts), what="its first instance starts")
    with pytest.raises(Conflict, match="needed by chat"):
        await bench.gateway.ask("delete_secret", ctl.SecretRef(name="token"))
    bench.node.put(bench.node.starts[0].instance, InstanceState.READY)
    deployed = (await deploying).version
    assert deployed is not None
    assert deployed.version == 1
    bench.node.behave = lambda _: InstanceState.READY
    bench.node.restart()
    await bench.none_left()
    assert (await bench.gateway.acquire()).error is None


async def test_the_route_goes_to_no_version_whose_secret_is_gone(bench: Bench) -> None:
    await bench.gateway.ask("put_secret", ctl.PutSecret(name="token", value=VALUE))
    await bench.gateway.deploy(manifest(secrets=("token",)))
    await bench.gateway.deploy(manifest())
    await bench.gateway.ask("delete_secret", ctl.SecretRef(name="token"))
    with pytest.raises(SecretNotFound, match="no secret token; `sllm secret set token`"):
        await bench.gateway.ask("rollback", ctl.Rollback(function="chat"))
    assert bench.controller.loop.view.functions["chat"].active == 2
    await bench.gateway.ask("put_secret", ctl.PutSecret(name="token", value=VALUE))
    await bench.gateway.ask("rollback", ctl.Rollback(function="chat"))
    assert bench.controller.loop.view.functions["chat"].active == 1


@pytest.mark.parametrize("deploys", [True, False], ids=["deployed again", "rolled back to"])
async def test_one_that_goes_while_a_version_of_before_is_given_the_route_keeps_that_from_it(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, *, deploys: bool
) -> None:
    """The secret was there when it was looked for; before the route moves somebody deletes it."""
    loop, gateway = bench.controller.loop, bench.gateway
    await gateway.ask("put_secret", ctl.PutSecret(name="token", value=VALUE))
    with_it = manifest(secrets=("token",))
    await gateway.deploy(with_it)
    await gateway.deploy(manifest())
    commit, waits, go_on = loop.commit, asyncio.Event(), asyncio.Event()

    async def slowly(step: Any) -> Any:  # JetStream elects
        waits.set()
        await go_on.wait()
        return await commit(step)

    monkeypatch.setattr(loop, "commit", slowly)
    asked = gateway.deploy(with_it) if deploys else gateway.ask("rollback", ctl.Rollback(function="chat"))
    moving = asyncio.create_task(asked)
    await asyncio.wait_for(waits.wait(), GIVE_UP_S)
    deleting = asyncio.create_task(gateway.ask("delete_secret", ctl.SecretRef(name="token")))
    await asyncio.wait({deleting}, timeout=0.3)
    go_on.set()
    await asyncio.wait({moving, deleting}, timeout=GIVE_UP_S)
    active = loop.view.functions["chat"].active
    there = {info.name for info in (await gateway.ask("secrets", ctl.Listing())).secrets}
    assert active == 2 or "token" in there, f"v{active} has the route and cannot start"
    assert isinstance(deleting.exception(), Conflict), "the version that needs it came first"


@pytest.mark.parametrize("deploys", [True, False], ids=["deployed", "rolled back"])
async def test_a_vault_that_hangs_holds_up_nobody_who_has_no_secret(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, *, deploys: bool
) -> None:
    """A directory on a share whose server is away, or a stream without a leader."""
    gateway, vault = bench.gateway, bench.controller.service._vault
    await gateway.ask("put_secret", ctl.PutSecret(name="token", value=VALUE))
    await gateway.deploy(manifest(secrets=("token",)))
    await gateway.deploy(manifest())
    await gateway.deploy(manifest("other"))
    await gateway.deploy(manifest("other", cpu=0.5))
    read, reading, back = vault.read, asyncio.Event(), asyncio.Event()

    async def hangs(names: Iterable[str]) -> Any:
        if tuple(names):
            reading.set()
            await back.wait()
        return await read(names)

    monkeypatch.setattr(vault, "read", hangs)
    first = asyncio.create_task(gateway.ask("rollback", ctl.Rollback(function="chat")))
    await asyncio.wait_for(reading.wait(), 5.0)
    try:
        if deploys:
            await gateway.ask("ping", ctl.Nothing())
            done = await asyncio.wait_for(gateway.deploy(manifest("third")), 4.0)
            assert done.version is not None
        else:
            await gateway.ask("rollback", ctl.Rollback(function="other"), 4.0)
            assert bench.controller.loop.view.functions["other"].active == 1
    finally:
        back.set()
        await first


async def test_two_who_go_back_at_once_give_the_route_to_no_version_whose_secret_is_gone(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one goes to where the first has not gone: to that version whose secrets were not looked for."""
    loop, gateway = bench.controller.loop, bench.gateway
    await gateway.ask("put_secret", ctl.PutSecret(name="token", value=VALUE))
    await gateway.deploy(manifest(secrets=("token",)))
    await gateway.deploy(manifest(cpu=0.5))
    await gateway.deploy(manifest(cpu=0.25))
    await gateway.ask("delete_secret", ctl.SecretRef(name="token"))
    commit, waits, go_on = loop.commit, asyncio.Event(), asyncio.Event()

    async def slowly(step: Any) -> Any:
        waits.set()
        await go_on.wait()
        return await commit(step)

    monkeypatch.setattr(loop, "commit", slowly)
    first = asyncio.create_task(gateway.ask("rollback", ctl.Rollback(function="chat", request="a" * 32)))
    await asyncio.wait_for(waits.wait(), 5.0)
    second = asyncio.create_task(gateway.ask("rollback", ctl.Rollback(function="chat", request="b" * 32)))
    await asyncio.wait({second}, timeout=0.3)
    go_on.set()
    await asyncio.wait({first, second}, timeout=5.0)
    assert loop.view.functions["chat"].active == 2
    assert isinstance(second.exception(), SecretNotFound)


async def test_a_vault_that_hangs_is_not_waited_for_without_end_by_who_goes_back(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody can tell whether its secrets are there, as of one that says so: the route goes back, and who comes next
    has its turn."""
    gateway, deployments = bench.gateway, bench.controller.service._deployments
    vault = bench.controller.service._vault
    await gateway.ask("put_secret", ctl.PutSecret(name="token", value=VALUE))
    await gateway.deploy(manifest(secrets=("token",)))
    await gateway.deploy(manifest())

    async def hangs(names: Iterable[str]) -> Any:
        return await asyncio.Event().wait() if tuple(names) else Secrets()

    monkeypatch.setattr(vault, "read", hangs)
    await gateway.ask("rollback", ctl.Rollback(function="chat"), 9.0)
    assert bench.controller.loop.view.functions["chat"].active == 1
    assert not deployments._secrets.locked()


@pytest.mark.parametrize(
    ("verb", "request_"),
    [
        ("secrets", ctl.Listing()),
        ("put_secret", ctl.PutSecret(name="token", value=VALUE)),
        ("delete_secret", ctl.SecretRef(name="token")),
    ],
)
async def test_a_vault_that_hangs_is_told_as_that(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, verb: str, request_: Any
) -> None:
    """And not as a controller that does not answer (docs/control.md). What it is asked it may do yet: a secret that
    goes is needed by no version that comes meanwhile."""
    gateway, vault, back = bench.gateway, bench.controller.service._vault, asyncio.Event()
    await gateway.ask("put_secret", ctl.PutSecret(name="token", value=VALUE))
    does = {name: getattr(vault, name) for name in ("names", "put", "remove")}

    def hanging(name: str) -> Any:
        async def hangs(*given: Any) -> Any:
            await back.wait()
            return await does[name](*given)

        return hangs

    for name in does:
        monkeypatch.setattr(vault, name, hanging(name))
    with pytest.raises(Unavailable, match="the platform's secrets do not answer within 5 s"):
        await gateway.ask(verb, request_, 15.0)
    assert bench.controller.service._deployments._secrets.locked() is (verb == "delete_secret")
    back.set()
    await until(lambda: not bench.controller.service._deployments._secrets.locked())
    there = {info.name for info in (await gateway.ask("secrets", ctl.Listing())).secrets}
    assert ("token" in there) is (verb != "delete_secret")
