"""What the measuring program told so far: rows, the case it is in, and what a lost case is worth."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Told:
    """The events of one or more programs that wrote to the same file, in order."""

    path: Path
    environment: dict[str, Any] | None = None
    rows: list[dict[str, Any]] = field(default_factory=list)
    done: set[str] = field(default_factory=set)
    """Names of the cases that are over: measured, refused, failed or left out."""
    left_out: list[str] = field(default_factory=list)
    current: str | None = None
    _lost: dict[str, Any] = field(default_factory=dict)
    _read: int = 0
    last: float = field(default_factory=time.monotonic)
    """When the last event was seen."""

    def read(self) -> bool:
        """Takes in what is new; whether there was something. A line is taken once it is whole."""
        if not self.path.exists():
            return False
        with self.path.open("rb") as source:
            source.seek(self._read)
            new = source.read()
        whole = new[: new.rfind(b"\n") + 1]
        self._read += len(whole)
        for line in whole.splitlines():
            self._take(json.loads(line))
        if whole:
            self.last = time.monotonic()
        return bool(whole)

    def _take(self, event: dict[str, Any]) -> None:
        kind = event["event"]
        if kind == "environment":
            self.environment = self.environment or event["environment"]
        elif kind == "row":
            self.rows.append(event["row"])
        elif kind == "begin":
            self.current, self._lost = event["case"], event["lost"]
        else:
            self.done.add(event["case"])
            self.current = None
            if kind == "left out":
                self.left_out.append(event["case"])

    def lose(self, reason: str) -> str | None:
        """The program is gone: the case it was in has failed with `reason`; its name, or None outside of any."""
        lost, self.current = self.current, None
        if lost is not None:
            self.rows.append(
                {**self._lost, "outcome": {"status": "failed", "reasons": [reason], "timing": None}}
            )
            self.done.add(lost)
        return lost

    def rates(self) -> list[tuple[str, str, float]]:
        """Ceilings of products as (protocol, name, TF/s): a second program need not measure them again."""
        return [
            (row["outcome"]["timing"]["protocol"], row["name"], row["rate"])
            for row in self.rows
            if row["kind"] == "ceiling" and row["unit"] == "TF/s" and row["outcome"]["timing"] is not None
        ]
