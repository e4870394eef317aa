"""Where a model's bytes come by, and where its partitions go."""

from __future__ import annotations

import pytest

from sllm_runtime.protocol.loader import CPU, DISK, path_of, place_of


@pytest.mark.parametrize(
    ("uri", "path"),
    [
        ("/models/a", DISK),
        ("models/a", DISK),
        ("file:///models/a", DISK),
        ("hf://org/name@main", "hub"),
        ("s3://bucket/a/b", "s3 bucket"),
        ("http://host:80/a", "http host:80"),
        ("https://host:80/a", "http host:80"),
        ("peer://host:7000/sha256:00", "peer host:7000"),
    ],
)
def test_what_shares_a_path(uri: str, path: str) -> None:
    assert path_of(uri) == path


@pytest.mark.parametrize(
    ("devices", "places"),
    [
        ((), [CPU, CPU, CPU]),
        ((CPU,), [CPU, CPU, CPU]),
        ((CPU, "cuda:3"), ["cuda:3", "cuda:3", "cuda:3"]),
        ((CPU, "fake:1", "fake:0"), ["fake:1", "fake:0", "fake:1"]),
    ],
)
def test_partitions_take_turns_over_devices(devices: tuple[str, ...], places: list[str]) -> None:
    assert [place_of(rank, devices) for rank in range(3)] == places
