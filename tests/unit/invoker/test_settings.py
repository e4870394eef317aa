"""What a node's settings lead to."""

from pathlib import Path

from sllm_invoker.settings import InvokerSettings


def test_whatever_is_the_platforms_is_hidden_from_functions(tmp_path: Path) -> None:
    """loaderd's socket too: who reaches it may register any file, and remove every model."""
    names = ("data_dir", "loaderd_socket", "home", "identity_file", "nats_creds", "nats_key")
    given = InvokerSettings.load({}, node="n1", **{name: tmp_path / name for name in names}, private=(tmp_path / "p",))
    hidden = given.hidden()
    assert set(hidden.hide) == {str(tmp_path / name) for name in (*names, "p")}
    assert set(hidden.keep) == {str(tmp_path / "data_dir" / name) for name in ("work", "tmp")}
