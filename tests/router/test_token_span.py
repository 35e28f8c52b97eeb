from __future__ import annotations

import json
import random
import unicodedata

import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from motet.router.text.token_bytes import max_bytes_per_token
from motet.tests.rigs.router_rig import byte_level_tokenizer


def unknown_words() -> Tokenizer:
    return Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))


def dropping(how: str) -> Tokenizer:
    """A byte-level tokenizer that drops some text, which then has no token."""
    tokenizer = byte_level_tokenizer()
    if how == "strips":
        tokenizer.normalizer = normalizers.Strip()
    elif how == "replaces":
        tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Replace("  ", " ")])
    elif how == "removes":
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    elif how == "swallows":
        tokenizer.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    elif how == "lacks bytes":
        tokenizer.model = models.BPE({"a": 0}, [])
    return tokenizer


def test_byte_level() -> None:
    tokenizer = byte_level_tokenizer()
    assert max_bytes_per_token(tokenizer) == max(len(token) for token in tokenizer.get_vocab())


def test_a_token_outside_the_alphabet_of_bytes_is_text() -> None:
    tokenizer = byte_level_tokenizer()
    state = json.loads(tokenizer.to_str())
    state["model"]["vocab"]["中" * 100] = 5_000
    assert max_bytes_per_token(Tokenizer.from_str(json.dumps(state))) == 300


@pytest.mark.parametrize("how", ["strips", "replaces", "removes", "swallows", "lacks bytes"])
def test_a_tokenizer_that_may_drop_text_promises_nothing(how: str) -> None:
    assert max_bytes_per_token(dropping(how)) is None
    assert max_bytes_per_token(unknown_words()) is None


def test_composed_characters_are_allowed_for() -> None:
    tokenizer = byte_level_tokenizer()
    tokenizer.normalizer = normalizers.NFC()
    limit = max_bytes_per_token(tokenizer)
    assert limit is not None
    rng = random.Random(3)
    # Characters with the longest ways of writing them apart, and marks in any order.
    letters = "ΐΰ각ǖ\u1fbe\u0308\u0301\u212b\u212a\u0327K"
    for _ in range(300):
        text = unicodedata.normalize("NFD", "".join(rng.choice(letters) for _ in range(30)))
        text += "\u1fbe\u0308\u0301" * 20
        assert len(text.encode()) <= limit * len(tokenizer.encode(text).ids)
