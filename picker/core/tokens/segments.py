"""Which texts a tokenizer tokenizes independently, proven from its `tokenizer.json`.

A Hugging Face tokenizer first finds its added tokens in the raw text, and treats each piece between them by itself:
normalizer, pre-tokenizer and model see one piece at a time. So the tokens of a prompt are those of its pieces, and a
piece seen before needs no tokenizing. This is exact when the text is cut only where the tokenizer itself cuts:

- at added tokens that are matched in the raw text (not `normalized`), take no blanks from their neighbours (`lstrip`,
  `rstrip`), do not look at them (`single_word`), and neither begin nor end with a blank that a neighbour could take;
- and whose every occurrence the tokenizer finds: no other added token overlaps their beginning. Matching is leftmost
  longest, so an occurrence is lost only to a match that starts earlier and reaches into it, or to a longer one.

One component looks beyond its piece: Metaspace with `prepend_scheme: first` marks the piece at the start of the
prompt only. Later pieces are therefore tokenized by a copy of the tokenizer with `never`. Whatever is not known here,
or is random (`dropout`), makes a tokenizer unsafe, and its prompts are tokenized whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from typing import Any

from msgspec import Struct

_PIECEWISE_NORMALIZERS = frozenset({
    "BertNormalizer", "ByteLevel", "Lowercase", "NFC", "NFD", "NFKC", "NFKD", "Nmt", "Precompiled", "Prepend",
    "Replace", "Strip", "StripAccents",
})  # fmt: skip
_PIECEWISE_PRE_TOKENIZERS = frozenset({
    "BertPreTokenizer", "ByteLevel", "CharDelimiterSplit", "Delimiter", "Digits", "FixedLength", "Metaspace",
    "Punctuation", "Split", "UnicodeScripts", "Whitespace", "WhitespaceSplit",
})  # fmt: skip
_MODELS = frozenset({"BPE", "Unigram", "WordLevel", "WordPiece"})
_POST_PROCESSORS = frozenset({"BertProcessing", "ByteLevel", "RobertaProcessing", "TemplateProcessing"})


class SegmentPlan(Struct, frozen=True):
    """How to cut prompts for one tokenizer. `unsafe` says why they must not be cut; it is empty when they may.

    `cuts` are the added tokens to cut at; their ids are the tokenizer's affair, which may know better than its
    description. `later` is the description of the tokenizer for pieces that are not at the
    start of a prompt, None when it is the same.
    """

    unsafe: str = ""
    cuts: frozenset[str] = frozenset()
    later: dict[str, Any] | None = None


def plan_segments(description: Mapping[str, Any]) -> SegmentPlan:
    """Return the plan for a parsed `tokenizer.json`."""
    try:
        return _plan(description)
    except (AttributeError, KeyError, TypeError) as error:
        return SegmentPlan(unsafe=f"its description is not understood: {error!r}")


def _plan(description: Mapping[str, Any]) -> SegmentPlan:
    model = description["model"]
    if model.get("type") not in _MODELS:
        return SegmentPlan(unsafe=f"unknown model {model.get('type')!r}")
    if model.get("dropout"):
        return SegmentPlan(unsafe="its model drops merges at random")
    for part, key, known in (
        ("normalizer", "normalizers", _PIECEWISE_NORMALIZERS),
        ("pre_tokenizer", "pretokenizers", _PIECEWISE_PRE_TOKENIZERS),
        ("post_processor", "processors", _POST_PROCESSORS),
    ):
        for component in _flat(description.get(part), key):
            if component["type"] not in known:
                return SegmentPlan(unsafe=f"unknown {part} {component['type']!r}")
    raw = [token for token in description.get("added_tokens", ()) if not token["normalized"] and token["content"]]
    if any(token["single_word"] for token in raw):
        return SegmentPlan(unsafe="an added token is a single word: it looks at its neighbours")
    cuts = _found_always({token["content"] for token in raw if _cuts(token)}, {token["content"] for token in raw})
    if not cuts:
        return SegmentPlan(unsafe="no added token is fit to cut at")
    return SegmentPlan(cuts=cuts, later=_later(description))


def _flat(component: Any, key: str) -> Iterator[Mapping[str, Any]]:
    if component is None:
        return
    if component["type"] == "Sequence":
        for inner in component[key]:
            yield from _flat(inner, key)
    else:
        yield component


def _cuts(token: Mapping[str, Any]) -> bool:
    text = token["content"]
    return not (token["lstrip"] or token["rstrip"] or text[0].isspace() or text[-1].isspace())


def _found_always(candidates: set[str], raw: set[str]) -> frozenset[str]:
    """The candidates that no other added token can hide, except those among themselves that are searched for too."""
    cuts = set(candidates)
    while True:
        others = raw - cuts
        inside = "\0".join(others)
        ends = {text[start:] for text in others for start in range(1, len(text))}
        hidden = {text for text in cuts if text in inside or any(text[:end] in ends for end in range(1, len(text) + 1))}
        if not hidden:
            return frozenset(cuts)
        cuts -= hidden


def _later(description: Mapping[str, Any]) -> dict[str, Any] | None:
    later = deepcopy(dict(description))
    firsts = [
        component
        for component in _flat(later.get("pre_tokenizer"), "pretokenizers")
        if component["type"] == "Metaspace" and component.get("prepend_scheme") == "first"
    ]
    for component in firsts:
        component["prepend_scheme"] = "never"  # type: ignore[index]
    return later if firsts else None


class Cutter:
    """Cuts prompts at added tokens."""

    def __init__(self, cuts: Mapping[str, int]) -> None:
        self._ids = dict(cuts)
        self._find = re.compile(_pattern(cuts)).finditer

    def cut(self, prompt: str) -> list[str | int]:
        """Return the prompt's pieces in order: texts that are not empty, and ids of added tokens."""
        pieces: list[str | int] = []
        ids, at = self._ids, 0
        for match in self._find(prompt):
            start, end = match.span()
            if start > at:
                pieces.append(prompt[at:start])
            pieces.append(ids[match.group()])
            at = end
        if at < len(prompt):
            pieces.append(prompt[at:])
        return pieces


def _pattern(texts: Iterable[str]) -> str:
    """A pattern that matches the longest of `texts`, as a tree, so that many with one beginning cost no more than one."""
    heads: dict[str, list[str]] = {}
    for text in texts:
        if text:
            heads.setdefault(text[0], []).append(text[1:])
    branches = []
    for head, tails in heads.items():
        rest = _pattern(tails)
        if rest and "" in tails:
            rest = f"(?:{rest})?"
        branches.append(re.escape(head) + rest)
    return branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})" if branches else ""
