"""The wafer drawn in characters: regions as boxes where they lie, the rest as dots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.text import Text

from wafer_emu.placement import Region

__all__ = ["wafer_picture"]

COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "red")
CHARACTER_ASPECT = 2  # a character is about twice as high as wide
USUAL_LINES, MOST_LINES, BOX_LINES = 14, 27, 3
UNUSED = "·"
Box = tuple[int, int, int, int]  # lines from, to; characters from, to


@dataclass
class _Canvas:
    lines: int
    width: int
    characters: list[list[str]] = field(init=False)
    styles: list[list[str]] = field(init=False)

    def __post_init__(self) -> None:
        self.characters = [[UNUSED] * self.width for _ in range(self.lines)]
        self.styles = [["dim"] * self.width for _ in range(self.lines)]

    def write(self, line: int, left: int, words: str, style: str) -> None:
        """Put words on a line."""
        for offset, character in enumerate(words):
            self.characters[line][left + offset] = character
            self.styles[line][left + offset] = style

    def text(self) -> Text:
        """The picture, without a line break at its end."""
        picture = Text(no_wrap=True)
        for line in range(self.lines):
            for character, style in zip(self.characters[line], self.styles[line], strict=True):
                picture.append(character, style)
            picture.append("\n" if line + 1 < self.lines else "")
        return picture


def wafer_picture(
    rows: int,
    columns: int,
    regions: Sequence[Region],
    captions: Sequence[Sequence[Sequence[str]]],
    width: int = 76,
) -> Text:
    """Draw regions on a fabric, to scale where that leaves every box room for a caption.

    Parameters
    ----------
    rows, columns
        Size of the fabric [cores].
    regions
        Rectangles of cores, in the order of the stages.
    captions
        Lines that stand in each region's box, the most important first, each in wordings that get
        shorter; all boxes use the longest that fits the narrowest (region, line, wording).
    width
        Characters across.
    """
    bands = rows // min(region.rows for region in regions)
    scaled = round(width * rows / columns / CHARACTER_ASPECT)
    lines = min(max(scaled, BOX_LINES * bands), max(USUAL_LINES, BOX_LINES * bands), MOST_LINES)
    canvas = _Canvas(max(lines, BOX_LINES), width)
    boxes = [
        (
            *_span(region.row, region.rows, rows, canvas.lines),
            *_span(region.column, region.columns, columns, width),
        )
        for region in regions
    ]
    for index, (box, words) in enumerate(zip(boxes, _worded(captions, boxes), strict=True)):
        _draw(canvas, box, words, COLOURS[index % len(COLOURS)])
    return canvas.text()


def _framed(box: Box) -> bool:
    top, bottom, left, right = box
    return right - left >= 4 and bottom - top >= BOX_LINES


def _worded(captions: Sequence[Sequence[Sequence[str]]], boxes: Sequence[Box]) -> list[list[str]]:
    """Captions in the wordings that fit every box; lines without such a wording are left out."""
    narrowest = min(right - left - 2 * _framed(box) for box in boxes for _, _, left, right in [box])
    lines = [list(zip(*line, strict=True)) for line in zip(*captions, strict=True)]
    chosen = []
    for wordings in lines:
        fitting = [each for each in wordings if max(map(len, each)) <= narrowest]
        chosen += fitting[:1]
    return [list(words) for words in zip(*chosen, strict=True)] or [[] for _ in boxes]


def _span(first: int, length: int, whole: int, characters: int) -> tuple[int, int]:
    """Characters [from, to) of a run of cores; neighbours share no character."""
    begin = min(first * characters // whole, characters - 1)
    return begin, max(begin + 1, (first + length) * characters // whole)


def _draw(canvas: _Canvas, box: Box, words: Sequence[str], colour: str) -> None:
    top, bottom, left, right = box
    inner = " " * (right - left - 2)
    for line in range(top, bottom):
        canvas.write(line, left, f"│{inner}│" if _framed(box) else " " * (right - left), colour)
    if _framed(box):
        canvas.write(top, left, f"┌{inner}┐".replace(" ", "─"), colour)
        canvas.write(bottom - 1, left, f"└{inner}┘".replace(" ", "─"), colour)
        top, bottom = top + 1, bottom - 1
    words = words[: bottom - top]
    first = (top + bottom - len(words)) // 2
    for offset, line_words in enumerate(words):
        style = f"bold {colour}" if offset == 0 else colour
        middle = left + (right - left - len(line_words)) // 2
        canvas.write(first + offset, middle, line_words, style)
