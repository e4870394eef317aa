"""A secret from the command line to the function that names it, and to no place beside."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fixtures.cluster import Cluster
from tests.fixtures.command import here, sllm_json

VALUE = "hunter2-of-this-test"
READS = """
import os
from pathlib import Path
import sllm

def all_of(name: str = "") -> dict[str, object]:
    if name:
        sllm.secret(name)
    directory = Path(os.environ["SLLM_SECRETS_DIR"])
    return {
        "said": len(sllm.secret("token")), "first": sllm.secret("token")[:7],
        "files": sorted(path.name for path in directory.iterdir()),
        "modes": sorted({oct(path.stat().st_mode & 0o777) for path in (directory, *directory.iterdir())}),
        "environment": any("hunter2" in text for text in os.environ.values()),
    }

reads = sllm.model_function(name="reads", memory="256MiB", secrets=["token"], retries=0)(all_of)
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("secrets")) as found:
        yield found


def test_a_secret_reaches_the_function_that_names_it_and_no_place_beside(cluster: Cluster, tmp_path: Path) -> None:
    file = tmp_path / "reads" / "function.py"
    file.parent.mkdir()
    file.write_text(READS)
    value = tmp_path / "value"
    value.write_text(VALUE)
    refused = here(cluster.env, "fn", "deploy", str(file), "--json", expect=3)
    assert "there is no secret token; `sllm secret set token`" in refused.stderr

    assert sllm_json(cluster.env, "secret", "set", "token", "--file", str(value))["name"] == "token"
    here(cluster.env, "secret", "set", "unrelated", "--file", str(value))
    here(cluster.env, "fn", "deploy", str(file), "--json")
    called = sllm_json(cluster.env, "fn", "invoke", "reads")
    assert called == {
        "said": len(VALUE), "first": "hunter2", "files": ["token"], "modes": ["0o400", "0o700"], "environment": False
    }  # fmt: skip
    listed = sllm_json(cluster.env, "secret", "list")["secrets"]
    assert [(each["name"], each["functions"]) for each in listed] == [("token", ["reads"]), ("unrelated", [])]
    here(cluster.env, "secret", "delete", "token", expect=2)
    here(cluster.env, "secret", "delete", "unrelated")

    shown = (
        here(cluster.env, "fn", "describe", "reads", "--json").stdout + here(cluster.env, "fn", "logs", "reads").stdout
    )
    assert VALUE not in shown
    assert kept_in(cluster.data, VALUE.encode()) == {
        "secrets/token",
        f"nodes/n1/invoker/work/{instance(cluster)}/secrets/token",
    }
    assert kept_in(cluster.home, VALUE.encode()) == set()


def instance(cluster: Cluster) -> str:
    (found,) = sllm_json(cluster.env, "fn", "describe", "reads")["instances"]
    return str(found["instance"])


def kept_in(directory: Path, value: bytes) -> set[str]:
    """Files below ``directory`` that hold ``value``."""
    files = (path for path in directory.rglob("*") if path.is_file() and not path.is_symlink())
    return {str(path.relative_to(directory)) for path in files if value in path.read_bytes()}
