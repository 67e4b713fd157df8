import datetime

from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ExplainRequest(_message.Message):
    __slots__ = ("prompt", "body", "path", "model", "headers")
    class HeadersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    HEADERS_FIELD_NUMBER: _ClassVar[int]
    prompt: str
    body: bytes
    path: str
    model: str
    headers: _containers.ScalarMap[str, str]
    def __init__(self, prompt: _Optional[str] = ..., body: _Optional[bytes] = ..., path: _Optional[str] = ..., model: _Optional[str] = ..., headers: _Optional[_Mapping[str, str]] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class Decision(_message.Message):
    __slots__ = ("time", "request_id", "model", "path", "reason", "destinations", "endpoints", "step_microseconds", "prompt_unused", "filters", "prompt_tokens", "tokens_from", "first", "prefill_place", "prefill_destination", "why")
    class StepMicrosecondsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    TIME_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DESTINATIONS_FIELD_NUMBER: _ClassVar[int]
    ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    STEP_MICROSECONDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_UNUSED_FIELD_NUMBER: _ClassVar[int]
    FILTERS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FROM_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    PREFILL_PLACE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_DESTINATION_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    time: _timestamp_pb2.Timestamp
    request_id: str
    model: str
    path: str
    reason: str
    destinations: _containers.RepeatedScalarFieldContainer[str]
    endpoints: _containers.RepeatedCompositeFieldContainer[EndpointScore]
    step_microseconds: _containers.ScalarMap[str, float]
    prompt_unused: str
    filters: _containers.RepeatedCompositeFieldContainer[FilterResult]
    prompt_tokens: float
    tokens_from: str
    first: str
    prefill_place: str
    prefill_destination: str
    why: str
    def __init__(self, time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., request_id: _Optional[str] = ..., model: _Optional[str] = ..., path: _Optional[str] = ..., reason: _Optional[str] = ..., destinations: _Optional[_Iterable[str]] = ..., endpoints: _Optional[_Iterable[_Union[EndpointScore, _Mapping]]] = ..., step_microseconds: _Optional[_Mapping[str, float]] = ..., prompt_unused: _Optional[str] = ..., filters: _Optional[_Iterable[_Union[FilterResult, _Mapping]]] = ..., prompt_tokens: _Optional[float] = ..., tokens_from: _Optional[str] = ..., first: _Optional[str] = ..., prefill_place: _Optional[str] = ..., prefill_destination: _Optional[str] = ..., why: _Optional[str] = ...) -> None: ...

class FilterResult(_message.Message):
    __slots__ = ("filter", "remaining")
    FILTER_FIELD_NUMBER: _ClassVar[int]
    REMAINING_FIELD_NUMBER: _ClassVar[int]
    filter: str
    remaining: int
    def __init__(self, filter: _Optional[str] = ..., remaining: _Optional[int] = ...) -> None: ...

class EndpointScore(_message.Message):
    __slots__ = ("name", "namespace", "address", "total", "plugins", "rank", "in_flight", "uncached_tokens", "queued_tokens", "cost_tokens", "cost_milliseconds")
    NAME_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    PLUGINS_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    UNCACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COST_MILLISECONDS_FIELD_NUMBER: _ClassVar[int]
    name: str
    namespace: str
    address: str
    total: float
    plugins: _containers.RepeatedCompositeFieldContainer[PluginScore]
    rank: int
    in_flight: int
    uncached_tokens: float
    queued_tokens: float
    cost_tokens: float
    cost_milliseconds: float
    def __init__(self, name: _Optional[str] = ..., namespace: _Optional[str] = ..., address: _Optional[str] = ..., total: _Optional[float] = ..., plugins: _Optional[_Iterable[_Union[PluginScore, _Mapping]]] = ..., rank: _Optional[int] = ..., in_flight: _Optional[int] = ..., uncached_tokens: _Optional[float] = ..., queued_tokens: _Optional[float] = ..., cost_tokens: _Optional[float] = ..., cost_milliseconds: _Optional[float] = ...) -> None: ...

class PluginScore(_message.Message):
    __slots__ = ("plugin", "score", "weight", "matched", "total", "unit")
    PLUGIN_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    MATCHED_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    UNIT_FIELD_NUMBER: _ClassVar[int]
    plugin: str
    score: float
    weight: float
    matched: int
    total: int
    unit: str
    def __init__(self, plugin: _Optional[str] = ..., score: _Optional[float] = ..., weight: _Optional[float] = ..., matched: _Optional[int] = ..., total: _Optional[int] = ..., unit: _Optional[str] = ...) -> None: ...
