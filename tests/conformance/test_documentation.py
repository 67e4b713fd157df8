"""docs/conformance.md names tests that exist, and no test of the public suite is left out."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "conformance.md").read_text()
SUITE = {
    "EppUnAvailableFailOpen",
    "GatewayDestinationEndpointServed",
    "GatewayFollowingEPPRouting",
    "GatewayFollowingEPPRoutingWithDataParallelism",
    "GatewayWeightedAcrossTwoInferencePools",
    "HTTPRouteInvalidInferencePoolRef",
    "HTTPRouteMultipleGatewaysDifferentPools",
    "HTTPRouteMultipleRulesDifferentPools",
    "InferencePoolAccepted",
    "InferencePoolAppProtocol",
    "InferencePoolControllerName",
    "InferencePoolHTTPRoutePortValidation",
    "InferencePoolInvalidEPPService",
    "InferencePoolMissingEPPRef",
    "InferencePoolResolvedRefsCondition",
}
"""The tests of the public suite, as of August 2026."""


def test_every_test_that_is_referred_to_exists():
    found = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)
    assert len(found) > 20
    for path, name in found:
        assert re.search(rf"^(async )?def {name}\(", (ROOT / path).read_text(), re.MULTILINE), f"{path}::{name}"


def test_every_test_of_the_public_suite_is_there_or_has_a_reason():
    rows = re.findall(r"^\| `([A-Z]\w+)` \| \S", PAGE, re.MULTILINE)
    assert sorted(rows) == sorted(SUITE)
