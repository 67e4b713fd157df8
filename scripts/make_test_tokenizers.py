"""Train the small tokenizers of tests/data/tokenizers, one for each family, on the sources of the standard library.

Run with `tokenizers` 0.23: python scripts/make_test_tokenizers.py
"""

from __future__ import annotations

import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

OUT = Path(__file__).parents[1] / "tests" / "data" / "tokenizers"
VOCABULARY = 900
CONTROL = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<tool_call>", "</tool_call>"]
SPLIT = r"(?i:'s|'t|'re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def texts() -> Iterator[str]:
    for name in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("[a-f]*.py")):
        yield name.read_text(encoding="utf-8", errors="ignore")[:20_000]
    yield "Grüße aus Köln, ça va? Привет, мир! 漢字かな交じり文。 한국어 텍스트 हिन्दी العربية 👍🏽 " * 50


def special(tokenizer: Tokenizer, text: str) -> tuple[str, int]:
    token = tokenizer.token_to_id(text)
    if token is None:
        raise KeyError(text)
    return text, token


def finish(tokenizer: Tokenizer, trainer: trainers.Trainer, bos: str | None = None) -> Tokenizer:
    tokenizer.train_from_iterator(texts(), trainer)
    tokenizer.add_special_tokens(
        [AddedToken(text, normalized=False, special=True) for text in CONTROL if text.startswith("<|")]
    )
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in CONTROL if not text.startswith("<|")])
    if bos is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[special(tokenizer, bos)]
        )
    return tokenizer


def byte_level(*, prefix_space: bool) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    if prefix_space:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(SPLIT), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, initial_alphabet=alphabet, show_progress=False)
    return finish(tokenizer, trainer)


def sentencepiece_bpe() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("▁+[^▁]*"), "isolated")
    reserved = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=reserved, limit_alphabet=120, show_progress=False
    )
    tokenizer = finish(tokenizer, trainer, bos="<s>")
    tokenizer.pre_tokenizer = None  # as converted SentencePiece models have it: words are found by merging alone
    return tokenizer


def unigram(prepend_scheme: str) -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend_scheme)
    reserved = ["<unk>", "<s>"]
    trainer = trainers.UnigramTrainer(
        vocab_size=VOCABULARY, special_tokens=reserved, unk_token="<unk>", show_progress=False
    )
    return finish(tokenizer, trainer, bos="<s>")


def word_piece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    reserved = ["[UNK]", "[CLS]", "[SEP]"]
    trainer = trainers.WordPieceTrainer(vocab_size=VOCABULARY, special_tokens=reserved, show_progress=False)
    tokenizer = finish(tokenizer, trainer)
    tokenizer.post_processor = processors.BertProcessing(special(tokenizer, "[SEP]"), special(tokenizer, "[CLS]"))
    return tokenizer


FAMILIES: dict[str, Callable[[], Tokenizer]] = {
    "byte-level-bpe": lambda: byte_level(prefix_space=False),
    "byte-level-bpe-prefix-space": lambda: byte_level(prefix_space=True),
    "sentencepiece-bpe": sentencepiece_bpe,
    "unigram-always": lambda: unigram("always"),
    "unigram-first": lambda: unigram("first"),
    "wordpiece": word_piece,
}


def main() -> None:
    OUT.mkdir(parents=True, exist_ok=True)
    for family, make in FAMILIES.items():
        path = OUT / f"{family}.json"
        make().save(str(path), pretty=False)
        print(f"{path.name}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
