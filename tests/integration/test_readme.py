"""The README's tour, as a newcomer types it: every command of every block, in one shell, from top to bottom."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fixtures.cluster import QUICK

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"<!-- tour -->\n```sh\n(.*?)```", re.DOTALL)
WITHIN_S = 240
CURL = shutil.which("curl")


def commands() -> list[str]:
    """Lines of the README's blocks."""
    blocks = BLOCK.findall((ROOT / "README.md").read_text())
    return [line for block in blocks for line in block.splitlines() if line.strip()]


def shell(lines: list[str], directory: Path) -> dict[str, str]:
    """Run the lines in one bash session: what each printed. Fails at the first that does not exit 0."""
    for name in ("functions", "templates"):
        (directory / name).symlink_to(ROOT / name)
    (directory / ".venv").symlink_to(sys.prefix)
    (directory / "tmp").mkdir()
    kept = {key: value for key, value in os.environ.items() if not key.startswith("SLLM_")}
    own = {"SLLM_HOME": str(directory / "home"), "SLLM_PORT": "0", "TMPDIR": str(directory / "tmp")}
    env = {**kept, **QUICK, **own}
    script = "".join(f"{line}\nprintf '\\n@@%s\\n' $?\n" for line in lines)
    try:
        done = subprocess.run(
            ["bash"], input=script, env=env, cwd=directory, text=True, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, timeout=WITHIN_S, check=False,
        )  # fmt: skip
    finally:
        subprocess.run([sys.executable, "-m", "sllm", "down"], env=env, capture_output=True, timeout=30, check=False)
    printed = re.split(r"\n@@(\d+)\n", done.stdout)
    outputs = dict(zip(lines, printed[::2], strict=False))
    failed = [line for line, status in zip(lines, printed[1::2], strict=False) if status != "0"]
    assert not failed, done.stdout
    assert len(printed) // 2 == len(lines), done.stdout
    return outputs


@pytest.fixture(scope="module")
def tour(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each command printed, by its line. Without curl on this machine its lines are left out."""
    lines = [line for line in commands() if CURL or not line.startswith("curl ")]
    return shell(lines, tmp_path_factory.mktemp("tour"))


def said(tour: dict[str, str], beginning: str) -> str:
    """What the one command that begins so printed."""
    (output,) = [text for line, text in tour.items() if line.startswith(beginning)]
    return output


def test_the_tour(tour: dict[str, str]) -> None:
    assert "ready in" in said(tour, "sllm up")
    assert "coder v1" in said(tour, "sllm fn deploy functions/coder")
    invoked = said(tour, "sllm fn invoke coder")
    assert re.search(r"^\s*first_token .* ms", invoked, re.MULTILINE)
    assert "Hello, you!" in said(tour, "sllm fn invoke hello")
    listed = said(tour, "sllm fn list")
    assert re.search(r"^coder\s", listed, re.MULTILINE)
    assert re.search(r"^hello\s", listed, re.MULTILINE)
    assert re.search(r"^v1\s+ACTIVE", said(tour, "sllm fn history coder"), re.MULTILINE)
    assert re.search(r"^n1\s+alive", said(tour, "sllm node list"), re.MULTILINE)
    assert "deleted" in said(tour, "sllm fn delete coder")
    assert "stopped http://127.0.0.1:" in said(tour, "sllm down")


@pytest.mark.curl
def test_the_tours_http_lines(tour: dict[str, str]) -> None:
    streamed = said(tour, 'curl -sN "$SLLM_URL/fn/coder"')
    assert streamed.count("\nid: ") + streamed.startswith("id: ") > 3
    assert streamed.rstrip().endswith("data: [DONE]")
    completion = json.loads(said(tour, 'curl -s "$SLLM_URL/v1/completions"'))
    assert completion["object"] == "text_completion"
    assert completion["choices"][0]["text"]


def test_the_readme_begins_with_what_a_newcomer_needs() -> None:
    text = (ROOT / "README.md").read_text()
    assert text.index("```mermaid") < text.index("make demo") < text.index("make test") < text.index("<!-- tour -->")
    links = re.findall(r"\]\((?!http)([^)#]+)", text)
    assert [link for link in links if not (ROOT / link).exists()] == []
    assert len(commands()) >= 12
