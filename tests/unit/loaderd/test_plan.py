"""What will be stored, by what a source has and the module says: without a file."""

from __future__ import annotations

import pytest

from sllm_loaderd.convert.module_plan import Fusion, ModulePlan
from sllm_loaderd.convert.plan import alias_records, plan_storage
from sllm_loaderd.convert.source import SourceTensor


def tensors(**dtypes: str) -> dict[str, SourceTensor]:
    """Of two items each, in this order."""
    return {
        name: SourceTensor(name, dtype, (2,), 8 if dtype == "float32" else 4, (0, 8 * number))
        for number, (name, dtype) in enumerate(dtypes.items())
    }


def fused(source: dict[str, SourceTensor]) -> dict[str, tuple[str, ...]]:
    """The parts of what is stored, where a module has ``a`` and ``b`` as one ``ab``."""
    module = ModulePlan(("ab",), True, fusions=(Fusion("ab", (4,), ("a", "b")),))
    plan = plan_storage(source, {}, module, lambda one, two: False)
    return {name: stored.parts for name, stored in plan.stored.items()}


def test_parts_of_two_dtypes_keep_their_names() -> None:
    assert fused(tensors(a="float32", b="float32")) == {"ab": ("a", "b")}
    assert fused(tensors(a="float32", b="bfloat16")) == {"a": ("a",), "b": ("b",)}


@pytest.mark.parametrize("same", [True, False])
def test_a_head_under_another_name_is_found_where_it_is_stored(same: bool) -> None:
    """It stands in the files beside the embedding, and the module calls both otherwise."""
    module = ModulePlan(
        ("m.embed", "m.head"), True, ties=(("m.embed", "m.head"),), renamed={"embed": "m.embed", "head": "m.head"}
    )
    plan = plan_storage(tensors(embed="float32", head="float32"), {}, module, lambda one, two: same)
    names = {alias.name: alias.of for alias in alias_records(plan)}
    assert (names["m.embed"], names["m.head"]) == ("embed", "embed" if same else "head")
    assert plan.order == ("embed", "head")


def test_what_a_module_ties_and_the_files_hold_in_two_dtypes_is_not_one() -> None:
    module = ModulePlan(("embed", "head"), True, ties=(("embed", "head"),))
    plan = plan_storage(tensors(embed="float32", head="bfloat16"), {}, module, lambda one, two: True)
    assert (set(plan.stored), plan.ties) == ({"embed", "head"}, {})
