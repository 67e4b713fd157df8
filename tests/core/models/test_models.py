"""Names of models in configuration, requests and responses."""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picker.core.models import ModelRestorer, ModelSettings, Rewrites, replace_model
from picker.core.models.rewrites import Rewrite, Target
from picker.core.strict import Findings

names = st.text(min_size=1, max_size=12)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6) | st.just("model"), inner, max_size=3)
    ),
    max_leaves=12,
)


@given(st.dictionaries(st.text(max_size=6), values, max_size=5), names, names, st.sampled_from([None, 1]), st.randoms())
def test_only_the_model_of_a_request_changes(fields, old, new, indent, dice):
    fields.pop("model", None)
    items = [*fields.items(), ("model", old)]
    dice.shuffle(items)
    body = json.dumps(dict(items), indent=indent, ensure_ascii=dice.random() < 0.5).encode("utf-8", "surrogatepass")
    changed = replace_model(body, new)
    assert json.loads(changed) == {**fields, "model": new}
    # Everything around the value is where it was.
    at = (
        next(n for n, (a, b) in enumerate(zip(body, changed, strict=False)) if a != b) if body != changed else len(body)
    )
    assert body[:at] == changed[:at]
    assert len(changed) - len(body) == len(json.dumps(new, ensure_ascii=False).encode()) - _length(body, old)


def _length(body, old):
    plain, escaped = json.dumps(old, ensure_ascii=False).encode(), json.dumps(old).encode()
    return len(plain) if plain in body else len(escaped)


@pytest.mark.parametrize(
    ("body", "changed"),
    [
        (b'{"model":"a","model" : "b"}', b'{"model":"a","model" : "new"}'),
        (b'{"x":{"model":"a"},"model":"a"}', b'{"x":{"model":"a"},"model":"new"}'),
        (b'{"model": null}', b'{"model": "new"}'),
        (b'{"x": 1.0e400, "model": "a"}', b'{"x": 1.0e400, "model": "new"}'),
        (b'{"x": 1}', None),
        (b'["model"]', None),
        (b'{"model": "a"', None),
        (b"\xff", None),
        (b"", None),
    ],
)
def test_bodies_of_all_kinds(body, changed):
    assert replace_model(body, "new") == changed


STREAM = (
    b'data: {"id":"1","model":"tgt","choices":[{"delta":{"content":"say \\"model\\":\\"tgt\\""}}]}\n\n'
    b'data: {"response": {"model" : "tgt"}, "x": "\\\\"}\r\n\r\n'
    b'data: {"model":"tgt-2","models":"tgt","modem":"tgt"}\n\ndata: [DONE]\n\n'
)
RESTORED = STREAM.replace(b'"model":"tgt"', b'"model":"alias"').replace(b'"model" : "tgt"', b'"model" : "alias"')


@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_a_response_says_what_the_client_asked_for_however_it_is_cut(cuts):
    restorer, out = ModelRestorer("tgt", "alias"), b""
    edges = [0, *sorted(cuts), len(STREAM)]
    for start, end in itertools.pairwise(edges):
        out += restorer.feed(STREAM[start:end], end=False)
        # Nothing is held back that could not be part of a pair.
        assert end - len(out) < 40
    out += restorer.feed(b"", end=True)
    assert out == RESTORED
    assert restorer.replaced == 2


@given(st.binary(max_size=200), st.integers(0, 200))
def test_other_bytes_pass_as_they_are(data, cut):
    restorer = ModelRestorer("tgt", "alias")
    assert restorer.feed(data[:cut], end=False) + restorer.feed(data[cut:], end=True) == data


def test_targets_are_chosen_by_weight():
    rewrites = Rewrites(
        ModelSettings((Rewrite("a", (Target("x", 9), Target("y", 1))), Rewrite("same", (Target("same"),))))
    )
    dice = random.Random(1)
    seen = Counter(rewrites.target("a", dice) for _ in range(10_000))
    assert seen.keys() == {"x", "y"}
    assert 8_800 < seen["x"] < 9_200
    assert rewrites.target("same", dice) is rewrites.target("other", dice) is None
    assert not Rewrites(ModelSettings())


def test_names_that_are_there_twice_or_lead_nowhere_are_refused():
    findings = Findings()
    ModelSettings((Rewrite("a", (Target("x"),)), Rewrite("a", ()))).check("models", findings)
    with pytest.raises(ValueError, match=r"models\.rewrites") as error:
        findings.check()
    assert 'models.rewrites[1].name: "a": is there twice; keep one entry, with all targets' in str(error.value)
    assert "models.rewrites[1].targets: is empty; add a model, or remove the entry" in str(error.value)
