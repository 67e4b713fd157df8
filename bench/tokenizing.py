"""What tokenizing in this process costs, with the tokenizer of the recorded engine."""

from __future__ import annotations

import asyncio
import gzip
import json
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.report import Row
from picker.core.tokens.prompt import EngineRequest, read_engine_request
from picker.io.tokenize.chain import ChainSettings, TokenizerChain
from picker.io.tokenize.files import LocalSettings
from picker.io.tokenize.local import Local, LocalTokenizer

TOKENIZER = Path(__file__).parents[1] / "tests" / "data" / "tokenizers" / "tiny-vllm.json.gz"
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TURN = 6_000
"""Characters of one message of a long conversation, some 1,600 tokens."""

Messages = list[dict[str, str]]


@contextmanager
def tokenizer_directory() -> Iterator[Path]:
    """A model's directory, as far as tokenizing needs it."""
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "tokenizer.json").write_bytes(gzip.decompress(TOKENIZER.read_bytes()))
        (Path(directory) / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHATML}))
        yield Path(directory)


def tokenizer() -> LocalTokenizer:
    with tokenizer_directory() as directory:
        return LocalTokenizer.load(LocalSettings(str(directory)))


def prose() -> str:
    """Text of the standard library, some 3 million characters."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return "".join(path.read_text(encoding="utf-8", errors="ignore")[:20_000] for path in files)


def conversation(text: str, messages: int) -> Messages:
    roles = ("user", "assistant")
    return [
        {"role": roles[number % 2], "content": text[number * TURN : (number + 1) * TURN]} for number in range(messages)
    ]


def body_of(messages: Messages) -> bytes:
    return json.dumps({"model": "m", "messages": messages}).encode()


def read(body: bytes) -> EngineRequest:
    request = read_engine_request("/v1/chat/completions", body)
    if not isinstance(request, EngineRequest):
        raise TypeError(request)
    return request


def seconds_to_tokenize(used: LocalTokenizer, messages: Messages) -> tuple[float, int]:
    """CPU seconds from a body's bytes to its tokens, and how many these are."""
    body = body_of(messages)
    start = time.process_time()
    request = read(body)
    request.digest()
    tokens = used.tokenize(request)[0].token_ids
    return time.process_time() - start, len(tokens)


def growing(used: LocalTokenizer, text: str) -> tuple[float, float, int]:
    """The first turn of a long conversation and the next, which adds an answer of 100 tokens and a question."""
    messages = conversation(text, 62)
    answer = {"role": "assistant", "content": text[-400:]}
    question = {"role": "user", "content": text[-1_600:-400]}
    first, count = seconds_to_tokenize(used, messages)
    grown, _ = seconds_to_tokenize(used, [*messages, answer, question])
    return first, grown, count


async def seconds_seen_before(used: LocalTokenizer, messages: Messages) -> float:
    """From the bytes of a body that was tokenized before to its tokens, by the chain's cache."""
    local = Local(used)
    chain = TokenizerChain([local], ChainSettings(deadline=10, step_deadline=10))
    body = body_of(messages)
    await chain.tokenize(read(body))
    start = time.perf_counter()
    await chain.tokenize(read(body))
    took = time.perf_counter() - start
    local.close()
    return took


def rows() -> list[Row]:
    """Measure everything; takes some seconds."""
    used, text = tokenizer(), prose()
    turns = [growing(used, text[at * 400_000 :]) for at in range(3)]
    first, grown, count = min(turns, key=lambda turn: turn[1])
    short, tokens = min(seconds_to_tokenize(used, conversation(text[at * 20_000 :], 3)) for at in range(60, 70))
    seen = min(asyncio.run(seconds_seen_before(used, conversation(text, 62))) for _ in range(3))
    return [
        Row(
            f"{count:,} tokens grown by a turn of 400, tokenized",
            f"{grown * 1e3:.1f} ms after {first * 1e3:.0f} ms",
            grown / first,
            "x",
            1 / 20,
        ),
        Row(f"{tokens:,} tokens never seen, tokenized", "", short * 1e3, "ms", 15),
        Row(f"{count:,} tokens seen before, tokenized", "", seen * 1e3, "ms", 2),
    ]
