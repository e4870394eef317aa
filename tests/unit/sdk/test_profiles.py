"""Flag over environment over sllm.toml over the profile."""

import stat
from pathlib import Path

import pytest

from sllm import profiles
from sllm_runtime.platform.profile import write_profile
from sllm_runtime.protocol.errors import InvalidRequest, NotFound


def test_nothing_set() -> None:
    assert profiles.load() == profiles.Profile(profiles.DEFAULT_URL)


def test_what_the_platform_writes_is_found(home: Path) -> None:
    write_profile(home, "default", "http://127.0.0.1:7777", "t")
    assert profiles.load() == profiles.Profile("http://127.0.0.1:7777", "t")


def test_all_gateways_of_a_platform_are_found_with_its_own_url_only(home: Path) -> None:
    urls = ("http://127.0.0.1:7777", "http://127.0.0.1:7778")
    write_profile(home, "default", urls[0], "t", urls)
    assert profiles.load().urls == urls
    assert profiles.load(url=urls[0]).urls == urls
    assert profiles.load(url="http://other:1").urls == ("http://other:1",)
    write_profile(home, "default", urls[0], "t", urls[:1])
    assert profiles.load().urls == urls[:1]


def test_each_wins_over_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    profiles.save("default", "http://profile:1", "profile")
    assert profiles.load().url == "http://profile:1"
    (tmp_path / "sllm.toml").write_text('url = "http://project:1"\n')
    below = tmp_path / "a" / "b"
    below.mkdir(parents=True)
    monkeypatch.chdir(below)
    assert profiles.load().url == "http://project:1"
    monkeypatch.setenv("SLLM_URL", "http://environment:1/")
    assert profiles.load().url == "http://environment:1"
    assert profiles.load(url="http://flag:1").url == "http://flag:1"
    assert profiles.load("default").url == "http://profile:1"
    monkeypatch.setenv("SLLM_TOKEN", "environment")
    assert profiles.load(token="flag").token == "flag"
    assert profiles.load().token == "environment"


def test_a_stored_token_goes_to_its_own_host_only(monkeypatch: pytest.MonkeyPatch) -> None:
    profiles.save("default", "http://mine:1/", "secret")
    assert profiles.load(url="http://other:1").token is None
    assert profiles.load(url="http://mine:1").token == "secret"
    monkeypatch.setenv("SLLM_URL", "http://other:1")
    assert profiles.load().token is None


def test_profiles_are_chosen_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    profiles.save("a", "http://a:1", "ta")
    profiles.save("b-x.y", "http://b:1", None)
    assert profiles.load("b-x.y") == profiles.Profile("http://b:1", None, "b-x.y")
    (tmp_path / "sllm.toml").write_text('profile = "a"\n')
    assert profiles.load().token == "ta"
    monkeypatch.setenv("SLLM_PROFILE", "b-x.y")
    assert profiles.load().url == "http://b:1"
    with pytest.raises(InvalidRequest, match=r"'c' is not in .* \(there: a, b-x\.y\)"):
        profiles.load("c")


def test_the_file_is_private_and_keeps_what_else_it_holds(home: Path) -> None:
    write_profile(home, "default", "http://127.0.0.1:1", "t")
    path = profiles.save("other", "https://x", 'odd"\\token')
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [each.name for each in profiles.stored()] == ["default", "other"]
    assert profiles.load("other").token == 'odd"\\token'
    profiles.remove("default")
    assert [each.name for each in profiles.stored()] == ["other"]
    with pytest.raises(NotFound, match="'default' is not in"):
        profiles.remove("default")
    assert list(home.iterdir()) == [path]


@pytest.mark.parametrize(
    "url",
    ["localhost:8600", "ftp://x", "http://", "nonsense", "http://host:port", "http://host:99999", "http://[::1",
     "http://a..b", "http://a\nb"],
)  # fmt: skip
def test_a_url_that_is_none(url: str) -> None:
    with pytest.raises(InvalidRequest, match="no URL of a gateway"):
        profiles.load(url=url)


@pytest.mark.parametrize(
    "url", ["http://host:8600", "https://host", "http://[::1]:8600", "http://127.0.0.1", "http://ü.de"]
)
def test_a_url_that_is_one(url: str) -> None:
    assert profiles.load(url=f"{url}/").url == url


def test_a_broken_file_is_named(home: Path) -> None:
    home.mkdir()
    (home / "profiles.toml").write_text("[profiles")
    with pytest.raises(InvalidRequest, match=r"profiles\.toml cannot be read"):
        profiles.load()


@pytest.mark.parametrize(
    "text",
    ["url = 3", "profile = []", "profiles = 3", "[profiles]\ndefault = 3", "[profiles.default]\nurl = 3",
     "[profiles.default]\ntoken = {}", "[profiles.default]\nurls = 'http://x'", "\xfc"],
)  # fmt: skip
def test_a_value_of_another_type_is_named(home: Path, tmp_path: Path, text: str) -> None:
    home.mkdir()
    for file in (home / "profiles.toml", tmp_path / "sllm.toml"):
        file.write_bytes(text.encode("latin-1"))
        with pytest.raises(InvalidRequest, match=rf"{file.name} cannot be read"):
            profiles.load()
        file.unlink()


def test_a_token_never_shows() -> None:
    assert "secret" not in repr(profiles.Profile("http://x", "secret"))
