"""The platform on one machine as data: where things lie, which programs run, with which settings. Starts nothing."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from sllm_runtime.platform import control_groups
from sllm_runtime.platform.nats_server import EmbeddedNats, new_identity, write_private
from sllm_runtime.platform.settings import Identity, Settings
from sllm_runtime.platform.streams import room_for_bundles
from sllm_runtime.platform.supervise import ChildSpec
from sllm_runtime.protocol.errors import InvalidRequest

CONTROLLER: Final = "controller"
"""The first one; others are numbered."""
UP: Final = "up"
"""``sllm up`` itself, on the bus."""
NATS: Final = "nats"
DEFAULT_PORT: Final = 8600
METRICS_PORT: Final = "SLLM_METRICS_PORT"
_LONGEST_DRAIN_S: Final = 3600.0
_CONTAINERS_END_S: Final = 12.0
"""An engine takes half a second to remove a container, several on a loaded machine, and one after another."""
_SOCKET_PATH: Final = 100
"""Longest path of a unix socket that every system takes."""
_NOT_HANDED_ON: Final = ("SLLM_TOKEN", "SLLM_URL", "SLLM_PROFILE", "SLLM_READY_FD", "SLLM_PARENT_PID")


@dataclass(frozen=True, kw_only=True)
class Options:
    """What ``sllm up`` was asked for. ``ports``: one for each gateway."""

    home: Path
    data: Path
    nodes: int = 1
    controllers: int = 1
    """One leads, the others stand by."""
    host: str = "127.0.0.1"
    ports: tuple[int, ...] = (DEFAULT_PORT,)
    profile: str = "default"
    pool: int = 0
    """Most nodes that the controller may start beside them, as processes (``spawned``)."""
    nats_url: str | None = None
    """An existing cluster instead of the embedded server."""

    @property
    def url(self) -> str:
        """Of the first gateway."""
        return self.urls[0]

    @property
    def urls(self) -> tuple[str, ...]:
        host = reached(self.host)
        host = f"[{host}]" if ":" in host and not host.startswith("[") else host
        return tuple(f"http://{host}:{port}" for port in self.ports)

    @property
    def node_names(self) -> tuple[str, ...]:
        return tuple(f"n{number}" for number in range(1, self.nodes + 1))

    @property
    def gateway_names(self) -> tuple[str, ...]:
        return tuple(f"g{number}" for number in range(1, len(self.ports) + 1))

    @property
    def controller_names(self) -> tuple[str, ...]:
        return (CONTROLLER, *(f"{CONTROLLER}-{number}" for number in range(2, self.controllers + 1)))

    @property
    def pool_names(self) -> tuple[str, ...]:
        return pool_names(self.pool)

    def identities(self) -> tuple[Identity, ...]:
        """A fresh user for everything that uses the bus."""
        return (
            new_identity("platform", UP),
            *(new_identity("controller", name) for name in self.controller_names),
            *(new_identity("gateway", name) for name in self.gateway_names),
            *(new_identity("node", name) for name in (*self.node_names, *self.pool_names)),
        )


@dataclass(frozen=True)
class Layout:
    """Where things lie below the data directory. Nodes share nothing."""

    data: Path

    @property
    def nats(self) -> Path:
        return self.data / "nats"

    @property
    def token(self) -> Path:
        return self.data / "token"

    @property
    def secrets(self) -> Path:
        """What functions are given by name."""
        return self.data / "secrets"

    @property
    def pool(self) -> Path:
        """Of the nodes that the controller starts."""
        return self.data / "pool"

    def node(self, name: str) -> Path:
        return self.data / "nodes" / name

    def log(self, name: str) -> Path:
        return self.data / "logs" / f"{name}.log"

    def identity_file(self, name: str) -> Path:
        return self.nats / "identities" / f"{name}.json"

    def socket(self, node: str) -> Path:
        """loaderd's control socket: with the node's data, or where that path is too long, in a directory made of it."""
        near = self.node(node) / "loaderd.sock"
        if len(str(near)) <= _SOCKET_PATH:
            return near
        return self.far_sockets / f"{node}.sock"

    @property
    def far_sockets(self) -> Path:
        mark = hashlib.sha256(f"{os.getuid()}:{self.data}".encode()).hexdigest()[:16]
        return Path(tempfile.gettempdir()) / f"sllm-{mark}"


def reached(host: str) -> str:
    """Where this machine finds who listens on ``host``. One without IPv6, as most containers, has no ``::1``, but all
    its addresses listen on ``::``."""
    if host != "::":
        return "127.0.0.1" if host == "0.0.0.0" else host
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return "127.0.0.1"
    return "::1"


def pool_names(most: int) -> tuple[str, ...]:
    """Names of up to ``most`` nodes that the controller starts: twice as many, so that one which has just gone is not
    taken for its successor."""
    return tuple(f"p{number}" for number in range(1, 2 * most + 1))


def prepare(options: Options, layout: Layout, token: str) -> EmbeddedNats | None:
    """Make directories, the token's file, the server's configuration and the identities; the server if embedded."""
    layout.data.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_private(layout.token, token + "\n")
    layout.secrets.mkdir(exist_ok=True, mode=0o700)  # there before any sandbox, which must not see it
    if options.pool:
        layout.pool.mkdir(exist_ok=True, mode=0o700)  # as well
    for name in options.node_names:
        layout.node(name).mkdir(parents=True, exist_ok=True, mode=0o700)
        if layout.socket(name).parent == layout.far_sockets:
            _private_directory(layout.far_sockets)
    if options.nats_url:
        for identity in options.identities():
            text = json.dumps({"identity": identity.identity, "kind": identity.kind})
            write_private(layout.identity_file(identity.identity), text)
        return None
    server = EmbeddedNats(directory=layout.nats, identities=options.identities())
    server.prepare()
    return server


def _private_directory(path: Path) -> None:
    path.mkdir(mode=0o700, exist_ok=True)
    found = path.lstat()
    if found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise InvalidRequest(f"{path} belongs to somebody else; remove it or choose a shorter --data", field="data")


def node_specs(layout: Layout, name: str, drain_s: float, environment: Mapping[str, str]) -> list[ChildSpec]:
    """The programs of one node that joins a cluster: how it is reached, and who the node is, stand in ``environment``.

    Makes their directories. ``drain_s``: seconds that its instances have to leave when it is stopped.
    """
    layout.node(name).mkdir(parents=True, exist_ok=True, mode=0o700)
    if layout.socket(name).parent == layout.far_sockets:
        _private_directory(layout.far_sockets)
    base = {key: value for key, value in environment.items() if key not in _NOT_HANDED_ON}
    loader, invoker = _node(1, layout, base, name, None)
    invoker = replace(invoker, env={**invoker.env, "SLLM_NODE_DRAIN": str(drain_s)}, grace_s=drain_s + invoker.grace_s)
    return [loader, invoker]


def specs(
    options: Options, layout: Layout, server: EmbeddedNats | None, environment: Mapping[str, str]
) -> list[ChildSpec]:
    """Every program of the platform. ``environment`` is handed on to them, without the caller's own access."""
    base = {key: value for key, value in environment.items() if key not in _NOT_HANDED_ON}
    base |= {
        "SLLM_HOME": str(options.home),
        "SLLM_NATS_URL": server.url if server else str(options.nats_url),
        "SLLM_DRAIN": str(drain_s(environment)),
        "SLLM_NODE_DRAIN": "0",  # its controller ends before a node does: nobody would move what runs there
    }
    found = [_nats(server)] if server else []
    store = {"SLLM_NATS_STORE": str(server.directory)} if server else {}
    bundles = {"SLLM_BUNDLE_BYTES": str(_bundle_bytes(server, environment))} if server else {}
    base |= {"SLLM_NODES_DATA": str(layout.pool)} if options.pool else {}
    for name in options.controller_names:
        own = {"SLLM_CONTROLLER": name, "SLLM_SECRETS": str(layout.secrets), **store}
        found.append(_daemon(layout, base, name, "sllm_runtime.control", name, 3, own))
    # Their keys were made with the server, so nobody else can live in it under their names: there is none to look for.
    nodes = {"SLLM_NAME_WAIT": "0"} | base if server else base
    for name in options.node_names:
        found += _node(options.nodes, layout, nodes, name, name, first=name == options.node_names[0])
    told = metrics_ports(options, environment)
    for number, (name, port) in enumerate(zip(options.gateway_names, options.ports, strict=True)):
        own = {
            "SLLM_GATEWAY": name,
            "SLLM_HOST": options.host,
            "SLLM_PORT": str(port),
            "SLLM_GATEWAYS": str(len(options.ports)),
            "SLLM_TOKEN_FILE": str(layout.token),
            **({METRICS_PORT: str(told[number])} if told else {}),
            **store,
            **bundles,
        }
        spec = _daemon(layout, base, f"gateway-{name}", "sllm_gateway", name, 4, own)
        found.append(replace(spec, grace_s=drain_s(environment) + spec.grace_s))
    return found


