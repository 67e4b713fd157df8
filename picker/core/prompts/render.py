"""Render messages to one string, in ChatML and in request order.

Only text counts: other parts, and messages without any text, leave no trace. The text is for matching prefixes,
not for the engine, so nothing is escaped. Source: seed "Building the prompt string" and the rules observed in
Kthena's router (skipped messages, parts joined by one newline).
"""

from __future__ import annotations

from typing import Any

_TEXT_PARTS = frozenset({"text", "input_text", "output_text"})


def chat_text(messages: list[Any], system: Any = None) -> str:
    """Render chat messages; a top-level `system` (text or text parts) comes first."""
    pieces: list[str] = []
    if (text := _content(system)) is not None:
        pieces.append(f"<|im_start|>system\n{text}<|im_end|>\n")
    for message in messages:
        if isinstance(message, dict):
            role, content = message.get("role"), message.get("content")
            if not isinstance(content, str):
                content = _content(content)
            if content is not None and isinstance(role, str):
                pieces.append(f"<|im_start|>{role}\n{content}<|im_end|>\n")
    return "".join(pieces)


def responses_text(items: Any, instructions: Any = None) -> str:
    """Render the Responses API: `instructions` as a developer message, then the input text or items."""
    messages: list[Any] = []
    if isinstance(instructions, str) and instructions:
        messages.append({"role": "developer", "content": instructions})
    if isinstance(items, str):
        messages.append({"role": "user", "content": items})
    elif isinstance(items, list):
        messages += [item for item in items if isinstance(item, dict) and _is_message(item)]
    return chat_text(messages)


def _is_message(item: dict[str, Any]) -> bool:
    kind = item.get("type")
    return bool(item.get("role")) and not (isinstance(kind, str) and kind and kind != "message")


def _content(content: Any) -> str | None:
    """The text of a message's content, or None when it has no usable text at all."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return None
    texts = [
        part["text"]
        for part in content
        if isinstance(part, dict)
        and isinstance(part.get("text"), str)
        and (not isinstance(part.get("type"), str) or part["type"] in _TEXT_PARTS)
    ]
    return "\n".join(texts) if texts else None
