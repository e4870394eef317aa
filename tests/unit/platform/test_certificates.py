"""When certificates expire, as openssl says it."""

import ssl
import subprocess
from pathlib import Path

import pytest

from sllm_runtime.platform.certificates import expires, first_expires
from tests.fixtures.certificates import make_certificates, openssl


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = make_certificates(tmp_path_factory.mktemp("tls"))
    # Its time has a year of four digits.
    openssl(directory, "x509", "-in", "ca.pem", "-signkey", "ca.key", "-days", "20000", "-out", "late.pem")
    return directory


def end_of(file: Path) -> float:
    words = ["openssl", "x509", "-in", str(file), "-noout", "-enddate"]
    said = subprocess.run(words, check=True, capture_output=True, text=True, timeout=60).stdout
    return ssl.cert_time_to_seconds(said.strip().removeprefix("notAfter="))


@pytest.mark.parametrize("name", ["ca.pem", "server.pem", "client.pem", "stranger.pem", "late.pem"])
def test_when_a_certificate_expires(certificates: Path, name: str) -> None:
    file = certificates / name
    assert expires(ssl.PEM_cert_to_DER_cert(file.read_text())) == end_of(file)
    assert first_expires(file) == end_of(file)


def test_of_several_the_first_counts_and_what_is_none_says_nothing(certificates: Path) -> None:
    both = certificates / "both.pem"
    both.write_text((certificates / "late.pem").read_text() + "\n" + (certificates / "ca.pem").read_text())
    assert first_expires(both) == end_of(certificates / "ca.pem")
    assert first_expires(certificates / "ca.key") is None
    assert first_expires(certificates / "not there.pem") is None
    whole = ssl.PEM_cert_to_DER_cert((certificates / "ca.pem").read_text())
    for size in (0, 1, 3, 30, 60):
        with pytest.raises(ValueError, match=r"."):
            expires(whole[:size])
    half = certificates / "half.pem"
    half.write_text(ssl.DER_cert_to_PEM_cert(whole[:60]))
    assert first_expires(half) is None
