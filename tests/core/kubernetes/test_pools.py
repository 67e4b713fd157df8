"""InferencePools in both of their versions, and label selectors as `kubectl -l` takes them."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picker.core.kubernetes.objects import MalformedError
from picker.core.kubernetes.pools import PoolGroup, Selection, read_pool, read_selector
from tests.support.fake_kubernetes.selectors import selects


def pool(spec):
    return json.dumps({"metadata": {"name": "pool"}, "spec": spec}).encode()


def test_version_1():
    spec = {
        "selector": {"matchLabels": {"app": "model", "example.com/tier": "a"}},
        "targetPorts": [{"number": 8000}, {"number": 8001}],
        "appProtocol": "http",
        "endpointPickerRef": {"name": "picker", "port": {"number": 9002}},
    }
    assert read_pool(pool(spec), PoolGroup.V1) == Selection("app=model,example.com/tier=a", (8000, 8001))
    assert PoolGroup.V1.version == "v1"


def test_version_1_alpha_2():
    spec = {"selector": {"app": "model"}, "targetPortNumber": 8000, "extensionRef": {"name": "picker"}}
    assert read_pool(pool(spec), PoolGroup.V1ALPHA2) == Selection("app=model", (8000,))
    assert PoolGroup.V1ALPHA2.version == "v1alpha2"


@pytest.mark.parametrize(
    "spec",
    [
        {},
        {"selector": {"matchLabels": {}}, "targetPorts": [{"number": 1}]},
        {"selector": {"matchLabels": {"a": "b"}}, "targetPorts": []},
        {"selector": {"matchLabels": {"a": "b"}}, "targetPorts": [{"number": 70_000}]},
        {"selector": {"matchLabels": {"a": "b"}}, "targetPorts": [{"number": port} for port in range(1, 10)]},
        {"selector": {"matchLabels": {"a": "b,c=d"}}, "targetPorts": [{"number": 1}]},
        {"selector": {"matchLabels": {"a)": "b"}}, "targetPorts": [{"number": 1}]},
        {"selector": {"a": "b"}, "targetPorts": [{"number": 1}]},
    ],
)
def test_pools_that_cannot_be(spec):
    with pytest.raises(MalformedError):
        read_pool(pool(spec), PoolGroup.V1)


@pytest.mark.parametrize(
    "selector",
    [
        "app=model",
        "app==model, tier!=b",
        "example.com/app in (a, b),!broken,present",
        "role notin (prefill)",
        "a=",
    ],
)
def test_selectors(selector):
    assert read_selector(selector) == selector


@pytest.mark.parametrize(
    "selector",
    ["", "  ", "a b", "a=b=c", "=b", "a in b", "a in (b", "a,,b", "a=b&limit=1", "-a=b", "a" * 5000, 7, None],
)
def test_what_is_no_selector(selector):
    with pytest.raises(ValueError, match=r"selector|everything|text|longer"):
        read_selector(selector)


@given(st.text(alphabet="ab=!,() in\n-/._&", max_size=20))
def test_what_is_taken_for_a_selector_is_one(text):
    try:
        read_selector(text)
    except ValueError:
        return
    selects(text, "")
