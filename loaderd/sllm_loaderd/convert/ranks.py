"""Which rank has which tensor: a parallelism plan, from a file or made by rule. Pure but for reading the file."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from sllm_loaderd.layout import PlannedTensor
from sllm_runtime.protocol.checkpoint import MAX_RANKS, is_plain_name
from sllm_runtime.protocol.errors import InvalidCheckpoint

_AUTO: Final = re.compile(r"(auto|auto-layers|auto-stages):([0-9]{1,4})")
_LAYOUTS: Final = {"auto": "tp", "auto-layers": "pp", "auto-stages": "stages"}


class PlanRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Tensors whose name ``match``es (``*`` and ``?`` match any characters) are in ``rank``, are ``split`` along that
    dimension over all ranks, or every rank has a ``copy``. Exactly one of the three is given."""

    match: str
    rank: int | None = None
    split: int | None = None
    copy: bool = False


class RankPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The plan file. Of the rules that match a name the first one holds."""

    ranks: int
    rules: tuple[PlanRule, ...]
    layout: str = "hf-plan"


@dataclass(frozen=True, slots=True)
class AutoPlan:
    """A plan to be made by rule: ``auto`` (tensor parallel), ``auto-layers`` (a run of layers per rank) or
    ``auto-stages`` (likewise, but what stands behind the layers is in the first)."""

    kind: str
    ranks: int

    @property
    def layout(self) -> str:
        """What the index calls it."""
        return f"hf-{_LAYOUTS[self.kind]}{self.ranks}"


@dataclass(frozen=True, slots=True)
class Share:
    """The ranks that have a tensor: one; or several with its parts along ``dim``, or with a copy each (no ``dim``)."""

    ranks: tuple[int, ...]
    dim: int | None = None


def read_plan(text: str) -> RankPlan | AutoPlan:
    """The plan that ``--plan`` names: ``auto:N``, ``auto-layers:N``, ``auto-stages:N`` or a JSON file. Raises
    ``InvalidCheckpoint``."""
    if match := _AUTO.fullmatch(text):
        auto = AutoPlan(match[1], int(match[2]))
        if not 1 <= auto.ranks <= MAX_RANKS:
            raise InvalidCheckpoint(f"{text}: ranks are 1 to {MAX_RANKS}", field="plan")
        return auto
    try:
        plan = msgspec.json.decode(Path(text).read_bytes(), type=RankPlan)
    except OSError as error:
        kinds = "auto:N, auto-layers:N, auto-stages:N or a plan file"
        raise InvalidCheckpoint(f"plan {text!r} is none of {kinds}: {error.strerror}", field="plan") from error
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise InvalidCheckpoint(f"{text} is not a plan: {error}", field="plan") from error
    _check(plan, text)
    return plan


def _check(plan: RankPlan, where: str) -> None:
    if not 1 <= plan.ranks <= MAX_RANKS:
        raise InvalidCheckpoint(f"{where}: {plan.ranks} ranks are not 1 to {MAX_RANKS}", field="ranks")
    if not is_plain_name(plan.layout) or plan.layout == "hf":
        raise InvalidCheckpoint(f"{where}: layout {plan.layout!r} is no plain name of its own", field="layout")
    for number, rule in enumerate(plan.rules):
        if (rule.rank is not None) + (rule.split is not None) + rule.copy != 1:
            text = f"{where}: rule {number} ({rule.match!r}) has to give one of rank, split and copy"
            raise InvalidCheckpoint(text, field="rules")
        if rule.rank is not None and not 0 <= rule.rank < plan.ranks:
            raise InvalidCheckpoint(f"{where}: rule {number} names rank {rule.rank} of {plan.ranks}", field="rules")


def assign(plan: RankPlan, tensors: Iterable[PlannedTensor], ties: Mapping[str, str]) -> dict[str, Share]:
    """The share of every tensor, and of every tie: a tie is where its tensor is, unless a rule gives it a ``rank``.

    Raises ``InvalidCheckpoint`` for a tensor that no rule matches, or that has not the dimension to split along.
    """
    rules = [(re.compile(fnmatch.translate(rule.match)), rule) for rule in plan.rules]
    everywhere = tuple(range(plan.ranks))
    shares: dict[str, Share] = {}
    for tensor in tensors:
        rule = _first(rules, tensor.name)
        if rule is None:
            text = f'no rule of the plan matches tensor {tensor.name!r}; end it with {{"match": "*", …}}'
            raise InvalidCheckpoint(text, field=tensor.name)
        if rule.split is not None and not 0 <= rule.split < len(tensor.shape):
            text = f"rule {rule.match!r} splits dimension {rule.split} of tensor {tensor.name!r} of {tensor.shape}"
            raise InvalidCheckpoint(text, field=tensor.name)
        ranks = everywhere if rule.rank is None else (rule.rank,)
        shares[tensor.name] = Share(ranks, rule.split if len(ranks) > 1 else None)
    for name, of in ties.items():
        rule = _first(rules, name)
        own = rule is not None and rule.rank is not None
        shares[name] = Share((rule.rank,)) if own and rule and rule.rank is not None else Share(shares[of].ranks)
    return shares


def _first(rules: Iterable[tuple[re.Pattern[str], PlanRule]], name: str) -> PlanRule | None:
    return next((rule for pattern, rule in rules if pattern.match(name)), None)
