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
from dataclasses import dataclass
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
_TOKEN_BYTES = 4  # of an id in what is hashed
_TOKENS_OF_A_TURN = 4096  # in which an invocation is looked for first


def adapter_start(request: SequenceRequest) -> int | None:
    """The first token of the prompt that the adapter computes; None: it computes none.

    That is where the invocation of an activated LoRA begins for the last time, as in PEFT.
    """
    if request.adapter is None:
        return None
    invocation = request.adapter.invocation_token_ids
    if not invocation:
        return 0
    prompt, text = request.prompt_token_ids, array("I", invocation).tobytes()[::-1]
    for ids in (prompt[-_TOKENS_OF_A_TURN:], prompt):  # mostly it is near the end
        # From the end, as bytes, of which `find` takes linear time in the worst case and `rfind` does not.
        tokens = array("I", ids).tobytes()[::-1]
        at = tokens.find(text)
        while at >= 0 and at % _TOKEN_BYTES:  # in the middle of a token
            at = tokens.find(text, at + 1)
        if at >= 0:
            return len(prompt) - len(invocation) - at // _TOKEN_BYTES
    return None


@dataclass(frozen=True)
class KeyChain:
    """How keys of a sequence's pages begin, and with which page its adapter's begin.

    Pages that the base has computed whole are those of the base's sequences. With the first page that is not, all go
    by the adapter and by the token from which it computes.
    """

    first_link: PageKey  # what the chain begins with. It is not the key of a page
    block_size: int
    start: int | None = None  # see `adapter_start`
    adapter: bytes = b""  # what the keys of its pages differ by; empty: nothing, or `first_link` does
    num_base_pages: int = 0  # whose keys are not the adapter's

    @staticmethod
    def of(request: SequenceRequest, block_size: int) -> KeyChain:
        adapter = request.adapter
        is_plain = adapter is not None and not adapter.invocation_token_ids
        start = 0 if is_plain else adapter_start(request)
        parts = (request.tenant, request.cache_salt, adapter.digest if adapter is not None and start == 0 else "")
        text = "".join([f"{len(part)}:{part}" for part in parts])
        link = blake2b(text.encode(), digest_size=KEY_BYTES).digest()
        if adapter is None or not start:
            return KeyChain(link, block_size, start)
        return KeyChain(link, block_size, start, f"{adapter.digest} {start}".encode(), start // block_size)

    def link(self, keys: Sequence[PageKey], depth: int) -> PageKey:
        """The key before the page at this depth."""
        link = keys[depth - 1] if depth else self.first_link
        if self.adapter and depth == self.num_base_pages:
            return blake2b(self.adapter, digest_size=KEY_BYTES, key=link).digest()
        return link

    def extend(self, keys: list[PageKey], token_ids: Sequence[int], num_keys: int) -> None:
        """Adds the keys of the sequence's next full pages, up to `num_keys` in all."""
        while len(keys) < num_keys:
            is_base = self.adapter and len(keys) < self.num_base_pages
            stop = min(num_keys, self.num_base_pages) if is_base else num_keys
            link, start = self.link(keys, len(keys)), len(keys) * self.block_size
            keys += next_keys(link, token_ids, start, self.block_size, stop - len(keys))


NO_ADAPTER = KeyChain(b"", 1)  # of a sequence that is not prepared


def next_keys(link: PageKey, token_ids: Sequence[int], start: int, block_size: int, num_keys: int) -> list[PageKey]:
    """Keys of `num_keys` full pages, of which the first begins at token `start`. `link`: the key before them."""
    keys: list[PageKey] = []
    content = array("I", token_ids[start : start + num_keys * block_size]).tobytes()
    page_bytes = _TOKEN_BYTES * block_size
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
