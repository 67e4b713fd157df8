"""What pickers tell each other of chains: read as it was meant, or refused; and names, in bounds."""

import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from picker.core.sessions.chain import MAX_POSITIONS, Chain, Stored
from picker.core.sessions.names import Names
from picker.core.sessions.shared import (
    MAX_IDS,
    chains_of,
    end_of,
    names_of,
    packed_chains,
    packed_end,
    packed_names,
)
from tests.core.sessions.test_chain import COMPLETIONS, RESPONSES, chat, read, user

texts = st.text(max_size=5) | st.integers(500, 1100).map(lambda size: "x" * size)
keys = st.integers(0, (1 << 64) - 1)


def heard(chain: Chain) -> Chain:
    """What another picker knows of a chain while its request is on its way."""
    (other,) = chains_of(packed_chains([chain]))
    return other


def following(chain: Chain, **more):
    return read(RESPONSES, stored=Stored(1, chain, fixed=True), input="And now?", **more)[0]


@given(st.lists(texts, min_size=1, max_size=4), texts, st.none() | keys, st.lists(keys, max_size=4))
def test_the_end_of_a_conversation_is_heard_as_it_was_told(turns, reply, response, ids):
    before = chat(*map(user, turns))
    after = before.replied(reply.encode())
    if after is before and response is not None:
        after = before.named(response)
    told = packed_end(before, after, ids)
    chain, names = end_of(told, heard(before))
    assert (chain.hashes, chain.sizes, chain.size, names) == (after.hashes, after.sizes, after.size, tuple(ids))
    assert following(chain) == following(after)
    assert following(chain, instructions="Others.") == following(after, instructions="Others.")
    # Only what is new of it is told.
    assert len(told) < 40 + 12 * (len(after.hashes) - len(before.hashes)) + 9 * len(ids)
    ((key, named),) = names_of(packed_names([(5, after)]))
    assert (key, named.hashes, named.opening) == (5, after.hashes, after.opening)
    assert following(named) == following(after)


@given(texts.filter(bool), texts.filter(bool))
def test_the_end_of_a_text_is_heard_as_it_was_told(prompt, reply):
    (before,) = read(COMPLETIONS, prompt=prompt)
    after = before.replied(reply.encode())
    chain, _ = end_of(packed_end(before, after, ()), heard(before))
    assert chain.hashes == read(COMPLETIONS, prompt=prompt + reply)[0].hashes
    assert chain.state is None


def test_a_chain_that_is_full_and_names_that_are_many_are_told_within_bounds():
    before = chat(*[user("x")] * MAX_POSITIONS)
    after = before.replied(b"reply")
    chain, names = end_of(packed_end(before, after, tuple(range(MAX_IDS + 5))), heard(before))
    assert chain.hashes == before.hashes
    assert chain.state is None
    assert names == tuple(range(MAX_IDS))


@given(st.binary(max_size=60))
def test_no_bytes_are_read_as_more_than_they_are(data):
    before = chat(user("hello"))
    for reading in (chains_of, names_of, lambda shared: [end_of(shared, before)]):
        try:
            found = reading(data)
        except ValueError:
            continue
        assert len(found) <= len(data)


def four(number):
    return struct.pack("I", number)


def end(kept=1, hashes=b"", sizes=b"", opening=0, goes_on=True, ids=()):
    return msgspec.msgpack.encode((kept, hashes, sizes, opening, goes_on, ids))


@pytest.mark.parametrize(
    "told",
    [
        b"",
        b"\xc1",
        end()[:-1],
        end(kept=2),
        end(kept=-1),
        end(kept=0),
        end(hashes=b"1234567", sizes=four(1)),
        end(hashes=b"12345678"),
        end(hashes=b"12345678", sizes=four((1 << 32) - 1)),
        end(hashes=b"12345678" * MAX_POSITIONS, sizes=four(1) * MAX_POSITIONS),
        end(ids=list(range(MAX_IDS + 1))),
        end(ids=[-1]),
        end(ids=["a"]),
        end(opening="a"),
        end(goes_on=None),
    ],
)
def test_an_end_that_nobody_told_is_refused(told):
    before = heard(chat(user("hello")))
    assert len(before.hashes) == 1
    assert end_of(end(), before)[0].hashes == before.hashes
    with pytest.raises(ValueError, match=r"\w"):
        end_of(told, before)


# --- Names --------------------------------------------------------------------------------------------------------


def test_names_are_bounded_and_those_not_used_for_longest_go_first():
    names = Names(100_000)
    for key in range(2000):
        names.put(key, chat(user(f"{key}" * 200)))
        assert names.get(0) is not None
    assert 50 < len(names) < 330
    assert names.evictions == 2000 - len(names)
    assert [key for key, _ in names.all()][-2:] == [1999, 0]
    names.put(5, chat(user("x" * 1_100_000)))
    assert names.get(5) is None


def test_hearsay_that_is_older_changes_nothing():
    names = Names()
    one = chat(user("1"))
    two = one.replied(b"more")
    names.add(7, one)
    names.add(7, two)
    names.add(7, one)
    assert names.get(7) is two
    names.put(7, one)
    assert names.get(7) is one
