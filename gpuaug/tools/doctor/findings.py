"""A finding of `gpuaug doctor`: what was seen, how bad it is, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gpuaug.tools.report import folded

OK, NOTE, SLOW, BROKEN, UNTESTED = "ok", "note", "warning", "BROKEN", "untested"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that was checked.

    Attributes:
        name: what was checked.
        status: ok, note (worth knowing), warning (works, but worse than it could), BROKEN or untested.
        text: what was seen.
        advice: what it means and what to do; "" where nothing has to be done.
        value: what was seen, as JSON.
    """

    name: str
    status: str
    text: str
    advice: str = ""
    value: Any = None


def judged(name: str, text: str, *, bad: str | None, advice: str, value: Any = None) -> Finding:
    """A finding of status ``bad`` with its advice; if ``bad`` is None, one that is ok and needs no advice."""
    return Finding(name=name, status=bad or OK, text=text, advice=advice if bad else "", value=value)


def usable(findings: list[Finding]) -> bool:
    """Whether nothing is broken."""
    return all(f.status != BROKEN for f in findings)


def conclusion(findings: list[Finding]) -> str:
    """The last line of the report."""
    broken = [f.name for f in findings if f.status == BROKEN]
    slow = [f.name for f in findings if f.status == SLOW]
    if broken:
        return f"gpuaug cannot be relied on here. Broken: {', '.join(broken)}. See the advice above."
    more = f" It could do better: {', '.join(slow)}." if slow else ""
    return f"gpuaug can be used here.{more}"


def shown(finding: Finding) -> str:
    """A finding as printed."""
    lines = [folded(finding.text, first=f"  {finding.name:<19} {finding.status:<9} ", indent=32)]
    if finding.advice:
        lines.append(folded(finding.advice, first=" " * 32, indent=32, width=118))
    return "\n".join(lines)
