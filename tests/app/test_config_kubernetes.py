"""`endpoints.kubernetes`: what it takes, what it refuses, and what is made of it."""

from __future__ import annotations

import pytest
import yaml

from picker.app.config import ConfigError, effective, load
from picker.app.kubernetes import kubernetes_settings
from picker.core.kubernetes.pools import PoolGroup, Selection


def loaded(text):
    return load(f"endpoints: {{kubernetes: {text}}}").config


def test_a_pool():
    config = loaded("{pool: {name: llama, group: inference.networking.x-k8s.io}, namespace: models}")
    settings = kubernetes_settings(config.endpoints.kubernetes)
    assert (settings.source, settings.group, settings.namespace) == ("llama", PoolGroup.V1ALPHA2, "models")
    assert kubernetes_settings(loaded("{pool: {name: llama}}").endpoints.kubernetes).group is PoolGroup.V1


def test_a_selector():
    config = loaded('{selector: "app=vllm,role in (decode,both)", ports: [8000, 8001], engine: sglang}')
    settings = kubernetes_settings(config.endpoints.kubernetes)
    assert settings.source == Selection("app=vllm,role in (decode,both)", (8000, 8001))
    assert (settings.engine, settings.namespace, settings.kubeconfig) == ("sglang", "", "")


@pytest.mark.parametrize("text", ["{pool: {name: a}}", "{selector: a=b, ports: [1], kubeconfig: k, context: c}"])
def test_what_is_in_force_can_be_read_again(text):
    config = loaded(text)
    assert load(yaml.safe_dump(effective(config))).config == config


def test_times():
    config = loaded("{pool: {name: a}, requestSeconds: 1, watchSeconds: 2, silenceSeconds: 3, longestRetrySeconds: 4}")
    settings = kubernetes_settings(config.endpoints.kubernetes)
    assert (settings.api.request, settings.watch.watch, settings.api.silence, settings.watch.longest_pause) == (
        1,
        2,
        3,
        4,
    )


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{}", ": has neither pool nor selector; name an InferencePool, or write a label selector and ports"),
        ("{pool: {name: a}, selector: a=b}", ": has both pool and selector; name an InferencePool"),
        ("{pool: {}}", ".pool.name: is missing; add it"),
        ("{pool: {name: A_b}}", '.pool.name: "A_b": does not match'),
        ("{pool: {name: a, group: x}}", '.pool.group: "x": is none of inference.networking.k8s.io, inference'),
        ("{pool: {name: a}, ports: [1]}", ".ports: [1]: belongs to selector; remove it"),
        ("{selector: a=b}", ".ports: is missing; add the ports that the pods serve on, such as [8000]"),
        ("{selector: a=b, ports: [0]}", ".ports[0]: 0: must be at least 1"),
        ("{selector: a=b, ports: [1, 1]}", ".ports: [1, 1]: has a port twice; remove one of them"),
        ("{selector: a=b, ports: [1, 2, 3, 4, 5, 6, 7, 8, 9]}", ".ports: has 9 entries; at most 8 are supported"),
        ("{selector: a b, ports: [1]}", '.selector: "a b": "a b" is no label selector; write such as "app=vllm,'),
        ("{pool: {name: a}, context: c}", '.context: "c": belongs to kubeconfig; name the kubeconfig too'),
        ("{pool: {name: a}, labelSelector: x}", '.labelSelector: "x": unknown key; did you mean "selector"?'),
    ],
)
def test_what_is_refused(text, problem):
    with pytest.raises(ConfigError) as caught:
        loaded(text)
    assert str(caught.value).splitlines()[0].startswith("endpoints.kubernetes" + problem)
