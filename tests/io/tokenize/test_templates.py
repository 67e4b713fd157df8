"""Chat templates against what `transformers` rendered; see scripts/record_chat_renderings.py."""

from __future__ import annotations

import json
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import pytest

from picker.core.tokens.conversation import Chat, ContentFormat, read_chat
from picker.core.tokens.prompt import EngineRequest, UnsupportedRequestError, read_engine_request
from picker.io.tokenize import templates
from picker.io.tokenize.templates import ChatTemplate

DATA = Path(__file__).parents[2] / "data" / "chat_templates"
CASES = json.loads((DATA / "cases.json").read_text(encoding="utf-8"))
HELLO = Chat([{"role": "user", "content": "Hello"}])


@cache
def template(name: str) -> ChatTemplate:
    return ChatTemplate((DATA / f"{name}.jinja").read_text(encoding="utf-8"), {"bos_token": "<s>", "eos_token": "</s>"})


@pytest.mark.parametrize("case", CASES, ids=[f"{n}-{case['template']}" for n, case in enumerate(CASES)])
def test_a_request_renders_as_the_engine_renders_it(case: dict[str, Any]) -> None:
    request = read_engine_request("/v1/chat/completions", json.dumps(case["body"]).encode())
    assert isinstance(request, EngineRequest)
    assert template(case["template"]).render(read_chat(request), seconds=5) == case["rendered"]


@pytest.mark.parametrize(
    ("source", "form"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", ContentFormat.STRING),
        ("{% for m in messages %}{% for c in m.content %}{{ c }}{% endfor %}{% endfor %}", ContentFormat.OPENAI),
        ("{% for m in messages %}{% for c in m['content'] %}{{ c }}{% endfor %}{% endfor %}", ContentFormat.OPENAI),
        (
            "{% set l = messages[1:] %}{% for m in l %}{% for c in m.content|list %}{% endfor %}{% endfor %}",
            ContentFormat.OPENAI,
        ),
        (
            "{% set a = messages %}{% set b = a %}{% for m in b %}{% for c in m.content %}{% endfor %}{% endfor %}",
            ContentFormat.OPENAI,
        ),
        ("{% for m in messages %}{% for c in m.tool_calls %}{% endfor %}{% endfor %}", ContentFormat.STRING),
        ("{% for m in others %}{% for c in m.content %}{% endfor %}{% endfor %}", ContentFormat.STRING),
        ("{% macro r(content) %}{% for c in content %}{% endfor %}{% endmacro %}{{ r(1) }}", ContentFormat.OPENAI),
        ("{% macro r(items) %}{% for c in items %}{% endfor %}{% endmacro %}{{ r(1) }}", ContentFormat.STRING),
        ("{% for k, v in messages %}{% endfor %}{% set x, y = messages %}", ContentFormat.STRING),
        ("{% set messages = messages[1:] %}{% for m in messages %}{{ m }}{% endfor %}", ContentFormat.STRING),
    ],
)
def test_the_content_format_is_found_in_the_template(source: str, form: ContentFormat) -> None:
    assert ChatTemplate(source, {}).content_format is form


def test_the_content_formats_of_whole_templates() -> None:
    forms = {path.stem: template(path.stem).content_format.value for path in DATA.glob("*.jinja")}
    assert forms == {
        "chatml-tools": "string",
        "llama3": "string",
        "mistral": "string",
        "deepseek": "string",
        "gemma": "openai",
        "plain": "string",
    }


def test_a_template_may_ask_for_the_date() -> None:
    year = str(datetime.now().year)  # noqa: DTZ005
    assert ChatTemplate("{{ strftime_now('%Y') }}", {}).render(HELLO, 1) == year


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('not this') }}",
        "{{ messages[0].content.nothing.more }}",
        "{{ messages[0]['content'] + 1 }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% for i in range(1000000) %}{% endfor %}",
        "{% for m in messages %}{{ m.content | unknown }}{% endfor %}",
    ],
)
def test_templates_that_fail_or_leave_the_sandbox_make_no_prompt(source: str) -> None:
    with pytest.raises((UnsupportedRequestError, jinja2.TemplateError)):
        assert not ChatTemplate(source, {}).render(HELLO, 1)


def test_a_template_is_stopped_when_it_renders_for_too_long_or_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    endless = ChatTemplate("{% for i in range(90000) %}{% for i in range(90000) %}x{% endfor %}{% endfor %}", {})
    with pytest.raises(UnsupportedRequestError, match="for more than"):
        endless.render(HELLO, 0.02)
    monkeypatch.setattr(templates, "MAX_CHARACTERS", 100)
    with pytest.raises(UnsupportedRequestError, match="more than 100 characters"):
        endless.render(HELLO, 5)


@pytest.mark.parametrize(
    ("source", "messages"),
    [
        ("{% for m in messages %}{{ m.role }}{% endfor %}", [{"role": "assistant", "content": "gone"}]),
        ("{% for m in messages %}{% for c in m.content %}{{ c.text }}{% endfor %}{% endfor %}", [{"role": "user"}]),
        ("x", []),
    ],
)
def test_a_final_message_that_is_not_there_cannot_be_continued(source: str, messages: list[Any]) -> None:
    chat = Chat(messages, add_generation_prompt=False, continue_final_message=True)
    with pytest.raises(UnsupportedRequestError, match="continue_final_message"):
        ChatTemplate(source, {}).render(chat, 1)
