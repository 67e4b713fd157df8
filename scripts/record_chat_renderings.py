"""Record how `transformers` renders the chats of tests/data/chat_templates, as the expectation of a test.

Run in an environment of its own, with `pip install transformers jinja2`: python scripts/record_chat_renderings.py

A case's `conversation` and `tools` are what vLLM hands to a template, written by hand where that differs from the body.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast  # type: ignore[import-not-found]

DATA = Path(__file__).parents[1] / "tests" / "data" / "chat_templates"


def main() -> None:
    cases = json.loads((DATA / "cases.json").read_text(encoding="utf-8"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), bos_token="<s>", eos_token="</s>")
    for case in cases:
        body = case["body"]
        variables = dict(body.get("chat_template_kwargs", {}))
        if "reasoning_effort" in body:
            variables["reasoning_effort"] = body["reasoning_effort"]
        case["rendered"] = tokenizer.apply_chat_template(
            case.get("conversation", body["messages"]),
            tools=case.get("tools", body.get("tools")),
            documents=body.get("documents"),
            chat_template=(DATA / f"{case['template']}.jinja").read_text(encoding="utf-8"),
            add_generation_prompt=body.get("add_generation_prompt", True),
            continue_final_message=body.get("continue_final_message", False),
            tokenize=False,
            **variables,
        )
    (DATA / "cases.json").write_text(json.dumps(cases, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    print(f"{len(cases)} cases recorded")


if __name__ == "__main__":
    main()
