"""An ext_proc server that decides nothing: what a picker is measured against.

It holds the same conversation as the picker (every message parsed, bodies sent back, one destination for all), on the
picker's own transport or, as most would write it, on grpcio's asyncio server. Prints its port as a JSON list and serves
until it is ended.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Callable

import grpc
import grpc.aio
import uvloop

from picker._proto.envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from picker.core.headers import DESTINATION, LB_METADATA
from picker.io.extproc.service import METHOD
from picker.io.rpc import Call
from picker.io.transport.server import Http2Server

_PLAIN_HEADERS = pb.ProcessingResponse(request_headers=pb.HeadersResponse())
_PLAIN_RESPONSE_HEADERS = pb.ProcessingResponse(response_headers=pb.HeadersResponse())


def _routed(destination: str) -> pb.CommonResponse:
    overwrite = pb.HeaderValueOption.HeaderAppendAction.OVERWRITE_IF_EXISTS_OR_ADD
    header = pb.HeaderValue(key=DESTINATION, raw_value=destination.encode())
    option = pb.HeaderValueOption(header=header, append_action=overwrite)
    return pb.CommonResponse(header_mutation=pb.HeaderMutation(set_headers=[option]))


def _streamed(body: pb.HttpBody) -> pb.BodyResponse:
    piece = pb.StreamedBodyResponse(body=body.body, end_of_stream=body.end_of_stream)
    return pb.BodyResponse(response=pb.CommonResponse(body_mutation=pb.BodyMutation(streamed_response=piece)))


class Conversation:
    """The answers of one stream, in the modes of the shipped Envoy configurations."""

    def __init__(self, by_headers: pb.ProcessingResponse, by_body: pb.ProcessingResponse) -> None:
        self._by_headers = by_headers
        self._by_body = by_body
        self._duplex = False
        self._body = b""

    def receive(self, message: pb.ProcessingRequest) -> list[pb.ProcessingResponse]:
        kind = message.WhichOneof("request")
        if kind == "request_headers":
            self._duplex = message.protocol_config.request_body_mode == pb.FULL_DUPLEX_STREAMED
            return [] if self._duplex else [_PLAIN_HEADERS]
        if kind == "request_body":
            if not self._duplex:
                return [self._by_body]
            self._body += message.request_body.body
            if not message.request_body.end_of_stream:
                return []
            whole = pb.HttpBody(body=self._body, end_of_stream=True)
            return [self._by_headers, pb.ProcessingResponse(request_body=_streamed(whole))]
        if kind == "response_headers":
            return [_PLAIN_RESPONSE_HEADERS]
        if kind == "response_body":
            return [pb.ProcessingResponse(response_body=_streamed(message.response_body))]
        raise ValueError(f"a message of kind {kind}, which no benchmark sends")


def _conversations(destination: str) -> Callable[[], Conversation]:
    by_headers = pb.ProcessingResponse(request_headers=pb.HeadersResponse(response=_routed(destination)))
    by_body = pb.ProcessingResponse(request_body=pb.BodyResponse(response=_routed(destination)))
    for answer in (by_headers, by_body):
        answer.dynamic_metadata.update({LB_METADATA: {DESTINATION: destination}})
    return lambda: Conversation(by_headers, by_body)


class _Http2Stream:
    def __init__(self, call: Call, conversation: Conversation) -> None:
        self._call = call
        self._conversation = conversation

    def message(self, data: bytes) -> None:
        for answer in self._conversation.receive(pb.ProcessingRequest.FromString(data)):
            self._call.send(answer.SerializeToString())

    def half_closed(self) -> None:
        self._call.finish()

    def closed(self) -> None:
        pass


async def _serve_http2(make: Callable[[], Conversation]) -> None:
    server = Http2Server({METHOD: lambda call: _Http2Stream(call, make())})
    print(json.dumps([await server.start("127.0.0.1", 0)]), flush=True)
    await asyncio.Event().wait()


async def _serve_grpcio(make: Callable[[], Conversation]) -> None:
    async def process(
        _: object, context: grpc.aio.ServicerContext[pb.ProcessingRequest, pb.ProcessingResponse]
    ) -> None:
        conversation = make()
        while isinstance(message := await context.read(), pb.ProcessingRequest):
            for answer in conversation.receive(message):
                await context.write(answer)

    service, _, method = METHOD[1:].partition("/")
    handler = grpc.stream_stream_rpc_method_handler(
        process,
        request_deserializer=pb.ProcessingRequest.FromString,
        response_serializer=pb.ProcessingResponse.SerializeToString,
    )
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(json.dumps([port]), flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("transport", choices=("http2", "grpcio"))
    parser.add_argument("destination")
    options = parser.parse_args()
    conversations = _conversations(options.destination)
    if options.transport == "http2":
        uvloop.run(_serve_http2(conversations))
    else:
        asyncio.run(_serve_grpcio(conversations))
