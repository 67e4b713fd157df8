"""llm-d's and the Gateway API Inference Extension's `EndpointPickerConfig`, put into the picker's own shape.

Strict as there: unknown keys, references and plugins are errors. What is served differently here is a warning, and
what would send requests to the wrong endpoints is refused with what to do instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from picker.app.migration.endpoint_picker_admission import DETECTOR, admit
from picker.app.migration.endpoint_picker_document import API_VERSIONS, EndpointPickerConfig, Plugin, Profile, Reference
from picker.app.migration.endpoint_picker_plugins import (
    APPROXIMATE,
    PLUGINS,
    Parameter,
    Role,
    Theirs,
    arguments_of,
)
from picker.app.migration.mapped import Mapped
from picker.core.plugins.profiles import PROFILES, ProfileName
from picker.core.plugins.registry import PLUGINS as OURS
from picker.core.strict import Findings, child, decode, suggest

_PRECISE = ("precise-prefix-cache-producer", "precise-prefix-cache-scorer")
_APPROXIMATE = "approx-prefix-cache-producer"
_SESSION = "session-prefix-cache-producer"
_BY_NAME = "prefix-cache-scorer"
_STAGES = {"prefill", "decode"}
_UNCHECKED: Mapping[str, str] = {
    "dataLayer": "endpoints and their metrics are read as `endpoints` and `scrape` say",
    "requestHandler": "requests are told apart by their path",
    "parser": "requests are told apart by their path",
    "engineConfigs": "which engine a pod runs is told by its label",
}
_GATES = ("flowControl", "haPopulateNonLeaderDatastore", "dataLayer", "prepareDataPlugins", "enableLegacyMetrics")
_LEAST_BLOCK_TOKENS = 64


def translate(data: Mapping[str, Any], findings: Findings) -> tuple[dict[str, Any], tuple[Mapped, ...]]:
    """The same in the picker's shape, and what became of each part; `findings` has what is wrong or different."""
    config: EndpointPickerConfig | None = decode(EndpointPickerConfig, data, "", findings)
    if config is None:
        return {}, ()
    if config.api_version not in API_VERSIONS:
        findings.add("apiVersion", "is not known", config.api_version, suggest(config.api_version, API_VERSIONS))
    return _Translation(config, findings).run(data)


