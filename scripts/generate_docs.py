"""Write the reference tables, which come from the code, into README.md.

Usage: python scripts/generate_docs.py
"""

from __future__ import annotations

import re
from pathlib import Path

from picker.app.config_reference import reference_markdown
from picker.io.metrics import metrics_markdown

README = Path(__file__).resolve().parent.parent / "README.md"


def render(text: str) -> str:
    """`text` with what stands between `<!-- generated: NAME -->` and `<!-- end -->` made anew."""
    for name, content in (("configuration", reference_markdown()), ("metrics", metrics_markdown())):
        marked = re.compile(rf"(<!-- generated: {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        text = marked.sub(lambda found, content=content: f"{found[1]}\n{content.strip()}\n\n{found[2]}", text)  # type: ignore[misc]
    return text


if __name__ == "__main__":
    README.write_text(render(README.read_text()))
