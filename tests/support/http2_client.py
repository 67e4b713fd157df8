"""An HTTP/2 client with prior knowledge: several requests at once on one connection."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import h2.config
import h2.connection
import h2.events

from tests.support.http_client import Answer


async def send_all(port: int, path: str, bodies: Sequence[bytes], tags: Sequence[str]) -> list[Answer]:
    """POST every body as a stream of its own, all on one connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    http2 = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding="utf-8"))
    http2.initiate_connection()
    unsent: dict[int, bytes] = {}
    answers: dict[int, Answer] = {}
    for body, tag in zip(bodies, tags, strict=True):
        stream = http2.get_next_available_stream_id()
        fields = {":method": "POST", ":scheme": "http", ":authority": "test", ":path": path, "x-tag": tag}
        http2.send_headers(stream, list(fields.items()))
        unsent[stream] = body
        answers[stream] = Answer(0, {}, b"")
    left = set(answers)
    try:
        while left:
            _upload(http2, unsent)
            writer.write(http2.data_to_send())
            data = await asyncio.wait_for(reader.read(65536), 10)
            assert data, "the connection was closed"
            for event in http2.receive_data(data):
                if isinstance(event, h2.events.ResponseReceived):
                    answers[event.stream_id].headers = dict(event.headers)
                    answers[event.stream_id].status = int(answers[event.stream_id].headers[":status"])
                elif isinstance(event, h2.events.DataReceived):
                    answers[event.stream_id].body += event.data
                    http2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
                elif isinstance(event, h2.events.StreamEnded | h2.events.StreamReset):
                    left.discard(event.stream_id)
    finally:
        writer.close()
    return list(answers.values())


def _upload(http2: h2.connection.H2Connection, unsent: dict[int, bytes]) -> None:
    """Send as much of the bodies as the windows allow."""
    for stream in list(unsent):
        while stream in unsent:
            body = unsent[stream]
            room = min(http2.local_flow_control_window(stream), http2.max_outbound_frame_size)
            if room <= 0 < len(body):
                break
            http2.send_data(stream, body[:room], end_stream=len(body) <= room)
            unsent[stream] = body[room:]
            if not unsent[stream]:
                del unsent[stream]
