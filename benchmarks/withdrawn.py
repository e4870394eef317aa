"""Aims in committed records whose method was found wrong: what they say was met is not shown as met."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Withdrawn:
    """Aims of a benchmark whose names have ``aims`` in them, of records that were begun before ``before``."""

    benchmark: str
    aims: re.Pattern[str]
    before: str
    """ISO 8601, from its beginning."""
    why: str


def _of(benchmark: str, aims: str, why: str, before: str = "2026-11-27T05:58") -> Withdrawn:
    return Withdrawn(benchmark, re.compile(aims), before, why)


ALL: Final = (
    _of("cold_start", r"^pool_empty:", "the reference imported what a start no longer does"),
    _of("cold_start", r"^gigabyte:", "the reference read into small pages"),
    _of("estimator", r"the constant's$", "the constant was one mean over models of three sizes", "2026-11-25"),
    _of("failover", r"longest interruption, ms$", "of any answer, where acquire is meant"),
    _of("gateway", r"litellm", "nobody read what LiteLLM printed, so that it stood still"),
    _of("load", r": fio / sllm$", "fio read into small pages"),
    _of("load", r"_1core: best peer", "its peers were chosen by what they took on two cores"),
    _of("load", r"^(copies|ssd_cold_2_5gb_1core): direct read|^sata: share", "the limit was beaten, so it is none"),
    _of("migration", r"pause p\d+, token intervals$", "in intervals of the moved call, which its moves make longer"),
    _of(
        "migration",
        r"longest gap from the command on p\d+,",
        "calls that began while an instance moved, and were not moved, counted as well",
        "2026-11-28T15:30",
    ),
    _of("replay", r"share served in time$", "within 300 s, of traces of 20 s"),
)


def reason(benchmark: str, aim: str, started: str) -> str:
    """Why an aim of a record does not hold any more; empty if it does."""
    found = (each for each in ALL if each.benchmark == benchmark and started < each.before and each.aims.search(aim))
    return next((each.why for each in found), "")