def metrics_ports(options: Options, environment: Mapping[str, str]) -> tuple[int, ...]:
    """Where gateways answer probes and metrics alone, if that is asked for: as those of calls, one after the other.

    Raises ``InvalidRequest`` for what is no port, or one of those."""
    text, count = environment.get(METRICS_PORT) or "", len(options.ports)
    if not text:
        return ()
    first = int(text) if text.isascii() and text.isdigit() else 0
    found = tuple(range(first, first + count))
    if not 1 <= first <= 65536 - count or set(found) & set(options.ports):
        raise InvalidRequest(
            f"{METRICS_PORT} is {text!r}; give the first of {count} port(s) beside those of calls", field=METRICS_PORT
        )
    return found


def drain_s(environment: Mapping[str, str]) -> float:
    """How long calls that run may go on while the platform stops: Ctrl-C should end in seconds, also with calls.

    Raises ``InvalidRequest`` if ``SLLM_DRAIN`` is no number of seconds.
    """
    text = environment.get("SLLM_DRAIN") or "1"
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= _LONGEST_DRAIN_S:
        raise InvalidRequest(f"SLLM_DRAIN is {text!r}; give seconds, 0 to {_LONGEST_DRAIN_S:g}", field="SLLM_DRAIN")
    return seconds


def _bundle_bytes(server: EmbeddedNats, environment: Mapping[str, str]) -> int:
    """What the embedded server has room for, or less where that is said. Raises ``InvalidRequest``."""
    room, text = room_for_bundles(server.store_bytes), environment.get("SLLM_BUNDLE_BYTES")
    return min(room, Settings.load({"SLLM_BUNDLE_BYTES": text}).bundle_bytes) if text else room