class _Translation:
    """One configuration on its way."""

    def __init__(self, config: EndpointPickerConfig, findings: Findings) -> None:
        self._config = config
        self._findings = findings
        self._plugins: dict[str, tuple[str, Plugin]] = {}
        """By the name that references use: where it stands, and the plugin."""
        self._filters: list[str] = []
        self._scorers: dict[str, float] = {}
        self._arguments: dict[str, dict[str, Any]] = {}
        self._disaggregation: dict[str, Any] = {}
        self._exchange: dict[str, Any] = {}
        self._mapped: list[Mapped] = []

    def run(self, data: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[Mapped, ...]]:
        self._declare()
        used: set[str] = set()
        for path, reference in self._references():
            used.add(reference.plugin_ref)
            known = self._plugins.get(reference.plugin_ref)
            if known is None:
                remedy = suggest(reference.plugin_ref, self._plugins)
                self._findings.add(child(path, "pluginRef"), "is not under plugins", reference.plugin_ref, remedy)
            else:
                self._use(*known, reference.weight, path)
        self._separate()
        self._know_prefixes()
        detectors = [(child(path, "parameters"), plugin.parameters) for path, plugin in self._of_type(DETECTOR)]
        admission, said = admit(self._config, detectors, self._findings)
        self._mapped += said
        self._say_what_is_left(used)
        self._say_sections(data)
        if self._findings.problems:
            return {}, ()
        scheduler = {
            "pluginConfig": [{"name": name, "args": args} for name, args in self._arguments.items()],
            **({"disaggregation": self._disaggregation} if self._disaggregation else {}),
            "plugins": {
                "Filter": {"enabled": self._filters},
                "Score": {"enabled": [{"name": name, "weight": weight} for name, weight in self._scorers.items()]},
            },
        }
        ours = {"scheduler": scheduler, "exchange": self._exchange, "admission": admission}
        return ours, tuple(self._mapped)

    def _declare(self) -> None:
        for index, plugin in enumerate(self._config.plugins):
            path = child("plugins", index)
            name = plugin.name or plugin.type
            if plugin.type not in PLUGINS:
                remedy = suggest(plugin.type, PLUGINS)
                self._findings.add(child(path, "type"), "is a plugin that is not known here", plugin.type, remedy)
                continue
            if name in self._plugins:
                self._findings.add(path, "has the name of another plugin", name, "give it a name of its own")
            self._plugins[name] = (path, plugin)
            theirs = PLUGINS[plugin.type]
            if theirs.role is Role.REFUSED:
                self._findings.add(child(path, "type"), "is not supported", plugin.type, theirs.remark)

    def _references(self) -> Iterator[tuple[str, Reference]]:
        """The plugins of the profile that answers; as there, all plugins where there is no profile."""
        profiles = self._config.scheduling_profiles
        if not profiles:
            for name, (path, _) in self._plugins.items():
                yield path, Reference(name)
            return
        names = [profile.name for profile in profiles]
        chosen = names.index("decode") if "decode" in names else 0
        if len(profiles) > 1 and set(names) != _STAGES:
            remedy = "keep one, or prefill and decode"
            self._findings.add("schedulingProfiles", "are not those that are known here", names, remedy)
        for index, profile in enumerate(profiles):
            if index != chosen and not self._same_scores(profile, profiles[chosen]):
                path = child("schedulingProfiles", index)
                self._findings.warn(path, f"has no effect: endpoints are chosen as {names[chosen]} says, of each role")
            path = child(child("schedulingProfiles", index), "plugins")
            for number, reference in enumerate(profile.plugins):
                if index == chosen or reference.plugin_ref not in self._plugins:
                    yield child(path, number), reference

    def _same_scores(self, one: Profile, other: Profile) -> bool:
        def scores(profile: Profile) -> dict[str, float]:
            roles = {name: PLUGINS[plugin.type].role for name, (_, plugin) in self._plugins.items()}
            used = (Role.SCORER, Role.FILTER, Role.PREFIX)
            return {each.plugin_ref: each.weight for each in profile.plugins if roles.get(each.plugin_ref) in used}

        return scores(one) == scores(other)

    def _use(self, where: str, plugin: Plugin, weight: float, path: str) -> None:
        theirs = PLUGINS[plugin.type]
        match theirs.role:
            case Role.SCORER:
                self._score(plugin.type, theirs.ours, weight, path, theirs.remark)
                self._arguments.update(self._take(theirs, plugin, child(where, "parameters")))
            case Role.FILTER:
                self._filters.append(theirs.ours)
                self._mapped.append(Mapped(plugin.type, f"{theirs.ours}, a filter", theirs.remark))
                self._arguments.update(self._take(theirs, plugin, child(where, "parameters")))
            case Role.DECIDER | Role.DETECTOR:
                pass
            case Role.PREFIX:
                self._prefix(plugin, weight, path, child(where, "parameters"))
            case Role.IGNORED:
                self._findings.warn(path, f"{plugin.type} has no effect: {theirs.remark}")
                self._mapped.append(Mapped(plugin.type, "", theirs.remark))
            case Role.BUILT_IN:
                self._mapped.append(Mapped(plugin.type, "", theirs.remark or "built in"))
                self._pick_more(plugin, child(where, "parameters"))
            case Role.REFUSED:
                pass

    def _score(self, type_: str, ours: str, weight: float, path: str, remark: str = "") -> None:
        if weight < 0:
            self._findings.add(child(path, "weight"), "must be at least 0", weight, "negative weights prefer the worst")
        elif weight == 0:
            self._mapped.append(Mapped(f"{type_}, weight 0", "", "weighs nothing"))
        elif ours in self._scorers:
            self._findings.add(path, f"{ours} is what stands for another scorer already", type_, "keep one of them")
        else:
            self._scorers[ours] = weight
            self._mapped.append(Mapped(f"{type_}, weight {weight:g}", f"{ours}, weight {weight:g}", remark))

    def _take(self, theirs: Theirs, plugin: Plugin, path: str) -> dict[str, dict[str, Any]]:
        arguments = self._arguments_of(theirs.parameters, plugin.parameters, path)
        return {theirs.ours: arguments} if arguments else {}

    def _arguments_of(self, known: Mapping[str, Parameter], given: Mapping[str, Any], path: str) -> dict[str, Any]:
        arguments, mapped = arguments_of(known, given, path, self._findings)
        self._mapped += mapped
        return arguments

    def _prefix(self, scorer: Plugin, weight: float, path: str, parameters: str) -> None:
        """A scorer of cached prefixes becomes the plugin that knows them."""
        name = scorer.parameters.get("prefixMatchInfoProducerName", "")
        where, producer = (
            self._plugins.get(name, (parameters, scorer)) if isinstance(name, str) else (parameters, scorer)
        )
        if name and producer is scorer:
            self._findings.add(child(parameters, "prefixMatchInfoProducerName"), "is not under plugins", name)
        if producer.type in _PRECISE or scorer.parameters.get("mode") == "cache_tracking":
            self._precise(scorer, producer, weight, path, where)
            return
        if producer.type == _SESSION:
            self._score(scorer.type, _BY_NAME, weight, path, "the part of the conversation that an endpoint holds")
            self._arguments[_BY_NAME] = {"prefixMatchInfoProducerName": _SESSION}
            return
        self._score(scorer.type, "prefix-cache", weight, path, "matches bytes, four a token")
        self._arguments["prefix-cache"] = self._approximate(scorer.parameters, parameters)

    def _approximate(self, own: Mapping[str, Any], path: str) -> dict[str, Any]:
        """The arguments of `prefix-cache`, from those of the producer there and of a scorer that is one itself."""
        given: dict[str, Any] = {}
        for where, plugin in self._of_type(_APPROXIMATE):
            given |= plugin.parameters
            path = path if own else child(where, "parameters")
        given |= own
        defaults = msgspec.structs.asdict(PROFILES[ProfileName.LLM_D].args["prefix-cache"])
        arguments = defaults | self._arguments_of(APPROXIMATE, given, path)
        size, tokens = arguments["blockSizeToHash"], given.get("maxPrefixTokensToMatch")
        if "blockSizeTokens" in given and type(size) is int:
            size = arguments["blockSizeToHash"] = max(size, 4 * _LEAST_BLOCK_TOKENS)
        if type(tokens) is int and type(size) is int and "maxPrefixBlocksToMatch" not in given:
            arguments["maxBlocksToMatch"] = max(1, 4 * tokens // max(1, size))
        return arguments

    def _precise(self, scorer: Plugin, producer: Plugin, weight: float, path: str, where: str) -> None:
        remark = "follows the engines' own KV events; their block size and hash seed need not be told"
        self._score(scorer.type, "kvcache-aware", weight, path, remark)
        self._arguments["kvcache-aware"] = self._events(producer, where)

    def _events(self, producer: Plugin, path: str) -> dict[str, Any]:
        """The arguments of `kvcache-aware`, from where the endpoint picker there hears of events."""
        events = _section(producer.parameters, "kvEventsConfig")
        discovery = _section(events, "podDiscoveryConfig")
        if events.get("zmqEndpoint"):
            self._findings.add(
                child(child(path, "kvEventsConfig"), "zmqEndpoint"),
                "has engines connect to the endpoint picker, and here the picker connects to them",
                events["zmqEndpoint"],
                'remove it, and have engines publish at "tcp://*:5557"',
            )
        replay = discovery.get("replaySocketPort")
        return {
            "indexMode": "direct",
            "zmqReplay": bool(replay),
            **({"zmqPort": discovery["socketPort"]} if "socketPort" in discovery else {}),
            **({"zmqReplayPort": replay} if replay else {}),
            **({"topic": events["topicFilter"]} if "topicFilter" in events else {}),
        }

    def _separate(self) -> None:
        """What deciders say of prompts that are computed elsewhere, wherever they are referred to."""
        for path, plugin in self._plugins.values():
            theirs = PLUGINS[plugin.type]
            if theirs.role is Role.DECIDER:
                said = self._arguments_of(theirs.parameters, plugin.parameters, child(path, "parameters"))
                self._disaggregation = said or {"minUncachedTokens": 0}
                least = self._disaggregation["minUncachedTokens"]
                setting = f"scheduler.disaggregation.minUncachedTokens: {least}"
                self._mapped.append(Mapped(plugin.type, setting, theirs.remark))

    def _know_prefixes(self) -> None:
        """Plugins that go by what a prompt means to endpoints need someone who knows, as there without being told."""
        used = (*self._filters, *self._scorers)
        if {"prefix-cache", "kvcache-aware", _BY_NAME}.isdisjoint(used) and any(
            OURS[name].counts_work for name in used
        ):
            for path, plugin in self._plugins.values():
                if plugin.type in _PRECISE:
                    self._arguments["kvcache-aware"] = self._events(plugin, path)
                    return
            self._arguments["prefix-cache"] = self._approximate({}, "plugins")

    def _of_type(self, type_: str) -> list[tuple[str, Plugin]]:
        return [each for each in self._plugins.values() if each[1].type == type_]

    def _pick_more(self, plugin: Plugin, path: str) -> None:
        """How many endpoints a picker names becomes how many fallbacks follow the first."""
        if not plugin.type.endswith("-picker") or "maxNumOfEndpoints" not in plugin.parameters:
            return
        most = plugin.parameters["maxNumOfEndpoints"]
        if type(most) is not int or most < 1:
            self._findings.add(child(path, "maxNumOfEndpoints"), "is not a number of endpoints", most, "give 1 or more")
            return
        self._exchange["fallbacks"] = most - 1
        self._mapped.append(Mapped("maxNumOfEndpoints", f"exchange.fallbacks: {most - 1}"))

    def _say_what_is_left(self, used: set[str]) -> None:
        for name, (_, plugin) in self._plugins.items():
            theirs = PLUGINS[plugin.type]
            if name not in used and theirs.role not in {Role.REFUSED, Role.DECIDER, Role.DETECTOR}:
                built_in = theirs.role is Role.BUILT_IN
                self._mapped.append(Mapped(name, "", theirs.remark or "built in" if built_in else "in no profile"))

    def _say_sections(self, data: Mapping[str, Any]) -> None:
        for key, why in _UNCHECKED.items():
            if key in data:
                self._mapped.append(Mapped(key, "", why))
        for index, gate in enumerate(self._config.feature_gates):
            name = gate.partition("=")[0]
            path = child("featureGates", index)
            if name not in _GATES:
                self._findings.add(path, "is a feature that is not known here", gate, suggest(name, _GATES))
            elif name == "flowControl":
                continue
            self._mapped.append(Mapped(f"featureGates: {gate}", "", "has no counterpart"))


def _section(data: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    section = data.get(key)
    return section if isinstance(section, dict) else {}
