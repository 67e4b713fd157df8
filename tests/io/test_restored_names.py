"""Which responses get the name back that the client asked for, by how their bodies are encoded."""

from __future__ import annotations

from collections import Counter

import pytest

from picker.core.exchange.effects import Answered, Side, StreamedBody
from picker.core.exchange.events import BodyMode, ResponseBody, ResponseHeaders
from picker.core.models import Rewritten
from picker.io.extproc.model_names import RestoredNames


@pytest.mark.parametrize(
    ("encoding", "outcome"),
    [
        (None, "restored"),
        (b"identity", "restored"),
        (b"Identity ", "restored"),
        (b"gzip", "compressed"),
        (b"identity, br", "compressed"),
    ],
)
def test_only_what_is_compressed_passes_as_it_is(encoding, outcome):
    counts = Counter()
    names = RestoredNames(Rewritten("fast", "org/m"), counts)
    headers = {} if encoding is None else {"content-encoding": encoding}
    names.apply((Answered(200, headers),), ResponseHeaders(200), BodyMode.FULL_DUPLEX_STREAMED)
    body = b'{"model":"org/m"}'
    piece = StreamedBody(Side.RESPONSE, body, end_of_stream=True)
    (sent,) = names.apply((piece,), ResponseBody(body, end_of_stream=True), BodyMode.FULL_DUPLEX_STREAMED)
    assert sent.data == (b'{"model":"fast"}' if outcome == "restored" else body)
    assert counts == {outcome: 1}
