"""The table of who fails in which step of a move (docs/migration.md) and the tests of it with real processes."""

from __future__ import annotations

from pathlib import Path

from sllm_gateway.move import STAGES
from sllm_runtime.protocol.states import MIGRATION, MigrationState
from tests.fixtures.held import PREPARING, STEPS
from tests.integration.test_migration_faults import ALL, ENDS, USUAL, VICTIMS, WAYS, of

TEXT = (Path(__file__).parents[3] / "docs" / "migration.md").read_text()


def rows() -> list[tuple[str, str, str]]:
    """Step, who, and test of each."""
    _, _, table = TEXT.partition("\n| step | who |")
    lines = table.partition("\n\n")[0].split("\n")[2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [(step, who, test.strip("`")) for step, who, _, _, _, test in cells]


def test_each_row_has_a_test_and_each_test_a_row() -> None:
    processes = [(step, victim, f"{step}-{victim}") for step, victim in ALL]
    ends = [(step, how, f"test_{how}[{step}]") for step in STEPS for how in ENDS]
    assert rows() == processes + ends


def test_what_happens_is_asserted_of_each_row() -> None:
    """But where the call's gateway dies: what another one does with it is not counted there."""
    assert [case for case in ALL if of(WAYS, *case) is None] == [(step, "gateway") for step in STEPS]


def test_all_steps_are_there() -> None:
    """Of the controller the one in which something is still to come; of its next one, the stages of each call."""
    assert MIGRATION[MigrationState.PREPARING] == {MigrationState.MOVING, MigrationState.ABANDONED}
    assert set(STEPS) == {PREPARING} | {stage.value for stage in STAGES}


def test_every_step_and_every_process_is_met_in_each_run() -> None:
    assert {step for step, _ in USUAL} == set(STEPS)
    assert {victim for _, victim in USUAL} == set(VICTIMS)
    assert set(ALL) > USUAL
