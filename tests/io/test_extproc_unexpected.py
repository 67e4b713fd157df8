"""Steps of a decision that go wrong by our own fault: the request goes on without them, and each is counted."""

from __future__ import annotations

import asyncio
import json

import pytest

from picker.core.admission.settings import AdmissionSettings, QueueSettings
from picker.core.admission.waiting import Left
from picker.core.endpoints import EngineMetrics
from picker.core.models import ModelSettings, Rewrites
from picker.core.sticky import Bindings, StickySessions, StickySettings
from picker.io.admission import Gate
from picker.io.afterwards import Afterwards
from picker.io.rpc import Status
from tests.io.test_extproc_service import BODY, BUFFERED, Call, Rig, body, destinations, headers, response


class BrokenRewrites(Rewrites):
    def __init__(self) -> None:
        super().__init__(ModelSettings())

    def __bool__(self) -> bool:
        return True

    def target(self, *_):
        raise RuntimeError("boom")


class BrokenSticky(StickySessions):
    """Fails whenever a request is read."""

    def session(self, *_):
        raise RuntimeError("boom")


class Admitting(Gate):
    """Says of every request what it is told to."""

    def __init__(self, rig: Rig, says: Left | None) -> None:
        super().__init__(rig.director, AdmissionSettings())
        self.says = says

    def enter(self, asked, left):  # noqa: ARG002
        if self.says is None:
            raise RuntimeError("boom")
        return self.says

    def room(self) -> None:
        raise RuntimeError("boom")


class Deaf(Call):
    """An RPC that fails when the answer that has the pick is sent."""

    def send(self, message: bytes) -> None:
        super().send(message)
        if self.sent[-1].request_body.response.header_mutation.set_headers:
            raise RuntimeError("boom")


def ask(rig: Rig, call: Call | None = None):
    call = call or Call({})
    stream = rig.service._handler(call)
    stream.message(headers(BUFFERED))
    stream.message(body(BODY))
    return call, stream


def test_a_model_that_cannot_be_rewritten_is_asked_for_by_its_name():
    rig = Rig()
    rig.director.rewrites = BrokenRewrites()
    call, stream = ask(rig)
    answer = call.sent[1].request_body
    assert len(destinations(answer)) == 3
    assert not answer.response.HasField("body_mutation")
    stream.message(response())
    stream.half_closed()
    stream.closed()
    assert call.status is Status.OK
    assert rig.value("errors_total", where="rewrite") == 1
    assert rig.service.model_names == {}
    assert rig.value("requests_finished_total", status="2xx") == 1


def test_a_request_whose_admission_fails_does_not_wait_and_one_that_ends_ends():
    rig = Rig()
    rig.service.gate = Admitting(rig, None)
    call, stream = ask(rig)
    assert len(destinations(call.sent[1].request_body)) == 3
    assert rig.value("errors_total", where="admission") == 1
    stream.message(response())
    stream.half_closed()
    stream.closed()
    assert call.status is Status.OK
    assert rig.value("errors_total", where="admission") == 2
    assert rig.value("in_flight_requests") == 0


def test_a_refusal_of_a_request_that_cannot_be_read_is_a_refusal():
    rig = Rig()
    rig.service.gate = Admitting(rig, Left.DISPLACED)
    rig.director.sticky = BrokenSticky(StickySettings(()), Bindings(60.0, 10), rig.director.now)
    call, stream = ask(rig)
    answer = call.sent[-1].immediate_response
    assert answer.status.code == 429
    assert json.loads(answer.body)["error"]["type"] == "saturated"
    stream.closed()
    assert call.status is None
    assert rig.metrics.errors.series == {("refuse",): 1}
    assert [record.view()["reason"] for record in rig.service.telemetry.recent] == ["saturated"]
    assert rig.value("buffered_body_bytes") == rig.value("in_flight_requests") == 0


async def test_who_waited_in_vain_is_told_so_and_the_others_are_not_held_up():
    rig = Rig()
    rig.service.gate = Gate(rig.director, AdmissionSettings(queue=QueueSettings(enabled=True)))
    for slot in range(3):
        rig.director.table.observe(slot, EngineMetrics(waiting=9.0), 0)
    (broken, one), (good, other) = ask(rig, Deaf({})), ask(rig)
    assert rig.service.gate.waiting == 2
    for slot in range(3):
        rig.director.table.observe(slot, EngineMetrics(waiting=0.0), 0)
    rig.service.gate.room()
    assert broken.status is Status.INTERNAL
    assert len(destinations(good.sent[-1].request_body)) == 3
    assert good.status is None
    assert rig.value("errors_total", where="stream") == 1
    one.closed()
    other.closed()
    assert rig.value("in_flight_requests") == rig.value("open_streams") == 0


async def test_an_answer_that_fails_after_its_preparation_ends_the_rpc():
    rig = Rig()
    found = asyncio.get_running_loop().create_future()

    class Preparation:
        def begin(self, asked, request, seconds):  # noqa: ARG002
            return found

    rig.director.preparation = Preparation()
    call, stream = ask(rig, Deaf({}))
    found.set_result({})
    await asyncio.sleep(0.01)
    assert call.status is Status.INTERNAL
    assert rig.value("errors_total", where="stream") == 1
    stream.closed()
    assert rig.value("in_flight_requests") == rig.value("open_streams") == 0


@pytest.mark.parametrize("at_once", [True, False])
def test_work_after_an_answer_that_fails_stops_no_other(at_once):
    due, done, errors = [], [], []
    afterwards = Afterwards(errors.append, None if at_once else due.append)

    def act(number: int) -> None:
        if number == 1:
            raise ValueError(number)
        done.append(number)

    for number in range(3):
        afterwards.add(act, number)
    for come in due:
        come()
    assert done == [0, 2]
    assert [repr(error) for error in errors] == ["ValueError(1)"]
