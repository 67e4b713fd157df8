"""The `sessionSticky` section: Kthena's keys, and what is wrong with others."""

from __future__ import annotations

import pytest

from picker.app.config import ConfigError, effective, load
from picker.core.sticky import Source, SourceType

KTHENA = """
sessionSticky:
  backend: redis
  redis: {address: redis:6379}
  sessionAffinitySeconds: 60
  sources:
    - {type: Header, name: X-Session-ID}
    - {type: Query, name: session_id}
    - {type: Cookie, name: session_sid}
    - {type: JWTClaim, name: sid}
"""


def test_the_sections_of_router_and_model_server_paste_in():
    loaded = load(KTHENA)
    sticky = loaded.config.session_sticky
    assert sticky.sources == (
        Source(SourceType.HEADER, "X-Session-ID"),
        Source(SourceType.QUERY, "session_id"),
        Source(SourceType.COOKIE, "session_sid"),
        Source(SourceType.JWT_CLAIM, "sid"),
    )
    assert (sticky.backend, sticky.redis.address, sticky.session_affinity_seconds) == ("redis", "redis:6379", 60)
    assert load("{}").config.session_sticky.session_affinity_seconds == 300
    assert load(str(effective(loaded.config))).config == loaded.config
    assert not [warning for warning in loaded.warnings if "sessionSticky" in warning]


@pytest.mark.parametrize(
    ("section", "problem"),
    [
        ("{sources: [{type: Headers, name: x}]}", "sessionSticky.sources[0].type"),
        ("{sources: [{type: Header, name: ''}]}", "sessionSticky.sources[0].name"),
        ("{sources: [{type: Header}]}", "sessionSticky.sources[0].name"),
        (f"{{sources: [{', '.join(['{type: Header, name: x}'] * 17)}]}}", "has 17 entries; keep at most 16"),
        ("{sessionAffinitySeconds: 0}", "sessionSticky.sessionAffinitySeconds"),
        ("{backend: mysql}", "sessionSticky.backend"),
        ("{modelServer: nothing}", "use namespace/name of a ModelServer"),
        ("{redis: {address: 'redis'}}", "sessionSticky.redis.address"),
        ("{sessionAfinitySeconds: 3}", "sessionAffinitySeconds"),
    ],
)
def test_what_is_wrong_is_named(section, problem):
    with pytest.raises(ConfigError) as raised:
        load(f"sessionSticky: {section}")
    assert problem in str(raised.value)


def test_what_has_no_effect_is_said():
    def warnings(section):
        return [warning for warning in load(f"sessionSticky: {section}").warnings if "sessionSticky" in warning]

    assert "no session sticks" in warnings("{backend: redis, redis: {address: 'redis:6379'}}")[0]
    assert "use backend: redis" in warnings("{sources: [{type: Header, name: x}], redis: {address: 'r:1'}}")[0]
    assert warnings("{sources: [{type: Header, name: x}]}") == warnings("{}") == []
