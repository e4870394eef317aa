"""An engine that breaks, hangs and works again while its node runs: a real program that does what a file says."""

import asyncio
import errno
import os
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path

import pytest

from sllm_invoker.containers import driver as drivers
from sllm_invoker.containers import probe
from sllm_invoker.containers.arguments import Owner
from sllm_invoker.containers.driver import ContainerDriver, Sizes
from sllm_invoker.containers.engine import Engine, EngineFailed, EngineHangs
from sllm_invoker.containers.health import Health
from sllm_runtime.platform.owned import Tasks
from sllm_runtime.protocol.errors import Unavailable
from tests.fixtures.waiting import GIVE_UP_S, until

SHORT_S = 0.3
SCRIPT = """#!/bin/sh
echo "$1" >> {log}
case $(cat {mode}) in
  works) echo 0 ;;
  picky) case "$*" in *no-such-image*) echo no such image >&2; exit 125 ;; *) echo 0 ;; esac ;;
  broken) echo cannot connect to its store >&2; exit 125 ;;
  hangs) exec sleep 1000 ;;
  keeps)
    case "$1" in
      ps) printf 'sb-old\\t%s\\n' {place} ;;
      rm) case "$*" in *sb-old*) echo device or resource busy >&2; exit 1 ;; esac ;;
      *) echo 0 ;;
    esac ;;
esac
"""


class Fake:
    """An engine whose program does what ``mode`` says."""

    def __init__(self, directory: Path) -> None:
        self._mode, self._log = directory / "mode", directory / "log"
        program = directory / "podman"
        program.write_text(SCRIPT.format(mode=self._mode, log=self._log, place=directory))
        program.chmod(0o755)
        self.engine = Engine("podman", str(program))
        self.be("works")

    def be(self, mode: str) -> None:
        """From its next command on. Only one that is to hang is not waited for: any other may be slow."""
        object.__setattr__(self.engine, "command_s", SHORT_S if mode == "hangs" else GIVE_UP_S)
        new = self._mode.with_suffix(".new")
        new.write_text(mode)
        new.rename(self._mode)

    @property
    def commands(self) -> list[str]:
        return self._log.read_text().split() if self._log.exists() else []


@pytest.fixture
def fake(tmp_path: Path) -> Fake:
    return Fake(tmp_path)


@pytest.fixture
async def tasks() -> AsyncIterator[Tasks]:
    made = Tasks("test")
    yield made
    await made.close()


@pytest.fixture
def health(fake: Fake, tasks: Tasks) -> Health:
    made = Health(partial(probe.trial, fake.engine), tasks, again_s=(0.05,))
    fake.engine.listeners.append(made.suspect)
    return made


async def fails(engine: Engine, *words: str) -> EngineFailed:
    with pytest.raises(EngineFailed) as caught:
        await engine.command(*words)
    return caught.value


async def test_a_broken_engine_is_a_problem_until_it_works_again(fake: Fake, health: Health, tasks: Tasks) -> None:
    fake.be("broken")
    await fails(fake.engine, "run")
    await until(lambda: "cannot connect to its store" in health.problem)
    fake.be("works")
    await until(lambda: not health.problem)
    await until(lambda: not len(tasks))


async def test_one_that_hangs_is_a_problem_at_once(fake: Fake, health: Health) -> None:
    fake.be("hangs")
    error = await fails(fake.engine, "run")
    assert isinstance(error, EngineHangs)
    assert health.problem == error.message == ("`podman run` has not ended within 0.3 s; see whether podman answers")
    fake.be("works")
    await until(lambda: not health.problem)


async def test_a_command_that_is_refused_for_a_reason_is_no_problem(fake: Fake, health: Health, tasks: Tasks) -> None:
    fake.be("picky")
    await fails(fake.engine, "run", "no-such-image")
    await until(lambda: not len(tasks))
    assert fake.commands[-1] == "rm"  # a container was tried to the end
    assert not health.problem


