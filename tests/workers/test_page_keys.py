"""Equal keys mean equal KV."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from motet.workers.wire.messages import AdapterRef, SamplingParams, SequenceRequest
from motet.workers.wire.page_keys import KEY_BYTES, KeyChain, adapter_start, next_keys, short_key

REQUEST = SequenceRequest(sequence_id=0, prompt_token_ids=[1], sampling=SamplingParams(), tenant="acme")
tokens = st.lists(st.integers(0, 2**31), min_size=1, max_size=40)


@given(tokens, tokens, st.integers(1, 8))
def test_keys_agree_as_far_as_all_tokens_do(first: list[int], second: list[int], block_size: int) -> None:
    link = KeyChain.of(REQUEST, 1).first_link
    chains = [next_keys(link, ids, 0, block_size, len(ids) // block_size) for ids in (first, second)]
    for count, (left, right) in enumerate(zip(*chains, strict=False), 1):
        assert (left == right) == (first[: count * block_size] == second[: count * block_size])
    assert all(len(key) == KEY_BYTES for chain in chains for key in chain)


@given(tokens, st.integers(1, 8), st.data())
def test_a_chain_can_be_made_bit_by_bit(token_ids: list[int], block_size: int, data: st.DataObject) -> None:
    num_keys = len(token_ids) // block_size
    whole = next_keys(KeyChain.of(REQUEST, 1).first_link, token_ids, 0, block_size, num_keys)
    cut = data.draw(st.integers(0, num_keys))
    head = next_keys(KeyChain.of(REQUEST, 1).first_link, token_ids, 0, block_size, cut)
    rest = next_keys(
        head[-1] if head else KeyChain.of(REQUEST, 1).first_link,
        token_ids,
        cut * block_size,
        block_size,
        num_keys - cut,
    )
    assert head + rest == whole


def test_whose_it_is_is_part_of_the_key() -> None:
    def replaced(**changes: object) -> bytes:
        return KeyChain.of(msgspec.structs.replace(REQUEST, **changes), 1).first_link

    links = [
        KeyChain.of(REQUEST, 1).first_link,
        replaced(tenant="globex"),
        replaced(adapter=AdapterRef("a" * 64, {})),
        replaced(adapter=AdapterRef("b" * 64, {})),
        replaced(cache_salt="x"),
        replaced(tenant="ac", cache_salt="me"),  # no two parts run together
        replaced(tenant="", cache_salt="acme"),
    ]
    assert len(set(links)) == len(links)
    assert replaced(sampling=SamplingParams(seed=3), prompt_token_ids=[5]) == KeyChain.of(REQUEST, 1).first_link


def test_short_keys_are_64_bits() -> None:
    key = next_keys(KeyChain.of(REQUEST, 1).first_link, [1, 2], 0, 2, 1)[0]
    assert short_key(key) == int.from_bytes(key[:8], "big") < 2**64


def _activated(prompt: list[int], invocation: tuple[int, ...] = (7, 8), digest: str = "a" * 64) -> SequenceRequest:
    return msgspec.structs.replace(REQUEST, prompt_token_ids=prompt, adapter=AdapterRef(digest, {}, invocation))


SHIFTED = st.sampled_from([0, 1, 1 << 8, 1 << 16])  # with the same bytes at other places


@given(st.lists(SHIFTED, max_size=40), st.lists(SHIFTED, min_size=1, max_size=3))
def test_an_activated_adapter_starts_with_its_last_invocation(prompt: list[int], invocation: list[int]) -> None:
    starts = [at for at in range(len(prompt)) if prompt[at : at + len(invocation)] == invocation]
    assert adapter_start(_activated(prompt, tuple(invocation))) == (starts[-1] if starts else None)


@given(st.lists(st.sampled_from([5, 6, 7, 8]), min_size=2, max_size=40), st.integers(1, 6), st.data())
def test_pages_are_the_bases_up_to_the_one_in_which_the_adapter_starts(
    prompt: list[int], block_size: int, data: st.DataObject
) -> None:
    num_keys = len(prompt) // block_size

    def keys_of(request: SequenceRequest) -> list[bytes]:
        keys: list[bytes] = []
        chain = KeyChain.of(request, block_size)
        chain.extend(keys, request.prompt_token_ids, data.draw(st.integers(0, num_keys)))
        chain.extend(keys, request.prompt_token_ids, num_keys)
        return keys

    base = keys_of(msgspec.structs.replace(REQUEST, prompt_token_ids=prompt, adapter=None))
    request = _activated(prompt)
    start, keys = adapter_start(request), keys_of(request)
    if start is None:
        assert keys == base
        return
    plain = keys_of(msgspec.structs.replace(request, adapter=AdapterRef("a" * 64, {})))
    num_base = start // block_size if start else 0
    assert keys[:num_base] == base[:num_base]
    assert not set(keys[num_base:]) & {*base}
    assert keys == plain if start == 0 else not {*keys} & {*plain}
    assert not set(keys[num_base:]) & {*keys_of(_activated(prompt, digest="b" * 64))}
