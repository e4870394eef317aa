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
_SHOW_AFTER_S = 1.0
_SHOW_EVERY_S = 0.2


class _Meter:
    """Bytes, rate and time left on stderr, for what takes more than a second and somebody to look at it."""

    def __init__(self, what: str, quiet: bool) -> None:
        self._what = what
        self._shows = not quiet and sys.stderr.isatty()
        self._begun = time.monotonic()
        self._last = self._begun + _SHOW_AFTER_S - _SHOW_EVERY_S

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
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
        if self._shows and time.monotonic() - self._begun >= _SHOW_AFTER_S:
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
    source: Annotated[str, typer.Argument(help="A Hugging Face directory, hf://org/name@revision or s3://…")],
    target: Annotated[Path, typer.Argument(help="The checkpoint to make; must not be there yet.")],
    cache: Annotated[Path | None, typer.Option(help="Where remote sources are fetched to.")] = None,
    json: Json = False,
) -> None:
    """Write a model as a loading-optimised checkpoint."""
    from sllm_loaderd.convert import convert_directory
    from sllm_loaderd.sources import open_source
    from sllm_loaderd.sources.fetch import resolve

    kept = cache or Path.home() / ".cache" / "sllm" / "sources"
    with _meter("fetching", json) as meter:
        directory = resolve(open_source(source), kept, meter)
    with _meter("converting", json) as meter:
        convert_directory(directory, target, progress=meter)
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
    order = {"traced": "as a forward pass uses them", "module": "as the module registers them"}
    rows = [
        ("model", info.model),
        ("architecture", info.architecture or "not stated (no config.json that says so)"),
        ("size", f"{show_bytes(info.nbytes)} in {len(info.partitions)} partition(s)"),
        ("tensors", f"{info.tensors}, {info.aliases} other names"),
        ("dtypes", ", ".join(f"{name} {show_bytes(nbytes)}" for name, nbytes in info.dtypes.items())),
        ("order", order.get(info.order, "by offset in the source's files: its module is not known here")),
        ("blocks", f"{len(info.blocks)}: {', '.join(_block(b.layers, b.nbytes) for b in info.blocks[:8])}"),
        ("biggest", ", ".join(f"{name} {show_bytes(nbytes)}" for name, nbytes in info.biggest[:5])),
        ("files", ", ".join(info.files)),
    ]
    for name, value in rows:
        _write(f"{name:<13} {value}")


def _block(layers: tuple[int, int] | None, nbytes: int) -> str:
    name = (
        "ends" if layers is None else f"layer {layers[0]}" if layers[0] == layers[1] else "layers {}-{}".format(*layers)
    )
    return f"{name} {show_bytes(nbytes)}"


def _write(line: str) -> None:
    sys.stdout.write(line + "\n")
