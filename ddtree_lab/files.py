"""A path in, the bytes of a regular file out; and a place to write: a file appears whole at its path, or not at all."""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def read_bounded(path: Path, limit: int) -> bytes:
    """The content of a regular file of at most ``limit`` bytes.

    Raises OSError naming ``path``: it cannot be opened, is no regular file (a pipe or a device could wait or go on for
    ever), or is larger.
    """
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as stream:
        status = os.fstat(stream.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        content = stream.read(limit + 1) if status.st_size <= limit else b""
    if max(status.st_size, len(content)) > limit:
        raise OSError(errno.EFBIG, f"larger than {limit} bytes", str(path))
    return content


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
