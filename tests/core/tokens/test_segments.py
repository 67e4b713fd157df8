"""Segments against the tokenizers library itself, which tokenizes whole prompts."""

from __future__ import annotations

import json
import unicodedata
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from picker.core.tokens.segments import Cutter, SegmentPlan, plan_segments

DATA = Path(__file__).parents[2] / "data" / "tokenizers"
FAMILIES = sorted(path.stem for path in DATA.glob("*.json"))
AWKWARD = (
    "e\u0301", "\u0301", "\u0915\u094d\u0937", "\u1100\u1161\u11a8", "\u0628\u0650", "\ufb01", "\ufb03", "\u200d", "\u200b", "\ufeff",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467", "\r\n", "\n", "\r", "\n\n", "\t", "  ", "\u00a0", "\u3000", "\u2581", "\u2581\u2581", "Hello", " world",
    "don't", "1234", "\u6f22", "\uff21\u00df\u0130", "<|im_", "_start|>", "<|", "|>", "<", "im_end", "<tool_call", "tool_call>", "</", "<s>", "[SEP]",
)  # fmt: skip
CONTROL = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<tool_call>", "</tool_call>")
PROMPTS = st.lists(st.sampled_from(AWKWARD) | st.sampled_from(CONTROL) | st.text(max_size=6), max_size=14).map("".join)


@cache
def description(family: str) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((DATA / f"{family}.json").read_text(encoding="utf-8"))
    return value


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids


class Pieces:
    """A tokenizer in pieces, beside the whole one."""

    def __init__(self, raw: dict[str, Any]) -> None:
        self.plan = plan_segments(raw)
        assert not self.plan.unsafe
        self.whole = Tokenizer.from_str(json.dumps(raw))
        self.later = Tokenizer.from_str(json.dumps(self.plan.later or raw))
        self.cutter = Cutter({text: self.whole.token_to_id(text) for text in self.plan.cuts})

    def encode(self, prompt: str) -> list[int]:
        tokens: list[int] = []
        for index, piece in enumerate(self.cutter.cut(prompt)):
            if isinstance(piece, int):
                tokens.append(piece)
            else:
                tokens += encode(self.later if index else self.whole, piece)
        return tokens


@cache
def pieces(family: str) -> Pieces:
    return Pieces(description(family))


def test_every_family_is_there() -> None:
    assert FAMILIES == [
        "byte-level-bpe",
        "byte-level-bpe-prefix-space",
        "sentencepiece-bpe",
        "unigram-always",
        "unigram-first",
        "wordpiece",
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_all_control_tokens_are_cuts_and_only_one_family_needs_another_tokenizer_later(family: str) -> None:
    plan = plan_segments(description(family))
    assert set(CONTROL) <= plan.cuts
    assert (plan.later is not None) == (family == "unigram-first")


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=250, deadline=None)
@given(prompt=PROMPTS)
def test_pieces_give_the_tokens_of_the_whole(family: str, prompt: str) -> None:
    assert pieces(family).encode(prompt) == encode(pieces(family).whole, prompt)


def test_without_a_tokenizer_for_later_pieces_the_first_family_would_be_wrong() -> None:
    tokenizer = pieces("unigram-first").whole
    prompt = "Hello<|im_end|>Hello"
    assert encode(tokenizer, prompt) != [
        *encode(tokenizer, "Hello"),
        tokenizer.token_to_id("<|im_end|>"),
        *encode(tokenizer, "Hello"),
    ]


def added(content: str, **flags: bool) -> dict[str, Any]:
    defaults = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    return {"id": 0, "content": content, **defaults, **flags}


def with_tokens(*tokens: dict[str, Any], family: str = "byte-level-bpe") -> dict[str, Any]:
    raw = deepcopy(description(family))
    first = max([*raw["model"]["vocab"].values(), *(token["id"] for token in raw["added_tokens"])]) + 1
    raw["added_tokens"] += [token | {"id": first + index} for index, token in enumerate(tokens)]
    return raw


