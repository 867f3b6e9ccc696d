"""All findings of one examination, as lines and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_kd.doctor.check import Check


@dataclass(frozen=True)
class DoctorReport:
    """What was found.

    Attributes:
        checks: of the nodes in their order, then of the job.
        ranks: how many answered.
        nodes: their nodes' names.
    """

    checks: Sequence[Check]
    ranks: int
    nodes: Sequence[str]

    @property
    def ok(self) -> bool:
        """Whether nothing failed."""
        return all(check.status != "fail" for check in self.checks)

    def to_json(self) -> dict[str, Any]:
        """``checks`` with name, status, found, todo and node; ``ok``; ``ranks``; ``nodes``."""
        return {
            "checks": [check.to_dict() for check in self.checks],
            "ok": self.ok,
            "ranks": self.ranks,
            "nodes": list(self.nodes),
        }

    def text(self) -> str:
        """A line for each finding; one that is well on several nodes is a line for all of them."""
        lines = [self._line(check) for check in self._merged()]
        count = {status: sum(check.status == status for check in self.checks) for status in ("fail", "warn")}
        where = f"{len(self.nodes)} node{'s' if len(self.nodes) != 1 else ''}"
        ranks = f"{self.ranks} rank{'s' if self.ranks != 1 else ''}"
        verdict = "all is well" if not any(count.values()) else f"{count['fail']} failed, {count['warn']} to look at"
        return "\n".join([*lines, f"{ranks} on {where}: {verdict}"])

    def _merged(self) -> list[Check]:
        if len(self.nodes) < 2:
            return list(self.checks)
        merged: list[Check] = []
        seen: set[str] = set()
        for check in self.checks:
            alike = [other for other in self.checks if other.name == check.name and other.node]
            well = [other for other in alike if other.status == "ok"]
            if not check.node or check.status != "ok" or len({other.node for other in well}) < len(self.nodes):
                merged.append(check)
            elif check.name not in seen:
                seen.add(check.name)
                of_first = [other for other in well if other.node == check.node]
                merged += [other.on(f"{len(self.nodes)} nodes") for other in of_first]
        return merged

    def _line(self, check: Check) -> str:
        where = f"{check.node}: " if check.node and len(self.nodes) > 1 else ""
        todo = f"; {check.todo}" if check.todo else ""
        return f"{check.status:4}  {check.name:18}  {where}{check.found}{todo}"
