"""Names of modules as PEFT matches them, found without trying each."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from motet.adapters.format.targets import PlainNames, named_in, names_found

PARTS = st.sampled_from(["a", "b", "ab", "a_b", "1", "q-proj"])
KEYS = st.lists(PARTS, min_size=1, max_size=4).map(".".join)
NAMES = st.lists(st.sampled_from(["a", "b", "_", "-", "1", ".", r"\.", "ab"]), min_size=1, max_size=5).map("".join)


@given(st.lists(NAMES, max_size=6), st.lists(KEYS, min_size=1, max_size=6))
def test_the_first_name_is_that_of_the_regular_expressions(names: list[str], keys: list[str]) -> None:
    assert all(map(PlainNames.is_plain, names))
    plain = PlainNames(names)
    for key in keys:
        found = (index for index, name in enumerate(names) if re.match(rf"(.*\.)?({name})$", key))
        assert plain.first(key) == next(found, None), (names, key)


def test_other_expressions_are_not_plain() -> None:
    for name in ("", "a|b", "a*", "^a", "a$", "(a)", "[ab]", "a\\", r"\d", "a\n", "ä"):
        assert not PlainNames.is_plain(name)


@given(st.lists(KEYS), st.lists(KEYS))
def test_names_of_a_list_are_keys_or_their_last_parts(names: list[str], keys: list[str]) -> None:
    expected = [key for key in keys if any(key == name or key.endswith(f".{name}") for name in names)]
    assert named_in(keys, frozenset(names)) == expected
    found = {name for name in names if any(key == name or key.endswith(f".{name}") for key in keys)}
    assert names_found(keys, frozenset(names)) == found
