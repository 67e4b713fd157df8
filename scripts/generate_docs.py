"""Write the reference tables, which come from the code, into README.md and docs/.

Usage: python scripts/generate_docs.py
"""

from __future__ import annotations

import re
from pathlib import Path

from picker.app.config_reference import reference_markdown
from picker.io.kv_index.sidecar_metrics import sidecar_metrics_markdown
from picker.io.metrics import metrics_markdown

ROOT = Path(__file__).resolve().parent.parent
PAGES = (ROOT / "README.md", ROOT / "docs" / "kvcache-aware.md")
TABLES = {
    "configuration": reference_markdown,
    "metrics": metrics_markdown,
    "sidecar-metrics": sidecar_metrics_markdown,
}


def render(text: str) -> str:
    """`text` with what stands between `<!-- generated: NAME -->` and `<!-- end -->` made anew."""
    for name, table in TABLES.items():
        marked = re.compile(rf"(<!-- generated: {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        text = marked.sub(lambda found, table=table: f"{found[1]}\n{table().strip()}\n\n{found[2]}", text)  # type: ignore[misc]
    return text


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(render(page.read_text()))
