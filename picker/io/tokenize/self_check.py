"""A check that a tokenizer's segments give its tokens, on prompts made to break it.

The plan is proven from the tokenizer's description; this guards against a library that does not do what was read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from random import Random

from picker.core.tokens.segments import Cutter

_AWKWARD = (
    " ", "  ", "\n", "\r\n", "\r", "\t", "\n\n \n", "\u00a0", "\u3000", "\u200b", "\u200d", "\ufeff", "\u2028", "\u2581",
    "a", "A", "I", "0", "7 8", "_", ".", "...", "'s", "don't", "Hello world", " the quick", "def f(x):\n    return x\n",
    "e\u0301", "\u0301", "\u0327\u0301", "o\u0308\u0323", "\ufb01", "\ufb03n", "\u0130", "\u00df", "\u1e9e", "\uff21",
    "\u6f22\u5b57", "\uac00", "\u1100\u1161", "\u0915\u094d\u0937", "\u0628\u064f", "\U0001f468\u200d\U0001f469", "\U0001f1e9\U0001f1ea",
    "<", ">", "|", "<|", "|>", "[", "]", "</", "<<", "\0", "\x1f", "\ufffd",
)  # fmt: skip


def adversarial_prompts(cuts: Iterable[str], rng: Random, count: int) -> Iterator[str]:
    """Make up prompts of added tokens, parts of them, and text that tempts a tokenizer to look at its neighbours."""
    tokens = sorted(cuts)[:200]
    for _ in range(count):
        pieces = []
        for _ in range(rng.randint(1, 12)):
            token = rng.choice(tokens)
            start, end = sorted(rng.choices(range(len(token) + 1), k=2))
            pieces += rng.choices([token, token[start:end], *rng.choices(_AWKWARD, k=4)], k=rng.randint(1, 3))
        yield "".join(pieces)


def first_difference(
    cutter: Cutter,
    prompts: Iterable[str],
    whole: Callable[[str], list[int]],
    piece: Callable[[str, bool], list[int]],
) -> str | None:
    """Return the first prompt whose pieces give other tokens than the whole, None when all agree.

    `piece` gets a text and whether it stands at the prompt's start.
    """
    for prompt in prompts:
        tokens: list[int] = []
        for index, part in enumerate(cutter.cut(prompt)):
            tokens += [part] if isinstance(part, int) else piece(part, index == 0)
        if tokens != whole(prompt):
            return prompt
    return None
