"""Where the files that ship with the library lie: names of parts -> path, in a checkout or in an installed package."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def data_path(*parts: str) -> Path:
    """The existing file or folder ``parts`` of the shipped data, such as ``data_path("prompts.jsonl")``.

    A wheel carries the data as ``ddtree_lab/_data``; a checkout (and its editable install) has it in ``data/`` beside
    the package. Raises FileNotFoundError naming what is missing and where it was looked for.
    """
    packaged = _PACKAGE / "_data"
    path = (packaged if packaged.is_dir() else _PACKAGE.parent / "data").joinpath(*parts)
    if not path.exists():
        raise FileNotFoundError(f"shipped data {'/'.join(parts)!r} is missing: there is no {path}")
    return path
