"""What a function's children leave behind in a container: each dead process that nobody reaps counts in its limit."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

from sllm_runtime.platform.wire import BlockingWire
from sllm_runtime.protocol import codec
from sllm_runtime.protocol.worker import Spawn, ToZygote
from tests.fixtures.waiting import GIVE_UP_S
from tests.unit.worker.harness import Worker, bundle_of, manifest

FIRST = """
import socket, sys
from sllm_runtime.platform.process import become_subreaper
from sllm_runtime.platform.wire import BlockingWire
from sllm_runtime.worker.container import First
become_subreaper()  # as process 1 is without
sys.exit(First(BlockingWire(socket.socket(fileno=int(sys.argv[1])))).serve())
"""
LEAVES = """
import os, subprocess, time

def dead():
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/stat") as file:
                state, parent = file.read().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        found += [pid] if (state, int(parent)) == ("Z", os.getpid()) else []
    return len(found)

def fn(count: int):
    for _ in range(count):
        try:
            subprocess.run("sleep 0.2; true", shell=True, timeout=0.05)
        except subprocess.TimeoutExpired:
            pass
    time.sleep(1)
    return dead()
"""


def test_process_one_reaps_what_a_worker_leaves(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    first = subprocess.Popen([sys.executable, "-c", FIRST, str(theirs.fileno())], pass_fds=[theirs.fileno()])
    theirs.close()
    mine, its = socket.socketpair()
    (out, out_end), (err, err_end) = os.pipe(), os.pipe()
    with ours:
        BlockingWire(ours).send(codec.pack(ToZygote(Spawn(sandbox="s1"))), (its.fileno(), out_end, err_end))
        its.close()
        os.close(out_end)
        os.close(err_end)
        worker = Worker(BlockingWire(mine), os.pidfd_open(first.pid), first.pid, (out, err))
        try:
            worker.start(manifest(), bundle_of({"user.py": LEAVES}), workdir=tmp_path)
            assert worker.run({"count": 5}).outputs == [0]
            worker.stop()
            assert first.wait(GIVE_UP_S) == 0
        finally:
            worker.close()
            first.wait(GIVE_UP_S)
