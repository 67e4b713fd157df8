"""Prefill on one endpoint, decode on another: which endpoints do what, and which two take a request.

The decode endpoint is the destination; it asks the prefill endpoint, which it is told in a header, for the KV cache of the
prompt. Both are chosen by the same plugins, each among endpoints of its role, with one look at who holds the prompt.
Roles: the label of llm-d, or labels of a group as in Kthena, in which a pair has the same value of `group_key`.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import numpy as np
from msgspec import Struct

from picker.core.arrays import Flags, Slots
from picker.core.endpoint_table import EndpointTable
from picker.core.endpoints import Endpoint
from picker.core.headers import PREFILLER, SettableHeaderName
from picker.core.scheduling.api import Candidates
from picker.core.scheduling.decision import Decision, PrefillPlace, Reason
from picker.core.scheduling.scheduler import Asked, Matched, Scheduler, narrow

_DECODE = frozenset(("decode", "prefill-decode", "both", "encode-prefill-decode"))
_PREFILL = frozenset(("prefill", "encode-prefill", "prefill-decode", "both", "encode-prefill-decode"))


class PrefillDecodeGroup(Struct, frozen=True, rename="camel"):
    """Which endpoints belong together and what each does, by labels, as Kthena's `pdGroup`."""

    group_key: str = ""
    """The label whose value a prefill and a decode endpoint have in common."""
    prefill_labels: Mapping[str, str] = {}
    """Labels of endpoints that compute prompts."""
    decode_labels: Mapping[str, str] = {}
    """Labels of endpoints that generate."""


class DisaggregationSettings(Struct, frozen=True, rename="camel"):
    """Prefill and decode on endpoints of their own. There is nothing to switch on: endpoints' roles decide."""

    role_label: str = "llm-d.ai/role"
    """The label that says what an endpoint does: `prefill`, `decode`, `both`, ... Without it an endpoint does both."""
    pd_group: PrefillDecodeGroup = PrefillDecodeGroup()
    """Labels instead of `roleLabel`, in force when `groupKey` is set."""
    header: SettableHeaderName = PREFILLER
    """The request header that names the prefill endpoint to the decode endpoint. Clients' own is removed; have
    Envoy remove one of another name, too, for while the picker is down."""
    min_uncached_tokens: int = 256
    """With fewer tokens to compute, the decode endpoint computes them itself."""


class Roles:
    """What each slot does, and the group that it does it in. Made anew when endpoints have changed."""

    def __init__(self, table: EndpointTable, settings: DisaggregationSettings) -> None:
        size = len(table.endpoints)
        self.version = table.version
        self.prefill: Flags = np.zeros(size, np.bool_)
        self.decode: Flags = np.zeros(size, np.bool_)
        self.group = [""] * size
        for slot in table.slots.tolist():
            endpoint = table.endpoints[slot]
            self.prefill[slot], self.decode[slot], self.group[slot] = _role(endpoint, settings)
        dedicated = self.prefill & ~self.decode
        self.split = bool(dedicated.any())
        """Whether any endpoint only computes prompts."""
        by_role = (np.flatnonzero(self.decode), np.flatnonzero(self.prefill))
        self.pools: tuple[Slots, ...] = by_role if self.split else (table.slots,)


def _role(endpoint: Endpoint, settings: DisaggregationSettings) -> tuple[bool, bool, str]:
    labels, group = endpoint.labels, settings.pd_group
    if group.group_key:
        has = labels.items()
        return (
            bool(group.prefill_labels) and group.prefill_labels.items() <= has,
            bool(group.decode_labels) and group.decode_labels.items() <= has,
            labels.get(group.group_key, ""),
        )
    role = labels.get(settings.role_label, "")
    return role in _PREFILL, not role or role in _DECODE, ""


class PrefillDecode:
    """Chooses a decode endpoint, and for prompts that are worth it a prefill endpoint of its group."""

    def __init__(self, settings: DisaggregationSettings) -> None:
        self.settings = settings
        self._roles: Roles | None = None

    def decide(self, scheduler: Scheduler, asked: Asked, candidates: Candidates) -> Decision:
        """Decide as the scheduler alone would while no endpoint is there for prefill only."""
        roles = self._roles_in(candidates.table)
        if not roles.split:
            return scheduler.choose(asked, candidates)
        matched = scheduler.match(asked.request, candidates, asked.rng)
        decoding = narrow(candidates, roles.decode[candidates.slots])
        if not len(decoding.slots):
            return scheduler.choose(asked._replace(reason=Reason.NO_DECODE_ENDPOINT), decoding, matched)
        decision = scheduler.choose(asked, decoding, matched)
        if decision.reason is not Reason.ROUTED:
            return decision
        if decision.tokens < self.settings.min_uncached_tokens:
            return msgspec.structs.replace(decision, prefill_place=PrefillPlace.FEW_TOKENS)
        prefill = self._prefill(scheduler, asked, candidates, matched, roles, decision)
        if prefill is None:
            return msgspec.structs.replace(decision, prefill_place=PrefillPlace.NO_ENDPOINT)
        group = roles.group[decision.slot]
        order = tuple(at for at in decision.order if roles.group[int(decision.slots[at])] == group)
        return msgspec.structs.replace(
            decision,
            order=order,
            headers=((self.settings.header, prefill.destinations[0].encode()),),
            prefill=prefill,
            prefill_place=PrefillPlace.APART,
        )

    def pools(self, table: EndpointTable) -> tuple[Slots, ...]:
        """Those that decode and those that prefill, while some do nothing else than that; else all."""
        return self._roles_in(table).pools

    def _roles_in(self, table: EndpointTable) -> Roles:
        roles = self._roles
        if roles is None or roles.version != table.version:
            roles = self._roles = Roles(table, self.settings)
        return roles

    def _prefill(
        self,
        scheduler: Scheduler,
        asked: Asked,
        candidates: Candidates,
        matched: Matched,
        roles: Roles,
        chosen: Decision,
    ) -> Decision | None:
        """The prefill endpoint of the chosen group; None when there is none that may be used."""
        group = roles.group[chosen.slot]
        able = roles.prefill[candidates.slots]
        able &= candidates.slots != chosen.slot
        if self.settings.pd_group.group_key:
            # Without the label an endpoint is in no group, and in no pair.
            able &= np.array([roles.group[slot] == group != "" for slot in candidates.slots.tolist()], np.bool_)
        if not able.any():
            return None
        decision = scheduler.choose(asked._replace(fallbacks=0, pinned=None), narrow(candidates, able), matched)
        return decision if decision.reason is Reason.ROUTED else None