@pytest.mark.parametrize(
    ("token", "lost"),
    [
        (added("<a>"), set()),
        (added("<b>", lstrip=True), {"<b>"}),
        (added("<c>", rstrip=True), {"<c>"}),
        (added("<d>", normalized=True), {"<d>"}),
        (added("\n\n"), {"\n\n"}),
        (added("x ", special=True), {"x "}),
        (added("m<|im", lstrip=True), {"m<|im", "<|im_start|>", "<|im_end|>"}),
        (added("<|im_end|>\n"), {"<|im_end|>\n", "<|im_end|>"}),
        (added(" <|im_end|> "), {" <|im_end|> ", "<|im_end|>"}),
        (added("<|im_end|>>"), set()),
    ],
)
def test_tokens_are_no_cuts_when_they_touch_or_hide_their_neighbours(token: dict[str, Any], lost: set[str]) -> None:
    cuts = plan_segments(with_tokens(token)).cuts
    assert cuts == ({*CONTROL, token["content"]} - lost)


@settings(max_examples=120, deadline=None)
@given(
    tokens=st.lists(
        st.builds(
            added,
            st.text(">dr_| \n<", min_size=1, max_size=6),
            lstrip=st.booleans(),
            rstrip=st.booleans(),
            normalized=st.booleans(),
        ),
        max_size=6,
        unique_by=lambda token: token["content"],
    ),
    data=st.data(),
)
def test_any_added_tokens_leave_pieces_exact(tokens: list[dict[str, Any]], data: st.DataObject) -> None:
    tokens = [token for token in tokens if token["content"] not in CONTROL]
    raw = with_tokens(*tokens)
    assume(not plan_segments(raw).unsafe)
    cut = Pieces(raw)
    words = [*CONTROL, *(token["content"] for token in tokens), " ", "\n", "x", "<|im", "<", "end|>"]
    prompt = "".join(data.draw(st.lists(st.sampled_from(words), max_size=14)))
    assert cut.encode(prompt) == encode(cut.whole, prompt)


def changed(**parts: Any) -> dict[str, Any]:
    return description("byte-level-bpe") | parts


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (changed(model={"type": "BPE", "dropout": 0.1}), "drops merges at random"),
        (changed(model={"type": "Neural"}), "unknown model 'Neural'"),
        (changed(normalizer={"type": "Sequence", "normalizers": [{"type": "Dream"}]}), "unknown normalizer 'Dream'"),
        (changed(pre_tokenizer={"type": "Dream"}), "unknown pre_tokenizer 'Dream'"),
        (changed(post_processor={"type": "Dream"}), "unknown post_processor 'Dream'"),
        (changed(added_tokens=[added("x", single_word=True)]), "single word"),
        (changed(added_tokens=[]), "no added token is fit"),
        (changed(added_tokens=[{"content": "x"}]), "not understood"),
        ({}, "not understood"),
        ({"model": 7}, "not understood"),
    ],
)
def test_what_is_not_proven_is_unsafe(raw: dict[str, Any], why: str) -> None:
    plan = plan_segments(raw)
    assert why in plan.unsafe
    assert plan == SegmentPlan(unsafe=plan.unsafe)


@given(
    tokens=st.sets(st.text("ab.<", min_size=1, max_size=5), min_size=1, max_size=8),
    prompt=st.text("ab.<x", max_size=30),
)
def test_the_longest_token_at_the_leftmost_place_is_cut(tokens: set[str], prompt: str) -> None:
    ids = {token: number for number, token in enumerate(sorted(tokens))}
    expected: list[str | int] = []
    text, at = "", 0
    while at < len(prompt):
        token = max((token for token in tokens if prompt.startswith(token, at)), key=len, default=None)
        if token is None:
            text, at = text + prompt[at], at + 1
            continue
        expected += [text, ids[token]] if text else [ids[token]]
        text, at = "", at + len(token)
    assert Cutter(ids).cut(prompt) == expected + ([text] if text else [])


def test_the_awkward_texts_are_awkward() -> None:
    assert unicodedata.normalize("NFC", AWKWARD[0]) != AWKWARD[0]
    assert unicodedata.normalize("NFKC", "\ufb03") == "ffi"
