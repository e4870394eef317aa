"""What a node's settings lead to."""

from pathlib import Path

from sllm_invoker import machine
from sllm_invoker.settings import InvokerSettings
from sllm_runtime.control.providing.processes import Processes
from sllm_runtime.control.providing.provider import Shape


def test_whatever_is_the_platforms_is_hidden_from_functions(tmp_path: Path) -> None:
    """loaderd's socket too: who reaches it may register any file, and remove every model."""
    names = ("data_dir", "loaderd_socket", "home", "identity_file", "nats_creds", "nats_key")
    given = InvokerSettings.load({}, node="n1", **{name: tmp_path / name for name in names}, private=(tmp_path / "p",))
    hidden = given.hidden()
    assert set(hidden.hide) == {str(tmp_path / name) for name in (*names, "p")}
    assert set(hidden.keep) == {str(tmp_path / "data_dir" / name) for name in ("work", "tmp")}


def test_a_node_that_is_made_without_gpus_has_none_of_its_machines(tmp_path: Path) -> None:
    """Several are made on one machine: each would offer all of its GPUs."""
    pool = Processes(tmp_path / "pool", Shape(cpu=1.0, memory=2**30), 0, 2, {})
    own = {"SLLM_DATA_DIR": str(tmp_path), "SLLM_LOADERD_SOCKET": str(tmp_path / "s")}
    given = InvokerSettings.load(pool._environment_of("p1") | own)
    assert given.gpus is not None, "else it looks for the machine's own"
    assert machine.parse_gpus(given.gpus) == ()
