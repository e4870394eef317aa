"""A node never promises more than it has, whatever comes and goes."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sllm_invoker.admission import Claim, Ledger, claim_of
from sllm_invoker.machine import cores, memory, parse_gpus, parse_labels
from sllm_runtime.protocol.errors import Conflict, InvalidRequest, NoCapacity
from sllm_runtime.protocol.node import Gpu, Shared
from sllm_runtime.protocol.records import ModelRecord
from tests.fixtures.invoker import order

GPUS = tuple(Gpu(index=index, kind="L4", memory=24 * 2**30) for index in range(3))
LEDGER = Ledger(cpu=2.0, memory=1000, gpus=GPUS, cpu_overcommit=2.0)
WEIGHTS = {"m": 300, "n": 200, "o": 50}
claims = st.builds(
    Claim,
    cpu=st.floats(0.1, 3.0),
    memory=st.integers(1, 600),
    gpus=st.lists(st.integers(0, 3), max_size=2).map(tuple),
    weights=st.sets(st.sampled_from(sorted(WEIGHTS))).map(lambda digests: {each: WEIGHTS[each] for each in digests}),
)


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.none() | claims), max_size=30))
def test_nothing_is_promised_twice(steps: list[tuple[str, Claim | None]]) -> None:
    ledger = LEDGER
    for name, claim in steps:
        if claim is None:
            ledger = ledger.release(name)
            assert name not in ledger.claims
            continue
        before = ledger
        try:
            ledger = ledger.admit(name, claim)
        except (NoCapacity, Conflict):
            assert ledger == before
        used = [each for claim in ledger.claims.values() for each in claim.weights]
        assert {each: shared.instances for each, shared in ledger.shared.items()} == Counter(used)
        promised = sum(claim.memory for claim in ledger.claims.values()) + sum(WEIGHTS[each] for each in set(used))
        assert promised == 1000 - ledger.free_memory <= 1000
        assert ledger.free_cpu >= -1e-6
        held = [index for one in ledger.claims.values() for index in one.gpus]
        assert len(held) == len(set(held))
        assert {gpu.index for gpu in ledger.held_gpus if gpu.used_by} == set(held)
    for name in "abcdef":
        ledger = ledger.release(name)
    assert ledger == LEDGER


@pytest.mark.parametrize(
    ("claim", "words"),
    [
        (Claim(5.0, 1), "needs 5 CPUs, this node has 4 free"),
        (Claim(1.0, 2000), "needs 2.0 KiB of memory, this node has 1000 B free"),
        (Claim(1.0, 1, (1,)), "needs GPU 1, which instance a holds"),
        (Claim(1.0, 1, (7,)), "needs GPU 7, this node has 3"),
    ],
)
def test_what_is_short_is_named(claim: Claim, words: str) -> None:
    ledger = Ledger(cpu=4.0, memory=1000, gpus=GPUS).admit("a", Claim(0.0, 0, (1,)))
    with pytest.raises(NoCapacity, match=words):
        ledger.admit("b", claim)


def test_one_instance_gets_no_more_cores_than_there_are() -> None:
    """Several may be promised more than that together, since most of them idle."""
    with pytest.raises(NoCapacity, match="needs 3 CPUs, this node has 2 free"):
        LEDGER.admit("a", Claim(3.0, 1))
    assert LEDGER.admit("a", Claim(2.0, 1)).admit("b", Claim(2.0, 1)).left_cpu == 0


def test_what_is_reserved_is_offered_to_nobody() -> None:
    """loaderd says its limit when it is there: what was admitted before stays, nothing more is."""
    ledger = replace(Ledger(cpu=4.0, memory=1000).admit("a", Claim(1.0, 600)), reserved=500)
    assert (ledger.offered_memory, ledger.free_memory) == (500, -100)
    with pytest.raises(NoCapacity, match="needs 1 B of memory, this node has 0 B free"):
        ledger.admit("b", Claim(1.0, 1))
    assert ledger.release("a").admit("b", Claim(1.0, 500)).free_memory == 0
    assert replace(ledger, reserved=5000).offered_memory == 0


def test_a_model_counts_as_memory_and_once() -> None:
    """However many instances use it, until the last of them has gone."""
    model = ModelRecord(digest="sha256:0", uri="/m", nbytes=1000, partitions=(1000,))
    one, none = claim_of(order(model=model)), claim_of(order())
    assert (one.memory, one.weights, none.weights) == (64 * 2**20, {"sha256:0": 1000}, {})
    ledger = Ledger(cpu=4.0, memory=10 * one.memory + 1000, cpu_overcommit=100)
    for number in range(10):
        ledger = ledger.admit(f"i{number}", one)
    assert ledger.free_memory == 0
    assert ledger.shared == {"sha256:0": Shared(1000, 10)}
    for number in range(9):
        ledger = ledger.release(f"i{number}")
    assert ledger.free_memory == 9 * one.memory
    with pytest.raises(NoCapacity, match="needs 999 B of memory, this node has 998 B free"):
        replace(ledger, memory=one.memory + 1998).admit("other", Claim(0.0, 900, weights={"sha256:1": 99}))
    assert ledger.release("i9").shared == {}


def test_overrides_are_parsed_or_refused_by_name() -> None:
    assert parse_gpus("L4:24GiB, H100:80GB") == (
        Gpu(index=0, kind="L4", memory=24 * 2**30),
        Gpu(index=1, kind="H100", memory=80 * 10**9),
    )
    assert parse_gpus("") == ()
    assert parse_labels("zone=a, disk=nvme") == {"zone": "a", "disk": "nvme"}
    for wrong in ("L4", "RTX 4090:24GiB", ":24GiB"):  # nobody could ask for these
        with pytest.raises(InvalidRequest, match=f"'{wrong}' is no GPU"):
            parse_gpus(wrong)
    with pytest.raises(InvalidRequest, match="'zone' is no label"):
        parse_labels("zone")


def test_this_machine_has_something() -> None:
    assert cores() > 0
    assert memory() > 2**20
