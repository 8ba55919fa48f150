"""What a command printed, as a picture of a terminal: python examples/screenshot.py OUTPUT.txt docs/demo.svg

OUTPUT.txt is what the demo printed (`make demo | tee OUTPUT.txt`). Long lines are folded, none left out.
"""

import argparse
import textwrap
from html import escape
from pathlib import Path

COLUMNS = 110
WIDTH, HEIGHT, MARGIN = 7.3, 17, 14  # of a character, of a line, around the text; in pixels of a 12 px font
COLOURS = {"[": "#7f8c9b", "(": "#7f8c9b", "0": "#e6e6e6"}  # by how a line starts: steps, counts, the table
PLAIN = "#cfd6dd"


def folded(text: str) -> list[str]:
    """Lines that fit; one that is too long goes on below."""
    lines = []
    for line in text.rstrip().splitlines():
        lines += textwrap.wrap(line, COLUMNS, subsequent_indent="  ", replace_whitespace=False) or [""]
    return lines


def picture(text: str, command: str) -> str:
    """An SVG of the command and what it printed."""
    lines = [f"$ {command}", *folded(text)]
    width = round(COLUMNS * WIDTH + 2 * MARGIN)
    height = len(lines) * HEIGHT + 2 * MARGIN
    drawn = []
    for row, line in enumerate(lines):
        if line:
            colour = COLOURS.get(line.lstrip()[:1], PLAIN)
            y = MARGIN + (row + 1) * HEIGHT - 5
            drawn.append(
                f'<text x="{MARGIN}" y="{y}" fill="{colour}" xml:space="preserve">{escape(line)}</text>'
            )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}" font-family="ui-monospace, Menlo, Consolas, monospace" '
            'font-size="12">',
            f'<rect width="{width}" height="{height}" rx="8" fill="#16191d"/>',
            *drawn,
            "</svg>\n",
        ]
    )


def main() -> None:
    """Read, draw, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("svg", type=Path)
    parser.add_argument("--command", default="make demo")
    o = parser.parse_args()
    o.svg.write_text(picture(o.output.read_text("utf-8"), o.command), "utf-8")
    print(f"{o.svg}: from {o.output}")


if __name__ == "__main__":
    main()
