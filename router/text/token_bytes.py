"""The bytes that each token of a vocabulary stands for."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final

from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

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
    remainder = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + rank): byte for rank, byte in enumerate(remainder)}


# How much text one token can stand for at most.

NFC_SHRINKS: Final = 4  # no character of a text in NFC comes of more than 3.5 times its bytes (U+0390)
_METASPACE: Final = "▁"


def max_bytes_per_token(tokenizer: Tokenizer) -> int | None:
    """UTF-8 bytes of text that no token exceeds; None: nothing is known that holds for every text.

    It is known of byte-level BPE (GPT-2, Llama 3, Qwen) and of BPE that falls back to bytes (Llama 2, Mistral), where
    every byte of the text is in some token. Other models drop text or have one token for any unknown word.
    """
    state: dict[str, Any] = json.loads(tokenizer.to_str())
    model = state["model"]
    kinds = _kinds(state["pre_tokenizer"])
    shrinks = _normalizer_shrinks(state["normalizer"])
    if model["type"] != "BPE" or kinds is None or shrinks is None:
        return None
    if any(token["lstrip"] or token["rstrip"] for token in state["added_tokens"]):
        return None  # such a token swallows any number of spaces
    vocab = model["vocab"]
    if "ByteLevel" in kinds:
        alphabet = frozenset(ByteLevel.alphabet())  # one of its characters stands for one byte; other tokens are text
        lengths = [len(token) if alphabet.issuperset(token) else len(token.encode()) for token in vocab]
        is_whole = all(char in vocab for char in alphabet)
    else:
        lengths = [len(token.encode()) for token in vocab]
        is_whole = bool(model["byte_fallback"]) and all(f"<0x{byte:02X}>" in vocab for byte in range(256))
    if not is_whole:
        return None
    added = [len(token["content"].encode()) for token in state["added_tokens"]]
    return max([*lengths, *added]) * shrinks


def _normalizer_shrinks(normalizer: Mapping[str, Any] | None) -> int | None:
    """The largest factor by which a normalizer can shorten a text; None: unknown."""
    if normalizer is None or normalizer["type"] == "Prepend":
        return 1
    if normalizer["type"] == "NFC":
        return NFC_SHRINKS
    if normalizer["type"] == "Replace":
        return 1 if normalizer["pattern"] == {"String": " "} and normalizer["content"] == _METASPACE else None
    if normalizer["type"] == "Sequence":
        product = 1
        for part in normalizer["normalizers"]:
            factor = _normalizer_shrinks(part)
            if factor is None:
                return None
            product *= factor
        return product
    return None


def _kinds(pre_tokenizer: Mapping[str, Any] | None) -> frozenset[str] | None:
    """The types that a pre-tokenizer is made of; None: one of them may drop text."""
    if pre_tokenizer is None:
        return frozenset()
    kind = pre_tokenizer["type"]
    if kind == "Sequence":
        parts = [_kinds(part) for part in pre_tokenizer["pretokenizers"]]
        return None if None in parts else frozenset(name for part in parts if part is not None for name in part)
    if kind in ("ByteLevel", "Digits", "Metaspace"):
        return frozenset({kind})
    if kind == "Split" and pre_tokenizer["behavior"] != "Removed":
        return frozenset({kind})
    return None
