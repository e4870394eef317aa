"""The case of ``load`` that the paper has: 20 copies of a model on the disk, read in random order.

Each copy is another model, in its first two bytes, so that nothing recognises one as the other.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from benchmarks.load_bench import Bench, Converted, free_bytes, names_in
from benchmarks.load_model import ONE, QUICK, Checkpoint, Shape
from benchmarks.load_reference import Read, limits, reference
from benchmarks.load_ssd import Competitor, add_ours, near, same, ssd_aims, start
from benchmarks.load_systems import Peer, take
from benchmarks.page_cache import empty
from benchmarks.record import Case
from benchmarks.runner import Run, in_turn
from sllm_loaderd.files import chunk_digest
from sllm_runtime.protocol.checkpoint import INDEX_NAME, decode_index, encode_index, index_digest, partition_name

COPIES: Final = 20
_SHARE: Final = 0.5
"""Of the free disk, at most."""


@dataclass(frozen=True)
class Copy:
    """One copy in both forms. ``digest``: as a checkpoint's."""

    stored: Converted
    directory: Path
    digest: str


def measure(bench: Bench, case: str, peers: Sequence[Peer], like: str) -> None:
    """Every system loads every copy once, in an order of its own; bytes are compared each time."""
    run, count = bench.run, bench.run.rounds if bench.run.quick else COPIES
    shape = size(free_bytes(bench.directory), count)
    checkpoint, home = bench.checkpoint(case, shape), bench.home(case)
    stored = bench.converted(checkpoint)
    run.note(f"{case}: writing {count} copies of {checkpoint.nbytes / 1e9:.2f} GB in two forms")
    copies = [make_copy(checkpoint, stored, home / str(number), number) for number in range(1, count + 1)]
    run.settings[f"{case}_copies"] = count
    try:
        with bench.node(case, *(copy.stored for copy in copies), room=checkpoint.nbytes) as node:
            loader = bench.programs.ours(node, copies[0].stored.model)
            first = loader.load(checkpoint.names)  # after which the pool's chunks have their pages
            same("sllm", first.digest, copies[0].digest)

            def mine(copy: Copy) -> None:
                node.until_free()
                for model in {each.model for each in node.status().resident}:
                    node.forget(model)
                empty(copy.stored.partition, primed=False)
                made = loader.load(checkpoint.names, model=copy.stored.model)
                same("sllm", made.digest, copy.digest)
                add_ours(run, case, made)

            turns: list[Callable[[Copy], None]] = [mine, *_limits(run, case)]
            turns += _peers(bench, case, checkpoint, peers, like)
            _rounds(run, case, copies, turns)
    finally:
        shutil.rmtree(home)  # of all cases it takes the most room
    ssd_aims(run, case, checkpoint.nbytes)


def size(free: int, count: int) -> Shape:
    """The larger shape if that many copies in two forms take half of the free disk at most, or the smaller one."""
    return ONE if 2 * count * ONE.nbytes <= free * _SHARE else QUICK


def _limits(run: Run, case: str) -> list[Callable[[Copy], None]]:
    """The disk's, on the copies' own files, of which nothing is read before."""
    return [functools.partial(_limit, run.case(case, system, "s"), read) for system, read in limits().items()]


def _limit(case: Case, read: Read, copy: Copy) -> None:
    reference(case, read, copy.stored.partition, primed=False)


def _peers(
    bench: Bench, case: str, checkpoint: Checkpoint, peers: Sequence[Peer], like: str
) -> list[Callable[[Copy], None]]:
    """Those that read safetensors, which the copies are: of them, and not of all peers, the fastest are measured."""
    able = [each for each in peers if each.reads == checkpoint.file]
    for each in peers:
        if each not in able:
            bench.run.case(case, each.name, "s").not_run = f"reads {each.reads}, of which no copies are made"
    chosen = near(bench.run, case, able, like)
    return [functools.partial(_peer, rival, checkpoint) for rival in start(bench, case, checkpoint, chosen)]


def _peer(rival: Competitor, checkpoint: Checkpoint, copy: Copy) -> None:
    empty(copy.directory / checkpoint.file, primed=False)
    made = rival.loader.load(checkpoint.names, directory=str(copy.directory))
    same(rival.case.system, made.digest, copy.digest)
    take(rival.case, made)


def _rounds(run: Run, case: str, copies: list[Copy], turns: list[Callable[[Copy], None]]) -> None:
    """Each system on one copy, in turn; orders are random, each its own, and the same in every run."""
    orders = [random.Random(number).sample(copies, len(copies)) for number in range(len(turns))]
    for number in range(len(copies)):
        if number % 5 == 0:
            run.note(f"{case}: copy {number + 1} of {len(copies)}")
        for turn, order in in_turn(list(zip(turns, orders, strict=True)), number):
            turn(order[number])


def make_copy(checkpoint: Checkpoint, stored: Converted, home: Path, number: int) -> Copy:
    """The checkpoint with ``number`` as the first two bytes of its first tensor, in both forms, synced."""
    home.mkdir()
    mark = number.to_bytes(2, "little")
    shutil.copytree(checkpoint.directory, home / "hf", ignore=shutil.ignore_patterns("*.bin", "*.tensors"))
    digest = _mark_source(home / "hf" / checkpoint.file, mark)
    shutil.copytree(stored.directory, home / "sllm")
    model = _mark_converted(home / "sllm", names_in(checkpoint)[0], mark)
    for file in (home / "hf" / checkpoint.file, home / "sllm" / partition_name(0)):
        with file.open("rb") as written:
            os.fsync(written.fileno())  # nothing is left to be written while others read
    return Copy(Converted(home / "sllm", model, 0.0), home / "hf", digest)


def _mark_source(file: Path, mark: bytes) -> str:
    """Change the first tensor; the digest over names and bytes then."""
    made = hashlib.sha256()
    with file.open("r+b") as source:
        length = int.from_bytes(source.read(8), "little")
        header = json.loads(source.read(length))
        source.write(mark)
        source.seek(8 + length)
        for name, tensor in header.items():
            if name != "__metadata__":
                begin, end = tensor["data_offsets"]
                made.update(name.encode())
                made.update(source.read(end - begin))
    return made.hexdigest()


def _mark_converted(directory: Path, tensor: str, mark: bytes) -> str:
    """Change that tensor's first bytes, the digest of their chunk and with that the model's, which is returned."""
    index = decode_index((directory / INDEX_NAME).read_bytes())
    offset = next(each.offset for each in index.tensors if each.name == tensor)
    chunk = offset // index.chunk_bytes
    with (directory / partition_name(0)).open("r+b") as partition:
        partition.seek(offset)
        partition.write(mark)
        partition.seek(chunk * index.chunk_bytes)
        found = chunk_digest(partition.read(index.chunk_bytes))
    digests = tuple(found if at == chunk else each for at, each in enumerate(index.partitions[0].digests))
    changed = (msgspec.structs.replace(index.partitions[0], digests=digests), *index.partitions[1:])
    encoded = encode_index(msgspec.structs.replace(index, partitions=changed))
    (directory / INDEX_NAME).write_bytes(encoded)
    return index_digest(encoded)
