"""Chat templates, rendered as Hugging Face's `apply_chat_template` renders them.

The environment is `transformers`': a sandbox, trimmed blocks, loop controls, a `tojson` that escapes nothing,
`raise_exception`, `strftime_now` and the `generation` tag. A template is configuration, the messages come from
strangers: they can make a template long, so that what it renders is bounded in time and size while it renders.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from picker.core.tokens.conversation import Chat, ContentFormat, conversation
from picker.core.tokens.prompt import UnsupportedRequestError

MAX_CHARACTERS = 8_000_000
"""The longest prompt; one of a million tokens has some four million characters."""

_CONTINUE = "CONTINUE_FINAL_MESSAGE_TAG "
"""Marks where the final message ends; that of `transformers`, as templates may trim its blank or not."""


class _Generation(Extension):
    """`{% generation %}` marks what an assistant said, for training; it renders what it encloses."""

    tags = {"generation"}  # noqa: RUF012  jinja2 declares it

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_enclosed"), [], [], body).set_lineno(line)

    def _enclosed(self, caller: Callable[[], str]) -> str:
        return caller()


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)  # noqa: DTZ005  engines use their local time, too


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplate:
    """One compiled template. `variables` are always seen by it: the tokenizer's special tokens, by name.

    `content_format` is what the template takes as content, found as vLLM finds it unless it is given. Raises
    jinja2.TemplateError when the source is no template.
    """

    def __init__(self, source: str, variables: Mapping[str, str], form: ContentFormat | None = None) -> None:
        environment = _environment()
        self._template = environment.from_string(source)
        self._variables = dict(variables)
        self.content_format = form or content_format(environment.parse(source))

    def render(self, chat: Chat, seconds: float) -> str:
        """Return the prompt of a chat. Raises UnsupportedRequestError when there is none, or not within `seconds`."""
        messages = conversation(chat.messages, self.content_format)
        final = _mark_final(messages) if chat.continue_final_message else None
        variables = {
            **self._variables,
            **chat.variables,
            "messages": messages,
            "tools": chat.tools,
            "documents": chat.documents,
            "add_generation_prompt": chat.add_generation_prompt,
        }
        try:
            prompt = "".join(_bounded(self._template.generate(**variables), seconds))
        except UnsupportedRequestError:
            raise
        except Exception as error:
            # A template may raise anything over messages that it was not written for; so does the engine's.
            raise UnsupportedRequestError(f"the chat template failed: {str(error)[:200]}") from error
        return prompt if final is None else _cut_after(prompt, final)


def _bounded(pieces: Iterable[str], seconds: float) -> Iterator[str]:
    deadline, size = time.monotonic() + seconds, 0
    for piece in pieces:
        size += len(piece)
        if size > MAX_CHARACTERS:
            raise UnsupportedRequestError(f"the chat template renders more than {MAX_CHARACTERS} characters")
        if time.monotonic() > deadline:
            raise UnsupportedRequestError(f"the chat template renders for more than {seconds} s")
        yield piece


def _mark_final(messages: list[dict[str, Any]]) -> str:
    """Mark where the final text of the final message ends, and return that text."""
    content = messages[-1]["content"] if messages else None
    if isinstance(content, str):
        messages[-1]["content"] += _CONTINUE
        return content
    if not content:
        raise UnsupportedRequestError("continue_final_message is set, but there is no text to continue")
    text: str = content[-1]["text"]
    content[-1]["text"] += _CONTINUE
    return text


def _cut_after(prompt: str, final: str) -> str:
    """Cut a prompt after its final message; where the template trimmed the mark, its text lost trailing blanks too."""
    at = prompt.rfind(_CONTINUE.strip())
    if at < 0 or final.strip() not in prompt:
        raise UnsupportedRequestError("continue_final_message is set, but the template drops the final message")
    return prompt[:at] if prompt.startswith(_CONTINUE, at) else prompt[:at].rstrip()


def content_format(template: nodes.Template) -> ContentFormat:
    """Tell what a template takes as content, as vLLM does when it is not told.

    A template that loops over the content of a message, or over a variable called `content`, takes a list of parts.
    Messages are the items of loops over `messages`, or over what was assigned from it; filters, tests and slices in
    between make no difference.
    """
    names = ["messages"]
    for name in names:
        names += [
            node.target.name
            for node in template.find_all(nodes.Assign)
            if isinstance(node.target, nodes.Name) and node.target.name not in names and _reads(node.node, name)
        ]
    loops = list(template.find_all(nodes.For))
    items = {
        loop.target.name
        for loop in loops
        if isinstance(loop.target, nodes.Name) and any(_reads(loop.iter, name) for name in names)
    }
    over_content = any(
        _is_name(loop.iter, "content") or any(_reads(loop.iter, item, "content") for item in items) for loop in loops
    )
    return ContentFormat.OPENAI if over_content else ContentFormat.STRING


def _is_name(node: nodes.Node | None, name: str) -> bool:
    return isinstance(node, nodes.Name) and node.name == name


def _reads(node: nodes.Node | None, name: str, key: str | None = None) -> bool:
    """Whether an expression is the variable, or its item `key`, behind any filters, tests and slices."""
    while isinstance(node, nodes.Filter | nodes.Test) or (
        isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
    ):
        node = node.node
    if key is None:
        return _is_name(node, name)
    if isinstance(node, nodes.Getitem):
        return _is_name(node.node, name) and isinstance(node.arg, nodes.Const) and node.arg.value == key
    return isinstance(node, nodes.Getattr) and _is_name(node.node, name) and node.attr == key
