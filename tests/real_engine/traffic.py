"""Requests as clients send them, with all that decides what an engine can reuse of earlier ones."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

Body = dict[str, Any]

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
WORDS = (
    *("river", "copper", "lantern", "seven", "harbour", "quiet", "orchard", "window", "paper", "the", "of", "and"),
    *("morning", "salt", "letter", "bridge", "market", "train", "glass", "winter", "stone", "garden", "mirror"),
    *("été", "Straße", "漢字", "мир", "don't", "2,048", "(see", "x_1)"),
)


def function(name: str, text: str) -> Body:
    parameters = {"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]}
    return {"type": "function", "function": {"name": name, "description": text, "parameters": parameters}}


@dataclass
class Request:
    """`kind` says what is special about it; `conversation` is what its answer belongs to."""

    kind: str
    path: str
    body: Body
    conversation: Conversation | None = None


@dataclass
class Conversation:
    kind: str
    more: Body
    messages: list[Body] = field(default_factory=list)
    turns: int = 0

    def answer(self, message: Body) -> None:
        """Go on as an agent does: what the model said, or a call that it might have made and its result."""
        self.turns += 1
        if "tools" in self.more and self.turns % 2:
            name = self.more["tools"][0]["function"]["name"]
            call = {"id": f"call-{self.turns}", "type": "function"}
            call["function"] = {"name": name, "arguments": '{"q": "copper \\"bridge\\""}'}
            self.messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
            self.messages.append({"role": "tool", "tool_call_id": call["id"], "content": "no letter was found"})
        else:
            self.messages.append({"role": "assistant", "content": message.get("content") or "(nothing)"})


class Traffic:
    """Makes requests from a seed. The working set is some times what the engine's cache holds."""

    def __init__(self, seed: int, model: str, block: int) -> None:
        self._rng = random.Random(seed)
        self._model = model
        self._block = block
        self._ids = [[self._rng.randrange(300, 900) for _ in range(block * 8)] for _ in range(6)]
        self._texts = [self._words(60, 160) for _ in range(4)]
        self._system = "You are careful and brief. " + self._words(50, 60)
        self._tools = [function(name, self._words(6, 12)) for name in ("search_files", "read_page")]
        self._conversations: list[Conversation] = []
        self._sent: list[Request] = []

    def next(self) -> Request:
        makers = (self._token_ids, self._text, self._chat, self._repeat, self._log_probabilities, self._response)
        (make,) = self._rng.choices(makers, (28, 14, 36, 12, 5, 5))
        request = make()
        self._sent.append(request)
        return request

    def _words(self, least: int, most: int) -> str:
        return " ".join(self._rng.choices(WORDS, k=self._rng.randint(least, most))) + ". "

    def _completion(self, kind: str, prompt: str | list[int]) -> Request:
        body = {"model": self._model, "prompt": prompt, "ignore_eos": True, "temperature": 0}
        body["max_tokens"] = self._rng.choice((1, 1, 8, 40))
        if self._rng.random() < 0.15:
            kind += ", salted"
            body["cache_salt"] = self._rng.choice(("tenant-a", "tenant-b"))
        if self._rng.random() < 0.2:
            kind += ", streamed"
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return Request(kind, COMPLETIONS, body)

    def _token_ids(self) -> Request:
        """A beginning that ends anywhere, at the edge of a block above all, with or without a new end."""
        block = self._block
        shared = self._rng.choice(self._ids)[: self._rng.choice((2 * block, 3 * block + 7, 4 * block, 8 * block))]
        new = [self._rng.randrange(300, 900) for _ in range(self._rng.choice((0, 0, 5, block, block + 3)))]
        return self._completion("token ids", shared + new)

    def _text(self) -> Request:
        return self._completion("text", self._rng.choice(self._texts) + self._words(0, 30))

    def _chat(self) -> Request:
        going_on = [one for one in self._conversations if one.turns < 5]
        if len(going_on) < 4:
            kind, more = self._rng.choice(
                (
                    ("chat", {}),
                    ("chat with tools", {"tools": self._tools}),
                    ("chat in parts", {}),
                    ("chat, salted", {"cache_salt": "tenant-a"}),
                )
            )
            going_on.append(Conversation(kind, more, [{"role": "system", "content": self._system}]))
            self._conversations.append(going_on[-1])
        conversation = self._rng.choice(going_on)
        text = self._words(8, 40)
        content: Any = text
        if conversation.kind == "chat in parts":
            content = [{"type": "text", "text": text}, {"type": "text", "text": self._words(3, 9)}]
        conversation.messages.append({"role": "user", "content": content})
        body = {"model": self._model, "messages": [*conversation.messages], **conversation.more}
        body |= {"max_tokens": self._rng.randint(8, 48), "seed": self._rng.randrange(1 << 20), "ignore_eos": True}
        return Request(conversation.kind, CHAT, body, conversation)

    def _repeat(self) -> Request:
        if not self._sent:
            return self._text()
        again = self._rng.choice(self._sent[-10:])
        return Request(f"repeated: {again.kind.removeprefix('repeated: ')}", again.path, again.body)

    def _log_probabilities(self) -> Request:
        prompts = [one.body["prompt"] for one in self._sent if one.path == COMPLETIONS] or self._texts
        body = {"model": self._model, "prompt": self._rng.choice(prompts[-10:]), "max_tokens": 1, "prompt_logprobs": 1}
        return Request("log probabilities of the prompt", COMPLETIONS, body)

    def _response(self) -> Request:
        body = {"model": self._model, "input": self._words(20, 60), "instructions": self._system, "store": False}
        return Request("response", RESPONSES, {**body, "max_output_tokens": 8})
