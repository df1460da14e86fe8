"""training_log.jsonl: one line an evaluation, each with the step, the loss and the held-out acceptance."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ddtree_lab.training.files import save_text


class TrainingLog:
    """The entries of a run up to the step that it goes on from; the file is replaced whole."""

    def __init__(self, path: Path, *, last_step: int) -> None:
        """Entries beyond ``last_step`` are of work that was lost; they are dropped."""
        self._path = path
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        self.entries: list[dict[str, Any]] = [e for e in map(json.loads, lines) if e["step"] <= last_step]

    def append(self, entry: dict[str, Any]) -> None:
        """Raises OSError when writing fails; the file then stays as it was."""
        self.entries.append(entry)
        save_text(self._path, "".join(json.dumps(each) + "\n" for each in self.entries))
