"""The `scheduler` section, in the shape of Kthena's `routerConfiguration`, and what it means.

Better than there: a misspelt name, a wrong type and a plugin that does not exist are errors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Self

import msgspec
from msgspec import Meta, Struct

from picker.core.plugins.args import NoArgs
from picker.core.plugins.profiles import PROFILES, Profile, ProfileName
from picker.core.plugins.registry import PLUGINS, SchedulerSpec
from picker.core.scheduling.disaggregation import DisaggregationSettings
from picker.core.strict import Findings, child, decode, suggest

_FILTERS = frozenset(name for name, plugin in PLUGINS.items() if plugin.filter)
_SCORERS = frozenset(name for name, plugin in PLUGINS.items() if plugin.scorer)
_RANDOM = "random"
_LOAD_SCORERS = frozenset(
    name
    for name, plugin in PLUGINS.items()
    if plugin.scorer
    and plugin.scorer(plugin.args()).producer is None
    and name not in (_RANDOM, "no-hit-lru", "prefix-cache-scorer", "lora-affinity")
)


def _plugin(data: object) -> str:
    if not isinstance(data, str):
        raise ValueError("expected the name of a plugin")  # noqa: TRY004  all that is wrong is a ValueError
    if data not in PLUGINS:
        raise ValueError(f"unknown plugin; {suggest(data, PLUGINS)}")
    return data


def _filter(data: object) -> str:
    name = _plugin(data)
    if name not in _FILTERS:
        raise ValueError(f"is not a filter; enable it under Score, or use one of {', '.join(sorted(_FILTERS))}")
    return name


def _scorer(data: object) -> str:
    name = _plugin(data)
    if name not in _SCORERS and PLUGINS[name].producer:
        raise ValueError(
            f'only knows who holds what; enable "prefix-cache-scorer" with prefixMatchInfoProducerName: {name}, or token-cost'
        )
    if name not in _SCORERS:
        raise ValueError(f"does not score; enable it under Filter, or use one of {', '.join(sorted(_SCORERS))}")
    return name


def _disabled(data: object) -> str:
    """The name of a plugin that is not used anyway: also one that we do not have, also with a weight as in Kthena."""
    name = data["name"] if isinstance(data, dict) and "name" in data and data.keys() <= {"name", "weight"} else data
    if not isinstance(name, str):
        raise ValueError("expected the name of a plugin")  # noqa: TRY004  all that is wrong is a ValueError
    return name


_Disabled = Annotated[str, Meta(extra={"read": _disabled})]


class WeightedPlugin(Struct, frozen=True):
    """A plugin that scores. The total of an endpoint is the sum of score * weight."""

    name: Annotated[str, Meta(extra={"read": _scorer})]
    """A plugin that scores."""
    weight: Annotated[float, Meta(gt=0, extra={"remedy": "remove the entry to disable the plugin"})]
    """How much its scores, 0..100, count. Greater than 0; only the ratios matter."""


class FilterPlugins(Struct, frozen=True):
    """Plugins that remove endpoints before scoring."""

    enabled: tuple[Annotated[str, Meta(extra={"read": _filter})], ...] | None = None
    """Names of plugins that filter, in their order. Without it, those of the profile."""
    disabled: tuple[_Disabled, ...] = ()
    """Has no effect, as in Kthena."""


class ScorePlugins(Struct, frozen=True):
    """Plugins that rate the endpoints that are left."""

    enabled: tuple[WeightedPlugin, ...] | None = None
    """Plugins that score, each with its `name` and `weight`. Without it, those of the profile."""
    disabled: tuple[_Disabled, ...] = ()
    """Has no effect, as in Kthena."""


class Plugins(Struct, frozen=True, rename={"filter": "Filter", "score": "Score"}):
    """Which plugins are used."""

    filter: FilterPlugins = FilterPlugins()
    """Plugins that remove endpoints before scoring."""
    score: ScorePlugins = ScorePlugins()
    """Plugins that rate the endpoints that are left."""


class _PluginEntry(Struct, frozen=True):
    name: Annotated[str, Meta(extra={"read": _plugin})]
    args: Mapping[str, Any] = {}


class PluginConfig(Struct, frozen=True):
    """Arguments of one plugin, for all that it does."""

    name: str
    """A plugin. It need not be enabled."""
    args: Struct = NoArgs()
    """Its arguments, listed below for each plugin."""

    @classmethod
    def read(cls, data: object, path: str, findings: Findings) -> Self | None:
        """Read an entry, with arguments of the type that the plugin takes."""
        entry = decode(_PluginEntry, data, path, findings)
        if entry is None:
            return None
        unknown = f'unknown argument of "{entry.name}"'
        args = decode(PLUGINS[entry.name].args, entry.args, child(path, "args"), findings, unknown=unknown)
        if args is None:
            return None
        args = _in_force(args, child(path, "args"), findings)
        if (check := getattr(args, "check", None)) is not None:
            check(child(path, "args"), findings)
        return cls(entry.name, args)


class SchedulerConfig(Struct, frozen=True, rename="camel"):
    """How an endpoint is chosen."""

    profile: ProfileName = ProfileName.TOKEN_COST
    """Which plugins are used where `plugins` does not say it, and with which arguments."""
    plugin_config: tuple[PluginConfig, ...] = ()
    """Arguments of plugins, each entry with a `name` and `args`."""
    plugins: Plugins = Plugins()
    """Which plugins are used."""
    disaggregation: DisaggregationSettings = DisaggregationSettings()
    """Prefill and decode on endpoints of their own."""


def settle(config: SchedulerConfig, path: str, findings: Findings) -> tuple[SchedulerConfig, SchedulerSpec]:
    """Look at the section as a whole, and make explicit what it leaves to defaults."""
    profile = PROFILES[config.profile]
    plugins, enabled = child(path, "plugins"), config.plugins.score.enabled
    if enabled is None:
        enabled = tuple(WeightedPlugin(name, weight) for name, weight in profile.scorers)
    filters = profile.filters if config.plugins.filter.enabled is None else config.plugins.filter.enabled
    scorers = [entry.name for entry in enabled]
    score = child(child(plugins, "Score"), "enabled")
    _refuse_twice(filters, child(child(plugins, "Filter"), "enabled"), findings)
    _refuse_twice(scorers, score, findings)
    if _RANDOM in scorers and len(enabled) > 1:
        findings.warn(score, "random is dropped, since it would only blur the other scores; use it alone")
        enabled = tuple(entry for entry in enabled if entry.name != _RANDOM)
    if not enabled:
        findings.warn(score, "is empty: endpoints are picked by chance")
    elif not _LOAD_SCORERS.intersection(scorers) and _RANDOM not in scorers:
        findings.warn(score, "no plugin looks at load, so endpoints may overload; token-cost would, or least-request")
    for kind, used, unused in (
        ("Filter", filters, config.plugins.filter.disabled),
        ("Score", scorers, config.plugins.score.disabled),
    ):
        for name in sorted(set(used).intersection(unused)):
            where = child(child(plugins, kind), "disabled")
            findings.warn(where, f'does not disable "{name}"; remove it from {kind}.enabled instead')

    by_name: dict[str, PluginConfig] = {}
    for index, entry in enumerate(config.plugin_config):
        if entry.name in by_name:
            findings.warn(child(child(path, "pluginConfig"), index), f'replaces an earlier entry of "{entry.name}"')
        by_name[entry.name] = entry
    producers = _producers((*filters, *scorers), by_name, profile)
    for name in (*filters, *scorers, *producers):
        by_name.setdefault(name, PluginConfig(name, profile.args.get(name) or PLUGINS[name].args()))
    settled = SchedulerConfig(
        config.profile,
        tuple(by_name.values()),
        Plugins(
            msgspec.structs.replace(config.plugins.filter, enabled=filters),
            msgspec.structs.replace(config.plugins.score, enabled=enabled),
        ),
        config.disaggregation,
    )
    weights = tuple((entry.name, entry.weight) for entry in enabled)
    return settled, SchedulerSpec(
        filters, weights, {name: entry.args for name, entry in by_name.items()}, producers, config.disaggregation
    )


def _producers(plugins: Iterable[str], configured: Iterable[str], profile: Profile) -> tuple[str, ...]:
    """What tells plugins who holds what: producers with arguments of their own, and those of the profile."""
    if not any(PLUGINS[name].counts_work for name in plugins):
        return ()
    asked = (name for name in configured if PLUGINS[name].producer)
    return tuple(dict.fromkeys((*asked, *profile.producers)))


def _in_force(args: Struct, path: str, findings: Findings) -> Struct:
    """The arguments with the default for each whole number that is zero or less where the default is not.

    That is what such numbers mean to every plugin, as in Kthena.
    """
    defaults = type(args)()
    changed: dict[str, int] = {}
    for field in msgspec.structs.fields(args):
        value, default = getattr(args, field.name), getattr(defaults, field.name)
        if type(value) is int and value <= 0 < default:
            findings.warn(child(path, field.encode_name), f"{value} means the default, {default}")
            changed[field.name] = default
    return msgspec.structs.replace(args, **changed)


def _refuse_twice(names: Iterable[str], path: str, findings: Findings) -> None:
    seen: set[str] = set()
    for index, name in enumerate(names):
        if name in seen:
            findings.add(child(path, index), "is enabled twice", name, "keep one entry")
        seen.add(name)
