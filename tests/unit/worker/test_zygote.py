"""The fork server: what it is when it forks, what a worker inherits, and who dies with whom."""

from __future__ import annotations

import errno
import itertools
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn, cast

import pytest

from sllm_runtime.platform.descriptors import HANDED_ON
from sllm_runtime.platform.framing import frame
from sllm_runtime.platform.process import NICE
from sllm_runtime.platform.wire import BlockingWire
from sllm_runtime.protocol import codec
from sllm_runtime.protocol.limits import MAX_FDS
from sllm_runtime.protocol.worker import FromWorker, FromZygote, Heartbeat, Spawn, Started, ToZygote, Unborn
from sllm_runtime.worker import isolation, rehearsal
from sllm_runtime.worker.imports import SINGLE_THREADED, Later
from sllm_runtime.worker.rehearsal import rehearse
from sllm_runtime.worker.working_set import WorkingSet
from sllm_runtime.worker.zygote import Zygote as ForkServer
from tests.fixtures.deployed import wait
from tests.fixtures.waiting import GIVE_UP_S
from tests.unit.worker.harness import Worker, Zygote, bundle_of, manifest


def title(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()


def test_it_runs_one_thread_and_says_what_it_took(zygote: Zygote) -> None:
    ready = zygote.wait_ready()
    assert ready.import_s > 0
    assert os.listdir(f"/proc/{zygote.process.pid}/task") == [str(zygote.process.pid)]
    assert title(zygote.process.pid).startswith("sllm-zygote")
    environment = Path(f"/proc/{zygote.process.pid}/environ").read_bytes()
    assert SINGLE_THREADED["OPENBLAS_NUM_THREADS"] == "1"
    assert b"LD_PRELOAD" not in environment


LOOK = """
import gc, os, resource, signal, sys
def fn():
    return {
        "limit": resource.getrlimit(resource.RLIMIT_NOFILE),
        "room": next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("FDSize")),
        "fds": sorted(int(n) for n in os.listdir("/proc/self/fd")),
        "leads": os.getpgid(0) == os.getpid(),
        "cwd": os.getcwd(),
        "stdin": os.read(0, 1).decode(),
        "env": os.environ["MINE"] + os.environ["OMP_NUM_THREADS"],
        "torch": "torch" in sys.modules,
        "main": __name__,
        "preload": "SLLM_PRELOAD" in os.environ,
        "collector": [gc.isenabled(), gc.get_freeze_count() > 100_000],
        "handlers": [signal.getsignal(number) is signal.SIG_DFL for number in (signal.SIGTERM, signal.SIGCHLD)],
        "ignored": next(line.split()[1] for line in open("/proc/self/status") if line.startswith("SigIgn")),
        "handed on": os.get_inheritable(3),
    }
def later():
    from sllm_runtime.worker.imports import LATER
    return [name for name in LATER if name not in sys.modules]
def temporary():
    import tempfile
    with tempfile.NamedTemporaryFile() as file:
        return [tempfile.gettempdir(), file.name]
def random():
    import random, numpy, torch
    return [random.random(), float(numpy.random.rand()), float(torch.rand(1))]
"""


def test_what_a_worker_inherits(worker: Worker, tmp_path: Path) -> None:
    worker.start(
        manifest(env={"MINE": "m"}), bundle_of({"user.py": LOOK}), workdir=tmp_path, env={"MINE": "n"}, threads=2
    )
    assert title(worker.pid) == "sllm-worker i1"
    seen = worker.run().outputs[0]
    # 0 - 2, the socket, uvloop's own ten, and the listing itself.
    assert len(seen["fds"]) <= 15, seen
    assert seen["room"] >= 2 * MAX_FDS  # made while there was one thread: later each doubling waits for the kernel
    # Descriptors on their way are counted for the user, against each sender's limit: it cannot fill its fork server's.
    assert seen["limit"] == [min(HANDED_ON, resource.getrlimit(resource.RLIMIT_NOFILE)[0]) // 2] * 2
    assert (seen["leads"], seen["stdin"], seen["env"], seen["torch"]) == (True, "", "n2", True)
    assert not seen["preload"]  # that is between the invoker and its fork server
    assert seen["collector"] == [True, True]  # it runs, and leaves alone what all workers share
    assert seen["cwd"] == str(tmp_path / "code")
    assert seen["handlers"] == [True, True]
    assert not int(seen["ignored"], 16) & 1 << signal.SIGINT - 1, "what it starts can be interrupted"
    assert not seen["handed on"], "the socket to the invoker is for nothing that it starts"


def test_where_memory_is_short_the_kernel_takes_a_worker_before_what_all_of_them_need(
    zygote: Zygote, worker: Worker
) -> None:
    """By what it counts, loaderd (all of the pool) and the fork server have more than most workers: with either all
    instances of a node would go, and who took the memory might stay."""
    process = zygote.process.pid
    one, all_of_them = (int(Path(f"/proc/{pid}/oom_score_adj").read_text()) for pid in (worker.pid, process))
    assert one > all_of_them


def test_so_it_does_whatever_part_of_the_memory_the_pool_has(zygote: Zygote, worker: Worker) -> None:
    """``SLLM_POOL_BYTES`` may be all of it but a byte, and on a node for models alone it is most of it. What the kernel
    compares: a process's pages, and ``oom_score_adj`` thousandths of all."""
    pool = 0.8
    one, other = (int(Path(f"/proc/{pid}/oom_score_adj").read_text()) for pid in (worker.pid, zygote.process.pid))
    assert one / 1000 >= min(1.0, other / 1000 + pool)


def test_who_serves_it_has_the_core_before_a_worker(zygote: Zygote, worker: Worker) -> None:
    behind = min(19, os.getpriority(os.PRIO_PROCESS, os.getpid()) + NICE)
    assert [os.getpriority(os.PRIO_PROCESS, pid) for pid in (worker.pid, zygote.process.pid)] == [behind, behind]


def test_the_rest_is_imported_while_nobody_asks(zygote: Zygote, tmp_path: Path) -> None:
    """Then it says so, and a worker that is forked from then on has everything."""
    zygote.wait_ready()
    zygote.wait_complete()
    worker = zygote.spawn()
    try:
        worker.start(manifest("user:later"), bundle_of({"user.py": LOOK}), workdir=tmp_path)
        assert worker.run().outputs[0] == []
    finally:
        worker.close()
        zygote.exited(zygote.count)
    assert os.listdir(f"/proc/{zygote.process.pid}/task") == [str(zygote.process.pid)]


def test_temporary_files_lie_in_the_instances_own_directory(zygote: Zygote, tmp_path: Path) -> None:
    """Which goes with it. Something of all that the fork server imports has asked where they lie: by its TMPDIR."""
    zygote.wait_ready()
    zygote.wait_complete()
    worker = zygote.spawn()
    try:
        env = {"TMPDIR": str(tmp_path)}
        worker.start(manifest("user:temporary"), bundle_of({"user.py": LOOK}), workdir=tmp_path, env=env)
        folder, file = worker.run().outputs[0]
    finally:
        worker.close()
        zygote.exited(zygote.count)
    assert folder == str(tmp_path)
    assert Path(file).parent == tmp_path


HUB = """
def fn():
    from huggingface_hub import constants
    from transformers.utils import hub
    return [constants.HF_HUB_CACHE, hub.constants.HF_HUB_CACHE, constants.HF_HUB_OFFLINE]
"""


def test_hugging_faces_cache_is_where_the_functions_own_environment_says(zygote: Zygote, tmp_path: Path) -> None:
    """The fork server has imported what looks once where it is."""
    zygote.wait_ready()
    zygote.wait_complete()
    worker = zygote.spawn()
    try:
        described = manifest(env={"HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1"})
        worker.start(described, bundle_of({"user.py": HUB}), workdir=tmp_path)
        assert worker.run().outputs[0] == [str(tmp_path / "hf" / "hub")] * 2 + [True]
    finally:
        worker.close()
        zygote.exited(zygote.count)


def test_a_node_may_do_without_transformers() -> None:
    assert Later("engine").done
    assert not Later("all").done


def test_twins_draw_different_numbers(zygote: Zygote, tmp_path: Path) -> None:
    drawn = []
    for name in "ab":
        worker = zygote.spawn()
        try:
            worker.start(manifest("user:random"), bundle_of({"user.py": LOOK}), workdir=tmp_path / name)
            drawn.append(worker.run().outputs[0])
        finally:
            worker.close()
            zygote.exited(zygote.count)
    assert not set(drawn[0]) & set(drawn[1])


def test_a_worker_whose_invoker_hangs_up_ends(worker: Worker, zygote: Zygote, tmp_path: Path) -> None:
    worker.start(manifest(), bundle_of({"user.py": LOOK}), workdir=tmp_path)
    worker.wire.sock.shutdown(2)
    assert zygote.exited(zygote.count).code == 0


def test_raw_writes_go_to_the_pipes(worker: Worker, tmp_path: Path) -> None:
    source = "import os\ndef fn():\n    os.write(2, b'raw')\n"
    worker.start(manifest(), bundle_of({"user.py": source}), workdir=tmp_path)
    worker.run()
    assert "raw" in worker.stderr()


@pytest.fixture
def own() -> Iterator[Zygote]:
    server = Zygote()
    yield server
    server.close()


DAEMON = (Path(__file__).parents[2] / "fixtures" / "functions" / "forks_daemon.py").read_text()


def dead(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] == b"Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.mark.parametrize("end", ["hang up", "SIGTERM", "SIGKILL"])
def test_everything_dies_with_it(own: Zygote, tmp_path: Path, end: str) -> None:
    worker = own.spawn()
    try:
        worker.start(manifest("d:fn"), bundle_of({"d.py": DAEMON}), workdir=tmp_path)
        daemon = worker.run().outputs[0]
        if end == "hang up":
            own.wire.sock.shutdown(2)
        else:
            own.process.send_signal(signal.SIGTERM if end == "SIGTERM" else signal.SIGKILL)
        wait(lambda: dead(worker.pid), "the worker is dead")
        if end != "SIGKILL":  # then a PID namespace or the next subreaper above it must do it
            wait(lambda: dead(daemon), "what it detached is dead")
        else:
            os.kill(daemon, signal.SIGKILL)
        assert own.process.wait(GIVE_UP_S) == (-9 if end == "SIGKILL" else 0)
    finally:
        worker.close()


def test_what_a_worker_detached_lives_as_long_as_it(own: Zygote, tmp_path: Path) -> None:
    """And no longer, though the fork server goes on; the end of another worker is not its own."""
    own.wait_ready()
    before = descriptors(own)
    workers, detached = [own.spawn(), own.spawn()], list[int]()
    try:
        for number, worker in enumerate(workers):
            worker.start(manifest("d:fn"), bundle_of({"d.py": DAEMON}), workdir=tmp_path / str(number))
            detached += worker.run().outputs
        workers[0].kill()
        own.exited(1)
        wait(lambda: dead(detached[0]), "what it detached is dead")
        assert not dead(detached[1]), "that one's worker lives"
        workers[1].kill()
        own.exited(2)
        wait(lambda: dead(detached[1]), "what it detached is dead")
        assert descriptors(own) == before, "none of a worker's is the fork server's"
    finally:
        for worker in workers:
            worker.close()


def descriptors(zygote: Zygote) -> int:
    return len(os.listdir(f"/proc/{zygote.process.pid}/fd"))


def no_room() -> int:
    raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")


@pytest.fixture
def serving() -> Iterator[tuple[ForkServer, BlockingWire]]:
    """One in this process, and its invoker's end."""
    ours, theirs = map(BlockingWire, socket.socketpair())
    server = ForkServer(ours, 0.0, Later("engine"), WorkingSet(), lambda: None, isolation.Leave.NEVER)
    yield server, theirs
    ours.close()  # not ``server.close``, which ends all children of this process
    theirs.close()
    os.close(server._wake)
    os.close(server._woken)


@pytest.mark.parametrize("refuses", ["fork", "pidfd_open"])
def test_a_fork_that_fails_costs_no_other_worker(
    serving: tuple[ForkServer, BlockingWire], monkeypatch: pytest.MonkeyPatch, refuses: str
) -> None:
    server, invoker = serving
    monkeypatch.setattr(os, "fork", no_room if refuses == "fork" else lambda: 2**22 - 1)  # there is no such process
    mine, worker = socket.socketpair()
    fds = [worker.fileno() for _ in range(3)]
    invoker.send(codec.pack(ToZygote(Spawn(sandbox="s"))), fds)
    worker.close()
    server._receive()
    mine.settimeout(GIVE_UP_S)
    assert mine.recv(1) == b"", "what was the worker's is closed"
    mine.close()
    assert not server._stopping
    invoker.sock.settimeout(GIVE_UP_S)
    told = codec.unpack(FromZygote, invoker.receive() or b"").body
    assert isinstance(told, Unborn), "who waits for it is told at once"
    assert (told.sandbox, told.why != "") == ("s", True)


def test_what_comes_together_is_heeded_together(serving: tuple[ForkServer, BlockingWire]) -> None:
    """No other message may come after them for hours."""
    server, invoker = serving
    told = b"".join(frame(codec.pack(ToZygote(Started(sandbox=name)))) for name in "ab")
    invoker.sock.sendall(told)
    server._receive()
    assert list(server._started) == ["a", "b"]


def test_it_waits_until_it_is_quiet_for_what_it_does_meanwhile(
    serving: tuple[ForkServer, BlockingWire], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To import goes on at once while nobody asks for anything, and begins anew when somebody has; a worker that has
    started is looked at before."""
    server, invoker = serving
    done = list[str]()
    left = deque("ab")
    server._later = cast(Later, SimpleNamespace(done=False, step=lambda: done.append(left.popleft())))
    monkeypatch.setattr(server, "_look", lambda name: done.append(f"look at {name}"))
    waited = list[float]()

    def polled(wait_ms: float) -> list[tuple[int, int]]:
        waited.append(wait_ms)
        turn = len(waited)
        if turn == 3:  # after two names
            invoker.send(codec.pack(ToZygote(Started(sandbox="s"))))
            return [(server._wire.sock.fileno(), select.POLLIN)]
        server._stopping = turn == 6
        return []

    monkeypatch.setattr(select, "poll", lambda: SimpleNamespace(register=lambda *_: None, poll=polled))
    left.extend("cd")
    handlers = {number: signal.getsignal(number) for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT)}
    try:
        server.serve()
    finally:
        signal.set_wakeup_fd(-1)
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert waited == [1000.0, 0, 0, 50.0, 1000.0, 0]
    assert done == ["a", "b", "look at s", "c", "d"]


def test_a_start_that_cannot_be_rehearsed_is_done_without(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def never(*_: object) -> NoReturn:
        raise AssertionError

    monkeypatch.setattr(os, "fork", no_room)
    before = len(os.listdir("/proc/self/fd"))
    rehearse(WorkingSet(), never)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    rehearse(WorkingSet(), never)
    assert len(os.listdir("/proc/self/fd")) == before
    assert capsys.readouterr().err.count("no start could be rehearsed") == 2


def test_a_start_that_is_not_ready_in_time_is_done_without(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Though its worker beats."""

    def beats(fds: list[int], *_: object) -> NoReturn:
        try:
            wire = BlockingWire(socket.socket(fileno=fds[0]))
            for _beat in range(1000):  # then it ends, which would be said
                wire.send(codec.pack(FromWorker(Heartbeat(running=0))))
        finally:
            os._exit(0)

    clock = itertools.count(step=GIVE_UP_S / 100)
    monkeypatch.setattr(rehearsal, "GIVE_UP_S", GIVE_UP_S)
    monkeypatch.setattr(rehearsal, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    rehearse(WorkingSet(), beats)
    assert "no start could be rehearsed, a node's first ones are slower: timed out" in capsys.readouterr().err


def test_what_memory_a_worker_had_at_its_most_is_told(zygote: Zygote, tmp_path: Path) -> None:
    """Beside what the fork server has itself: what is left of 512 MiB in any case is 128."""
    source = "def fn(mib):\n    held = bytearray(b'x') * (mib * 2**20)\n    return len(held)\n"
    peaks = []
    for mib in (1, 512):
        worker = zygote.spawn()
        try:
            worker.start(manifest(memory=2**30), bundle_of({"user.py": source}), workdir=tmp_path / str(mib))
            worker.run({"mib": mib})
        finally:
            worker.close()
            peaks.append(zygote.exited(zygote.count).peak)
    assert peaks[0] < 2**27 < peaks[1] < 2**30


def test_memory_of_who_started_the_fork_server_is_not_taken_for_its_own() -> None:
    """The kernel hands a peak on over an exec."""
    asks = "import resource; from sllm_runtime.worker import zygote; "
    asks += "print(zygote._most_kib(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    large = f"import subprocess, sys; held = b'x' * 2**29; subprocess.run([sys.executable, '-c', {asks!r}], check=True)"
    done = subprocess.run([sys.executable, "-c", large], capture_output=True, text=True, timeout=60, check=True)
    own, handed_on = map(int, done.stdout.split())
    assert own < 2**18 < handed_on, "KiB"


def test_a_warm_worker_has_what_starts_touch(own: Zygote, tmp_path: Path) -> None:
    """The first already, by a start that was rehearsed; the next also what this function touched of what was there."""
    with started(own, tmp_path / "cold", warm=False) as cold:
        pass
    with started(own, tmp_path / "first", warm=True) as first:
        own.started(own.count)  # it looks when it is quiet

        def faults_later() -> int:
            with started(own, tmp_path / f"later-{own.count}", warm=True) as later:
                return later

        wait(lambda: faults_later() < first - 100, "the next ones have more")
    assert first < cold / 2, (cold, first)


NETWORK = """
import os
def fn():
    return [os.readlink("/proc/self/ns/net"), sorted(os.listdir("/proc/self/fd")), open("/proc/self/status").read()]
"""


@pytest.mark.parametrize("network", [False, True])
def test_a_warm_worker_has_left_the_network_and_comes_back_for_a_function_that_may_have_it(
    own: Zygote, tmp_path: Path, network: bool
) -> None:
    if isolation.leave() is not isolation.Leave.FOR_NOW:
        pytest.skip("this user may not enter this machine's network again")
    found = []
    for warm in (False, True):
        worker = own.spawn()
        try:
            if warm:
                until_left(worker.pid, network_of(own.process.pid))
            worker.start(manifest(network=network), bundle_of({"user.py": NETWORK}), workdir=tmp_path / str(warm))
            (answer,) = worker.run().outputs
            found.append(answer)
        finally:
            worker.close()
    (_, fds, _), (own_network, warm_fds, status) = found
    assert (own_network == network_of(own.process.pid)) is network
    assert len(warm_fds) == len(fds), "what it left is closed"
    assert "CapEff:\t0000000000000000" in status


def until_left(pid: int, network: str) -> None:
    wait(lambda: network_of(pid) != network, f"it has left {network}")


def network_of(pid: int) -> str:
    return os.readlink(f"/proc/{pid}/ns/net")


LARGE = """
import torch
names = [name for name, value in sorted(vars(torch).items()) if callable(value)]
def fn():
    return len(names)
"""


@contextmanager
def started(zygote: Zygote, workdir: Path, *, warm: bool) -> Iterator[int]:
    """A worker's faults until it is ready: all of them, or, of a ``warm`` one, those since its assignment."""
    worker = zygote.spawn()
    try:
        if warm:
            wait(lambda: private_kib(worker.pid) > 6 * 1024, "it takes pages")
            taken = [-1]
            wait(lambda: taken.append(faults(worker.pid)) or taken[-1] == taken[-2], "it has them")  # type: ignore[func-returns-value]
        before = faults(worker.pid) if warm else 0
        worker.start(manifest(), bundle_of({"user.py": LARGE}), workdir=workdir)
        yield faults(worker.pid) - before
    finally:
        worker.close()


def faults(pid: int) -> int:
    """Minor faults of the process until now."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[7])


def private_kib(pid: int) -> int:
    """Memory that it shares with nobody."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return int(rollup.partition("Private_Dirty:")[2].split()[0])
