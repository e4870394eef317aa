"""``sllm up`` and ``sllm down`` (entry points of ``sllm.commands``)."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from sllm_runtime.platform.daemon import READY, READY_FD
from sllm_runtime.platform.joining import Joined, JoinSettings
from sllm_runtime.platform.local import DEFAULT_PORT, Layout, Options
from sllm_runtime.platform.nats_server import free_port
from sllm_runtime.platform.process import PARENT, die_with_parent, require_calls, tail
from sllm_runtime.platform.running import RUNNING_FILE, Running, read_running, stop_running
from sllm_runtime.platform.settings import Settings
from sllm_runtime.platform.spawned import PoolSettings
from sllm_runtime.platform.telemetry import configure_logging
from sllm_runtime.platform.up import Platform, require_disk
from sllm_runtime.protocol.errors import ErrorBody, InvalidRequest, NotFound, StartFailed
from sllm_runtime.protocol.profiles import LOCK_FILE, PLATFORM_LOCK, PROFILES_FILE, profile_name
from sllm_runtime.protocol.subjects import is_token

_DOWN_S: Final = 15.0
_INSIDE: Final = os.R_OK | os.W_OK | os.X_OK
"""How a directory is used: files are made in it, and replaced."""
_WRITTEN: Final = os.R_OK | os.W_OK
_FILES: Final = ((PLATFORM_LOCK, _WRITTEN), (RUNNING_FILE, os.R_OK), ("logs/*", _WRITTEN), ("nats/*.log*", _WRITTEN),
                 ("nodes/*/loaderd/lock", _WRITTEN))  # fmt: skip
"""Those that are opened as they are; others are replaced whole, for which it takes their directory alone."""
_TREES: Final = (("nats/jetstream", _WRITTEN), ("nodes/*/loaderd", os.R_OK), ("nodes/*/invoker/bundles", os.R_OK),
                 ("nodes/*/invoker/proofs", os.R_OK), ("nodes/*/invoker/logs", _WRITTEN))  # fmt: skip
"""What nobody but a daemon of the platform writes: of a stream that NATS cannot read it would begin a new one."""

Nodes = Annotated[int, typer.Option("--nodes", min=0, max=64, help="Nodes on this machine; they share nothing.")]
Gateways = Annotated[int, typer.Option("--gateways", min=1, max=16, help="Gateways, on consecutive ports.")]
Controllers = Annotated[
    int,
    typer.Option("--controllers", envvar="SLLM_CONTROLLERS", min=1, max=5, help="One leads, the others stand by."),
]
Port = Annotated[
    int, typer.Option("--port", envvar="SLLM_PORT", min=0, max=65535, help="Of the first gateway; 0: any free port.")
]
Host = Annotated[
    str,
    typer.Option("--host", envvar="SLLM_HOST", help="Address that the gateways listen on, or a name of this machine."),
]
Data = Annotated[Path | None, typer.Option("--data", help="Where everything is kept (default: <SLLM_HOME>/run).")]
Detach = Annotated[bool, typer.Option("--detach", "-d", help="Return when ready; `sllm down` stops it.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
Node = Annotated[
    bool,
    typer.Option("--node", help="Join the cluster of SLLM_NATS_URL as node SLLM_NODE, no more."),
]
WithParent = Annotated[bool, typer.Option("--with-parent", help="Stop when the process that started this ends.")]


def up(
    context: typer.Context,
    nodes: Nodes = 1,
    gateways: Gateways = 1,
    controllers: Controllers = 1,
    port: Port = DEFAULT_PORT,
    host: Host = "127.0.0.1",
    data: Data = None,
    detach: Detach = False,
    as_json: Json = False,
    with_parent: WithParent = False,
    node: Node = False,
) -> int:
    """Start the platform on this machine: NATS, controller, gateways, and for each node an invoker and a loader."""
    flags = context.find_root().params
    _refuse_flags("up", flags, "url", "token")
    settings = Settings.load()
    pool = 0 if node else PoolSettings.load().most
    require_calls(nodes=bool(node or nodes or pool))
    _require_temporary()
    if node:
        if detach:
            raise InvalidRequest("--node and --detach do not go together; run it as a service", field="detach")
        return _join((data or settings.home / "run").absolute(), as_json, with_parent)
    if detach and with_parent:
        raise InvalidRequest("--detach and --with-parent do not go together: a parent is outlived", field="detach")
    options = Options(
        home=settings.home.absolute(),
        data=(data or settings.home / "run").absolute(),
        nodes=nodes,
        controllers=controllers,
        host=host,
        ports=_ports(port, gateways),
        profile=_profile(flags.get("profile") or os.environ.get("SLLM_PROFILE") or "default"),
        pool=pool,
        nats_url=settings.nats_url,
    )
    for directory in (options.home, options.data):
        _require_writable(directory)
    for name, wanted in ((LOCK_FILE, _WRITTEN), (PROFILES_FILE, os.R_OK)):
        _require_access(options.home / name, wanted, options.home / name)
    _require_own(options.data)
    if warning := require_disk(options):
        _note(warning)
    if detach:
        return _detached(options, port, as_json)
    _begin(with_parent)
    with _progress(quiet=as_json) as report:

        async def run() -> int:
            platform = Platform(options, os.environ, report)
            shown = partial(_show, asked=options.profile, token=platform.token, began=platform.began)
            return await platform.run(lambda running: shown(running, as_json=as_json, report=report))

        status = _loop(run())
    if status:
        raise typer.Exit(status)
    return 0


def _begin(with_parent: bool) -> None:
    if with_parent:
        starter = os.environ.get(PARENT)
        die_with_parent(signal.SIGTERM, int(starter) if starter else None)
    settings = Settings.load()
    if settings.log_json:  # it goes where the daemons' logs go, to who reads those by line
        configure_logging("platform", "up", settings)
    else:
        logging.basicConfig(format="%(message)s", stream=sys.stderr)
    logging.getLogger().setLevel(logging.WARNING)


def _join(data: Path, as_json: bool, with_parent: bool) -> int:
    """``--node``."""
    settings = JoinSettings.load()
    _require_writable(data)
    _require_own(data)
    _begin(with_parent)

    def show(running: Running) -> None:
        _tell(running)
        if as_json:
            document = {
                "node": settings.node,
                "data": running.data,
                "pid": running.pid,
                "pids": running.pids,
                "notes": running.notes,
            }
            sys.stdout.write(json.dumps(document) + "\n")
            sys.stdout.flush()

    async def run() -> int:
        return await Joined(data, settings, os.environ, _note).run(show)

    status = _loop(run())
    if status:
        raise typer.Exit(status)
    return 0


def _loop(main: Coroutine[Any, Any, int]) -> int:
    """``asyncio.run``, which answers Ctrl-C by cancelling ``main`` only where it finds Python's own answer: one that is
    raised in the middle of a loop leaves children that nobody knows."""
    ours = threading.current_thread() is threading.main_thread()
    if ours and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return asyncio.run(main)


def down(context: typer.Context, data: Data = None, as_json: Json = False) -> None:
    """Stop the platform that runs here, in order."""
    _refuse_flags("down", context.find_root().params, "url", "token", "profile")
    settings = Settings.load()
    directory = (data or settings.home / "run").absolute()
    for path, wanted in ((directory, os.R_OK | os.X_OK), (directory / RUNNING_FILE, os.R_OK)):
        _require_access(path, wanted, directory)  # else one that runs would be none
    running = read_running(directory)
    if running is None:
        raise NotFound(f"no platform runs on {directory}")
    with _progress(quiet=as_json) as report:
        what = running.url or running.data
        report(f"stopping {what}")
        stop_running(running)
    if as_json:
        sys.stdout.write(json.dumps({"stopped": what, "pid": running.pid}) + "\n")
    else:
        _note(f"stopped {what}")


def _profile(name: str) -> str:
    try:
        return profile_name(name)
    except ValueError as error:
        raise InvalidRequest(str(error), field="profile") from error


def _refuse_flags(verb: str, flags: Mapping[str, Any], *names: str) -> None:
    """``flags``: those before the verb, of whichever command line it is a part of."""
    for name in names:
        if flags.get(name) is not None:
            raise InvalidRequest(
                f"--{name} names a platform to talk to; `sllm {verb}` is about the one of this machine whose directory "
                f"--data names: leave --{name} out",
                field=name,
            )


def _require_writable(directory: Path) -> None:
    """Make it. Raises ``InvalidRequest`` where nothing can be kept in it."""
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryFile(dir=directory) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise InvalidRequest(
                    f"files in {directory} cannot be locked ({error.strerror}): of network file systems not all can; "
                    "choose a directory on a disk of this machine by SLLM_HOME, or by --data for what runs"
                ) from error
    except OSError as error:
        raise InvalidRequest(
            f"nothing can be kept in {directory} ({error.strerror}); "
            "choose a directory that you may write by SLLM_HOME, or by --data for what runs"
        ) from error


def _require_own(data: Path) -> None:
    """Raises ``InvalidRequest`` for what the platform has in there and this user can do nothing with; of secrets who
    asks for one is told."""
    for path, wanted in _kept(data):
        _require_access(path, wanted, data)


def _kept(data: Path) -> Iterator[tuple[Path, int]]:
    """What is opened in there, and how: what lies above first. What has another name is nobody's matter: a disk that is
    mounted there has a `lost+found`, a filer's a `.snapshot`."""
    for pattern in ("logs/", "nats/", "nats/*/", "nodes/", "nodes/*/", "nodes/*/*/", "pool/"):
        found = (path for path in sorted(data.glob(pattern)) if path.is_dir())
        yield from ((path, _INSIDE) for path in found if all(map(is_token, path.relative_to(data).parts)))
    for pattern, wanted in _FILES:
        yield from ((path, wanted) for path in sorted(data.glob(pattern)) if path.is_file())
    for pattern, wanted in _TREES:
        for root in sorted(data.glob(pattern)):
            for where, directories, files in os.walk(root):
                directories[:] = sorted(name for name in directories if name != "lost+found" and name[0] != ".")
                yield from ((Path(where, name), _INSIDE) for name in directories)
                yield from ((Path(where, name), wanted) for name in sorted(files))


