"""Every setting, with its default. The docstrings of the fields are the reference documentation."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from msgspec import Meta, Struct

from picker.app.config_scheduler import SchedulerConfig
from picker.app.config_sharing import SharingSettings
from picker.app.config_sticky import SessionSticky
from picker.core import addresses
from picker.core.admission.settings import AdmissionSettings
from picker.core.exchange.events import BodyMode
from picker.core.kubernetes.pools import PoolGroup, read_selector
from picker.core.models import ModelSettings
from picker.io.discovery.endpoint_list import EndpointEntry, Engine

_Listen = Annotated[str, Meta(extra={"read": addresses.listening})]
_File = Annotated[str, Meta(pattern=r"^[^\x00-\x1f]*$", max_length=4096, extra={"remedy": "use the path of a file"})]
_HostName = Annotated[
    str, Meta(pattern=r"^[A-Za-z0-9.:*_-]{1,253}$", extra={"remedy": "use a DNS name or an IP address"})
]
_ObjectName = Annotated[
    str,
    Meta(
        pattern=r"^([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?)?$",
        extra={"remedy": "use the name of an object in Kubernetes"},
    ),
]
_Port = Annotated[int, Meta(ge=1, le=65_535)]
_Bytes = Annotated[int, Meta(ge=1024, le=2**31 - 1)]
_Interval = Annotated[float, Meta(ge=0.01, le=3600)]


def _selector(data: object) -> str:
    return "" if data == "" else read_selector(data)


class TlsMode(StrEnum):
    """Where the certificate of the ext_proc port comes from."""

    OFF = "off"
    SELF_SIGNED = "self-signed"
    FILES = "files"


class Tls(Struct, frozen=True, rename="camel"):
    """Encryption of the ext_proc port."""

    mode: TlsMode = TlsMode.OFF
    """`off`: plaintext; `self-signed`: a certificate made at start, which encrypts but proves nothing; `files`: that of
    `certificate` and `key`, read again when they change."""
    certificate: _File = ""
    """PEM file of the certificate chain, for `files`."""
    key: _File = ""
    """PEM file of the private key, for `files`."""
    names: tuple[_HostName, ...] = ()
    """DNS names and IP addresses in the `self-signed` certificate, besides localhost."""


class Transport(StrEnum):
    """What carries ext_proc."""

    HTTP2 = "http2"
    GRPCIO = "grpcio"


class Listen(Struct, frozen=True, rename="camel"):
    """Where the picker listens. Changes need a restart, but for `leaveSeconds` and `drainSeconds`."""

    extproc: _Listen = "0.0.0.0:9002"
    """Address of ext_proc and gRPC health."""
    admin: _Listen = "0.0.0.0:9003"
    """Address of the admin gRPC service."""
    http: _Listen = "0.0.0.0:9090"
    """Address of metrics, health and debug pages."""
    transport: Transport = Transport.HTTP2
    """What carries ext_proc: `http2` is several times faster, `grpcio` is the reference implementation."""
    max_message_bytes: _Bytes = 16 * 1024 * 1024
    """Largest ext_proc message, in bytes. A larger one ends its stream."""
    max_concurrent_streams: Annotated[int, Meta(ge=1, le=2**31 - 1)] = 100_000
    """ext_proc streams on one connection. Envoy has one open for every request in flight; where the limit is too small,
    requests pass without a pick, or fail in full duplex."""
    tls: Tls = Tls()
    """Encryption of the ext_proc port."""
    leave_seconds: Annotated[float, Meta(ge=0, le=60)] = 3.0
    """How long new streams are still taken after SIGTERM made the picker not ready, in seconds: the time in which
    health checks and endpoint lists take it out of rotation."""
    drain_seconds: Annotated[float, Meta(ge=0, le=3600)] = 30.0
    """How long streams may take to finish after SIGTERM, in seconds."""


class AssumedBody(StrEnum):
    """The request body mode of an Envoy that does not say it."""

    AUTO = "auto"
    BUFFERED = "buffered"
    FULL_DUPLEX = "full-duplex"
    STREAMED = "streamed"
    NONE = "none"

    @property
    def body_mode(self) -> BodyMode | None:
        """The mode of the protocol; None when it is to be told by evidence."""
        return _BODY_MODES[self]


_BODY_MODES = {
    AssumedBody.AUTO: None,
    AssumedBody.BUFFERED: BodyMode.BUFFERED,
    AssumedBody.FULL_DUPLEX: BodyMode.FULL_DUPLEX_STREAMED,
    AssumedBody.STREAMED: BodyMode.STREAMED,
    AssumedBody.NONE: BodyMode.NONE,
}


class LearnUsage(StrEnum):
    """Whether responses are read."""

    OFF = "off"
    FROM_BODY = "from-body"


class Exchange(Struct, frozen=True, rename="camel"):
    """How the picker talks with Envoy about one request."""

    fallbacks: Annotated[int, Meta(ge=0, le=16)] = 2
    """Further endpoints named after the picked one, for Envoy to retry on."""
    decision_seconds: Annotated[float, Meta(ge=0.001, le=60)] = 0.1
    """How long a decision waits for the tokens of its prompt, and for Redis, in seconds; then it is made without."""
    max_body_bytes: _Bytes = 16 * 1024 * 1024
    """Request body that is kept for a decision, in bytes. A longer one is routed by load only."""
    max_buffered_bytes: Annotated[int, Meta(ge=1024, le=2**40)] = 1024 * 1024 * 1024
    """Request bodies kept at one time, in bytes. Requests beyond are routed by load only."""
    assume_request_body: AssumedBody = AssumedBody.AUTO
    """The request body mode of an Envoy too old to say it; `auto` tells it by evidence."""
    mode_grace_seconds: Annotated[float, Meta(ge=0, le=10)] = 0.02
    """How long `auto` waits for evidence, in seconds."""
    retry_after_seconds: Annotated[int, Meta(ge=0, le=86_400)] = 1
    """`Retry-After` of answers that refuse a request for lack of endpoints, in seconds."""
    learn_usage: LearnUsage = LearnUsage.OFF
    """`from-body`: response bodies are read for what engines say of tokens. They come in full duplex, from an observing
    filter (`envoy/observability.yaml`), or because the picker asks for them where Envoy's `allow_mode_override` lets it,
    which costs a message both ways for each chunk."""
    conformance: bool = False
    """Whether clients may choose the endpoint by the header `test-epp-endpoint-selection`, and are told who served: for
    the conformance suite of the Gateway API Inference Extension, never for production."""


class Predict(Struct, frozen=True, rename="camel"):
    """The listener for `POST /v1/cache/predict`, there while `kvcache-aware` is enabled. Changes need a restart."""

    enabled: bool = True
    """Whether there is one."""
    listen: _Listen = "127.0.0.1:9091"
    """Its address. What it says tells what others have asked: set a token before other machines can reach it."""
    token_environment: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_]*$", max_length=256)] = ""
    """The environment variable with the bearer token that callers must bring; left out: none."""
    requests_per_second: Annotated[float, Meta(gt=0, le=1e6)] = 100.0
    """Requests that are answered in a second, of all callers together."""


class StaticEndpoints(Struct, frozen=True):
    """Endpoints in the configuration itself."""

    static: tuple[EndpointEntry, ...] = ()
    """The endpoints, with the fields below."""


class FileSource(Struct, frozen=True, rename="camel"):
    """A file with endpoints."""

    path: Annotated[_File, Meta(min_length=1)]
    """YAML or JSON file with a list of endpoints, relative to the working directory."""
    poll_seconds: _Interval = 1.0
    """How often the file is looked at, in seconds."""


class FileEndpoints(Struct, frozen=True):
    """Endpoints in a file of their own, which is read again when it changes."""

    file: FileSource
    """The file."""


class Pool(Struct, frozen=True, rename="camel"):
    """An InferencePool."""

    name: _ObjectName
    """Its name."""
    group: PoolGroup = PoolGroup.V1
    """Its API group: that of version `v1`, or that of its predecessor `v1alpha2`, which ends in `x-k8s.io`."""


class KubernetesSource(Struct, frozen=True, rename="camel"):
    """The ready pods of an InferencePool, or those that a label selector finds: `pool`, or `selector` and `ports`."""

    pool: Pool = Pool("")
    """The InferencePool; its selector and target ports say what the endpoints are."""
    selector: Annotated[str, Meta(extra={"read": _selector})] = ""
    """Labels of the pods, as `kubectl -l` takes them: `app=vllm,role in (decode,both)`."""
    ports: tuple[_Port, ...] = ()
    """The ports they serve on, for `selector`. Each port of each pod is an endpoint: a data-parallel rank."""
    namespace: _ObjectName = ""
    """The namespace of pool and pods. Left out: the picker's own, or that of the kubeconfig's context."""
    engine: Engine = Engine.VLLM
    """What pods run whose label `llm-d.ai/engine-type` does not say it."""
    kubeconfig: _File = ""
    """The kubeconfig to use outside of a cluster. Left out: the ServiceAccount of the picker's own pod."""
    context: Annotated[str, Meta(max_length=256)] = ""
    """The context of the kubeconfig. Left out: its current one."""
    request_seconds: Annotated[float, Meta(ge=0.1, le=300)] = 30.0
    """How long the API server may take for an answer, in seconds."""
    watch_seconds: Annotated[float, Meta(ge=1, le=3600)] = 300.0
    """How long one watch lasts at most, in seconds; the next one goes on where it ended."""
    silence_seconds: Annotated[float, Meta(ge=0.1, le=3600)] = 75.0
    """How long a watch may be silent until it is not believed any more and the pods are listed anew, in seconds.
    An API server says something about once a minute."""
    longest_retry_seconds: Annotated[float, Meta(ge=0.1, le=300)] = 1.0
    """The longest pause before an API server that fails is asked again, in seconds: how long after an outage it takes
    until pods that went meanwhile are known."""


