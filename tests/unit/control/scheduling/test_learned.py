"""What starts teach."""

from __future__ import annotations

import math
from dataclasses import replace

import msgspec
import pytest

from sllm_runtime.control.instances import report
from sllm_runtime.control.reports import observe
from sllm_runtime.control.scheduling.estimate import estimate
from sllm_runtime.control.scheduling.index import Servers
from sllm_runtime.control.scheduling.learned import (
    COLD_SANDBOX_S,
    EVERY_NODE,
    OVER,
    RECENT,
    RELEASE_S,
    WARM_SANDBOX_S,
    Learned,
)
from sllm_runtime.control.scheduling.prediction import Estimate, Tier
from sllm_runtime.control.scheduling.remembered import learned as remembered
from sllm_runtime.control.scheduling.remembered import record
from sllm_runtime.control.view import Instance, View
from sllm_runtime.protocol import codec
from sllm_runtime.protocol.limits import MOST_PROOFS
from sllm_runtime.protocol.loader import DISK, link_of
from sllm_runtime.protocol.node import InstanceStatus, NodeStatus, PathLoad
from sllm_runtime.protocol.records import InstanceRecord, LearnedRecord
from sllm_runtime.protocol.states import InstanceState
from sllm_runtime.protocol.timeline import IMPORT, PROVE, SANDBOX, SETUP, WEIGHTS, Span
from tests.unit.control.scheduling.cluster import GB, NOW, cluster, function, model, node, queued

KEY = ("chat", 1)


def spans(sandbox: float, imports: float, setup: float) -> tuple[Span, ...]:
    return (
        Span(SANDBOX, 0.0, sandbox * 1000),
        Span(IMPORT, sandbox * 1000, imports * 1000),
        Span(WEIGHTS, sandbox * 1000, 123.0),
        Span(SETUP, 0.0, setup * 1000),
    )


def starting(queue: float, *, served: bool = False) -> tuple[View, Instance]:
    """A start of KEY from the SSD, whose weights take a second and wait ``queue`` seconds for others; ``served``: its
    disk has read for loads."""
    where = node("a", paths=(PathLoad(path=DISK, bandwidth=1e9, queued=0, served=True),)) if served else node("a")
    view, what = function(cluster(where), KEY[0])
    guess = Estimate("ssd", True, sandbox=0.02, imports=0.0, queue=queue, read=1.0, setup=0.1)
    record = InstanceRecord(instance="i", function=KEY[0], version=KEY[1], node="a", state=InstanceState.STARTING)
    return view, Instance(record, what, placed=NOW, predicted=guess)


def ready(*stages: Span) -> InstanceStatus:
    return InstanceStatus(instance="i", function=KEY[0], version=KEY[1], state=InstanceState.READY, spans=stages)


def test_what_versions_taught_alone_is_forgotten_with_them() -> None:
    learned = Learned().after(KEY, "a", True, spans(0.05, 2.0, 1.0)).released(KEY, 0.4).called(KEY, 0.5)
    view, what = starting(queue=0.0)
    view = report(view.put_instance(what), what, ready(*spans(0.05, 2.0, 1.0)), NOW + 4.0)
    for known in (learned, view.learned):
        assert known.versions() == {KEY}
        assert known.without(frozenset({("chat", 2)})) is known
        left = known.without(frozenset({KEY}))
        assert left.versions() == frozenset()
        assert left.import_s(KEY) == Learned().import_s(KEY)
        assert left.sandbox == known.sandbox, "the nodes are the same"
    assert ({key for key, _ in view.learned.rest}, {key for key, _ in left.rest}) == ({KEY, None}, {None})
    assert learned.without(frozenset({KEY})).release_s(KEY) == 0.4, "as of any version"


def test_the_first_start_is_believed_and_later_ones_move_the_median() -> None:
    learned = Learned().after(KEY, "a", True, spans(0.05, 2.0, 1.0))
    assert (learned.sandbox_s("a", True), learned.import_s(KEY), learned.setup_s(KEY)) == (0.05, 2.0, 1.0)
    learned = learned.after(KEY, "a", True, spans(0.05, 1.5, 1.0))
    assert learned.import_s(KEY) == 1.5, "the first one found nothing in a cache"
    learned = learned.after(KEY, "a", True, spans(0.05, 1.8, 1.0))
    assert learned.import_s(KEY) == 1.8
    assert learned.sandbox_s("a", False) > 1.0, "an empty pool is another thing"
    assert learned.sandbox_s("b", True) == 0.05, "as on the only node that is known"
    for seconds in (0.001, 0.002, 0.003):
        assert learned.sandbox_s("b", True) == learned.sandbox_s("c", True), "as on others, until there are OWN"
        learned = learned.after(KEY, "b", True, spans(sandbox=seconds, imports=0, setup=0))
    assert learned.sandbox_s("b", True) == 0.002
    assert learned.sandbox_s("c", True) == 0.003, "the middle of what starts took of late, wherever they were"
    assert learned.sandbox_s("a", True) == 0.05


def test_the_least_that_a_sandbox_or_a_release_takes_is_the_least_that_one_took() -> None:
    """Where that is more than one took no search looks at servers where it is as quick."""
    learned = Learned()
    for seconds, least in ((0.5, WARM_SANDBOX_S), (0.004, 0.004), (0.01, 0.004)):
        learned = learned.after(KEY, "a", True, spans(seconds, 0.0, 0.0))
        assert learned.least == least
    for seconds, least in ((0.5, RELEASE_S), (0.1, 0.1), (0.15, 0.1)):
        learned = learned.released(KEY, seconds)
        assert learned.least_release == least


def test_of_all_that_the_weights_are_expected_to_take_a_share_is_taken_back() -> None:
    """Also of what waits before them."""
    weights = model("m", 2 * GB)
    view = cluster(queued(node("a", models=(weights.digest,)), DISK, 8 * GB), models=(weights,))
    learned = Learned().missed(KEY, "ssd", -10.0)
    assert estimate(Servers().of(view)["a"], KEY, weights, learned).rest == pytest.approx(-OVER * 10.0)


def test_of_moves_the_newest_count_most() -> None:
    learned = Learned()
    for number, took_s in ((100, 1.0), (30, 2.0)):
        for tokens in range(number):
            learned = learned.resumed("m", float(tokens % 10), took_s)
    assert 1.7 < learned.resume_s("m", 5.0) < 2.0


def test_a_self_test_is_not_expected_again() -> None:
    learned = Learned().after(KEY, "a", True, (*spans(0.05, 2.0, 1.0), Span(PROVE, 0.0, 900.0)))
    assert learned.setup_s(KEY) == pytest.approx(0.1)
    more_than_there_was = Learned().after(KEY, "a", True, (*spans(0.05, 2.0, 1.0), Span(PROVE, 0.0, 1900.0)))
    assert more_than_there_was.setup_s(KEY) == 0.0


def test_of_a_disk_that_served_no_start_its_like_tell_as_much_as_a_probe() -> None:
    disk, store = (PathLoad(path=path, bandwidth=1e9, queued=0) for path in (DISK, "s3 models"))
    assert Learned().disk_bandwidth("a", 1e9) == 1e9
    learned = Learned().served("b", 1.44e9)
    assert learned.disk_bandwidth("a", 1e9) == pytest.approx(1.2e9)
    assert learned.disk_bandwidth("a", 0.9e9) == 0.9e9, "another kind"
    assert learned.disk_bandwidth("a", 2.2e9) == 2.2e9, "another kind"
    assert learned.disk_bandwidth("a", 0.0) == 0.0, "it has said nothing yet"
    assert learned.disk_bandwidth("b", 1e9) == 1e9, "its loader tells by now what starts get"
    view = replace(cluster(node("a", paths=(disk, store))), learned=learned)
    expected = Servers().of(view)["a"].paths
    assert expected[DISK].bandwidth == pytest.approx(1.2e9)
    assert expected[store.path] == store


def test_what_was_learned_of_disks_counts_also_where_a_node_has_not_reported_since() -> None:
    """As in an index that is made anew: `explain` looks in one."""
    view = cluster(node("a", paths=(PathLoad(path=DISK, bandwidth=1e9, queued=0),)))
    servers = Servers()
    servers.of(view)
    view = replace(view, learned=Learned().served("b", 1.44e9))
    view = view.put_node(replace(view.nodes["a"], left=True))  # or anything placed there
    assert servers.of(view)["a"].paths == Servers().of(view)["a"].paths


NO_TIMES = (math.nan, math.inf, -math.inf, -1.0, 1e30)


@pytest.mark.parametrize("odd", [*NO_TIMES, 0.0, 1e-310])
def test_no_disk_has_such_a_bandwidth(odd: float) -> None:
    learned = Learned().served("a", odd)
    assert learned == Learned()
    assert learned.disk_bandwidth("b", 1e9) == 1e9


@pytest.mark.parametrize("odd", NO_TIMES)
@pytest.mark.parametrize("stage", [SANDBOX, IMPORT, SETUP, PROVE])
def test_no_start_has_such_a_stage(stage: str, odd: float) -> None:
    """A sandbox says so. What is learned of it must be a record that can be read again."""
    view, what = starting(queue=0.0)
    told = tuple(span for span in (*spans(0.05, 2.0, 1.0), Span(PROVE, 0.0, 1.0)) if span.name != stage)
    for wrong in (Span(stage, 0.0, odd), Span(stage, math.nan, 1.0)):
        after = report(view.put_instance(what), what, ready(*told, wrong), NOW + 4.0)
        found = codec.from_json(LearnedRecord, codec.to_json(record(after.learned)))
        without = report(view.put_instance(what), what, ready(*told), NOW + 4.0)
        assert remembered(found) == remembered(record(without.learned))
        assert after.instances["i"].spans == without.instances["i"].spans


def test_a_start_from_the_disk_teaches_what_disk_its_node_has() -> None:
    view, what = starting(queue=0.0)
    probed = report(view.put_instance(what), what, ready(*spans(0.05, 2.0, 1.0)), NOW + 4.0)
    assert not probed.learned.disk, "all of it was in the page cache: its disk has shown a probe, and no load"
    view, what = starting(queue=0.0, served=True)
    view = report(view.put_instance(what), what, ready(*spans(0.05, 2.0, 1.0)), NOW + 4.0)
    assert {name: recent.seconds for name, recent in view.learned.disk.items()} == {"a": (1.0,), EVERY_NODE: (1.0,)}
    view, what = starting(queue=0.0, served=True)
    assert what.predicted is not None
    near = replace(what, predicted=msgspec.structs.replace(what.predicted, tier="dram"))
    view = report(view.put_instance(near), near, ready(*spans(0.05, 2.0, 1.0)), NOW + 4.0)
    assert not view.learned.disk


def test_an_empty_pool_takes_what_its_node_took_to_make_one_until_a_start_has_found_it_so() -> None:
    where = node("a", pool_idle=0, sandbox_s=0.25)
    started = Learned().after(KEY, "b", False, spans(0.5, 0.0, 0.0))

    def guess(learned: Learned, status: NodeStatus) -> float:
        return estimate(Servers().of(cluster(status))["a"], KEY, None, learned).sandbox

    assert guess(Learned(), node("a", pool_idle=0)) == COLD_SANDBOX_S
    assert guess(started, node("a", pool_idle=0)) == 0.5, "as on others"
    assert guess(started, where) == 0.25, "but this one has been measured itself"
    assert guess(started.after(KEY, "a", False, spans(0.75, 0.0, 0.0)), where) == 0.75
    assert guess(started, msgspec.structs.replace(where, pool_idle=1)) == WARM_SANDBOX_S
    hasty = msgspec.structs.replace(where, sandbox_s=0.001)
    assert guess(Learned(), hasty) == WARM_SANDBOX_S
    slow = Learned().after(KEY, "b", True, spans(0.5, 0.0, 0.0))
    assert guess(slow, where) == 0.5, "no quicker than one that waits: a node is not better off without"