def _nats(server: EmbeddedNats) -> ChildSpec:
    return ChildSpec(
        name=NATS,
        argv=lambda: server.new_child().argv,
        env=server.new_child().env,
        log=server.log_file,
        ready=server.wait_ready,
        stage=0,
        stop_order=0,
    )


def _node(
    nodes: int, layout: Layout, base: Mapping[str, str], name: str, identity: str | None, *, first: bool = True
) -> list[ChildSpec]:
    """``nodes``: as many share this machine, one of them is the ``first``. ``identity``: whose file it has; None: what
    the environment says."""
    directory, socket = layout.node(name), layout.socket(name)
    shared = {"SLLM_NODE": name, "SLLM_LOADERD_SOCKET": str(socket)} | _share(base, nodes, first=first)
    loader = shared | {"SLLM_DATA": str(directory / "loaderd"), "SLLM_SOCKET": str(socket)}
    others = (layout.data / "nodes", layout.data / "logs", layout.far_sockets)
    private = [str(path) for path in (layout.nats, layout.token, layout.secrets, *others)]
    private += [str(layout.pool), *more_private(base)]
    if key := base.get("SLLM_SECRETS_KEY"):
        private.append(str(Path(key).absolute()))
    invoker = shared | {"SLLM_DATA_DIR": str(directory / "invoker"), "SLLM_PRIVATE": json.dumps(private)}
    ours = _daemon(layout, base, f"invoker-{name}", "sllm_invoker", identity, 2, invoker)
    if base.get("SLLM_SANDBOX", "process") != "process":
        ours = replace(ours, grace_s=_CONTAINERS_END_S)
    return [_daemon(layout, base, f"loaderd-{name}", "sllm_loaderd", None, 1, loader), ours]


def _share(base: Mapping[str, str], nodes: int, *, first: bool) -> dict[str, str]:
    """Several nodes on one machine divide its memory, and the ``first`` has its GPUs, unless the environment says how
    much, and which, each has."""
    if nodes == 1:
        return {}
    # Of which its loaderd's pool has half by itself, as of what is said.
    memory = {} if base.get("SLLM_MEMORY") else {"SLLM_MEMORY": str(control_groups.memory() // nodes)}
    gpus = {} if first or "SLLM_GPUS" in base else {"SLLM_GPUS": "", "SLLM_CUDA_DEVICES": ""}
    return gpus | memory


class _Private(Settings):
    private: tuple[Path, ...] = ()


def more_private(environment: Mapping[str, str]) -> list[str]:
    """What ``SLLM_PRIVATE`` says that functions must not see. Raises ``InvalidRequest``."""
    return [str(path) for path in _Private.load({"SLLM_PRIVATE": environment.get("SLLM_PRIVATE", "")}).private]


def _daemon(
    layout: Layout,
    base: Mapping[str, str],
    name: str,
    module: str,
    identity: str | None,
    stop_order: int,
    own: Mapping[str, str],
) -> ChildSpec:
    env = {**base, **own}
    if identity is not None:
        env["SLLM_IDENTITY_FILE"] = str(layout.identity_file(identity))
    argv = [sys.executable, "-m", module]
    return ChildSpec(
        name=name, argv=lambda: argv, env=env, log=layout.log(name), stage=1, stop_order=stop_order, cwd=layout.data
    )