class KubernetesEndpoints(Struct, frozen=True):
    """Endpoints that are pods, followed as they come and go."""

    kubernetes: KubernetesSource
    """Which pods."""


class Scrape(Struct, frozen=True, rename="camel"):
    """How the load of engines is read."""

    enabled: bool = True
    """Whether engine metrics are read at all. Without them only requests in flight count."""
    interval_seconds: _Interval = 0.2
    """Time between two readings of one engine, in seconds."""
    timeout_seconds: _Interval = 1.0
    """How long one reading may take, in seconds."""
    stale_seconds: _Interval = 2.0
    """Age from which on load counts as unknown, in seconds."""
    path: Annotated[str, Meta(pattern=r"^/[!-~]*$", max_length=2048, extra={"remedy": 'start it with "/"'})] = (
        "/metrics"
    )
    """Path of the metrics page."""
    models_interval_seconds: _Interval = 5.0
    """Time between two questions for the models an engine serves, in seconds."""


class LogLevel(StrEnum):
    """The least severe messages that are logged."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LogFormat(StrEnum):
    """How log lines look."""

    JSON = "json"
    CONSOLE = "console"


class Log(Struct, frozen=True, rename="camel"):
    """What is logged."""

    level: LogLevel = LogLevel.INFO
    """The least severe messages that are logged. `debug` has every decision."""
    format: LogFormat = LogFormat.JSON
    """`json`: one object a line; `console`: for people. Changes need a restart."""
    sample_decisions: Annotated[int, Meta(ge=0, le=10**9)] = 100
    """One in so many decisions is logged at `info`; 0 logs none."""


class Debug(Struct, frozen=True, rename="camel"):
    """Limits of what is there for looking into the picker. Changes need a restart."""

    watch_buffer: Annotated[int, Meta(ge=1, le=100_000)] = 256
    """Decisions kept for a watcher that reads slowly; older ones are dropped."""


class Config(Struct, frozen=True, rename="camel"):
    """A configuration with every default filled in."""

    listen: Listen = Listen()
    """Where the picker listens."""
    exchange: Exchange = Exchange()
    """How the picker talks with Envoy about one request."""
    endpoints: StaticEndpoints | FileEndpoints | KubernetesEndpoints = StaticEndpoints()
    """Where endpoints come from: exactly one of `static`, `file` and `kubernetes`."""
    scrape: Scrape = Scrape()
    """How the load of engines is read."""
    scheduler: SchedulerConfig = SchedulerConfig()
    """How an endpoint is chosen. A Kthena `routerConfiguration` pastes in here."""
    session_sticky: SessionSticky = SessionSticky()
    """Requests of one session go to one endpoint, for as long as it passes the filters. Off without `sources`."""
    admission: AdmissionSettings = AdmissionSettings()
    """Who is turned away, and who waits, while the pool is saturated."""
    sharing: SharingSettings = SharingSettings()
    """Picks shared between pickers."""
    models: ModelSettings = ModelSettings()
    """Names of models."""
    predict: Predict = Predict()
    """The listener for `POST /v1/cache/predict`. It needs `kvcache-aware` in the scheduler, enabled under Score or, beside
    `token-cost`, named in pluginConfig; without, nothing listens, or, once a reload took it away, the answer is 503."""
    log: Log = Log()
    """What is logged."""
    debug: Debug = Debug()
    """Limits of what is there for looking into the picker."""
