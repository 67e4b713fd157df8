"""The ways to tokenize that the arguments of `kvcache-aware` name, opened and closed together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack

import structlog

from picker.core.plugins.kvcache_args import KvCacheArgs, Way
from picker.io.keep import Failed, log_failure
from picker.io.tokenize.chain import ChainSettings, TokenizerChain
from picker.io.tokenize.remote import Remote, Remotely, Target
from picker.io.tokenize.step import Precedence, Step

logger = structlog.get_logger(__name__)


async def open_tokenizers(
    args: KvCacheArgs,
    engines: Callable[[], Sequence[Target]],
    stack: AsyncExitStack,
    failed: Failed = log_failure,
    precedence: Callable[[], Precedence] | None = None,
) -> TokenizerChain:
    """Open them, to be closed with `stack`. One that cannot be opened is left out, and the log says why.

    `failed` is told of unexpected errors of theirs that were survived. Threads of this process take `precedence`.
    """
    engine = await stack.enter_async_context(Remote(Remotely.ENGINE, engines))
    steps: list[Step] = []
    for way in args.ways:
        if way is Way.LOCAL:
            steps += await _local(args.model_directory, engine, stack, failed, precedence)
        elif way is Way.ENGINE:
            steps.append(engine)
        elif way is Way.RENDER:
            steps.append(await stack.enter_async_context(Remote(Remotely.RENDER, engines)))
        else:
            service = [Target(args.tokenizer_service.endpoint.rstrip("/"))]
            steps.append(await stack.enter_async_context(Remote(Remotely.SERVICE, lambda: service)))  # noqa: B023  one
    return TokenizerChain(steps, ChainSettings())


async def _local(
    directory: str, engine: Step, stack: AsyncExitStack, failed: Failed, precedence: Callable[[], Precedence] | None
) -> list[Step]:
    try:
        # Only those who tokenize here need these libraries.
        from picker.io.tokenize.files import LocalSettings, TokenizerFilesError  # noqa: PLC0415
        from picker.io.tokenize.local import Local, LocalTokenizer  # noqa: PLC0415
        from picker.io.tokenize.verified import Verified  # noqa: PLC0415
    except ImportError as error:
        logger.error("Prompts are not tokenized here; install tokenizers and jinja2", error=str(error))  # noqa: TRY400
        return []
    try:
        tokenizer = await asyncio.to_thread(LocalTokenizer.load, LocalSettings(directory))
    except TokenizerFilesError as error:
        logger.error("Prompts are not tokenized here", error=str(error))  # noqa: TRY400
        return []
    local = Local(tokenizer, precedence=precedence)
    stack.callback(local.close)
    verified = Verified(local, engine, failed=failed)
    stack.push_async_callback(verified.close)
    return [verified]
