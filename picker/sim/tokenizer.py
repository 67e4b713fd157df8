"""A toy tokenizer: four bytes of UTF-8 are one token, and a token id is those bytes read as a number.

It costs next to nothing, needs no vocabulary, decodes back to the text and gives equal prefixes equal tokens, except
for the last one, which may end inside a cell: all that a cache needs. Byte 0xFF never occurs in UTF-8, so ids from
`IM_START` up are free for the control tokens of ChatML, and no prompt text can forge them.
"""

from __future__ import annotations

import random
import sys
from array import array
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import groupby

from picker.sim.block_cache import UINT32

CELL = 4
IM_START = 0xFF000000
IM_END = 0xFF000001
VOCABULARY = 2**32
"""Token ids are below this."""

_CONTROL = {IM_START: "<|im_start|>", IM_END: "<|im_end|>"}
_WORDS = (
    "all and any ask bad big box boy but can car cat cow day did dog eat end far few fly for fun get got had has "
    "her him his how its job key law let lot low man map may men new now old one our out own pay put ran red run "
    "saw say see sky sun ten the tie too try two use war was way web who why win yes yet you zoo"
)
_OUTPUT = 1 << 16


def encode(text: str) -> array[int]:
    """Return the token ids of `text`; a last cell that is not full is padded with zero bytes."""
    data = text.encode("utf-8", "surrogatepass")
    tokens = array(UINT32)
    tokens.frombytes(data + b"\0" * (-len(data) % CELL))
    if sys.byteorder == "big":
        tokens.byteswap()
    return tokens


def decode(tokens: Iterable[int]) -> str:
    """Return the text of `tokens`; bytes that are no UTF-8, also where a character is cut, become U+FFFD."""
    cells = array(UINT32, tokens)
    return "".join(
        _text(array(UINT32, group)) if control is None else control * len(list(group))
        for control, group in groupby(cells, _CONTROL.get)
    )


def render_chat(
    messages: Sequence[tuple[str, str]], *, add_generation_prompt: bool = True, open_end: bool = False
) -> array[int]:
    """Return the tokens of (role, text) messages in ChatML; `open_end` leaves the last message to be continued.

    Roles and texts start cells of their own, so a text has the same tokens wherever it stands, and a generated answer
    keeps its tokens when it comes back as an assistant message.
    """
    tokens = array(UINT32)
    for role, text in messages:
        tokens.append(IM_START)
        tokens += _line(role)
        tokens += encode(text)
        tokens.append(IM_END)
        tokens += _line("")
    if open_end:
        del tokens[-2:]
    if add_generation_prompt:
        tokens.append(IM_START)
        tokens += _line("assistant")
    return tokens


def generate(seed: int, count: int) -> array[int]:
    """Return `count` tokens of made-up text, the same for the same seed: short words, each exactly one token."""
    text = _babble()
    start = seed % len(text)
    output = text[start : start + count]
    while len(output) < count:
        output += text[: count - len(output)]
    return output


@cache
def _babble() -> array[int]:
    return encode("".join(random.Random(0).choices([word + " " for word in _WORDS.split()], k=_OUTPUT)))


def _line(text: str) -> array[int]:
    return encode(text + "\n")


def _text(cells: array[int]) -> str:
    if sys.byteorder == "big":
        cells.byteswap()
    return cells.tobytes().replace(b"\0", b"").decode("utf-8", "replace")
