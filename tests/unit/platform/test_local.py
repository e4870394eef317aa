"""The platform of one machine as data."""

import errno
import json
import os
import socket
import stat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sllm_gateway.settings import GatewaySettings
from sllm_invoker.settings import InvokerSettings
from sllm_loaderd.daemon.settings import LoaderSettings
from sllm_runtime.platform import control_groups
from sllm_runtime.platform.local import Layout, Options, node_specs, prepare, specs
from sllm_runtime.platform.supervise import ChildSpec
from sllm_runtime.platform.up import Platform, require_port, token
from sllm_runtime.protocol import subjects
from sllm_runtime.protocol.errors import Conflict, InvalidRequest
from tests.fixtures.named import named, needs_ipv6


def options(data: Path, nodes: int = 1, gateways: int = 1, **others: Any) -> Options:
    ports = tuple(range(9000, 9000 + gateways))
    return Options(home=data.parent / "home", data=data, nodes=nodes, ports=ports, **others)


def made(given: Options, environment: dict[str, str] | None = None) -> dict[str, ChildSpec]:
    layout = Layout(given.data)
    server = prepare(given, layout, "the-token")
    return {spec.name: spec for spec in specs(given, layout, server, environment or {})}


def test_nodes_share_no_path_and_no_identity(tmp_path: Path) -> None:
    found = made(options(tmp_path / "run", nodes=3))
    own = ("SLLM_DATA", "SLLM_DATA_DIR", "SLLM_SOCKET", "SLLM_NODE", "SLLM_IDENTITY_FILE", "SLLM_LOADERD_SOCKET")
    values = {
        name: {
            value for kind in ("invoker", "loaderd") for key, value in found[f"{kind}-{name}"].env.items() if key in own
        }
        for name in ("n1", "n2", "n3")
    }
    assert not values["n1"] & values["n2"] | values["n2"] & values["n3"] | values["n1"] & values["n3"]
    memory = [int(found[f"invoker-{name}"].env["SLLM_MEMORY"]) for name in values]
    assert sum(memory) <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_an_invoker_finds_the_socket_of_its_own_loader(tmp_path: Path) -> None:
    found = made(options(tmp_path / "run", nodes=2))
    for name in ("n1", "n2"):
        assert found[f"invoker-{name}"].env["SLLM_LOADERD_SOCKET"] == found[f"loaderd-{name}"].env["SLLM_SOCKET"]


def test_all_that_is_written_for_the_daemons_is_hidden_from_functions(tmp_path: Path) -> None:
    """Every file but the directories' own: what a later file would add must be hidden too."""
    given = options(tmp_path / "run", nodes=2)
    found = made(given)
    written = [path for path in given.data.rglob("*") if path.is_file()]
    assert len(written) > 4
    for name in ("n1", "n2"):
        hidden = [Path(text) for text in json.loads(found[f"invoker-{name}"].env["SLLM_PRIVATE"])]
        assert [path for path in written if not any(path.is_relative_to(place) for place in hidden)] == []


def test_no_secret_stands_in_an_environment_or_a_command_line(tmp_path: Path) -> None:
    given = options(tmp_path / "run", gateways=2)
    found = made(given, {"SLLM_TOKEN": "the-token", "SLLM_URL": "x", "PATH": "/bin"})
    config = json.loads((tmp_path / "run" / "nats" / "nats.conf").read_text())
    secrets = {user["password"] for user in config["authorization"]["users"]} | {"the-token"}
    for spec in found.values():
        text = json.dumps([*spec.argv(), *spec.env.values()])
        assert not any(secret in text for secret in secrets)
        assert spec.env["PATH"] == "/bin" or spec.name == "nats"


def test_gateways_stop_first_and_nats_last(tmp_path: Path) -> None:
    found = made(options(tmp_path / "run"))
    order = sorted(found, key=lambda name: -found[name].stop_order)
    assert order == ["gateway-g1", "controller", "invoker-n1", "loaderd-n1", "nats"]
    assert [name for name in found if found[name].stage == 0] == ["nats"]


