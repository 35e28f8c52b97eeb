"""A tokenizer for the oracle's small models, so that grammars have bytes to go by."""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from motet.tests.rigs.oracle import VOCAB_SIZE

EOS = VOCAB_SIZE - 1
NUM_PADDING = 6  # rows of the embedding, before the end-of-sequence token, that are no tokens
_PAIRS = [a + b for a in '{"aeint,:' for b in '"aeinrt'][: VOCAB_SIZE - 1 - NUM_PADDING - 95]
TOKENS = [*map(chr, range(ord("!"), ord("~") + 1)), "Ġ", *_PAIRS]  # by id; Ġ stands for a space


def write_tokenizer(folder: Path) -> None:
    """All printable ASCII, some pairs, padding, and the end-of-sequence token."""
    vocab = {token: index for index, token in enumerate(TOKENS)}
    tokenizer = Tokenizer(models.BPE(vocab, [(pair[0], pair[1]) for pair in _PAIRS]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    padding = [f"<pad{index}>" for index in range(NUM_PADDING)]
    tokenizer.add_special_tokens([AddedToken(each, special=True) for each in (*padding, "<|end|>")])
    assert tokenizer.token_to_id("<|end|>") == EOS
    tokenizer.save(str(folder / "tokenizer.json"))


def text_of(token_ids: list[int]) -> str:
    """The text of an answer, without the end-of-sequence token."""
    return "".join(TOKENS[each] for each in token_ids if each != EOS).replace("Ġ", " ")
