"""The bytes that each token of a vocabulary stands for."""

from __future__ import annotations

import json
import re
from functools import lru_cache
from typing import Final

from tokenizers import Tokenizer

NUM_KEPT_TOKENS: Final = 1 << 16  # whose bytes and text are kept, some 200 bytes each: log-probabilities name many
_BYTE_TOKEN: Final = re.compile(r"^<0x([0-9A-F]{2})>$")


class TokenBytes:
    """Bytes by token id. Joined over a completion's tokens they are its text, special tokens apart."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._added = {token_id: token.content for token_id, token in tokenizer.get_added_tokens_decoder().items()}
        kinds = _decoder_kinds(tokenizer)
        self._byte_of_char = _byte_of_char() if "ByteLevel" in kinds else None
        self._has_byte_tokens = "ByteFallback" in kinds
        self._has_metaspace = bool(kinds & {"Metaspace", "Replace"})

    def __call__(self, token_id: int) -> bytes:
        added = self._added.get(token_id)
        if added is not None:
            return added.encode()
        token = self._tokenizer.id_to_token(token_id)
        if token is None:  # the embedding may have more rows than the tokenizer has tokens
            return b""
        if self._byte_of_char is not None:
            spelled = [self._byte_of_char.get(char) for char in token]
            # One character outside the alphabet, as in some extended vocabularies, and the decoder takes all as text.
            return token.encode() if None in spelled else bytes(byte for byte in spelled if byte is not None)
        match = _BYTE_TOKEN.match(token) if self._has_byte_tokens else None
        if match is not None:
            return bytes([int(match[1], 16)])
        if self._has_metaspace:
            return token.replace("▁", " ").encode()
        return self._tokenizer.decode([token_id], skip_special_tokens=False).encode()


@lru_cache(NUM_KEPT_TOKENS)
def readable(raw: bytes) -> str:
    r"""A token's bytes as text; incomplete characters are escaped: `\xe2\x80`."""
    return raw.decode("utf-8", "backslashreplace")


def _decoder_kinds(tokenizer: Tokenizer) -> set[str]:
    """Types of the tokenizer's decoder and of the decoders that it is made of."""
    if tokenizer.decoder is None:
        return set()
    decoder = json.loads(tokenizer.decoder.__getstate__())
    return {decoder["type"], *(part["type"] for part in decoder.get("decoders", ()))}


def _byte_of_char() -> dict[str, int]:
    """The alphabet of byte-level BPE (GPT-2): printable Latin-1 stands for itself, other bytes for 256, 257, …"""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + rank): byte for rank, byte in enumerate(others)}