async def test_many_failures_are_one_look(fake: Fake, health: Health, tasks: Tasks) -> None:
    fake.be("broken")
    await asyncio.gather(*(fails(fake.engine, "run") for _ in range(8)))
    assert len(tasks) == 1


async def test_a_trial_that_this_machine_cannot_make_is_made_again(fake: Fake, tasks: Tasks) -> None:
    """Without a descriptor left, say: nothing asks for another trial while there is a problem."""
    short = True

    async def trial() -> None:
        if short:
            raise OSError(errno.EMFILE, "Too many open files")

    health = Health(trial, tasks, again_s=(0.05,))
    fake.engine.listeners.append(health.suspect)
    fake.be("hangs")
    await fails(fake.engine, "run")
    await until(lambda: "cannot be tried: [Errno 24] Too many open files" in health.problem)
    short = False
    await until(lambda: not health.problem)


async def test_an_image_that_is_gone_is_made_again(fake: Fake, tmp_path: Path) -> None:
    """`image prune` takes one that no container runs from."""
    asked = 0

    async def image() -> str:
        nonlocal asked
        asked += 1
        return "localhost/no-such-image:1"

    owner = Owner(node="n1", place=str(tmp_path), boot="b1")
    sizes = Sizes(memory=1 << 30, cpu=1.0, pids=64, tmp=1 << 20)
    driver = ContainerDriver(fake.engine, image, ("python",), owner, tmp_path / "sandboxes", sizes)
    fake.be("picky")
    await driver.start()
    try:
        for number in range(1, 3):
            with pytest.raises(EngineFailed, match="no such image"):
                await driver.create(f"sb-{number}")
            assert asked == number
        assert driver.problem == ""
    finally:
        await driver.close()


@pytest.mark.parametrize("mode", ["broken", "hangs"])
async def test_a_driver_makes_nothing_while_its_engine_does_not_work(fake: Fake, tmp_path: Path, mode: str) -> None:
    async def image() -> str:
        return "localhost/sllm-base:1"

    owner = Owner(node="n1", place=str(tmp_path), boot="b1")
    sizes = Sizes(memory=1 << 30, cpu=1.0, pids=64, tmp=1 << 20)
    driver = ContainerDriver(fake.engine, image, ("python",), owner, tmp_path / "sandboxes", sizes)
    await driver.start()
    try:
        assert driver.problem == ""
        fake.be(mode)
        with pytest.raises(Unavailable):
            await driver.create("sb-1")
        await until(lambda: driver.problem != "")
        with pytest.raises(Unavailable) as refused:
            await driver.create("sb-2")
        assert "podman" in refused.value.message
        assert not (tmp_path / "sandboxes" / "sb-2").exists()
        fake.be("works")
        await until(lambda: driver.problem == "")
    finally:
        await driver.close()
    assert fake.engine.listeners == []


async def test_a_container_that_cannot_be_removed_keeps_no_node_from_its_start(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an earlier life has left, as docker may: the rest of the engine works."""
    monkeypatch.setattr(drivers, "REMOVE_AGAIN_S", (0.05,) * 100)

    async def image() -> str:
        return "localhost/sllm-base:1"

    owner = Owner(node="n1", place=str(tmp_path), boot="b2")
    sizes = Sizes(memory=1 << 30, cpu=1.0, pids=64, tmp=1 << 20)
    driver = ContainerDriver(fake.engine, image, ("python",), owner, tmp_path / "sandboxes", sizes)
    fake.be("keeps")
    try:
        await driver.start()
        await until(lambda: driver.problem == "" and fake.commands.count("rm") > 3, what="it is tried again")
    finally:
        await driver.close()


async def test_who_looks_for_an_engine_waits_once_for_one_that_hangs(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.be("hangs")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)

    def quick(make: Callable[..., Engine], *given: object) -> Engine:
        return make(*given, command_s=SHORT_S)

    monkeypatch.setattr(probe, "Engine", partial(quick, Engine))
    with pytest.raises(Unavailable, match="podman: `podman images` has not ended"):
        await probe.find("podman")
    assert fake.commands in ([], ["images"])
