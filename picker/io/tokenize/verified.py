"""A step that is compared with another before it is trusted for good.

What engines make of a request depends on releases and flags that no directory tells: `transformers` rebuilds the
tokenizers of some models, templates are replaced at start, tools are written in other ways. So the local tokenizer's
tokens for a few fixed requests are compared with those of an engine. A kind of request for which they differ is left
to the next step, and the log says so.
"""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import structlog

from picker.core.tokens.prompt import Api, EngineRequest, Served, read_engine_request
from picker.io.keep import Failed, log_failure
from picker.io.tokenize.step import Outcome, Step, StepError, Tokens

logger = structlog.get_logger(__name__)

PAUSE_SECONDS = 10.0
"""Between attempts to compare, while there is no engine to compare with."""
_SECONDS = 5.0
_TEXT = "The quick brown fox:\n\tdef f(x):\r\n    return 'é' + \"e\u0301\"  # 漢字, ﬁ, 👩\u200d💻 12345.678\n\n"
_TOOL = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "Looks <up> a “word”.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
    },
}
_TURNS = [
    {"role": "user", "content": _TEXT},
    {"role": "assistant", "content": " An answer.\n"},
    {"role": "user", "content": "And now? "},
]
_PARTS = [{"role": "user", "content": [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]}]


def _probe(path: Api, **body: Any) -> EngineRequest:
    request = read_engine_request(path, json.dumps(body).encode())
    assert isinstance(request, EngineRequest)  # noqa: S101  written above
    return request


_PROBES = (
    _probe(Api.COMPLETIONS, prompt=_TEXT),
    _probe(Api.COMPLETIONS, prompt=f"  {_TEXT}<s></s><|im_end|> x", add_special_tokens=False),
    _probe(Api.CHAT, messages=_TURNS[:1]),
    _probe(Api.CHAT, messages=[{"role": "system", "content": " Be brief. "}, *_TURNS]),
    _probe(Api.CHAT, messages=_PARTS),
    _probe(Api.CHAT, messages=_TURNS[:1], tools=[_TOOL]),
)


def _kind(request: EngineRequest) -> str:
    """What can differ by itself: texts, chats, and chats with tools."""
    if request.prompts:
        return "text"
    tools = request.fields.get("tools")
    return "chat" if tools is None or bytes(tools) in (b"null", b"[]") else "tools"


class Verified:
    """A step that is as good as `reference`, or not taken. `differs` says by kind of request how they differ.

    Requests are answered while the comparison runs in the background; it begins with the first one, and again `pause`
    seconds after it was not possible. `failed` is told of unexpected errors that were survived, as `compare_tokenizers`.
    """

    def __init__(
        self, step: Step, reference: Step, *, failed: Failed = log_failure, pause: float = PAUSE_SECONDS
    ) -> None:
        self.name = step.name
        self.differs: dict[str, str] = {}
        self._step = step
        self._reference = reference
        self._failed = failed
        self._pause = pause
        self._comparing: asyncio.Task[bool] | None = None
        self._next = 0.0

    async def tokenize(self, request: EngineRequest, served: Served, seconds: float) -> list[Tokens]:
        """See `Step`."""
        if self._comparing is None or (self._comparing.done() and self._again(self._comparing)):
            self._comparing = asyncio.create_task(self._compare(served))
        if (detail := self.differs.get(_kind(request))) is not None:
            raise StepError(Outcome.DISABLED, detail)
        return await self._step.tokenize(request, served, seconds)

    def _again(self, comparing: asyncio.Task[bool]) -> bool:
        return (comparing.cancelled() or not comparing.result()) and time.monotonic() >= self._next

    async def _compare(self, served: Served) -> bool:
        """Compare all probes; False when that was not possible."""
        for probe in _PROBES:
            try:
                await self._compare_one(probe, served)
            except StepError as failure:
                if failure.outcome is Outcome.UNSUPPORTED:
                    continue
            except Exception as error:  # noqa: BLE001  requests are tokenized though comparing failed
                self._failed("compare_tokenizers", error)
            else:
                continue
            self._next = time.monotonic() + self._pause
            return False
        return True

    async def _compare_one(self, probe: EngineRequest, served: Served) -> None:
        mine = await self._step.tokenize(probe, served, _SECONDS)
        theirs = await self._reference.tokenize(probe, served, _SECONDS)
        if mine != theirs:
            kind = _kind(probe)
            self.differs[kind] = f"{self._reference.name} makes other tokens of a {kind}: {_difference(mine, theirs)}"
            logger.error("tokenizers_differ", step=self.name, kind=kind, detail=self.differs[kind])

    async def close(self) -> None:
        """End the comparison."""
        if self._comparing is not None:
            self._comparing.cancel()
            await asyncio.gather(self._comparing, return_exceptions=True)


def _difference(mine: list[Tokens], theirs: list[Tokens]) -> str:
    ours, engines = mine[0].token_ids, theirs[0].token_ids
    pairs = enumerate(zip(ours, engines, strict=False))
    at = next((index for index, (own, other) in pairs if own != other), min(len(ours), len(engines)))
    return f"from token {at}, {ours[at : at + 5].tolist()} here and {engines[at : at + 5].tolist()} there"
