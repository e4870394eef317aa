"""`sllm model convert | describe | validate` as a person types them."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sllm_loaderd.convert.staging import staged
from sllm_runtime.protocol.errors import Conflict
from tests.fixtures.loaderd import numbers_model
from tests.fixtures.models import save_model
from tests.fixtures.waiting import GIVE_UP_S

WAIT = GIVE_UP_S
HELD = """
import sys, time
from sllm.cli import main
from sllm_loaderd.convert.writer import PartitionWriter
flush, seconds = PartitionWriter._flush, float(sys.argv.pop(1))
def held(writer):
    flush(writer)
    print("held", flush=True)
    time.sleep(seconds)
PartitionWriter._flush = held
main()
"""
"""The command line, in which a conversion waits so many seconds after each chunk that it has written, and says so."""


def held(seconds: float, tmp_path: Path) -> list[str]:
    """The command line that converts ``source`` to ``checkpoint`` and takes its time."""
    convert = ["model", "convert", str(tmp_path / "source"), str(tmp_path / "checkpoint")]
    return [sys.executable, "-c", HELD, str(seconds), *convert]


def sllm(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sllm", "model", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=WAIT, check=False)


def test_convert_describe_validate(tmp_path: Path) -> None:
    save_model("tied_llama", tmp_path / "source")
    done = sllm("convert", tmp_path / "source", tmp_path / "checkpoint", "--json")
    assert done.returncode == 0, done.stderr
    made = json.loads(done.stdout)
    assert made["architecture"] == "LlamaForCausalLM"
    assert made["blocks"][1]["layers"] == [0, 2]
    described = sllm("describe", tmp_path / "checkpoint", "--json")
    assert json.loads(described.stdout) == made
    shown = sllm("describe", tmp_path / "checkpoint")
    for text in (made["model"], "LlamaForCausalLM", "model.embed_tokens.weight", "as a forward pass uses them"):
        assert text in shown.stdout
    valid = sllm("validate", tmp_path / "checkpoint", "--json")
    assert json.loads(valid.stdout) == {"model": made["model"], "valid": True}


def test_a_damaged_checkpoint_is_told_by_exit_status_and_json(tmp_path: Path) -> None:
    numbers_model(tmp_path / "source")
    assert sllm("convert", tmp_path / "source", tmp_path / "checkpoint").returncode == 0
    path = tmp_path / "checkpoint" / "partition_0.bin"
    data = bytearray(path.read_bytes())
    data[5000] ^= 1
    path.write_bytes(data)
    done = sllm("validate", tmp_path / "checkpoint", "--json")
    assert done.returncode == 2
    assert done.stdout == ""
    error = json.loads(done.stderr)["error"]
    assert error["code"] == "corrupt_checkpoint"
    assert "chunk 0" in error["message"]


@pytest.mark.parametrize("verb", ["describe", "validate"])
def test_what_is_no_checkpoint_is_refused(verb: str, tmp_path: Path) -> None:
    done = sllm(verb, tmp_path)
    assert done.returncode == 2
    assert "is a converted model" not in done.stdout
    assert "index.json cannot be read" in done.stderr


def test_sources_that_are_not_there_leave_nothing(tmp_path: Path) -> None:
    for source in (tmp_path / "none", "ftp://x/y"):
        done = sllm("convert", source, tmp_path / "checkpoint")
        assert done.returncode in (2, 3)
        assert "error" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_in_130_and_leaves_nothing(number: signal.Signals, tmp_path: Path) -> None:
    numbers_model(tmp_path / "source")
    with subprocess.Popen(held(WAIT, tmp_path), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        assert list(tmp_path.glob(".checkpoint.*.tmp/partition_0.bin")), "it is in the middle of its work"
        process.send_signal(number)
        process.communicate(timeout=WAIT)
    assert process.returncode == 130
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def write_sparse(path: Path, nbytes: int) -> None:
    """A valid safetensors file of zeros that takes no space."""
    header = json.dumps({"a": {"dtype": "U8", "shape": [nbytes], "data_offsets": [0, nbytes]}}).encode()
    path.parent.mkdir()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + nbytes)


def test_a_plan_and_a_comparison_with_the_source(tmp_path: Path) -> None:
    save_model("llama", tmp_path / "source")
    done = sllm("convert", tmp_path / "source", tmp_path / "checkpoint", "--plan", "auto:2", "--verify", "--json")
    assert done.returncode == 0, done.stderr
    made = json.loads(done.stdout)
    assert made["layout"] == "hf-tp2"
    assert len(made["partitions"]) == 2
    shown = sllm("describe", tmp_path / "checkpoint").stdout
    for text in ("2 partition(s), layout hf-tp2", "over several ranks", "partition 1", "layers 0-2"):
        assert text in shown
    refused = sllm("convert", tmp_path / "source", tmp_path / "other", "--plan", "auto:x")
    assert refused.returncode == 2
    assert "auto-layers:N" in refused.stderr


def test_what_a_killed_conversion_left_is_removed_by_the_next(tmp_path: Path) -> None:
    numbers_model(tmp_path / "source")
    with subprocess.Popen(held(WAIT, tmp_path), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        left = list(tmp_path.glob(".checkpoint.*.tmp"))
        assert list(left[0].iterdir())
        other = tmp_path / ".checkpoint.mine.tmp"  # not of a conversion: its name is another one
        other.mkdir()
        process.kill()
    assert left[0].is_dir()
    assert sllm("convert", tmp_path / "source", tmp_path / "checkpoint").returncode == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == [other.name, "checkpoint", "source"]


def test_what_another_conversion_is_writing_is_left_alone(tmp_path: Path) -> None:
    target = tmp_path / "checkpoint"
    with contextlib.ExitStack() as slow:
        late = slow.enter_context(staged(target))
        with staged(target) as first:  # begins later, ends earlier
            assert late.is_dir()
            (first / "index.json").write_text("first")
        with pytest.raises(Conflict, match="is there already"):
            slow.close()
    assert not late.exists()
    assert (target / "index.json").read_text() == "first"


def test_a_person_sees_rate_and_time_left(tmp_path: Path) -> None:
    write_sparse(tmp_path / "source" / "model.safetensors", 2**34)
    ours, theirs = pty.openpty()
    with (
        open(ours, "rb", buffering=0) as screen,
        subprocess.Popen(held(0.2, tmp_path), stdout=subprocess.DEVNULL, stderr=theirs) as process,
    ):
        os.close(theirs)
        seen = b""
        deadline = time.monotonic() + WAIT
        while b" s left" not in seen:
            assert time.monotonic() < deadline, seen
            readable, _, _ = select.select([screen], [], [], 1.0)
            seen += screen.read(4096) if readable else b""
        process.send_signal(signal.SIGINT)
        process.wait(WAIT)
    assert re.search(rb"converting: [0-9.]+ .iB of 16.0 GiB, [0-9.]+ .iB/s, \d+ s left", seen), seen
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
