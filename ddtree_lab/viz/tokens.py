"""Token text made readable and safe to show: decoded text -> visible text, labels, and markup-safe text.

``visible`` and ``label`` deal with what a reader sees; ``escape``, ``escape_plotly`` and ``script_json`` are the output
boundary, and everything that goes into HTML, SVG, a plotly figure or a script element passes through one of them.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddtree_lab.target.protocol import Target

EMPTY = "∅"
ELLIPSIS = "…"
MAX_MARKS = 4  # combining marks drawn on one base character; further ones are spelled out

_PICTURES = {" ": "␣", "\n": "⏎", "\t": "⇥", "\r": "␍"}
_LAID_OUT = {" ": " ", "\n": "⏎\n", "\t": "⇥\t", "\r": "␍"}
_BLANK_LETTERS = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0")  # drawn as nothing, not category C or Z
_JOINER = "\u200d"
_SCRIPT_ESCAPES = str.maketrans({c: f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"})
_PLOTLY_ESCAPES = str.maketrans({c: f"&#{ord(c)};" for c in "&<>$"})
_MARKUP_ESCAPES = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;"})


def token_decoder(target: Target | None) -> Callable[[int], str]:
    """Token id -> its text by the target's tokenizer; the id itself without a target or tokenizer, and beyond the
    target's vocabulary, as a trace of another target may hold it."""
    if target is None or target.tokenizer is None:
        return str
    return lambda token: target.tokenizer.decode([token]) if token < target.vocab_size else str(token)


def visible(text: str, *, laid_out: bool = False) -> str:
    """Text with nothing hidden: every character of the result is drawn as something.

    Space is ␣, newline ⏎, tab ⇥, carriage return ␍, the empty text ∅. Control, format and bidi control characters,
    other spaces, lone surrogates, private-use and unassigned code points are spelled ⟨U+XXXX⟩; a zero-width joiner
    stays between two symbols (an emoji sequence), and a leading combining mark gets a dotted circle to stand on.

    ``laid_out=True`` is for running text: spaces stay spaces, and a line break or tab follows its symbol.
    """
    if not text:
        return "" if laid_out else EMPTY
    pictures = _LAID_OUT if laid_out else _PICTURES
    shown: list[str] = []
    marks = 0
    for index, char in enumerate(text):
        category = unicodedata.category(char)
        if char in pictures:
            shown.append(pictures[char])
        elif char == _JOINER and _joins_symbols(text, index):
            shown.append(char)
        elif category[0] in "CZ" or char in _BLANK_LETTERS or (category[0] == "M" and marks >= MAX_MARKS):
            shown.append(f"⟨U+{ord(char):04X}⟩")
        elif category[0] == "M":
            on_nothing = index == 0 or text[index - 1] in pictures
            shown.append(f"◌{char}" if on_nothing else char)
        else:
            shown.append(char)
        marks = marks + 1 if category[0] == "M" else 0
    return "".join(shown)


def label(text: str, *, columns: int) -> str:
    """``visible(text)`` cut to at most ``columns`` character cells, never inside a character and its marks.

    Wide East Asian characters and emoji take two cells, combining marks none. A cut label ends in an ellipsis.
    """
    if columns < 2:
        raise ValueError(f"columns must be at least 2, got {columns}")
    clusters = _clusters(visible(text))
    if sum(map(_cells, clusters)) <= columns:
        return "".join(clusters)
    kept: list[str] = []
    left = columns - 1
    for cluster in clusters:
        left -= _cells(cluster)
        if left < 0:
            break
        kept.append(cluster)
    return "".join(kept) + ELLIPSIS


def escape(text: str) -> str:
    """Text for HTML or SVG content and for quoted attributes. Characters that XML forbids become ⟨U+XXXX⟩."""
    return "".join(c if _xml_allows(c) else f"⟨U+{ord(c):04X}⟩" for c in text).translate(_MARKUP_ESCAPES)


def escape_plotly(text: str) -> str:
    """Text for a plotly figure, which reads a subset of HTML and formulas between dollars."""
    return text.translate(_PLOTLY_ESCAPES)


def script_json(value: object) -> str:
    """Compact JSON that cannot leave a script element: no ``<``, ``>`` or ``&``, no NaN, no lone surrogate."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False, sort_keys=True)
    text = text.translate(_SCRIPT_ESCAPES)
    return "".join(f"\\u{ord(c):04x}" if "\ud800" <= c <= "\udfff" else c for c in text)


def _joins_symbols(text: str, index: int) -> bool:
    before = text[:index].rstrip("\ufe0f\U0001f3fb\U0001f3fc\U0001f3fd\U0001f3fe\U0001f3ff")[-1:]
    after = text[index + 1 : index + 2]
    return all(char and unicodedata.category(char) == "So" for char in (before, after))


def _clusters(text: str) -> list[str]:
    """Characters with the marks, joined symbols and skin tones that belong to them; a spelled code point is one."""
    clusters: list[str] = []
    joined = spelled = False
    for char in text:
        belongs = unicodedata.category(char)[0] == "M" or char == _JOINER or "\U0001f3fb" <= char <= "\U0001f3ff"
        if clusters and (belongs or joined or spelled):
            clusters[-1] += char
        else:
            clusters.append(char)
        joined = char == _JOINER
        spelled = char != "⟩" and (spelled or char == "⟨")
    return clusters


def _cells(cluster: str) -> int:
    if cluster.startswith("⟨"):
        return len(cluster)
    return 2 if unicodedata.east_asian_width(cluster[0]) in "WF" or "\ufe0f" in cluster else 1


def _xml_allows(char: str) -> bool:
    code = ord(char)
    return char in "\t\n\r" or (code >= 0x20 and not 0xD800 <= code <= 0xDFFF and code not in (0xFFFE, 0xFFFF))