def test_a_gateway_may_drain_as_long_as_it_was_told(tmp_path: Path) -> None:
    """What stops it waits longer than it drains."""
    for number, environment in enumerate(({}, {"SLLM_DRAIN": "60"})):
        spec = made(options(tmp_path / str(number)), environment)["gateway-g1"]
        assert spec.grace_s > float(spec.env["SLLM_DRAIN"])
    for wrong in ("soon", "nan", "-1", "1e9"):
        with pytest.raises(InvalidRequest, match="SLLM_DRAIN"):
            made(options(tmp_path / "wrong"), {"SLLM_DRAIN": wrong})


def test_an_existing_cluster_gets_no_server_and_identities_without_passwords(tmp_path: Path) -> None:
    found = made(options(tmp_path / "run", nats_url="tls://a:1,tls://b:2"), {"SLLM_NATS_CA": "/ca.pem"})
    assert "nats" not in found
    for spec in found.values():
        assert spec.env["SLLM_NATS_URL"] == "tls://a:1,tls://b:2"
        assert spec.env["SLLM_NATS_CA"] == "/ca.pem"
    identity = json.loads(Path(found["invoker-n1"].env["SLLM_IDENTITY_FILE"]).read_text())
    assert identity == {"identity": "n1", "kind": "node"}


def test_every_user_of_the_configuration_has_its_own_rights(tmp_path: Path) -> None:
    made(options(tmp_path / "run", nodes=2))
    file = tmp_path / "run" / "nats" / "nats.conf"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    users = {user["user"]: user["permissions"] for user in json.loads(file.read_text())["authorization"]["users"]}
    assert set(users) == {"up", "controller", "g1", "n1", "n2"}
    assert users["n1"]["publish"] == list(subjects.node_rights("n1").publish)


@given(length=st.integers(1, 200))
def test_a_socket_s_path_is_never_too_long(length: int) -> None:
    assert len(str(Layout(Path("/" + "d" * length)).socket("n64"))) <= 100


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:9000"),
        ("0.0.0.0", "http://127.0.0.1:9000"),
        ("::1", "http://[::1]:9000"),
        ("::", "http://[::1]:9000"),
    ],
)
def test_the_url_is_one_that_can_be_called(tmp_path: Path, host: str, url: str) -> None:
    assert options(tmp_path, host=host).url == url


def test_a_machine_without_ipv6_is_found_by_its_other_loopback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As most containers: on ``::`` it can be listened, ``::1`` is nobody's."""

    class Probe(socket.socket):
        def bind(self, address: Any) -> None:
            if address[0] == "::1":
                raise OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")
            super().bind(address)

    monkeypatch.setattr(socket, "socket", Probe)
    assert options(tmp_path, host="::").url == "http://127.0.0.1:9000"


def test_a_pool_of_nodes_has_identities_and_a_place_that_functions_do_not_see(tmp_path: Path) -> None:
    given = options(tmp_path / "run", pool=2)
    found = made(given)
    assert {identity.identity for identity in given.identities() if identity.kind == "node"} == {
        "n1", "p1", "p2", "p3", "p4",
    }  # fmt: skip
    pool = Layout(given.data).pool
    place = str(pool)
    assert stat.S_IMODE(pool.stat().st_mode) == 0o700, "before any sandbox: what is not there yet is not hidden"
    assert found["controller"].env["SLLM_NODES_DATA"] == place
    assert place in json.loads(found["invoker-n1"].env["SLLM_PRIVATE"])


