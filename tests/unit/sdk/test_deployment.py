"""From a file to a version, over HTTP."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sllm import Client, bundle, deployment
from sllm.answers import Trace, error_from
from sllm.cli import load
from sllm.following import Losing
from sllm.gateways import Gateways
from sllm.profiles import Profile
from sllm.transport import Unreached
from sllm_runtime.protocol.errors import InstanceLost, InvalidManifest, NoCapacity, SllmError, StoreFull, Unavailable
from sllm_runtime.protocol.http import DeployResult, ProgressView
from tests.fixtures.modules import own_modules
from tests.fixtures.waiting import GIVE_UP_S
from tests.unit.sdk.gateway import DONE, TOKEN, Answer, Gateway, error, progress, sse

TEXT = (
    "from sllm import model_function\n\n@model_function(name='chat')\ndef hello(text: str) -> str:\n    return text\n"
)


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "function.py").write_text(TEXT)
    (tmp_path / "data.bin").write_bytes(b"x" * 600_000)
    with own_modules():
        yield tmp_path / "function.py"


def test_the_bundle_is_sent_once(gateway: Gateway, file: Path) -> None:
    seen: list[ProgressView] = []
    function = load.one(str(file))
    with Client() as client:
        result = deployment.deploy(function, client, seen.append)
        assert (result.version, result.function.name) == (1, "chat")
        uploads = [view.done for view in seen if view.stage == "upload"]
        assert uploads == sorted(uploads)
        assert len(uploads) >= 3
        assert uploads[-1] == len(bundle.build(function).data)
        assert seen[-1].stage == "sandbox"
        seen.clear()
        assert function.deploy(client=client, observe=seen.append).version == 1
        assert [view.stage for view in seen] == ["sandbox"]
    assert len(gateway.bundles) == 1
    assert [manifest.name for manifest in gateway.deployed] == ["chat", "chat"]


def test_a_refused_upload_is_sent_again_from_its_beginning(gateway: Gateway, file: Path) -> None:
    gateway.refused[:] = [Unavailable("the disk is full")]
    built = bundle.build(load.one(str(file)))
    with Client() as client:
        assert deployment.upload(built, client)
    assert list(gateway.bundles.values()) == [built.data]


def test_an_upload_that_is_refused_each_time_says_why(
    gateway: Gateway, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deployment, "CONTROLLER_WAIT_S", 0.0)
    gateway.refused[:] = [Unavailable("the disk is full")] * 3
    with Client() as client, pytest.raises(Unavailable, match="the disk is full"):
        deployment.upload(bundle.build(load.one(str(file))), client)
    assert not gateway.bundles


def test_an_upload_waits_for_a_store_that_elects_its_leader_and_says_so(gateway: Gateway, file: Path) -> None:
    gateway.looks[:] = [503] * 5
    gateway.refused[:] = [Unavailable("no leader")] * 7
    built, seen = bundle.build(load.one(str(file))), list[ProgressView]()
    with Client() as client:
        assert deployment.upload(built, client, seen.append)
    assert list(gateway.bundles.values()) == [built.data]
    waits = [view.message for view in seen if view.stage == "store"]
    assert len(waits) == 3
    assert "HTTP 503" in waits[0]
    assert "URL" not in waits[0]
    assert "no leader" in waits[-1]


def test_an_upload_does_not_wait_for_a_gateway_that_is_not_there(file: Path) -> None:
    seen = list[ProgressView]()
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        url = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        with Client(url, "t") as client, pytest.raises(Unavailable, match="no gateway answers"):
            deployment.upload(bundle.build(load.one(str(file))), client, seen.append)
    assert seen == []


@contextmanager
def dying() -> Iterator[str]:
    """The URL of a gateway that dies in the middle of an upload."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                connection, _ = listener.accept()
                with connection:
                    while (head := connection.recv(64 * 1024)).startswith(b"HEAD"):
                        connection.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
                    if head:
                        listener.close()
                        return

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread.join(GIVE_UP_S)


def test_a_deployment_goes_on_whose_gateway_dies_as_the_bundle_is_sent(gateway: Gateway, file: Path) -> None:
    """Whatever has come of it there: it has the same name everywhere."""
    with dying() as first, Client(profile=Profile(first, TOKEN, others=(gateway.url,))) as client:
        assert load.one(str(file)).deploy(client=client).version == 1
    assert len(gateway.bundles) == 1


def test_a_deployment_goes_on_whose_gateway_dies_behind_a_proxy(gateway: Gateway, file: Path) -> None:
    """As ``test_a_deployment_goes_on_whose_gateway_dies_as_the_bundle_is_sent``: the proxy's answer is no gateway's."""
    gateway.looks[:] = [502] * 4
    with Client() as client:
        assert load.one(str(file)).deploy(client=client).version == 1
    assert len(gateway.bundles) == 1


def test_an_upload_does_not_wait_for_room(gateway: Gateway, file: Path) -> None:
    gateway.refused[:] = [StoreFull("no room")] * 3
    with Client() as client, pytest.raises(StoreFull, match="no room"):
        deployment.upload(bundle.build(load.one(str(file))), client)
    assert gateway.refused == []


