"""Where the embedded server listens."""

import json
import os
import socket
import stat
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from nats.js.api import StreamConfig

from sllm_runtime.platform import nats_server
from sllm_runtime.platform.bus import Bus
from sllm_runtime.platform.nats_server import EmbeddedNats, free_port, new_identity, threads, write_private
from sllm_runtime.platform.settings import Settings
from sllm_runtime.protocol.errors import Unavailable
from sllm_runtime.protocol.limits import MIB
from tests.fixtures.nats import CONTROLLER, Nats


def test_a_free_port_is_none_that_a_connection_or_another_server_could_be_given() -> None:
    """Linux gives those from 32768 on, macOS from 49152."""
    assert max(free_port() for _ in range(100)) < 32_768


def test_a_port_that_is_taken_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    found: set[int] = set()
    while len(found) < 2:
        found.add(free_port())
    first, second = found
    numbers = iter([first - 20_000, second - 20_000])
    with socket.create_server(("127.0.0.1", first)):
        monkeypatch.setattr("secrets.randbelow", lambda _: next(numbers))
        assert free_port() == second


def test_what_a_killed_process_left_of_a_private_file_goes(tmp_path: Path) -> None:
    """When it is written again; not what a process that is there writes, nor other files."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    kept = {f".token.{os.getppid()}", f".token.old.{ended.pid}", ".token.", ".token.x", ".token.20261127"}
    for name in (f".token.{ended.pid}", *kept):
        (tmp_path / name).write_text("left")
    write_private(tmp_path / "token", "new")
    assert {path.name for path in tmp_path.iterdir()} == {"token", *kept}
    assert stat.S_IMODE((tmp_path / "token").stat().st_mode) == 0o600


async def test_a_server_of_somebody_else_is_not_taken_for_its_own(nats: Nats, tmp_path: Path) -> None:
    """Its port was free when it was chosen, and is not by now."""
    server = EmbeddedNats(directory=tmp_path / "mine", identities=(new_identity("controller", CONTROLLER),))
    server.prepare()
    server.port = nats.server.port
    server._configure()
    child = server.new_child()
    await child.start()
    with pytest.raises(Unavailable, match="did not start"):
        await server.wait_ready(child)
    try:
        await server.start()
        assert server.port != nats.server.port
        env = {"SLLM_NATS_URL": server.url, "SLLM_IDENTITY_FILE": str(server.identity_file(CONTROLLER))}
        bus = await Bus.connect(Settings.load(env), CONTROLLER, name="test")
        await bus.close()
    finally:
        await server.stop()


async def test_what_the_server_acknowledges_is_on_its_disk(tmp_path: Path) -> None:
    """As the server itself tells it, at its monitoring port, which the platform leaves closed."""
    server = EmbeddedNats(directory=tmp_path, identities=(new_identity("controller", CONTROLLER),))
    server.prepare()
    monitor = f"127.0.0.1:{free_port()}"
    server.config_file.write_text(json.dumps({**json.loads(server.config_file.read_text()), "http": monitor}))
    child = server.new_child()
    await child.start()
    try:
        await server.wait_ready(child)
        async with httpx.AsyncClient() as http:
            told = (await http.get(f"http://{monitor}/jsz")).json()
        assert told["config"]["sync_always"] is True
    finally:
        await child.stop(0.0)


def test_the_server_leaves_most_of_a_machine_to_others() -> None:
    assert [threads(cores) for cores in (1, 2, 4, 8, 64)] == [1, 1, 1, 2, 16]


async def test_a_store_on_a_disk_that_it_has_filled_itself_takes_records_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it holds is room that it has: by what is free alone its limit is below that at the next start, and JetStream
    refuses whatever is written, a leader's term and deletions too."""
    monkeypatch.setattr(nats_server, "LEAST_STORE", 8 * MIB)
    monkeypatch.setattr(nats_server, "_KEEP_FREE", 8 * MIB)
    directory = tmp_path / "nats"

    def disk_usage(path: Path) -> SimpleNamespace:
        return SimpleNamespace(free=64 * MIB - sum(file.stat().st_size for file in directory.rglob("*.blk")))

    monkeypatch.setattr("shutil.disk_usage", disk_usage)
    for life in range(2):
        server = EmbeddedNats(directory=directory, identities=(new_identity("controller", CONTROLLER),))
        server.prepare()
        await server.start()
        env = {"SLLM_NATS_URL": server.url, "SLLM_IDENTITY_FILE": str(server.identity_file(CONTROLLER))}
        bus = await Bus.connect(Settings.load(env), CONTROLLER, name="test")
        try:
            if not life:
                await bus.jetstream.add_stream(StreamConfig(name="KV_sllm_state", subjects=["$KV.sllm_state.>"]))
                for number in range(48):
                    await bus.jetstream.publish(f"$KV.sllm_state.{number}", bytes(MIB - 4096))
            await bus.jetstream.publish("$KV.sllm_state.term", b"1")
        finally:
            await bus.close()
            await server.stop()
