"""The whole platform is stopped in order and started again on the same directory: what people have made is there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.fixtures.cluster import Cluster
from tests.fixtures.command import here, sllm_json
from tests.fixtures.deployed import deploy, view
from tests.fixtures.moving import AT

READS = """
import sllm

@sllm.model_function(name="reads", memory="256MiB", secrets=["token"], keep_alive=300)
def reads() -> str:
    return f"{VERSION} {{sllm.secret('token')}}"
"""
ASK = {"gate": "", "at": 2 * AT, "max_tokens": AT}


def models(cluster: Cluster) -> dict[str, Any]:
    """And the tiers that they lie in, by node."""
    found: dict[str, Any] = sllm_json(cluster.env, "model", "list", "--tiers")
    return found


def told(cluster: Cluster) -> dict[str, Any]:
    """What people have made, as the command line tells it."""
    return {
        "functions": [each["name"] for each in sllm_json(cluster.env, "fn", "list")["functions"]],
        "versions": [(each.version, each.state) for each in view(cluster, "reads").versions],
        "models": [(each["digest"], each["uri"], each["used_by"]) for each in models(cluster)["models"]],
        "cordoned": {each["node"]: each["cordoned"] for each in sllm_json(cluster.env, "node", "list")["nodes"]},
        "secrets": [(each["name"], each["functions"]) for each in sllm_json(cluster.env, "secret", "list")["secrets"]],
    }


def test_functions_versions_models_cordons_and_secrets_are_found_again(tmp_path: Path, coder: Path) -> None:
    file = tmp_path / "reads" / "function.py"
    file.parent.mkdir()
    (tmp_path / "value").write_text("hunter2")
    with Cluster(tmp_path, nodes=2) as cluster:
        here(cluster.env, "secret", "set", "token", "--file", str(tmp_path / "value"))
        for version in (1, 2):
            file.write_text(READS.format(VERSION=version))
            here(cluster.env, "fn", "deploy", str(file), "--json")
        here(cluster.env, "fn", "rollback", "reads", "--json")
        deploy(cluster, "gated_coder::fn", name="coder", model=str(coder / "model"))
        text = cluster.http.post("/fn/coder", json=ASK).json()
        here(cluster.env, "node", "cordon", "n2", "--json")
        before = told(cluster)
    assert before["functions"] == ["coder", "reads"]
    assert before["versions"] == [(1, "ACTIVE"), (2, "RETIRED")]
    assert [used for _, _, used in before["models"]] == [["coder:v1"]]
    assert before["cordoned"] == {"n1": False, "n2": True}
    assert before["secrets"] == [("token", ["reads"])]
    with Cluster(tmp_path, nodes=2) as again:
        assert told(again) == before
        assert again.http.post("/fn/reads").json() == "1 hunter2"
        here(again.env, "fn", "rollback", "reads", "--version", "2", "--json")
        assert again.http.post("/fn/reads").json() == "2 hunter2"
        assert again.http.post("/fn/coder", json=ASK).json() == text
        assert {each.node for name in ("reads", "coder") for each in view(again, name).instances} == {"n1"}
        ((model, _, _),) = before["models"]
        assert "dram" in models(again)["tiers"]["n1"][model]