def _require_access(path: Path, wanted: int, root: Path) -> None:
    """Raises ``InvalidRequest`` for what is there and is another user's, who left this one no way to open it."""
    if os.access(path, wanted):
        return
    with contextlib.suppress(OSError):  # it is not there; or goes, as one that runs there takes files away
        raise InvalidRequest(
            f"{path} belongs to user {path.stat().st_uid} and user {os.getuid()} cannot use it: this platform"
            " was started by another user, or is a copy that lost its owners;"
            f" `chown -R {os.getuid()} {root}` (`chmod -R u+rwX {root}` if it is yours), or do this as that user"
        )


def _require_temporary() -> None:
    """Raises ``InvalidRequest`` where no daemon could make a temporary file."""
    try:
        tempfile.gettempdir()
    except OSError as error:
        raise InvalidRequest(
            "there is no directory for temporary files that can be written: name one by TMPDIR, or mount one at /tmp "
            "(in a container with a read-only root: --tmpfs /tmp, an emptyDir)"
        ) from error


def _ports(port: int, gateways: int) -> tuple[int, ...]:
    if port:
        if port + gateways > 65536:
            raise InvalidRequest(f"--port {port} leaves no room for {gateways} gateways", field="port")
        return tuple(range(port, port + gateways))
    found: set[int] = set()
    while len(found) < gateways:
        found.add(free_port())
    return tuple(sorted(found))


