"""Grammars applied without a model: which texts they take, and random ones that they let through."""

from __future__ import annotations

import random
from collections.abc import Iterable

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

NUM_TOKENS = 260  # the bytes, the end, and ids of special tokens
END = 256
_LIKELY = b'"]},'  # which end what has begun


class _Bytes:
    bos_token_id = None
    eos_token_id = END
    special_token_ids = (END,)
    tokens = [bytes([byte]) for byte in range(256)] + [b""] * (NUM_TOKENS - 256)

    def __call__(self, text: str) -> list[int]:
        return [*text.encode()]


_TOKENIZER = LLTokenizer(TokenizerWrapper(_Bytes()), slices=[])


def accepts(lark: str, *parts: str | int) -> bool:
    """Whether the grammar takes the parts, texts and ids of tokens, as a whole."""
    matcher = _matcher(lark)
    ids = [token for part in parts for token in (part.encode() if isinstance(part, str) else [part])]
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def random_text(lark: str, rng: random.Random, max_bytes: int = 400) -> str | None:
    """What a model without any sense would answer under the grammar's masks; None: it has not come to an end."""
    matcher, text = _matcher(lark), bytearray()
    while len(text) < max_bytes:
        mask = matcher.compute_bitmask()
        allowed = [token for token in range(NUM_TOKENS) if mask[token // 8] >> token % 8 & 1]
        assert allowed, matcher.get_error()
        if END in allowed and (len(allowed) == 1 or rng.random() < 0.3):
            return text.decode()
        allowed = [token for token in allowed if token != END]
        token = rng.choice(_preferred(allowed, rng))
        assert matcher.consume_token(token), matcher.get_error()
        text.append(token)
    return None


def _preferred(allowed: list[int], rng: random.Random) -> list[int]:
    likely: Iterable[int] = set(_LIKELY) & set(allowed)
    return sorted(likely) if likely and rng.random() < 0.4 else allowed


def _matcher(lark: str) -> LLMatcher:
    matcher = LLMatcher(_TOKENIZER, lark, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher
