"""Which of two nodes of one name goes, and what does not count as one."""

import re
import subprocess
import sys

from sllm_invoker.namesake import APART_S, Namesake
from sllm_runtime.protocol.errors import SllmError
from sllm_runtime.protocol.node import NodeStatus


def report(boot: str, sequence: int, since: float = 0.0) -> NodeStatus:
    return NodeStatus(
        node="n1", boot=boot, since=since, sequence=sequence, term=1, cpu=1.0, memory=1, free_cpu=1.0, free_memory=1
    )


class Listening:
    def __init__(self, since: float = 100.0, boot: str = "me") -> None:
        self.now, self.found = 0.0, list[SllmError]()
        self.namesake = Namesake("n1", boot, since, lambda: self.now, self.found.append)

    def hear(self, *reports: NodeStatus, apart_s: float = 2 * APART_S) -> bool:
        for each in reports:
            self.namesake.heard(each, "")
            self.now += apart_s
        return bool(self.found)


def test_one_that_goes_on_reporting_lives() -> None:
    assert not Listening().hear(report("me", 1), report("me", 2))
    assert not Listening().hear(report("other", 7))
    assert Listening().hear(report("other", 7), report("other", 8))


def test_the_last_words_of_a_life_that_is_over_come_together_or_twice() -> None:
    assert not Listening().hear(report("other", 7), report("other", 8), apart_s=0.1 * APART_S)
    assert not Listening().hear(report("other", 7), report("other", 7))
    assert not Listening().hear(report("one", 7), report("another", 8))


def test_of_two_that_take_part_one_goes() -> None:
    for theirs, mine in ((99.0, "b"), (100.0, "b"), (101.0, "b"), (0.0, "a")):
        here, there = Listening(100.0, mine), Listening(theirs, "aa")
        here.namesake.takes_part = there.namesake.takes_part = True
        ends = here.hear(report("aa", 1, theirs), report("aa", 2, theirs))
        assert ends != there.hear(report(mine, 1, 100.0), report(mine, 2, 100.0))
        assert ends == ((theirs, "aa") < (100.0, mine))


def test_who_has_to_go_is_told_a_command_that_there_is() -> None:
    here = Listening()
    assert here.hear(report("other", 7), report("other", 8))
    (words,) = re.findall(r"sllm (up [^`]+)`", here.found[0].message)
    asked = [sys.executable, "-m", "sllm_runtime.platform", *words.split()]
    said = subprocess.run(asked, capture_output=True, check=False, env={}, text=True, timeout=60).stderr
    assert "unexpected extra argument" not in said, said
