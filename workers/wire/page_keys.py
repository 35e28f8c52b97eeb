"""Names of KV pages by what they hold: equal keys mean equal KV.

A key stands for a full page of tokens and for all tokens before it, so the keys of a sequence form a chain. The chain
begins with all that sequences must have in common to share pages: tenant, salt and the adapter's digest. So no tenant
can use another's pages, or learn from the time of an answer what another has requested, and a new version of an adapter
never uses the KV of an old one. The idea of chained hashes is vLLM's automatic prefix caching.

Leaders and routers make the same keys of the same request.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from hashlib import blake2b
from itertools import compress

from .messages import SequenceRequest

# An adapter's digest in few bytes, for lists of many.


def short_digest(digest: str) -> int:
    """64 bits of it: enough to say which adapters are somewhere, and too few to load one by."""
    return int.from_bytes(blake2b(digest.encode(), digest_size=8).digest(), "big")


KEY_BYTES = 16
PageKey = bytes  # of length KEY_BYTES, or with one byte more that of a recurrent state
_STATE = b"s"


def first_link(request: SequenceRequest) -> PageKey:
    """What the chain of a sequence's keys begins with. It is not the key of a page."""
    digest = "" if request.adapter is None else request.adapter.digest
    parts = (request.tenant, request.cache_salt, digest)
    return blake2b("".join(f"{len(part)}:{part}" for part in parts).encode(), digest_size=KEY_BYTES).digest()


def next_keys(link: PageKey, token_ids: Sequence[int], start: int, block_size: int, num_keys: int) -> list[PageKey]:
    """Keys of `num_keys` full pages, of which the first begins at token `start`. `link`: the key before them."""
    keys: list[PageKey] = []
    content = array("I", token_ids[start : start + num_keys * block_size]).tobytes()
    page_bytes = 4 * block_size
    assert len(content) == num_keys * page_bytes, "a page's key needs all of its tokens"
    for first in range(0, len(content), page_bytes):
        link = blake2b(content[first : first + page_bytes], digest_size=KEY_BYTES, key=link).digest()
        keys.append(link)
    return keys


def dense_key(key: PageKey) -> PageKey:
    """The key of a dense page whose last block has this key in a page of all layers."""
    return bytes([key[0] ^ 0xFF]) + key[1:]


def state_key(key: PageKey) -> PageKey:
    """The key of the recurrent state after the page with this key."""
    return key + _STATE


def last_state(keys: Sequence[PageKey], is_there: Callable[[PageKey], bool]) -> int:
    """How many of the first pages with these keys come before the last recurrent state that is there; 0: none is.

    Little work for each key, since there may be thousands.
    """
    states = (key + _STATE for key in reversed(keys))
    return next(compress(range(len(keys), 0, -1), map(is_there, states)), 0)


def is_state(key: PageKey) -> bool:
    """Whether the key is that of a recurrent state."""
    return len(key) > KEY_BYTES


def short_key(key: PageKey) -> int:
    """64 bits of a key: enough for a router to guess which gang has a page, and too few to share pages by."""
    return int.from_bytes(key[:8], "big")
