"""A path in, a place to write beside it out: the file appears whole at the path, or not at all."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A fresh, empty temporary file beside ``path``, which takes the place of ``path`` at the end, on the disk.

    It has the access mode of any new file, whatever wrote it. After an error it is removed, and what stood at ``path``
    stays. Raises OSError when the folder cannot be written.
    """
    temporary = path.with_name(f".{secrets.token_hex(8)}.tmp")
    try:
        temporary.touch(exist_ok=False)
        mode = temporary.stat().st_mode
        yield temporary
        with temporary.open("rb") as written:
            os.fchmod(written.fileno(), mode)
            os.fsync(written.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
