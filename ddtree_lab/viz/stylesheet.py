"""The files of static/: as text for pages, and static/*.css as colours and strokes for pictures that take no CSS.

The sheets stay the one place where a colour or a dash is written. Only what they use is understood: hexadecimal colours
in custom properties, one block for the dark scheme, and rules of plain declarations.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

_DARK = re.compile(r"@media \(prefers-color-scheme: dark\) \{(.*?\})\s*\}", re.DOTALL)
_VARIABLE = re.compile(r"--([\w-]+): (#[0-9a-f]{6});")
_RULE = re.compile(r"([^{}]+)\{([^{}]*)\}")
_DECLARATION = re.compile(r"([\w-]+): ([^;]+);")


@dataclass(frozen=True)
class Stroke:
    """How a shape is drawn in the light scheme."""

    colour: str | None  # #rrggbb, None for no line
    fill: str | None  # #rrggbb, None for an open shape
    width: float  # pixels
    dash: tuple[float, ...]  # pixels on and off, empty for a solid line

    @property
    def plotly_line(self) -> dict[str, Any]:
        """The ``line`` of a plotly shape or trace."""
        dash = ",".join(f"{length:g}px" for length in self.dash) or "solid"
        return {"color": self.colour, "width": self.width, "dash": dash}


@dataclass(frozen=True)
class StyleSheet:
    """Custom properties, without their dashes, in both schemes -> #rrggbb; and declarations by selector."""

    light: Mapping[str, str]
    dark: Mapping[str, str]
    rules: Mapping[str, Mapping[str, str]]

    def declarations(self, *selectors: str) -> dict[str, str]:
        """What the selectors' rules say together, the last word winning; a selector without a rule says nothing."""
        return {name: value for selector in selectors for name, value in self.rules.get(selector, {}).items()}

    def stroke(self, *selectors: str) -> Stroke:
        """The declarations of a shape. KeyError when they do not say its width."""
        said = self.declarations(*selectors)
        return Stroke(
            colour=self.colour("stroke", *selectors),
            fill=self.colour("fill", *selectors),
            width=float(said["stroke-width"]),
            dash=tuple(map(float, said.get("stroke-dasharray", "").split())),
        )

    def colour(self, name: str, *selectors: str) -> str | None:
        """The colour that the selectors give the declaration ``name``, None when they give it none."""
        value = self.declarations(*selectors).get(name, "none")
        return None if value == "none" else self.light[value.removeprefix("var(--").removesuffix(")")]

    def family(self, selector: str) -> str:
        """The font family of a rule with a ``font`` of size and family."""
        return self.declarations(selector)["font"].partition(" ")[2]


def static_text(name: str) -> str:
    """The text of a file in ``static/``."""
    return (files("ddtree_lab.viz") / "static" / name).read_text(encoding="utf-8")


def tree_style() -> str:
    """The style sheet of the pictures of trees, every rule under ``.ddtree``."""
    return static_text("tree.css")


def themed_style() -> str:
    """The light and the dark palette of ``tree_style`` once more, each for JupyterLab's themes of its kind."""
    light, dark = (
        " ".join(re.findall(r"--dd-[\w-]+: [^;]+;", rules))
        for rules in re.findall(r"\.ddtree \{(.*?)\}", tree_style(), re.DOTALL)
    )
    return (
        f'[data-jp-theme-light="true"] .ddtree {{{light} color-scheme: light;}}\n'
        f'[data-jp-theme-light="false"] .ddtree {{{dark} color-scheme: dark;}}\n'
    )


def read_style(*names: str) -> StyleSheet:
    """The sheets ``static/<name>.css`` one after the other."""
    text = "\n".join(static_text(f"{name}.css") for name in names)
    plain = _DARK.sub("", text)
    light = dict(_VARIABLE.findall(plain))
    rules: dict[str, dict[str, str]] = {}
    for selectors, body in _RULE.findall(plain):
        for selector in selectors.split(","):
            rules.setdefault(selector.strip(), {}).update(_DECLARATION.findall(body))
    return StyleSheet(light, light | dict(_VARIABLE.findall("".join(_DARK.findall(text)))), rules)
