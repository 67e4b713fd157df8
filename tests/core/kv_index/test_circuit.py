"""The circuit breaker, by its states."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from picker.core.kv_index.circuit import CircuitBreaker, CircuitState


def breaker(jitter=1.0, failures=3):
    return CircuitBreaker(failures, 1.0, 4.0, lambda: jitter)


def test_it_opens_after_failures_in_a_row_only():
    circuit = breaker()
    for _ in range(5):
        circuit.failed(0)
        circuit.failed(0)
        circuit.succeeded()
    assert circuit.state(0) is CircuitState.CLOSED
    for _ in range(3):
        circuit.failed(10)
    assert circuit.state(10) is CircuitState.OPEN
    assert circuit.until_probe(10.25) == 0.75
    assert circuit.state(11) is CircuitState.HALF_OPEN
    assert circuit.opened == 1


def test_pauses_double_while_probes_fail_and_begin_anew_after_a_success():
    circuit = breaker(failures=1)
    now, pauses = 0.0, []
    for _ in range(4):
        circuit.failed(now)
        pauses.append(circuit.until_probe(now))
        now += pauses[-1]
    assert pauses == [1, 2, 4, 4]
    circuit.succeeded()
    assert circuit.state(now) is CircuitState.CLOSED
    circuit.failed(now)
    assert circuit.until_probe(now) == 1


def test_failures_of_tries_from_before_it_opened_do_not_lengthen_the_pause():
    circuit = breaker()
    for _ in range(10):
        circuit.failed(0)
    assert circuit.until_probe(0) == 1
    assert circuit.opened == 1


@given(st.lists(st.tuples(st.booleans(), st.floats(0, 3)), max_size=50), st.floats(0, 1))
def test_it_never_stays_open_longer_than_the_longest_pause(tries, jitter):
    circuit, now = breaker(jitter), 0.0
    for ok, later in tries:
        now += later
        if circuit.state(now) is not CircuitState.OPEN:
            circuit.succeeded() if ok else circuit.failed(now)
        assert 0 <= circuit.until_probe(now) <= 4
        assert circuit.state(now + 4) is not CircuitState.OPEN
