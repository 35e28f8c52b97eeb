"""How much text one token can stand for at most."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

_NFC_SHRINKS: Final = 4  # no character of a text in NFC comes of more than 3.5 times its bytes (U+0390)
_METASPACE: Final = "▁"


def max_bytes_per_token(tokenizer: Tokenizer) -> int | None:
    """UTF-8 bytes of text that no token exceeds; None: nothing is known that holds for every text.

    It is known of byte-level BPE (GPT-2, Llama 3, Qwen) and of BPE that falls back to bytes (Llama 2, Mistral), where
    every byte of the text is in some token. Other models drop text or have one token for any unknown word.
    """
    state: dict[str, Any] = json.loads(tokenizer.to_str())
    model = state["model"]
    kept = _kinds(state["pre_tokenizer"])
    shrinks = _normalizer_shrinks(state["normalizer"])
    if model["type"] != "BPE" or kept is None or shrinks is None:
        return None
    if any(token["lstrip"] or token["rstrip"] for token in state["added_tokens"]):
        return None  # such a token swallows any number of spaces
    vocab = model["vocab"]
    if "ByteLevel" in kept:
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
        return _NFC_SHRINKS
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
