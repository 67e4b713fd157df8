from __future__ import annotations

from collections import OrderedDict

from hypothesis import given
from hypothesis import strategies as st

from picker.core.tokens.lru import ByteLru


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 8), st.integers(1, 30)), max_size=80))
def test_it_is_a_bounded_list_in_the_order_of_use(steps: list[tuple[bool, int, int]]) -> None:
    lru: ByteLru[int, int] = ByteLru(100)
    model: OrderedDict[int, tuple[int, int]] = OrderedDict()
    for number, (put, key, size) in enumerate(steps):
        if put:
            lru.put(key, number, size)
            if size <= 25:
                model.pop(key, None)
                model[key] = (number, size)
                while sum(size for _, size in model.values()) > 100:
                    model.popitem(last=False)
        else:
            found = model.get(key)
            assert lru.get(key) == (found and found[0])
            if found:
                model.move_to_end(key)
        assert lru.bytes == sum(size for _, size in model.values()) <= 100
        assert len(lru) == len(model)
