"""What MkDocs makes of the pages beyond Markdown: formulas, and the table of the scenarios that come with capsim.

Formulas stand in fences called ``math`` and between ``$`` and ``$`` with backticks inside, as code hosts show them too.
They become MathML, which browsers draw themselves.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml
from latex2mathml.converter import convert

SCENARIOS = Path(__file__).parents[2] / "scenarios"
BLOCK = re.compile(r"^```math\n(.*?)\n```$", re.DOTALL | re.MULTILINE)
INLINE = re.compile(r"\$`([^`\n]+)`\$")
TABLE = "<!-- scenarios -->"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by MkDocs with the text of every page."""
    markdown = BLOCK.sub(lambda found: f'<div class="formula">{convert(found[1], display="block")}</div>', markdown)
    markdown = INLINE.sub(lambda found: convert(found[1]), markdown)
    return markdown.replace(TABLE, scenario_table())


def scenario_table() -> str:
    """Every shipped scenario: its name, and the question it asks or else its description."""
    rows = ["| name | question |", "| --- | --- |"]
    for file in sorted(SCENARIOS.glob("*.yaml")):
        text = file.read_text(encoding="utf-8")
        first = text.split("\n", 1)[0]
        question = first.removeprefix("#").strip() if first.startswith("#") else yaml.safe_load(text)["description"]
        rows.append(f"| `{file.stem}` | {question} |")
    return "\n".join(rows)
