"""What starting costs: nothing is imported that is not used."""

import json
import os
import subprocess
import sys
import tempfile
from importlib import metadata

import pytest

from sllm import local
from sllm.cli.main import main

HEAVY = {"torch", "transformers", "numpy", "nats", "starlette", "uvicorn", "psutil", "boto3"}
LATER = {"httpx", "rich.console", "pydantic", "typer"}


def modules(code: str) -> set[str]:
    code = f"import sys\n{code}\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    return set(done.stdout.split())


def test_importing_sllm_brings_nothing() -> None:
    assert modules("import sllm") & (HEAVY | LATER) == set()


def test_describing_a_function_needs_no_connection() -> None:
    found = modules("from sllm import model_function\n@model_function\ndef f(a: int) -> int: return a")
    assert found & (HEAVY | {"httpx", "rich.console", "typer"}) == set()


def test_deploying_brings_no_library_of_the_servers() -> None:
    found = modules("import sllm.cli.main, sllm.cli.fn, sllm.cli.model, sllm.cli.doctor, sllm.doctor.checks")
    assert found & HEAVY == set()


def test_help_imports_neither_client_nor_drawing() -> None:
    code = "from sllm.cli.main import main\ntry: main(['--help'])\nexcept SystemExit: pass"
    found = modules(code)
    assert found & (HEAVY | {"httpx", "pydantic", "rich.console", "asyncio"}) == set()


@pytest.mark.parametrize(
    "verb", ["up", "down", "run", "model convert", "model describe", "model validate", "profile list"]
)
def test_every_verb_is_there(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([*verb.split(), "--help"])
    assert stop.value.code == 0
    assert "--json" in capsys.readouterr().out


def test_a_verb_whose_extra_is_not_installed_names_it() -> None:
    """As `pip install sllm` alone leaves it: the modules of the server's libraries are not there."""
    hide = "import sys\nfor name in ('nats', 'torch'): sys.modules[name] = None\n"
    code = f"{hide}from sllm.cli.main import main\nmain(['up'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 5
    assert "`sllm up` needs nats, which is not installed: pip install 'sllm[server]'" in done.stderr
    code = f"{hide}from sllm import model_function\n@model_function\ndef f() -> int: return 1\nf.local()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert "needs torch, which is not installed: pip install 'sllm[server,worker]'" in done.stderr


@pytest.mark.parametrize(
    ("words", "there", "lacks"), [("sllm ", {"fn", "run"}, {"up", "down"}), ("sllm model ", {"list"}, {"convert"})]
)
def test_a_shell_completes_where_only_the_client_is_installed(words: str, there: set[str], lacks: set[str]) -> None:
    hide = "import sys\nfor name in ('nats', 'xxhash', 'torch'): sys.modules[name] = None\n"
    env = {
        **os.environ,
        "_SLLM_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split())),
    }
    code = f"{hide}from sllm.cli.main import main\nmain([])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False, env=env
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert there <= set(done.stdout.split())
    assert not lacks & set(done.stdout.split())


def test_what_no_package_brings_is_not_advised_to_be_installed() -> None:
    """On Windows the platform does not run, whatever is installed: its Python has no fcntl."""
    hide = "import sys\nsys.modules['fcntl'] = None\n"
    local = "from sllm import model_function\n@model_function\ndef f() -> int: return 1\nf.local()"
    for code in ("from sllm.cli.main import main\nmain(['up'])", local):
        done = subprocess.run(
            [sys.executable, "-c", hide + code], capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode != 0
        assert "works on Linux only: Python has no fcntl on this system" in done.stderr
        assert "pip install" not in done.stderr.splitlines()[-1]


def test_a_command_runs_where_there_are_few_signals() -> None:
    """What Windows' Python lacks of what a client could use."""
    code = """
import os, signal, sys
for name in ("SIGALRM", "setitimer", "pthread_sigmask"):
    delattr(signal, name)
sys.modules["fcntl"] = None
del os.getuid
from sllm.cli import main
main()
"""
    with tempfile.TemporaryDirectory() as home:
        for words in (("--version",), ("--url", "http://h", "profile", "set", "a"), ("profile", "list", "--json")):
            done = subprocess.run(
                [sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=60, check=False,
                env={**os.environ, "SLLM_HOME": home},
            )  # fmt: skip
            assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["profiles"] == [{"name": "a", "url": "http://h", "token": False}]


def test_the_version_is_the_packages() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "sllm", "--version"], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == f"sllm {metadata.version('sllm')}\n"


def test_a_python_that_was_built_without_a_module_is_told_as_that() -> None:
    said = local.lacking("running a function here", ModuleNotFoundError("x", name="_ctypes"), "worker").message
    assert "Linux only" not in said
    assert "_ctypes" in said
