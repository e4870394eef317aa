"""The main job from start to end, as a person would do it, with the two timelines side by side (``tools/demo.py``).

Starts the platform, deploys ``functions/coder``, waits until it holds nothing, streams tokens cold and then warm, and
stops everything (``--keep`` leaves it up). Exit status 1 and a reason if anything failed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

from sllm import Client, profiles
from sllm.answers import Trace
from sllm_runtime.platform.process import PARENT
from sllm_runtime.platform.scratch import scratch
from sllm_runtime.protocol.errors import SllmError, StartFailed
from sllm_runtime.protocol.http import API
from sllm_runtime.protocol.timeline import Span

ROOT: Final = Path(__file__).resolve().parents[1]
SLLM: Final = [sys.executable, "-m", "sllm"]
FUNCTION: Final = "coder"
PROMPT: Final = "def "
TOKENS: Final = 64
SEED: Final = 7
COLD_TIMEOUT_S: Final = 120.0
STAGES: Final = ("queue", "sandbox", "import", "weights", "setup", "first_token", "tokens")

console = Console(highlight=False)


def command(words: list[str], env: dict[str, str]) -> None:
    """Run one ``sllm`` command, shown as a person would type it. Raises ``StartFailed``."""
    console.print(f"[bold]$ sllm {' '.join(words)}[/]")
    if subprocess.run([*SLLM, *words], cwd=ROOT, env=env, check=False).returncode:
        raise StartFailed(f"`sllm {' '.join(words)}` failed")


@contextlib.contextmanager
def platform(keep: bool) -> Iterator[dict[str, str]]:
    """A platform of our own: in the user's home with ``keep``, else in a directory that goes away with it."""
    env = {key: value for key, value in os.environ.items() if key not in ("SLLM_URL", "SLLM_TOKEN")}
    if keep:
        env |= {"SLLM_HOME": os.environ.get("SLLM_HOME") or str(Path.home() / ".sllm")}
        with kept(env):
            yield env
        return
    with scratch("sllm-demo-") as own:
        env |= {"SLLM_HOME": str(own.path)}
        console.print("[bold]$ sllm up[/]")
        words = [*SLLM, "up", "--json", "--with-parent", "--port", "0"]
        # In a session of its own: a Ctrl-C reaches it through us, once and in order.
        born = env | {PARENT: str(os.getpid())}
        with subprocess.Popen(
            words, cwd=ROOT, env=born, stdout=subprocess.PIPE, text=True, start_new_session=True, pass_fds=(own.held,)
        ) as process:
            try:
                yield env | address(process)
            finally:
                process.send_signal(signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(20)
                process.kill()


@contextlib.contextmanager
def kept(env: dict[str, str]) -> Iterator[None]:
    """A platform that stays, unless something failed."""
    command(["up", "--detach"], env)
    try:
        yield
    except BaseException:
        command(["down"], env)
        raise


def address(process: subprocess.Popen[str]) -> dict[str, str]:
    """Where the platform listens, from its own JSON. Raises ``StartFailed`` if it ended first."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise StartFailed("the platform did not start; its error stands above")
    ready = json.loads(line)
    console.print(f"ready in {ready['seconds']:.1f} s: {ready['url']}")
    return {"SLLM_URL": ready["url"], "SLLM_TOKEN": ready["token"]}


def until_cold(client: Client) -> None:
    """Wait until the function holds nothing (its keep-alive passes) and a warm sandbox is there for it."""
    deadline = time.monotonic() + COLD_TIMEOUT_S
    with console.status("waiting until nobody has called for the keep-alive: the function holds nothing then"):
        while time.monotonic() < deadline:
            view = client.request("GET", f"{API}/functions/{FUNCTION}")
            nodes = client.request("GET", f"{API}/nodes")["nodes"]
            live = [each for each in view["instances"] if each["state"] not in ("STOPPED", "FAILED", "LOST")]
            if not live and any(node["pool_idle"] for node in nodes):
                return
            time.sleep(0.2)
    raise StartFailed(f"{FUNCTION} still holds an instance after {COLD_TIMEOUT_S:.0f} s")


def stream(client: Client, name: str) -> tuple[tuple[Span, ...], float, str]:
    """One call, its tokens shown as they come: its timeline, the client's own time to the first piece, the text."""
    console.print(f"\n[bold]{name} call[/]: completing {PROMPT!r}\n")
    trace, pieces, first = Trace(), [], 0.0
    began = time.monotonic()
    arguments = {"prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0.7, "seed": SEED}
    sys.stdout.write(PROMPT)
    for piece in client.stream(FUNCTION, arguments, trace=trace):
        first = first or time.monotonic() - began
        pieces.append(piece)
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")
    if not pieces or not trace.timeline:
        raise StartFailed(f"the {name} call brought {len(pieces)} pieces and {len(trace.timeline)} stages")
    return trace.timeline, first * 1000, "".join(pieces)


def compare(runs: dict[str, tuple[tuple[Span, ...], float, str]]) -> None:
    """The timelines side by side."""
    table = Table(title="Where the time went (ms; stages of a start overlap)")
    table.add_column("stage")
    for name in runs:
        table.add_column(name, justify="right")
    for stage in STAGES:
        cells = [next((f"{span.ms:.1f}" for span in spans if span.name == stage), "-") for spans, _, _ in runs.values()]
        table.add_row(stage, *cells)
    table.add_section()
    table.add_row("first token at the client", *(f"{first:.1f}" for _, first, _ in runs.values()))
    console.print()
    console.print(table)


def paste(kept: bool) -> None:
    """The lines to go on with."""
    found = profiles.load()
    console.print("\n[bold]To paste[/]" + ("" if kept else " (`make demo KEEP=1` leaves the platform up)") + "\n")
    body = json.dumps({"prompt": PROMPT, "max_tokens": TOKENS})
    header = f'-H "Authorization: Bearer {found.token}"'
    sys.stdout.write(f"curl -N {found.url}/fn/{FUNCTION} {header} -H 'Accept: text/event-stream' -d '{body}'\n\n")
    sys.stdout.write(
        "from openai import OpenAI\n"
        f'client = OpenAI(base_url="{found.url}/v1", api_key="{found.token}")\n'
        f'request = {{"model": "{FUNCTION}", "prompt": "{PROMPT}", "max_tokens": {TOKENS}}}\n'
        "for part in client.completions.create(**request, stream=True):\n"
        '    print(part.choices[0].text, end="", flush=True)\n'
    )


def run(keep: bool) -> None:
    """The whole demo. Raises ``SllmError`` where a step fails."""
    with platform(keep) as env:
        os.environ.update(env)
        command(["fn", "deploy", f"functions/{FUNCTION}/function.py"], env)
        with Client() as client:
            until_cold(client)
            runs = {"cold": stream(client, "cold"), "warm": stream(client, "warm")}
        if runs["cold"][2] != runs["warm"][2]:
            raise StartFailed("the cold and the warm call gave different tokens for the same request")
        compare(runs)
        paste(keep)
    console.print("\nthe platform is up; `sllm down` stops it" if keep else "\neverything is stopped")


def main() -> int:
    """Exit status: 0 done, 1 failed, 130 interrupted."""
    parser = argparse.ArgumentParser(description="The main job, cold and warm.")
    parser.add_argument("--keep", action="store_true", help="leave the platform up")
    keep = parser.parse_args().keep
    try:
        signal.signal(signal.SIGTERM, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
        signal.signal(signal.SIGINT, signal.default_int_handler)
        run(keep)
    except SllmError as error:
        console.print(f"[red]demo failed[/]: {error.message}")
        return 1
    except KeyboardInterrupt:
        console.print("\ninterrupted; everything is stopped")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
