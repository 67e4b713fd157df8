"""What clients get: answers of the four APIs, whole and as server-sent events. Values in, bytes out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from picker.sim.openai import ApiError, Call

encode_json = msgspec.json.Encoder().encode
DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a prompt, of its answer so far, and how many of the prompt's came from the cache."""

    prompt: int
    completion: int
    cached: int

    def __add__(self, other: Usage) -> Usage:
        return Usage(self.prompt + other.prompt, self.completion + other.completion, self.cached + other.cached)


class Answer(Protocol):
    """One API's way to answer one call. Streaming is `opening`, any number of `delta`, `closing`."""

    def __init__(self, call: Call, identity: str, model: str, created: int) -> None: ...

    def whole(self, texts: Sequence[str], usage: Usage) -> bytes:
        """Return the body of an answer that is not streamed; one text per prompt."""

    def opening(self, usages: Sequence[Usage]) -> bytes:
        """Return what comes before the first text."""

    def delta(self, index: int, text: str, usage: Usage, *, last: bool) -> bytes:
        """Return the next piece of the answer to prompt `index`, whose usage so far is given."""

    def closing(self, texts: Sequence[str], usage: Usage) -> bytes:
        """Return what comes after the last piece."""


def error_body(error: ApiError) -> bytes:
    """Return the body of an error answer in vLLM's shape."""
    return encode_json(
        {"error": {"message": error.message, "type": error.kind, "param": error.param, "code": error.status}}
    )


