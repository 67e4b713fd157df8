"""grpc.health.v1 on the RPC seam, and the state behind it."""

from __future__ import annotations

from collections.abc import Callable

from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2

from picker.io.keep import Failed, log_failure
from picker.io.rpc import Call, Handler, Services, Status

LIVENESS = "liveness"
READINESS_SERVICES = ("", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor", "inference-extension")
"""Services that are serving when the picker is ready; `liveness` is serving as long as anything answers."""

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
_SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


class HealthState:
    """Whether the picker is ready, and who wants to know when that changes.

    `failed` is told of one who could not be told, as `health`.
    """

    def __init__(self, failed: Failed = log_failure) -> None:
        self._failed = failed
        self._ready = False
        self._subscribers: dict[object, Callable[[], None]] = {}

    @property
    def services(self) -> tuple[str, ...]:
        """Names of all services with a health."""
        return (LIVENESS, *READINESS_SERVICES)

    @property
    def ready(self) -> bool:
        return self._ready

    def set_ready(self, ready: bool) -> None:
        """Change the readiness; every subscriber is called if that is a change."""
        if ready == self._ready:
            return
        self._ready = ready
        for callback in list(self._subscribers.values()):
            try:
                callback()
            except Exception as error:  # noqa: BLE001  the others want to know, too
                self._failed("health", error)

    def is_serving(self, service: str) -> bool | None:
        """Return whether a service is serving; None if there is no such service."""
        if service == LIVENESS:
            return True
        return self._ready if service in READINESS_SERVICES else None

    def subscribe(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Have `callback` called after every change, until the function that is returned is called."""
        key = object()
        self._subscribers[key] = callback
        return lambda: self._subscribers.pop(key, None) and None


def health_services(state: HealthState) -> Services:
    """Return the three methods of grpc.health.v1.Health for `state`."""
    return {
        "/grpc.health.v1.Health/Check": lambda call: _Check(call, state),
        "/grpc.health.v1.Health/List": lambda call: _List(call, state),
        "/grpc.health.v1.Health/Watch": lambda call: _Watch(call, state),
    }


def _status(serving: bool | None) -> int:
    if serving is None:
        return _SERVICE_UNKNOWN
    return _SERVING if serving else _NOT_SERVING


class _OneRequest(Handler):
    """A method that takes one request."""

    def __init__(self, call: Call, state: HealthState) -> None:
        self._call = call
        self._state = state
        self._asked = False

    def message(self, data: bytes) -> None:
        if self._asked:
            self._call.finish(Status.INTERNAL, "the method takes one request message, this is the second")
            return
        self._asked = True
        try:
            self.answer(data)
        except DecodeError:
            self._call.finish(Status.INVALID_ARGUMENT, "the request message is no valid protobuf")

    def half_closed(self) -> None:
        if not self._asked:
            self._call.finish(Status.INTERNAL, "the method takes one request message, there was none")

    def closed(self) -> None:
        """Nothing is held."""

    def answer(self, data: bytes) -> None:
        raise NotImplementedError


class _Check(_OneRequest):
    def answer(self, data: bytes) -> None:
        service = health_pb2.HealthCheckRequest.FromString(data).service
        serving = self._state.is_serving(service)
        if serving is None:
            self._call.finish(Status.NOT_FOUND, f"unknown service {service[:100]!r}")
            return
        self._call.send(health_pb2.HealthCheckResponse(status=_status(serving)).SerializeToString())
        self._call.finish()


class _List(_OneRequest):
    def answer(self, data: bytes) -> None:
        health_pb2.HealthListRequest.FromString(data)  # type: ignore[attr-defined]  # newer than its stubs
        response = health_pb2.HealthListResponse()  # type: ignore[attr-defined]
        for service in self._state.services:
            response.statuses[service].status = _status(self._state.is_serving(service))
        self._call.send(response.SerializeToString())
        self._call.finish()


class _Watch(_OneRequest):
    def __init__(self, call: Call, state: HealthState) -> None:
        super().__init__(call, state)
        self._service = ""
        self._sent: bool | None = None
        self._unsubscribe: Callable[[], None] | None = None

    def answer(self, data: bytes) -> None:
        self._service = health_pb2.HealthCheckRequest.FromString(data).service
        self._unsubscribe = self._state.subscribe(self._report)
        self._sent = self._state.is_serving(self._service)
        self._send()

    def closed(self) -> None:
        if self._unsubscribe is not None:
            self._unsubscribe()

    def _report(self) -> None:
        serving = self._state.is_serving(self._service)
        if serving != self._sent:
            self._sent = serving
            self._send()

    def _send(self) -> None:
        self._call.send(health_pb2.HealthCheckResponse(status=_status(self._sent)).SerializeToString())
