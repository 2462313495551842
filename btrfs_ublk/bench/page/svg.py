"""Drawings as SVG: inside a page, whose style sheet colours them for light and dark,
and as files of their own, which carry theirs; and as PNG.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from dataclasses import dataclass
from xml.etree import ElementTree

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from btrfs_ublk.bench.page.palette import BACKGROUND, ROLE_OF_LIGHT, ROLES

_SVG = "http://www.w3.org/2000/svg"
_XLINK = "{http://www.w3.org/1999/xlink}href"
_PNG_DPI = 200
#: What a figure says of itself; no date, so that equal figures are equal files.
_NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))
#: matplotlib's names of our only font; browsers are to take what they have.
_FONT_FAMILY = "font-family"
_LINK = re.compile(r"url\(#([^)]+)\)")
_TEXT_STACK = '"DejaVu Sans", Verdana, system-ui, sans-serif'


@dataclass(frozen=True)
class Picture:
    """A drawing in all its forms. ``name`` is the stem of its files; ``png`` is None
    where nobody asked for it.
    """

    name: str
    inline: str
    standalone: str
    png: bytes | None


def picture(
    figure: Figure, *, name: str, title: str, description: str, png: bool
) -> Picture:
    """Of a figure that was drawn within settings(), which is still to be the case.

    ``name`` has to be different for all pictures of a page, and a word.
    """
    root = _parsed(figure)
    _tidy(root, name)
    _describe(root, name, title, description)
    ElementTree.register_namespace("", _SVG)
    inline = ElementTree.tostring(root, encoding="unicode")
    _make_standalone(root)
    standalone = ElementTree.tostring(root, encoding="unicode", xml_declaration=True)
    return Picture(name, inline, standalone + "\n", _png(figure) if png else None)


def _parsed(figure: Figure) -> ElementTree.Element:
    content = io.BytesIO()
    FigureCanvasSVG(figure)
    figure.savefig(content, format="svg", metadata=_NO_METADATA)
    return ElementTree.fromstring(content.getvalue())


def _png(figure: Figure) -> bytes:
    content = io.BytesIO()
    FigureCanvasAgg(figure)
    figure.set_facecolor(BACKGROUND.light)
    figure.savefig(content, format="png", dpi=_PNG_DPI, metadata={"Software": None})
    return content.getvalue()


def _parents(
    root: ElementTree.Element,
) -> Iterator[tuple[ElementTree.Element, ElementTree.Element]]:
    for parent in list(root.iter()):
        for child in list(parent):
            yield parent, child


def _tidy(root: ElementTree.Element, name: str) -> None:
    """Classes instead of colours, identifiers that are this drawing's own, no metadata,
    no background.
    """
    for parent, child in _parents(root):
        tag = child.tag.rpartition("}")[2]
        background = child.get("id") == "patch_1" and parent.get("id") == "figure_1"
        if tag in ("metadata", "style") or background:
            parent.remove(child)
    used = set(_references(root))
    for element in root.iter():
        identifier = element.attrib.pop("id", None)
        if identifier in used:
            element.set("id", f"{name}-{identifier}")
        link = element.attrib.pop(_XLINK, None)
        if link is not None:
            element.set("href", f"#{name}-{link[1:]}")
        for key, value in list(element.attrib.items()):
            if key != "style":
                element.set(key, _LINK.sub(rf"url(#{name}-\1)", value))
        _restyle(element)
    for attribute in ("width", "height", "version"):
        root.attrib.pop(attribute, None)
    for element in root.iter():
        for text in ("text", "tail"):
            if not (getattr(element, text) or "").strip():
                setattr(element, text, None)


def _references(root: ElementTree.Element) -> Iterator[str]:
    for element in root.iter():
        for key, value in element.attrib.items():
            if key == _XLINK:
                yield value[1:]
            else:
                yield from _LINK.findall(value)


def _restyle(element: ElementTree.Element) -> None:
    found: dict[str, str] = {}
    for declaration in element.attrib.pop("style", "").split(";"):
        key, _, value = (part.strip() for part in declaration.partition(":"))
        if key == "font":
            found |= dict(_font(value))
        elif key and key != _FONT_FAMILY:
            found[key] = value
    if found.get("stroke-opacity") == "0":
        del found["stroke-opacity"]
        found["stroke"] = "none"
    classes = [
        f"{key[0]}-{ROLE_OF_LIGHT[found.pop(key)]}"
        for key in ("fill", "stroke")
        if found.get(key) in ROLE_OF_LIGHT
    ]
    kept = [f"{key}:{value}" for key, value in found.items()]
    if kept:
        element.set("style", ";".join(kept))
    if classes:
        element.set("class", " ".join(classes))


def _font(value: str) -> Iterator[tuple[str, str]]:
    """Of the shorthand "bold 12px 'DejaVu Sans', ..."."""
    for word in value.partition("'")[0].split():
        if word[:1].isdigit() and word.endswith("px"):
            yield "font-size", word
        elif word in ("bold", "700"):
            yield "font-weight", "bold"


def _describe(
    root: ElementTree.Element, name: str, title: str, description: str
) -> None:
    root.set("class", "plot")
    root.set("role", "img")
    root.set("aria-labelledby", f"{name}-title {name}-desc")
    for position, (kind, text) in enumerate((("title", title), ("desc", description))):
        element = ElementTree.Element(f"{{{_SVG}}}{kind}", {"id": f"{name}-{kind}"})
        element.text = text
        root.insert(position, element)


def role_rules() -> Iterator[str]:
    """A style sheet's rules for the classes, with a variable for each role."""
    for role in ROLES:
        yield f".f-{role}{{fill:var(--{role})}}.s-{role}{{stroke:var(--{role})}}"


def _make_standalone(root: ElementTree.Element) -> None:
    """NB: no variables, which many programs that show SVG do not know; these also pass
    over the question for the dark.
    """
    _, _, width, height = root.attrib["viewBox"].split()
    root.set("width", width)
    root.set("height", height)
    light, dark = (
        "".join(
            f".f-{role}{{fill:{colors[mode]}}}.s-{role}{{stroke:{colors[mode]}}}"
            for role, colors in ROLES.items()
        )
        for mode in (0, 1)
    )
    style = ElementTree.Element(f"{{{_SVG}}}style")
    style.text = (
        f"text{{font-family:{_TEXT_STACK}}}{light}"
        f"@media (prefers-color-scheme:dark){{{dark}}}"
    )
    ground = ElementTree.Element(
        f"{{{_SVG}}}rect", {"width": width, "height": height, "class": "f-bg"}
    )
    # After title and description, which come first.
    root.insert(2, style)
    root.insert(3, ground)