@pytest.mark.parametrize(
    ("answer", "raised", "said"),
    [
        (Answer((progress("sandbox"), error(NoCapacity("needs an H100")))), NoCapacity, "needs an H100"),
        (Answer(problem=InvalidManifest("gpu: none such")), InvalidManifest, "none such"),
        (Answer((progress("sandbox"),), breaks=True), InstanceLost, "broke off .*`sllm fn describe chat` says whether"),
        (Answer((progress("sandbox"), DONE)), Unavailable, "ended without a result"),
    ],
)
def test_how_it_can_fail(
    gateway: Gateway,
    file: Path,
    answer: Answer,
    raised: type[Exception],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(deployment, "CONTROLLER_WAIT_S", 0.0)  # what breaks off is sent again for so long, see below
    gateway.will(answer)
    with pytest.raises(raised, match=said):
        load.one(str(file)).deploy()
    assert len(gateway.deployed) == 1


def test_a_deployment_goes_on_at_the_gateway_that_comes_back(gateway: Gateway, file: Path) -> None:
    """By the name that it has had from the beginning: the platform joins who asks for it again."""
    result = DeployResult(function=gateway.view("chat"), version=7)
    done = Answer((progress("sandbox"), sse(result.model_dump(mode="json"), event="done"), DONE))
    gateway.will(Answer((progress("sandbox"),), breaks=True), Answer(breaks=True), done)
    assert load.one(str(file)).deploy().version == 7
    (name,) = set(gateway.requests)
    assert name
    assert len(gateway.requests) == 3


def test_a_deployment_that_stays_lost_is_given_up() -> None:
    """Counted from when it was lost last: it may have gone on for minutes before."""
    losing, lost = Losing(Gateways(("http://a", "http://b")), 15.0), InstanceLost("gone")
    broken = Trace(broken=True, gateway="http://a")
    assert losing.wait(lost, broken, 0.0, 200.0) > 0
    assert losing.gateways.urls[0] == "http://b"
    assert losing.wait(Unavailable("nobody"), Trace(), 214.0, 214.0) > 0
    with pytest.raises(InstanceLost, match="gone"):
        losing.wait(lost, broken, 214.5, 215.5)
    with pytest.raises(NoCapacity, match="its answer"):
        Losing(losing.gateways, 15.0).wait(NoCapacity("its answer"), Trace(gateway="http://a"), 0.0, 1.0)


def test_a_proxy_that_has_no_answer_in_time_is_not_asked_for_ever() -> None:
    """Its gateways drop what it sends (no power, a firewall): nginx says 504 after its 60 s, again and again."""
    losing, silent = Losing(Gateways(("https://proxy",)), 15.0), error_from(504, {}, b"<h1>504 Gateway Time-out</h1>")

    def ask(began: float) -> float:
        """When it is asked again."""
        return began + 60.0 + losing.wait(silent, Trace(gateway="https://proxy"), began, began + 60.0)

    again = ask(0.0)
    with pytest.raises(SllmError, match="HTTP 504"):
        ask(again)


def given_up(losing: Losing, error: SllmError, takes: float) -> float:
    """When it is no longer asked for, of a gateway or of many of which each try says nothing for ``takes`` seconds."""
    now = 0.0
    while now < 600.0:
        began, now = now, now + takes
        try:
            now += losing.wait(error, Trace(), began, now)
        except type(error):
            break
    return now


@pytest.mark.parametrize(("gateways", "asked"), [(1, 2), (2, 2), (3, 3)])
def test_a_gateway_that_says_nothing_is_not_asked_for_ever(gateways: int, asked: int) -> None:
    """As its proxy's 504: it takes the connection and stands still (stopped, a disk that hangs), and with the proxy of
    docs/gateway.md, which waits for an hour, it is this client that gives up after its 60 s, again and again."""
    losing = Losing(Gateways(tuple(f"http://{number}" for number in range(gateways))), 15.0)
    assert given_up(losing, InstanceLost("no word"), 60.0) < 61.0 * asked


def test_gateways_none_of_which_takes_a_connection_are_not_asked_for_ever() -> None:
    """A network that drops everything (a VPN that ended): 5 s for each."""
    losing = Losing(Gateways(("http://a", "http://b", "http://c", "http://d")), 15.0)
    assert given_up(losing, Unreached("nobody"), 20.0) < 60.0


def test_a_deployment_that_goes_on_for_long_is_lost_anew_each_time() -> None:
    losing, now = Losing(Gateways(("http://a",)), 15.0), 0.0
    for _ in range(5):
        losing.wait(InstanceLost("gone"), Trace(broken=True, gateway="http://a"), now, now + 100.0)
        losing.wait(InstanceLost("gone"), Trace(), now + 101.0, now + 101.0)
        now += 102.0


def test_a_deployment_that_a_proxy_has_no_answer_for_says_where_to_look(
    gateway: Gateway, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deployment, "CONTROLLER_WAIT_S", 0.0)
    gateway.will(Answer(front=502))
    with pytest.raises(SllmError, match=r"HTTP 502.*`sllm fn describe chat` says whether it is deployed"):
        load.one(str(file)).deploy()
