"""``sllm doctor``: checks this machine and says what to do."""

from __future__ import annotations

from typing import Final

import typer

from sllm.cli import output
from sllm.cli.context import Json, Target
from sllm.doctor import checks
from sllm.doctor.finding import Finding, Level

_SIGN: Final = {Level.OK: "ok", Level.WARNING: "warning", Level.FAILURE: "FAILURE"}
_COLOUR: Final = {Level.OK: "32", Level.WARNING: "33", Level.FAILURE: "31"}


def doctor(context: typer.Context, json: Json = False) -> None:
    """Check this machine and say what to do. Ends with 1 where something cannot work, with 0 for warnings."""
    found: list[Finding] = []
    target = context.find_object(Target) or Target()
    with output.progress("checking", quiet=json):
        for finding in checks.run(target.url, target.token, target.profile):
            found.append(finding)
            if not json:
                _show(finding)
    healthy = all(finding.level is not Level.FAILURE for finding in found)
    if json:
        output.value({"healthy": healthy, "checks": [finding.document() for finding in found]})
    if not healthy:
        raise typer.Exit(1)


def _show(finding: Finding) -> None:
    sign = output.coloured(f"{_SIGN[finding.level]:<8}", _COLOUR[finding.level])
    output.raw(f"{sign} {finding.check:<14} {output.printable(finding.what)}")
    if finding.remedy:
        output.text(f"{'':<23} -> {finding.remedy}")
