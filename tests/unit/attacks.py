"""HTML that runs or fetches something where it is shown as it is."""

from pathlib import Path

ATTACKS = Path(__file__).with_suffix(".txt").read_text(encoding="utf-8").strip().split("\n%%\n")
#: A picture in the page itself, whose own script no browser runs.
WITNESS = (
    '<img src=\'data:image/svg+xml,<svg xmlns="http://www.w3.org/2000/svg" onload="hit=1"/>\'>'
)
