"""Flag over environment over sllm.toml over the profile."""

import os
import stat
import tomllib
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path

import pytest

from sllm import profiles
from sllm_runtime.platform.profile import claim, write_profile
from sllm_runtime.protocol.errors import InvalidRequest, NotFound
from sllm_runtime.protocol.profiles import toml


def test_a_file_that_begins_with_a_mark_is_read(home: Path) -> None:
    """As PowerShell and older editors of Windows write it."""
    home.mkdir(parents=True)
    (home / "profiles.toml").write_bytes(b'\xef\xbb\xbf[profiles.default]\nurl = "http://h:1"\n')
    assert profiles.load().url == "http://h:1"


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


def test_another_token_for_the_same_platform_leaves_its_other_gateways(home: Path) -> None:
    urls = ("http://127.0.0.1:7777", "http://127.0.0.1:7778")
    write_profile(home, "default", urls[0], "old", urls)
    profiles.save("default", urls[0], "new")
    assert profiles.load() == profiles.Profile(urls[0], "new", others=urls)
    profiles.save("default", "http://other:1", "new")
    assert profiles.load().urls == ("http://other:1",)


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
    monkeypatch.delenv("SLLM_URL")
    monkeypatch.setenv("SLLM_PROFILE", "default")
    assert profiles.load() == profiles.Profile("http://profile:1", "environment")


def test_a_token_goes_to_no_url_that_only_a_directory_names(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cloned repository, or what somebody has put into /tmp, could have it sent to itself."""
    (tmp_path / "sllm.toml").write_text('url = "http://evil:1/"\n')
    profiles.save("default", "http://mine:1", "stored")
    assert profiles.load() == profiles.Profile("http://evil:1")
    remedy = r"sllm\.toml alone names http://evil:1, .*SLLM_URL=http://evil:1 beside SLLM_TOKEN .* profile set NAME"
    with pytest.raises(InvalidRequest, match=remedy):
        profiles.load(token="flag")
    monkeypatch.setenv("SLLM_TOKEN", "environment")
    with pytest.raises(InvalidRequest, match=remedy):
        profiles.load()
    assert profiles.load(url="http://evil:1").token == "environment"
    assert profiles.load("default").token == "stored"
    monkeypatch.setenv("SLLM_URL", "http://evil:1")
    assert profiles.load().token == "environment"
    monkeypatch.delenv("SLLM_URL")
    profiles.save("team", "http://evil:1", "theirs")  # as the error says
    assert profiles.load().token == "environment"
    monkeypatch.delenv("SLLM_TOKEN")
    assert profiles.load().token == "theirs"


def test_no_profile_is_stored_by_what_only_a_directory_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sllm.toml").write_text('url = "http://evil:1"\n')
    monkeypatch.setenv("SLLM_TOKEN", "environment")
    assert profiles.given() == profiles.Given(None, "environment")


@pytest.mark.skipif(os.geteuid() != 0, reason="to give a file away takes root")
def test_the_settings_of_another_user_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "sllm.toml").write_text('url = "http://evil:1"\n')
    os.chown(tmp_path / "sllm.toml", 12345, -1)
    with pytest.raises(InvalidRequest, match=r"sllm\.toml belongs to another user; say --url or --profile"):
        profiles.load()
    assert profiles.load(url="http://mine:1").url == "http://mine:1"


@pytest.mark.parametrize("broken", ["profile that is not there", "file that cannot be read", "no home"])
def test_what_is_given_whole_needs_no_file(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    if broken == "no home":
        monkeypatch.delenv("SLLM_HOME")
        monkeypatch.delenv("HOME")
        monkeypatch.setattr(Path, "home", no_home)
        said = "set SLLM_HOME"
    elif broken == "file that cannot be read":
        (home / "profiles.toml").mkdir(parents=True)
        said = "cannot be read"
    else:
        (tmp_path / "sllm.toml").write_text('profile = "team"\n')
        said = "'team' is not in"
    assert profiles.load(url="http://a:1", token="t") == profiles.Profile("http://a:1", "t")
    with pytest.raises(InvalidRequest, match=said):
        profiles.load()
    monkeypatch.setenv("SLLM_URL", "http://a:1")
    monkeypatch.setenv("SLLM_TOKEN", "t")
    assert profiles.load() == profiles.Profile("http://a:1", "t")


def no_home() -> Path:
    raise RuntimeError("Could not determine home directory.")


def test_a_stored_token_goes_to_its_own_host_only(monkeypatch: pytest.MonkeyPatch) -> None:
    profiles.save("default", "http://mine:1/", "secret")
    assert profiles.load(url="http://other:1").token is None
    assert profiles.load(url="http://mine:1").token == "secret"
    profiles.save("other", "http://other:1", "its own")
    assert profiles.load(url="http://other:1").token == "its own"
    profiles.remove("other")
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
    assert sorted(home.iterdir()) == [path.with_name("profiles.lock"), path]  # the platform waits at the same lock


def test_what_an_owner_has_written_stays(home: Path) -> None:
    home.mkdir()
    own = {"since": date(2026, 1, 2), "deep": {"a": 1, "b": [{"c": float("inf")}]}}
    (home / "profiles.toml").write_text(toml({"profiles": {"mine": {"url": "http://mine:1", **own}}, **own}))
    profiles.save("é😀", "http://other:1", None)
    found = tomllib.loads((home / "profiles.toml").read_text())
    assert found.pop("profiles") == {"mine": {"url": "http://mine:1", **own}, "é😀": {"url": "http://other:1"}}
    assert found == own


def test_a_name_that_no_file_can_hold_is_refused(home: Path) -> None:
    profiles.save("mine", "http://mine:1", "t")
    with pytest.raises(InvalidRequest, match="no profile's name"):
        profiles.save(b"caf\xe9".decode("utf-8", "surrogateescape"), "http://other:1", None)
    assert profiles.load("mine").token == "t"


def test_those_that_change_profiles_take_turns(home: Path) -> None:
    """Two of the SDK and two platforms, at the same moment: none is lost."""
    home.mkdir()
    names = [f"p{number}" for number in range(16)]

    def write(number: int) -> None:
        if number % 2:
            profiles.save(names[number], "http://mine:1", None)
        else:
            claim(home, names[number], f"http://127.0.0.1:{number}", "t", home / "run", lambda _: True)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(write, range(16)))
    assert sorted(each.name for each in profiles.stored()) == sorted(names)


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