def test_proofs_are_kept_by_version_the_last_ones() -> None:
    learned = Learned()
    for number in range(MOST_PROOFS + 1):
        learned = learned.proved(("f", 1), f"machine {number}")
    assert learned.proofs == {("f", 1): tuple(f"machine {number}" for number in range(1, MOST_PROOFS + 1))}
    assert learned.proved(("f", 1), "machine 2") is learned, "nothing is new"
    assert learned.proved(("f", 2), "machine 2").proofs["f", 2] == ("machine 2",)


def test_what_held_up_one_start_is_not_expected_of_the_next() -> None:
    learned = Learned()
    for imports in (2.0, 2.0, 60.0):
        learned = learned.after(KEY, "a", True, spans(0.05, imports, 1.0))
    assert learned.import_s(KEY) == 2.0
    for _ in range(RECENT):
        learned = learned.after(KEY, "a", True, spans(0.05, 5.0, 1.0))
    assert learned.import_s(KEY) == 5.0, "what has changed for good is"


def test_weights_come_while_the_sandbox_is_made() -> None:
    learned = Learned().after(KEY, "a", True, spans(0.5, 1.0, 0.25))
    big, small = model("big", 3 * GB), model("small", GB // 10)
    view = cluster(node("a", models=(big.digest, small.digest)), models=(big, small))
    server = Servers().of(view)["a"]
    assert estimate(server, KEY, big, learned).seconds == pytest.approx(3.0 + 0.25)
    assert estimate(server, KEY, small, learned).seconds == pytest.approx(1.5 + 0.25)
    assert estimate(server, KEY, None, learned, release=1.0).seconds == pytest.approx(2.5 + 0.25)


def test_what_the_parts_do_not_tell_is_learned_as_a_whole() -> None:
    m, other = model("m", GB), model("other", GB)
    server = Servers().of(cluster(node("a", models=(m.digest, other.digest)), models=(m, other)))["a"]
    learned = Learned().missed(KEY, "ssd", 0.5)
    assert estimate(server, KEY, m, learned).seconds == pytest.approx(1.5)
    assert estimate(server, ("new", 1), other, learned).seconds == pytest.approx(1.5), "as others start from there"
    learned = learned.missed(KEY, "ssd", 1.5).missed(KEY, "ssd", 1.0)
    assert learned.rest_s(KEY, "ssd") == pytest.approx(1.0)
    assert learned.rest_s(KEY, "dram") == 0.0
    early = Learned().missed(KEY, "ssd", -9.0)
    assert early.rest_s(KEY, "ssd") == 0.0, "no start takes less than its parts"
    assert estimate(server, KEY, m, early).seconds == pytest.approx(1.0 - OVER), "but its weights may come sooner"
    assert estimate(server, KEY, m, Learned().missed(KEY, "ssd", -0.1)).seconds == pytest.approx(0.9)


def test_who_waits_for_the_path_does_not_wait_for_its_own_command_as_well() -> None:
    m = model("m", GB)
    learned = Learned().led(KEY, "ssd", 1.25, 1.0)
    alone = Servers().of(cluster(node("a", models=(m.digest,)), models=(m,)))["a"]
    assert estimate(alone, KEY, m, learned).seconds == pytest.approx(1.25)
    assert estimate(alone, ("new", 1), m, learned).seconds == pytest.approx(1.25), "as others start from there"
    disk = PathLoad(path="disk", bandwidth=1e9, queued=GB)
    behind = Servers().of(cluster(node("a", models=(m.digest,), paths=(disk,)), models=(m,)))["a"]
    assert estimate(behind, KEY, m, learned).seconds == pytest.approx(2.0)
    comes = Servers().of(cluster(node("a", models=(m.digest,), coming=GB), models=(m,)))["a"]
    assert estimate(comes, KEY, m, learned).seconds == pytest.approx(2.25), "it has to wait for its own command, too"
    sooner = Learned().led(KEY, "ssd", 0.1, 1.0)
    assert estimate(alone, KEY, m, sooner).seconds == pytest.approx(1.0 - OVER)
    assert estimate(behind, KEY, m, sooner).seconds == pytest.approx(2.0 - OVER)


@pytest.mark.parametrize(("queue", "lead"), [(0.0, 0.5), (0.75, 0.0)])
def test_a_start_that_waited_for_others_does_not_teach_when_weights_are_asked_for(queue: float, lead: float) -> None:
    """Who was served first may be another than was expected."""
    view, instance = starting(queue, served=True)
    stages = (Span(SANDBOX, 0.0, 20.0), Span(WEIGHTS, 20.0, 1480.0), Span(SETUP, 1500.0, 100.0))
    view = report(view, instance, ready(*stages), NOW + 1.625)
    assert view.learned.lead_s(KEY, "ssd") == pytest.approx(lead + 0.0125 * bool(lead))
    assert view.learned.rest_s(KEY, "ssd") == pytest.approx(0.0125), "the way back is known all the same"


@pytest.mark.parametrize(
    ("tier", "path", "device", "read"),
    [
        ("ssd", DISK, False, 0.25),
        ("remote", "s3 models", False, 0.25),
        ("ssd", DISK, True, 0.5),  # the link is slower
        ("dram", DISK, True, 0.5),
        ("remote", "other", False, 1.0),  # of this one nobody knows anything new
        ("ssd", "other", False, 1.5),  # the page cache gave all: that says nothing of when a disk is asked
    ],
)
def test_when_weights_are_asked_for_is_told_by_what_their_path_gave_them(
    tier: Tier, path: str, device: bool, read: float
) -> None:
    """Had its bandwidth been known before, the start had been expected so: what was wrong with it counts no more."""
    link = PathLoad(path=link_of("cuda:0"), bandwidth=2e9, queued=0)
    where = node("a", paths=(PathLoad(path=path, bandwidth=4e9, queued=0, served=path == DISK), link))
    m = model("m", GB)
    view, what = function(cluster(where, models=(m,)), KEY[0], m)
    guess = Estimate(tier, True, sandbox=0.02, imports=0.0, queue=0.0, read=1.0, setup=0.1)
    record = InstanceRecord(instance="i", function=KEY[0], version=KEY[1], node="a", state=InstanceState.STARTING)
    instance = Instance(record, what, placed=NOW, predicted=guess, gpus=(0,) if device else ())
    stages = (Span(SANDBOX, 0.0, 20.0), Span(WEIGHTS, 20.0, 1480.0), Span(SETUP, 1500.0, 100.0))
    soon = 0.7 * read
    cached = report(view, instance, ready(stages[0], Span(WEIGHTS, 20.0, soon * 1000 - 20.0)), NOW + soon)
    if tier == "ssd":
        assert not cached.learned.lead, "so soon no disk has them there"
    view = report(view, instance, ready(*stages), NOW + 1.6)
    assert view.learned.lead_s(KEY, tier) == pytest.approx(1.5 - read)


def test_an_engine_that_begins_before_its_weights_are_there_teaches_the_whole() -> None:
    view, instance = starting(queue=0.0)
    view = report(view, instance, ready(Span(SANDBOX, 0.0, 20.0), Span(SETUP, 20.0, 100.0)), NOW + 1.0)
    assert view.learned.lead_s(KEY, "ssd") == 0.0
    assert view.learned.rest_s(KEY, "ssd", 1.0) == pytest.approx(-0.1)


def test_a_model_that_its_node_had_to_make_says_nothing_of_other_versions() -> None:
    """Its own next start on a node without it takes as long again."""
    learned = Learned().missed(KEY, "remote", 10.5, own=10.0)
    assert learned.rest_s(KEY, "remote") == pytest.approx(10.5)
    assert learned.rest_s(("new", 1), "remote") == pytest.approx(0.5)
    beside = Learned().missed(KEY, "remote", 0.25, own=10.0)
    assert beside.rest_s(("new", 1), "remote") == 0.0
    beside = beside.missed(KEY, "remote", 1.0).missed(KEY, "remote", 0.5)
    assert beside.rest_s(("new", 1), "remote") == pytest.approx(0.5)


def test_the_slowest_way_to_an_accelerator_counts() -> None:
    """From memory it is the link; what comes by a disk goes on by the link as it comes."""
    m = model("m", GB)
    disk, links = PathLoad(path="disk", bandwidth=1e9, queued=0), (0.0, 4e9, 2e9)
    paths = (disk, *(PathLoad(path=link_of(f"cuda:{n}"), bandwidth=b, queued=0) for n, b in enumerate(links)))
    in_memory, on_disk = node("a", resident=(m.digest,), paths=paths), node("b", models=(m.digest,), paths=paths)
    there = Servers().of(cluster(in_memory, on_disk, models=(m,)))
    assert estimate(there["a"], KEY, m, Learned(), device=True).read == pytest.approx(0.5)
    assert estimate(there["a"], KEY, m, Learned()).read == 0.0
    assert estimate(there["b"], KEY, m, Learned(), device=True).read == pytest.approx(1.0)
    slow = msgspec.structs.replace(on_disk, paths=(disk, PathLoad(path=link_of("cuda:0"), bandwidth=1e8, queued=0)))
    assert estimate(Servers().of(cluster(slow, models=(m,)))["b"], KEY, m, Learned(), device=True).read == 10.0


def test_what_is_known_of_a_remote_model_is_no_copy_of_it() -> None:
    m = model("m", GB)
    view = cluster(node("a", models=(m.digest,), remote=(m.digest,)), models=(m,))
    guess = estimate(Servers().of(view)["a"], KEY, m, Learned())
    assert guess.tier == "remote"
    assert guess.read == pytest.approx(10.0)


def test_a_path_that_was_never_used_is_taken_for_slow() -> None:
    m = model("m", GB)
    guess = estimate(Servers().of(cluster(node("a", paths=()), models=(m,)))["a"], KEY, m, Learned())
    assert guess.read == pytest.approx(10.0)


def test_what_a_part_took_longer_does_not_count_as_rest_as_well() -> None:
    guess = Estimate(tier="dram", warm=True, sandbox=0.02, imports=0.1, queue=0.0, read=0.0, setup=0.0, rest=0.01)
    parts = guess.measured(spans(0.5, 0.1, 0.2))
    assert parts.seconds - parts.rest == pytest.approx(0.8)
    assert guess.measured(()) == guess


def test_a_release_is_expected_to_take_what_those_before_it_took() -> None:
    assert Learned().release_s(KEY) == RELEASE_S
    learned = Learned().released(KEY, 2.0)
    assert (learned.release_s(KEY), learned.release_s(("new", 1))) == (2.0, 2.0)
    learned = learned.released(("other", 1), 0.01).released(("other", 1), 0.01)
    assert learned.release_s(KEY) == 2.0
    assert learned.release_s(("new", 1)) == 0.01
    assert learned.least_release == 0.01, "searches pass over nothing that is quicker"


def test_a_node_tells_once_what_a_release_took() -> None:
    """Each of its reports says so for a minute; another life of it, or of the controller, learns nothing from them."""
    gone = InstanceStatus(instance="i", function="chat", version=1, state=InstanceState.STOPPED)
    freed = msgspec.structs.replace(gone, release_s=1.5)
    first = node("a", instances=(gone,))
    second = msgspec.structs.replace(first, sequence=2, instances=(freed,))
    view = observe(function(cluster(first), "chat")[0], second, NOW, 0.0)
    assert view.learned.release[KEY].seconds == (1.5,)
    again = observe(view, msgspec.structs.replace(second, sequence=3, pool_idle=0), NOW, 0.0)
    assert again.learned is view.learned
    assert KEY not in cluster(second).learned.release
    reborn = observe(function(cluster(first), "chat")[0], msgspec.structs.replace(second, boot="another"), NOW, 0.0)
    assert KEY not in reborn.learned.release
