"""docs/exchange.md shows the transition table as it is. `python tests/core/exchange/test_documentation.py` renews it."""

from pathlib import Path

from picker.core.exchange import states
from picker.core.exchange.events import (
    RequestBody,
    RequestHeaders,
    RequestTrailers,
    ResponseBody,
    ResponseHeaders,
    ResponseTrailers,
    StreamEnded,
    TimerFired,
)
from picker.core.exchange.states import DECIDED, TRANSITIONS, State

PAGE = Path(__file__).parents[3] / "docs" / "exchange.md"
COLUMNS = (
    RequestHeaders,
    RequestBody,
    RequestTrailers,
    ResponseHeaders,
    ResponseBody,
    ResponseTrailers,
    StreamEnded,
    TimerFired,
)


def cell(state: State, event: type) -> str:
    if event not in TRANSITIONS[state]:
        return "-"
    action, leads_to = TRANSITIONS[state][event]
    words = action.replace("_", " ")
    return f"{words} → {', '.join(leads_to)}" if leads_to else words


def render() -> str:
    _, _, theory = (states.__doc__ or "").partition("Theory of operation\n-------------------\n")
    rows = [
        "| state | " + " | ".join(event.__name__ for event in COLUMNS) + " | decided |",
        "|" + "---|" * (len(COLUMNS) + 2),
    ]
    for state in State:
        cells = [cell(state, event) for event in COLUMNS]
        rows.append("| " + " | ".join([f"**{state}**", *cells, ", ".join(DECIDED.get(state, ())) or "-"]) + " |")
    return "\n".join(
        [
            "# The exchange: one ext_proc stream",
            "",
            "Generated from `picker/core/exchange/states.py`; `machine.py` carries it out.",
            "",
            theory.strip(),
            "",
            "## Transitions",
            "",
            "Each cell names the action and the states it may lead to besides staying; `-` does nothing.",
            "",
            *rows,
            "",
        ]
    )


def test_the_page_shows_the_table_as_it_is():
    assert PAGE.read_text() == render(), "run: python tests/core/exchange/test_documentation.py"


if __name__ == "__main__":
    PAGE.write_text(render())
