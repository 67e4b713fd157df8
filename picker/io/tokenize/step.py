"""What every way of tokenizing gives and takes."""

from __future__ import annotations

from array import array
from contextlib import AbstractContextManager
from enum import StrEnum
from typing import Protocol

from msgspec import Struct

from picker.core.tokens.prompt import EngineRequest, MultiModalItem, Served


class Outcome(StrEnum):
    """How a step, or a whole chain, ended; the label of a counter."""

    OK = "ok"
    TIMEOUT = "timeout"
    ERROR = "error"
    UNSUPPORTED = "unsupported"
    """This way cannot tokenize this request exactly."""
    DISABLED = "disabled"
    """The target does not offer it, or was given up for a while."""
    OVERLOADED = "overloaded"


class StepError(Exception):
    """A step that did not tokenize: how it ended, and what happened."""

    def __init__(self, outcome: Outcome, detail: str) -> None:
        super().__init__(detail)
        self.outcome = outcome


class Tokens(Struct, frozen=True):
    """The token ids of one prompt, `array("I")`, with the media in it."""

    token_ids: array[int]
    multimodal: tuple[MultiModalItem, ...] = ()


class Precedence(Protocol):
    """What goes before others who share the interpreter, such as readers of KV events, while it needs that."""

    def enter(self) -> None:
        """It does from now on. For any thread."""

    def away(self) -> AbstractContextManager[None]:
        """It does not meanwhile. For any thread."""

    def end(self) -> None:
        """It soon does no more. For any thread."""


class Step(Protocol):
    """One way of tokenizing."""

    name: str

    async def tokenize(self, request: EngineRequest, served: Served, seconds: float) -> list[Tokens]:
        """Return the tokens of each text of `request.prompts`, or of its conversation, within `seconds`.

        Prompts that are token ids already are not asked for, and left out. Raises StepError, and nothing else.
        """