class CompletionAnswer:
    """/v1/completions."""

    kind = chunk_kind = "text_completion"

    def __init__(self, call: Call, identity: str, model: str, created: int) -> None:
        self._call = call
        self._head = {"id": identity, "created": created, "model": model}

    def whole(self, texts: Sequence[str], usage: Usage) -> bytes:
        choices = [
            {"index": index, **self._full(text), "logprobs": None, "finish_reason": "length", "stop_reason": None}
            for index, text in enumerate(texts)
        ]
        return encode_json({**self._head, "object": self.kind, "choices": choices, "usage": _openai_usage(usage)})

    def opening(self, usages: Sequence[Usage]) -> bytes:  # noqa: ARG002 - the first piece opens
        return b""

    def delta(self, index: int, text: str, usage: Usage, *, last: bool) -> bytes:
        return self._chunk(index, self._piece(text), usage, "length" if last else None)

    def closing(self, texts: Sequence[str], usage: Usage) -> bytes:  # noqa: ARG002
        if not self._call.include_usage:
            return DONE
        return _event({**self._head, "object": self.chunk_kind, "choices": [], "usage": _openai_usage(usage)}) + DONE

    def _chunk(self, index: int, piece: dict[str, Any], usage: Usage, finish_reason: str | None) -> bytes:
        choice = {"index": index, **piece, "logprobs": None, "finish_reason": finish_reason}
        chunk = {**self._head, "object": self.chunk_kind, "choices": [choice]}
        if self._call.continuous_usage:
            chunk["usage"] = _counts(usage)
        return _event(chunk)

    def _full(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def _piece(self, text: str) -> dict[str, Any]:
        return {"text": text}


class ChatAnswer(CompletionAnswer):
    """/v1/chat/completions."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def opening(self, usages: Sequence[Usage]) -> bytes:
        return b"".join(
            self._chunk(index, {"delta": {"role": "assistant", "content": ""}}, usage, None)
            for index, usage in enumerate(usages)
        )

    def _full(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text}}

    def _piece(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text}}


class ResponsesAnswer:
    """/v1/responses. Like engines do, it ends with `response.completed` also when the token limit was reached."""

    def __init__(self, call: Call, identity: str, model: str, created: int) -> None:
        self._head = {
            "id": identity,
            "object": "response",
            "created_at": created,
            "model": model,
            "max_output_tokens": call.max_tokens,
        }
        self._item = "msg_" + identity.removeprefix("resp_")
        self._number = 0

    def whole(self, texts: Sequence[str], usage: Usage) -> bytes:
        return encode_json(self._completed(texts[0], usage))

    def opening(self, usages: Sequence[Usage]) -> bytes:  # noqa: ARG002 - this API tells the usage at the end
        started = {**self._head, "status": "in_progress", "output": [], "usage": None}
        return b"".join(
            (
                self._numbered("response.created", response=started),
                self._numbered("response.in_progress", response=started),
                self._numbered("response.output_item.added", output_index=0, item=self._message("in_progress", [])),
                self._numbered("response.content_part.added", **self._place(), part=_output_text("")),
            )
        )

    def delta(self, index: int, text: str, usage: Usage, *, last: bool) -> bytes:  # noqa: ARG002
        return self._numbered("response.output_text.delta", **self._place(), delta=text, logprobs=[])

    def closing(self, texts: Sequence[str], usage: Usage) -> bytes:
        part = _output_text(texts[0])
        return b"".join(
            (
                self._numbered("response.output_text.done", **self._place(), text=texts[0], logprobs=[]),
                self._numbered("response.content_part.done", **self._place(), part=part),
                self._numbered("response.output_item.done", output_index=0, item=self._message("completed", [part])),
                self._numbered("response.completed", response=self._completed(texts[0], usage)),
            )
        )

    def _completed(self, text: str, usage: Usage) -> dict[str, Any]:
        return {
            **self._head,
            "status": "completed",
            "output": [self._message("completed", [_output_text(text)])],
            "usage": {
                "input_tokens": usage.prompt,
                "input_tokens_details": {"cached_tokens": usage.cached},
                "output_tokens": usage.completion,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage.prompt + usage.completion,
            },
        }

    def _message(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self._item, "type": "message", "role": "assistant", "status": status, "content": content}

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._item, "output_index": 0, "content_index": 0}

    def _numbered(self, kind: str, **fields: Any) -> bytes:
        event = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return _event(event, kind)


class MessagesAnswer:
    """/v1/messages, Anthropic's API: its `input_tokens` are those that did not come from the cache."""

    def __init__(self, call: Call, identity: str, model: str, created: int) -> None:  # noqa: ARG002
        self._head = {"id": identity, "type": "message", "role": "assistant", "model": model}

    def whole(self, texts: Sequence[str], usage: Usage) -> bytes:
        content = [{"type": "text", "text": texts[0]}]
        return encode_json({**self._head, "content": content, **_STOP, "usage": _anthropic_usage(usage)})

    def opening(self, usages: Sequence[Usage]) -> bytes:
        message: dict[str, Any] = {
            **self._head,
            "content": [],
            **dict.fromkeys(_STOP),
            "usage": _anthropic_usage(usages[0]),
        }
        block = {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
        return _event({"type": "message_start", "message": message}, "message_start") + _event(
            block, "content_block_start"
        )

    def delta(self, index: int, text: str, usage: Usage, *, last: bool) -> bytes:  # noqa: ARG002
        delta = {"type": "text_delta", "text": text}
        return _event({"type": "content_block_delta", "index": 0, "delta": delta}, "content_block_delta")

    def closing(self, texts: Sequence[str], usage: Usage) -> bytes:  # noqa: ARG002 - the pieces were the text
        return b"".join(
            (
                _event({"type": "content_block_stop", "index": 0}, "content_block_stop"),
                _event(
                    {"type": "message_delta", "delta": _STOP, "usage": _anthropic_usage(usage)},
                    "message_delta",
                ),
                _event({"type": "message_stop"}, "message_stop"),
            )
        )


_STOP = {"stop_reason": "max_tokens", "stop_sequence": None}


def _event(data: dict[str, Any], name: str | None = None) -> bytes:
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + encode_json(data) + b"\n\n"


def _output_text(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": []}


def _counts(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt,
        "total_tokens": usage.prompt + usage.completion,
        "completion_tokens": usage.completion,
    }


def _openai_usage(usage: Usage) -> dict[str, Any]:
    return {**_counts(usage), "prompt_tokens_details": {"cached_tokens": usage.cached}}


def _anthropic_usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt - usage.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.completion,
    }
