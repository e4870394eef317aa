"""`sllm model convert | describe | validate`: work on directories, with no platform. Loaded when called."""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Annotated

import msgspec
import typer

from sllm_loaderd.verify import describe as describe_checkpoint
from sllm_loaderd.verify import open_checkpoint, validate_checkpoint
from sllm_runtime.protocol.loader import ModelInfo
from sllm_runtime.protocol.quantities import show_bytes

Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
Directory = Annotated[Path, typer.Argument(help="A converted model.")]
_SOURCE = "A model directory, a GGUF file, hf://org/name@revision, s3://…, https://… or peer://…"
_PLAN = (
    "Which rank has what: auto:N (tensor parallel, llama-like models), auto-layers:N (a run of layers per rank),"
    " auto-stages:N (likewise, as parallelism={'pipeline': N} takes them) or a JSON plan file. One partition file per"
    " rank; all is in rank 0 without it."
)
_ORDERS = {
    "traced": "as a forward pass uses them",
    "module": "as the module registers them",
    "names": "by the layer numbers in their names",
}
_BLOCKS_SHOWN = 8
_SHOW_AFTER_S = 1.0
_SHOW_EVERY_S = 0.2


class _Meter:
    """Bytes, rate and time left on stderr, for what takes more than a second and somebody to look at it."""

    def __init__(self, what: str, quiet: bool) -> None:
        self._what = what
        self._shows = not quiet and sys.stderr.isatty()
        self._begun = self._last = 0.0

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if not self._begun:  # the rate is that of this stage, not of what was before it
            self._begun, self._last = now, now + _SHOW_AFTER_S - _SHOW_EVERY_S
        if not self._shows or now - self._last < _SHOW_EVERY_S:
            return
        self._last = now
        rate = done / (now - self._begun)
        left = f", {(total - done) / rate:.0f} s left" if rate else ""
        of = f"{show_bytes(done)} of {show_bytes(total)}"
        sys.stderr.write(f"\r\x1b[K{self._what}: {of}, {show_bytes(int(rate))}/s{left}")
        sys.stderr.flush()

    def close(self) -> None:
        """Give the line back."""
        if self._shows and self._begun and time.monotonic() - self._begun >= _SHOW_AFTER_S:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


@contextlib.contextmanager
def _meter(what: str, quiet: bool) -> Iterator[_Meter]:
    """A meter; SIGTERM ends the work as Ctrl-C does, so that nothing half-made is left."""

    def stop(signum: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    meter = _Meter(what, quiet)
    try:
        yield meter
    finally:
        meter.close()
        signal.signal(signal.SIGTERM, before)


def convert(
    source: Annotated[str, typer.Argument(help=_SOURCE)],
    target: Annotated[Path, typer.Argument(help="The checkpoint to make; must not be there yet.")],
    plan: Annotated[str | None, typer.Option(help=_PLAN)] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Leave GGUF's quantised blocks packed.")] = False,
    verify: Annotated[bool, typer.Option("--verify", help="Compare every bit with the source afterwards.")] = False,
    cache: Annotated[Path | None, typer.Option(help="Where remote sources are fetched to.")] = None,
    json: Json = False,
) -> None:
    """Write a model or a LoRA adapter as a loading-optimised checkpoint.

    Reads safetensors and PyTorch .bin files (single or sharded), GGUF files and PEFT adapters. The checkpoint appears
    whole or not at all.
    """
    from sllm_loaderd.convert import ConvertOptions, convert_directory
    from sllm_loaderd.convert.ranks import read_plan
    from sllm_loaderd.sources import open_source
    from sllm_loaderd.sources.fetch import resolve

    options = ConvertOptions(plan=None if plan is None else read_plan(plan), keep=keep)
    kept = cache or Path.home() / ".cache" / "sllm" / "sources"
    with _meter("fetching", json) as meter:
        directory = resolve(open_source(source), kept, meter)
    with _meter("converting", json) as meter, _meter("comparing", json) as checking:
        convert_directory(directory, target, options=options, progress=meter, verify=checking if verify else None)
    _show(describe_checkpoint(open_checkpoint(target)), json)


def describe(directory: Directory, json: Json = False) -> None:
    """Say what a converted model has: partitions, blocks, dtypes, biggest tensors."""
    _show(describe_checkpoint(open_checkpoint(directory)), json)


def validate(directory: Directory, json: Json = False) -> None:
    """Compare every byte of a converted model with its digest."""
    with _meter("checking", json) as meter:
        checkpoint = validate_checkpoint(directory, meter)
    if json:
        _write(msgspec.json.encode({"model": checkpoint.digest, "valid": True}).decode())
    else:
        _write(f"{directory}: every byte is as {checkpoint.digest} says ({show_bytes(checkpoint.index.nbytes)})")


def _show(info: ModelInfo, json: bool) -> None:
    if json:
        document = msgspec.to_builtins(info)
        for field in ("type", "request"):
            document.pop(field, None)
        _write(msgspec.json.encode(document).decode())
        return
    for name, value in _rows(info):
        _write(f"{name:<13} {value}")


def _rows(info: ModelInfo) -> Iterator[tuple[str, str]]:
    """What a person is told, line by line."""
    yield "model", info.model
    if info.adapter:
        yield "adapter of", info.adapter
    else:
        yield "architecture", info.architecture or "not stated (no config.json that says so)"
    yield "size", f"{show_bytes(info.nbytes)} in {len(info.partitions)} partition(s), layout {info.layout}"
    split = f", {info.splits} of them over several ranks" if info.splits else ""
    yield "tensors", f"{info.tensors}{split}; {info.aliases} other names"
    yield "dtypes", ", ".join(f"{name} {show_bytes(nbytes)}" for name, nbytes in info.dtypes.items())
    if info.packed:
        yield "packed", ", ".join(f"{kind} {show_bytes(nbytes)}" for kind, nbytes in info.packed.items())
    yield "order", _ORDERS.get(info.order, "by offset in the source's files: its module is not known here")
    for rank, nbytes in enumerate(info.partitions):
        blocks = [block for block in info.blocks if block.rank == rank]
        shown = ", ".join(_block(block.layers, block.nbytes) for block in blocks[:_BLOCKS_SHOWN])
        more = f", and {len(blocks) - _BLOCKS_SHOWN} more" if len(blocks) > _BLOCKS_SHOWN else ""
        yield f"partition {rank}", f"{show_bytes(nbytes)} in {len(blocks)} block(s): {shown}{more}"
    yield "biggest", ", ".join(f"{name} {show_bytes(nbytes)}" for name, nbytes in info.biggest[:5])
    yield "files", ", ".join(info.files)


def _block(layers: tuple[int, int] | None, nbytes: int) -> str:
    name = (
        "ends" if layers is None else f"layer {layers[0]}" if layers[0] == layers[1] else "layers {}-{}".format(*layers)
    )
    return f"{name} {show_bytes(nbytes)}"


def _write(line: str) -> None:
    sys.stdout.write(line + "\n")