def test_a_node_alone_hides_what_its_platform_hides_and_has_time_to_leave(tmp_path: Path) -> None:
    layout = Layout(tmp_path / "node")
    environment = {"SLLM_NODE": "i-1", "SLLM_PRIVATE": '["/secret"]', "SLLM_IDENTITY_FILE": "/own", "SLLM_TOKEN": "t"}
    loader, invoker = node_specs(layout, "i-1", 30.0, environment)
    assert (invoker.env["SLLM_NODE"], loader.env["SLLM_NODE"]) == ("i-1", "i-1")
    assert invoker.env["SLLM_IDENTITY_FILE"] == "/own", "credentials of its own, not a file that is made here"
    assert "/secret" in json.loads(invoker.env["SLLM_PRIVATE"])
    assert invoker.env["SLLM_NODE_DRAIN"] == "30.0"
    assert invoker.grace_s > 30
    assert "SLLM_TOKEN" not in invoker.env


def test_bundles_have_no_more_than_was_said_also_on_the_embedded_server(tmp_path: Path) -> None:
    """``SLLM_BUNDLE_BYTES``: gateways store none beyond it in all; what the disk has not is not to be had."""
    given, most = options(tmp_path / "run"), 2**60
    room = int(made(given)["gateway-g1"].env["SLLM_BUNDLE_BYTES"])
    assert int(made(given, {"SLLM_BUNDLE_BYTES": "1000000"})["gateway-g1"].env["SLLM_BUNDLE_BYTES"]) == 1000000
    assert int(made(given, {"SLLM_BUNDLE_BYTES": str(most)})["gateway-g1"].env["SLLM_BUNDLE_BYTES"]) <= room + 2**30
    with pytest.raises(InvalidRequest, match="SLLM_BUNDLE_BYTES"):
        made(given, {"SLLM_BUNDLE_BYTES": "much"})


def test_the_key_of_secrets_is_hidden_from_functions(tmp_path: Path) -> None:
    """None but a controller knows what sealed secrets are (docs/control.md)."""
    found = made(options(tmp_path / "run", nodes=2), {"SLLM_SECRETS_KEY": str(tmp_path / "key")})
    for name in ("n1", "n2"):
        assert str(tmp_path / "key") in json.loads(found[f"invoker-{name}"].env["SLLM_PRIVATE"])


@pytest.mark.parametrize("environment", [{"SLLM_MEMORY": "4GiB"}, {"SLLM_MEMORY": ""}, {"SLLM_POOL_BYTES": ""}, {}])
def test_of_what_each_of_several_nodes_has_its_pool_takes_half(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]
) -> None:
    """The invoker offers what the pool leaves: half of a larger machine would leave nothing (docs/loaderd.md)."""
    monkeypatch.setattr(control_groups, "memory", lambda: 64 * 2**30)
    found = made(options(tmp_path / "run", nodes=2), environment)
    each = 4 * 2**30 if environment.get("SLLM_MEMORY") else 32 * 2**30
    for name in ("n1", "n2"):
        assert InvokerSettings.load(found[f"invoker-{name}"].env).memory == each
        assert LoaderSettings.load(found[f"loaderd-{name}"].env).pool_bytes == each // 2


