"""Functions in containers: the main job, attempts to get out, and what is left of those whose invoker is killed."""

import hashlib
import io
import stat
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from sllm import bundle
from sllm.deployment import deploy_bundle
from sllm_invoker.containers.engine import Engine
from sllm_runtime.protocol.errors import InstanceLost, ProtocolError, SllmError
from tests.fixtures.cluster import Cluster
from tests.fixtures.command import here
from tests.fixtures.containers import ECHO, LIMITS, PIDS, SMALL, TMP_MIB, call, listed
from tests.fixtures.deployed import client_of, deploy, described, live, wait, wait_gone, workers
from tests.fixtures.models import save_byte_tokenizer, save_model
from tests.fixtures.modules import own_modules

pytestmark = [pytest.mark.container, pytest.mark.slow, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def cluster(image: str, engine: Engine, coder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    env = {**LIMITS, "SLLM_SANDBOX": engine.kind, "SLLM_IMAGE": image}
    with Cluster(tmp_path_factory.mktemp("platform"), env=env) as running:
        deploy(running, str(ECHO), name="neighbour", keep_alive=3600, **SMALL)
        deploy(running, str(coder / "function.py"), name="coder", keep_alive=3600)
        yield running


@pytest.fixture
def neighbour(cluster: Cluster) -> Iterator[None]:
    """Another function's instance, which is the same and answers after the test as before."""
    call(cluster, "neighbour", text="here")
    before = live(cluster, "neighbour")
    yield
    assert call(cluster, "neighbour", text="well") == {"text": "well", "length": 4}
    assert live(cluster, "neighbour") == before != []


ASK = {"prompt": "def add(a, b):", "max_tokens": 16, "temperature": 0}


def test_tokens_stream_out_of_a_container_from_weights_nobody_can_write(cluster: Cluster, coder: Path) -> None:
    with client_of(cluster) as client:
        pieces = list(client.stream("coder", ASK))
    assert len(pieces) > 1
    deploy(cluster, "writes_weights", model=str(coder / "model"))
    tried = call(cluster, "writes-weights")
    assert isinstance(tried, dict)
    assert tried, "its weights lie in memory files"
    assert all(said[0] for said in tried.values()), tried  # what it could write to is a copy of its own
    with client_of(cluster) as client:
        assert list(client.stream("coder", ASK)) == pieces


def test_stages_of_one_model_meet_in_two_containers(cluster: Cluster, coder: Path) -> None:
    with client_of(cluster) as client:
        pieces = list(client.stream("coder", ASK))
    deploy(cluster, str(coder / "function.py"), name="staged", parallelism={"pipeline": 2})
    with client_of(cluster) as client:
        assert list(client.stream("staged", ASK)) == pieces
        client.request("DELETE", "/api/v1/functions/staged")


def test_nothing_can_be_reached_over_the_network(cluster: Cluster, neighbour: None) -> None:
    nats = urlsplit(cluster.running().nats_url).port
    deploy(cluster, "reaches_network")
    tried = call(cluster, "reaches-network", ports=[urlsplit(cluster.url).port, nats])
    assert isinstance(tried, dict)
    assert len(tried) >= 3
    assert "connected" not in tried.values(), tried


def test_a_fork_bomb_goes_off_in_its_own_container(cluster: Cluster, neighbour: None) -> None:
    deploy(cluster, "fork_bomb")
    made = call(cluster, "fork-bomb")
    assert isinstance(made, int)
    assert 0 < made < PIDS


def test_who_eats_memory_is_told_so_with_the_limit(cluster: Cluster, neighbour: None) -> None:
    deploy(cluster, "eats_memory")
    with pytest.raises(InstanceLost, match=r"ran out of memory \(limit 64\.0 MiB\)"):
        call(cluster, "eats-memory")


def test_what_can_be_written_to_has_a_limit(cluster: Cluster, neighbour: None) -> None:
    deploy(cluster, "fills_tmp")
    written = call(cluster, "fills-tmp", most_mib=4 * TMP_MIB)
    assert isinstance(written, dict)
    assert 0 < written.pop("/tmp") <= TMP_MIB
    assert 0 < written.pop("/tmp/instance/code") <= TMP_MIB
    assert set(written.values()) == {-1}


def test_who_ignores_signals_ends_all_the_same(cluster: Cluster, engine: Engine, neighbour: None) -> None:
    deploy(cluster, "ignores_sigterm")
    (instance,) = live(cluster, "ignores-sigterm")
    with client_of(cluster) as client:
        values = client.stream("ignores-sigterm", {})
        next(values)
        pids = set(workers(instance))
        assert len(pids) == 2  # and its child, which has its name
        client.request("DELETE", "/api/v1/functions/ignores-sigterm")
        values.close()
    wait_gone(pids)


def test_who_leaves_a_daemon_behind_takes_it_along(cluster: Cluster, neighbour: None) -> None:
    deploy(cluster, "forks_daemon", **SMALL)
    (instance,) = live(cluster, "forks-daemon")
    assert call(cluster, "forks-daemon") != 0
    pids = set(workers(instance))
    assert len(pids) == 2
    cluster.http.delete("/api/v1/functions/forks-daemon").raise_for_status()
    wait_gone(pids)


def test_the_host_is_not_to_be_seen(cluster: Cluster) -> None:
    deploy(cluster, "reads_host")
    here = [str(cluster.home), str(cluster.data), str(Path(__file__)), "/root", "/etc/shadow", "/run/containers"]
    seen = call(cluster, "reads-host", paths=here)
    assert isinstance(seen, dict)
    assert {path: seen[path] for path in here} == {path: ["FileNotFoundError"] for path in here}
    assert seen["/proc/1/environ"] == seen["/proc/1/fd"] == seen["/proc/1/root"] == ["PermissionError"]
    assert len(seen["pids"]) == 2  # process 1 and this one
    assert not [name for name in seen["environment"] if name.startswith("SLLM")]
    assert sorted(seen["user"][1:]) == ["CapBnd:0000000000000000", "CapEff:0000000000000000", "NoNewPrivs:1"]
    assert seen["user"][0] != "0"


def test_another_functions_secret_is_nowhere_to_be_found(cluster: Cluster, tmp_path: Path, neighbour: None) -> None:
    value = "of-the-keeper-alone-4b1d"
    (tmp_path / "value").write_text(value)
    here(cluster.env, "secret", "set", "token", "--file", str(tmp_path / "value"))
    deploy(cluster, str(ECHO), name="keeper", keep_alive=3600, secrets=["token"], **SMALL)
    deploy(cluster, "reads_others::secret", name="reads-secret")
    paths = [str(cluster.data), str(cluster.home)]
    found = call(cluster, "reads-secret", which="token", backwards=value[::-1], paths=paths)
    assert found == {"asked": "SecretNotFound", "found": []}
    assert live(cluster, "keeper")


def test_another_functions_code_is_nowhere_to_be_found(cluster: Cluster, neighbour: None) -> None:
    piece = "Answers `text`, repeated, and its length in characters."
    assert piece in ECHO.read_text()
    deploy(cluster, "reads_others::bundle", name="reads-bundle")
    paths = [str(cluster.data), str(ECHO.parent)]
    assert call(cluster, "reads-bundle", backwards=piece[::-1], paths=paths) == []
    own = "Looks for what only another function was given"
    assert call(cluster, "reads-bundle", backwards=own[::-1], paths=[]), "it finds what is its own"


def test_another_model_is_refused_by_loaderd(cluster: Cluster, coder: Path, tmp_path: Path, neighbour: None) -> None:
    with client_of(cluster) as client:
        pieces = list(client.stream("coder", ASK))
        (model,) = [each for each in client.request("GET", "/api/v1/models")["models"] if "coder" in each["used_by"][0]]
    save_model("llama", tmp_path / "tiny")
    save_byte_tokenizer(tmp_path / "tiny")
    deploy(cluster, "asks_loaderd::other_model", model=str(tmp_path / "tiny"))
    said = call(cluster, "other-model", digest=model["digest"])
    assert said["own"] == "given"
    assert said["other"].startswith("forbidden: this sandbox may load"), said
    with client_of(cluster) as client:
        assert list(client.stream("coder", ASK)) == pieces


def test_memory_files_with_weights_cannot_be_written_to(cluster: Cluster, coder: Path, neighbour: None) -> None:
    with client_of(cluster) as client:
        pieces = list(client.stream("coder", ASK))
    deploy(cluster, "asks_loaderd::writes_files", model=str(coder / "model"))
    tried = call(cluster, "writes-files")
    assert len(tried) == 7
    assert all(said and all(each == "PermissionError" for each in said) for said in tried.values()), tried
    with client_of(cluster) as client:
        assert list(client.stream("coder", ASK)) == pieces


def test_who_speaks_for_another_call_is_ended_and_said_to_be(cluster: Cluster, neighbour: None) -> None:
    deploy(cluster, "speaks_for_others")
    with pytest.raises(ProtocolError):
        call(cluster, "speaks-for-others")


LINKS = {
    "absolute": {"away": "/etc/passwd"},
    "upwards": {"away": "../../../etc/passwd"},
    "a directory, and a file below it": {"away": "/tmp", "away/planted.py": None},
}


@pytest.mark.parametrize("entries", LINKS.values(), ids=LINKS.keys())
def test_links_in_a_bundle_are_refused(cluster: Cluster, entries: dict[str, str | None], neighbour: None) -> None:
    """No SDK packs one: the zip is made by hand."""
    with own_modules():
        built = bundle.build(described(str(ECHO), name="links", **SMALL))
    data = io.BytesIO(built.data)
    with zipfile.ZipFile(data, "a") as archive:
        for name, target in entries.items():
            info = zipfile.ZipInfo(name)
            info.external_attr = ((stat.S_IFLNK if target else stat.S_IFREG) | 0o777) << 16
            archive.writestr(info, target or "planted = True")
    packed = data.getvalue()
    changed = replace(built, data=packed, digest="sha256:" + hashlib.sha256(packed).hexdigest())
    with client_of(cluster) as client, pytest.raises(SllmError, match="is a link"):
        deploy_bundle(changed, client)


def test_a_killed_invoker_leaves_nothing_behind(cluster: Cluster, engine: Engine) -> None:
    before = listed(cluster, engine)
    (instance,) = live(cluster, "neighbour")
    pids = set(workers(instance))
    assert before
    assert len(pids) == 1
    cluster.wait_restarted("invoker", cluster.kill("invoker"))
    wait_gone(pids)
    wait(lambda: not before & listed(cluster, engine), "the containers of its former life are gone")
    assert call(cluster, "neighbour", text="again") == {"text": "again", "length": 5}
