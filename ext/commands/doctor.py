"""`python -m ext doctor`: what is installed, what is wrong, and the fix of each."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from ext.commands import doctor_hosts, doctor_machine
from ext.commands.findings import Finding

EXIT_INFEASIBLE = 2
_STYLES = {"ok": "green", "info": "cyan", "warning": "yellow", "error": "bold red"}


def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False) -> None:
    """Say what is installed and what is wrong with it, each with its fix.

    Exit code 0, or 2 with a finding of level error: no run can work on this machine as it is.
    """
    findings = examine(os.environ)
    if as_json:
        typer.echo(json.dumps({"findings": [asdict(finding) for finding in findings]}, indent=1))
    else:
        show(findings, Console(soft_wrap=True))
    if any(finding.level == "error" for finding in findings):
        raise typer.Exit(EXIT_INFEASIBLE)


def examine(environ: Mapping[str, str]) -> list[Finding]:
    """Everything that doctor looks at, for the environment variables ``environ``."""
    probes: list[tuple[str, Callable[[], Iterable[Finding]]]] = [
        ("this package", doctor_hosts.package),
        ("Python", doctor_hosts.python),
        ("torch", doctor_hosts.torch),
        ("deepspeed", doctor_hosts.deepspeed),
        ("megatron-core", lambda: doctor_hosts.megatron(environ)),
        ("apex", doctor_hosts.apex),
        ("the accelerator", lambda: doctor_machine.accelerator(environ)),
        ("the launcher", lambda: doctor_machine.launcher(environ)),
        ("extension locks", lambda: doctor_machine.extension_locks(environ)),
        ("compilers", lambda: doctor_machine.compilers(environ)),
        ("the rendezvous port", lambda: doctor_machine.port(environ)),
        ("disks", lambda: doctor_machine.disks(environ)),
        ("memory", doctor_machine.memory),
    ]
    findings: list[Finding] = []
    for name, probe in probes:
        try:
            findings.extend(probe())
        except OSError as error:
            findings.append(Finding("warning", f"{name} could not be looked at: {error}", "check access rights"))
    return findings


def show(findings: Iterable[Finding], console: Console) -> None:
    """Print findings for people."""
    counts: Counter[str] = Counter()
    for finding in findings:
        counts[finding.level] += 1
        console.print(Text(f"{finding.level:8}", _STYLES[finding.level]) + Text(finding.what))
        if finding.fix:
            console.print(Text(f"{'':8}fix: {finding.fix}", "dim"))
    console.print(", ".join(f"{counts[level]} {level}" for level in _STYLES if counts[level]))