def test_several_gateways_share_what_one_may_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four took a quarter each for bodies and a quarter each for answers: twice the machine."""
    monkeypatch.setattr("sllm_gateway.settings.memory", lambda: 64 * 2**30)
    for count in (1, 4):
        found = made(options(tmp_path / str(count), gateways=count))
        each = [GatewaySettings.load(found[f"gateway-g{number + 1}"].env) for number in range(count)]
        assert sum(settings.all_bodies() for settings in each) == 16 * 2**30
        assert sum(settings.all_outputs() for settings in each) == 16 * 2**30
    assert GatewaySettings.load({"SLLM_GATEWAYS": "4", "SLLM_BODIES": str(2**30)}).all_bodies() == 2**30


def test_gateways_tell_their_metrics_at_ports_that_follow_each_other(tmp_path: Path) -> None:
    chosen = options(tmp_path, gateways=2)
    beside = max(chosen.ports) + 1
    found = made(chosen, {"SLLM_METRICS_PORT": str(beside)})
    told = [GatewaySettings.load(found[f"gateway-{name}"].env).metrics_port for name in chosen.gateway_names]
    assert told == [beside, beside + 1]
    assert GatewaySettings.load(made(chosen)["gateway-g1"].env).metrics_port is None
    for wrong in (str(chosen.ports[1]), "0", "65535", "x"):
        with pytest.raises(InvalidRequest, match="SLLM_METRICS_PORT"):
            made(chosen, {"SLLM_METRICS_PORT": wrong})


def test_nodes_that_stop_with_their_platform_wait_for_nobody_to_move_what_they_run(tmp_path: Path) -> None:
    """The controller has ended before them: they would be killed, and be in the middle of it."""
    spec = made(options(tmp_path / "run"), {"SLLM_NODE_DRAIN": "30"})["invoker-n1"]
    assert spec.grace_s > InvokerSettings.load(spec.env).node_drain


def test_nodes_with_keys_of_their_own_look_for_no_other_of_their_name(tmp_path: Path) -> None:
    """Keys are made with the embedded server, and anew each time; a cluster has keys that anybody may hold."""
    given = options(tmp_path / "run")
    before = Layout(given.data).identity_file("n1")
    found = [(InvokerSettings.load(made(given)["invoker-n1"].env).name_wait, before.read_text()) for _ in range(2)]
    assert [wait for wait, _ in found] == [0, 0]
    assert found[0][1] != found[1][1]
    assert InvokerSettings.load(made(given, {"SLLM_NAME_WAIT": "2"})["invoker-n1"].env).name_wait == 2
    joins = made(options(tmp_path / "joins", nats_url="nats://10.0.0.1:4222"))["invoker-n1"]
    assert InvokerSettings.load(joins.env).name_wait > 0


def test_more_that_functions_must_not_see_is_read_as_daemons_read_it(tmp_path: Path) -> None:
    private = made(options(tmp_path / "a"), {"SLLM_PRIVATE": "/keys, /more"})["invoker-n1"].env["SLLM_PRIVATE"]
    assert {"/keys", "/more"} < set(json.loads(private))
    for number, wrong in enumerate(("5", '{"a": 1}', "[5]", '"/keys"')):
        with pytest.raises(InvalidRequest, match="SLLM_PRIVATE"):
            made(options(tmp_path / str(number)), {"SLLM_PRIVATE": wrong})


@pytest.mark.parametrize("token", ["abc\ndef", "pässwört", "   "])
def test_a_token_that_no_client_could_send_is_refused_at_the_start(tmp_path: Path, token: str) -> None:
    with pytest.raises(InvalidRequest, match="SLLM_TOKEN"):
        Platform(options(tmp_path / "run"), {"SLLM_TOKEN": token}, lambda _: None)


def test_the_line_end_of_a_file_is_none_of_its_token() -> None:
    assert token({"SLLM_TOKEN": "abc\n"}) == "abc"


@pytest.mark.parametrize("host", ["", " ", "127.0.0.1:80", "192.0.2.1"])
def test_what_is_no_address_of_this_machine_is_no_matter_of_the_port(host: str) -> None:
    """An empty one, as of a variable that is not set, would be waited for until the gateway had to be ready."""
    with pytest.raises(InvalidRequest, match="--host"):
        require_port(host, 0)


@needs_ipv6
@pytest.mark.parametrize("addresses", [["::1"], ["::1", "127.0.0.1"], ["::1", "192.0.2.1"]])
def test_a_name_of_this_machine_is_one_by_whatever_addresses(
    addresses: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    named(monkeypatch, "box", *addresses)
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as there:
        port = there.getsockname()[1]
        with pytest.raises(Conflict, match=f"box:{port}"):
            require_port("box", port)
    require_port("box", 0)


def test_nor_is_one_of_a_family_that_this_kernel_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """Booted with ``ipv6.disable=1``."""

    def none(*_: object) -> socket.socket:
        raise OSError(errno.EAFNOSUPPORT, os.strerror(errno.EAFNOSUPPORT))

    monkeypatch.setattr(socket, "socket", none)
    with pytest.raises(InvalidRequest, match="--host '::'"):
        require_port("::", 0)