def _show(running: Running, asked: str, token: str, began: float, as_json: bool, report: Callable[[str], None]) -> None:
    """``asked``: the profile that it was to have."""
    seconds = time.monotonic() - began
    report("")
    if running.profile != asked:
        _note(
            f"the profile {asked!r} names another platform and stays; this one is {running.profile!r}: "
            f"sllm --profile {running.profile} ..., or SLLM_PROFILE={running.profile}"
        )
    _tell(running)
    if as_json:
        document = {
            "url": running.url,
            "urls": list(running.urls),
            "token": token,
            "profile": running.profile,
            "data": running.data,
            "nats_url": running.nats_url,
            "pid": running.pid,
            "pids": running.pids,
            "notes": running.notes,
            "seconds": round(seconds, 3),
        }
        sys.stdout.write(json.dumps(document) + "\n")
        sys.stdout.flush()
        return
    _note(f"ready in {seconds:.1f} s: {running.url}  (token in profile {running.profile!r}, data in {running.data})")
    _note("next: sllm fn init hello && sllm fn deploy hello/function.py   -   Ctrl-C or `sllm down` stops it")


def _tell(running: Running) -> None:
    for name, note in running.notes.items():
        _note(f"{name}: {note}")


def _note(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


@contextlib.contextmanager
def _progress(*, quiet: bool) -> Iterator[Callable[[str], None]]:
    """What goes on now: a spinner on a terminal, lines elsewhere; "" takes it away."""
    if quiet:
        yield lambda _text: None
        return
    if not sys.stderr.isatty():
        yield lambda text: _note(text) if text else None
        return
    from rich.console import Console

    console = Console(stderr=True, no_color="NO_COLOR" in os.environ or None)
    status = console.status("")

    def report(text: str) -> None:
        status.update(text)
        if text:
            status.start()
        else:
            status.stop()

    try:
        yield report
    finally:
        status.stop()


def _detached(options: Options, port: int, as_json: bool) -> int:
    """Start this same command in a session of its own and wait until it says that it is ready."""
    log = Layout(options.data).log("up")
    log.parent.mkdir(parents=True, exist_ok=True)
    argv = [sys.executable, "-m", "sllm_runtime.platform", "up", "--json", "--data", str(options.data)]
    argv += ["--nodes", str(options.nodes), "--gateways", str(len(options.ports)), "--host", options.host]
    argv += ["--controllers", str(options.controllers), "--port", str(port)]
    began = time.monotonic()
    read, write = os.pipe()
    # The shown token must be the one it uses, and its stdout is a log: hence a private answer through up.json.
    with open(log, "ab") as output, os.fdopen(read, "rb") as answer, _progress(quiet=as_json) as report:
        report("starting the platform")
        if read_running(options.data) is None:  # else it is another one's log, which goes on writing it
            output.truncate(0)
        try:
            child = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=output,
                pass_fds=(write,),
                env={**os.environ, READY_FD: str(write), "SLLM_PROFILE": options.profile},
                start_new_session=True,
            )
        finally:
            os.close(write)
        try:
            is_ready = answer.read(len(READY)) == READY
        except KeyboardInterrupt:
            child.terminate()
            child.wait(_DOWN_S)
            raise
        running = read_running(options.data) if is_ready else None
        if running is None:
            child.terminate()
            child.wait(_DOWN_S)
            raise _failure(log)
        token = Layout(options.data).token.read_text().strip()
        _show(running, options.profile, token, began, as_json, report)
    return 0


def _failure(log: Path) -> Exception:
    """The error that the detached process wrote as its last line."""
    text = tail(log)
    for line in reversed(text.splitlines()):
        with contextlib.suppress(ValueError, KeyError, TypeError):
            return ErrorBody(**json.loads(line)["error"]).to_error()
    return StartFailed(f"the platform did not start; {log} ends:\n{text}")
