"""Compares the tokenizer that an adapter was trained with, and that is not served, with the base's."""

from __future__ import annotations

from itertools import islice
from typing import Final

from ...adapters.errors import AdapterInvalid, listed
from ...adapters.format.own_tokenizer import OwnTokenizer
from ..text.text import TextService

_NUM_SHOWN: Final = 3
_OTHER_TEMPLATE: Final = (
    "the adapter's chat template is not the base's, which renders all chats here: if it was trained on chats in "
    "another form, train it with the base's template, or send prompts in its form to /v1/completions"
)


def tokenizer_warnings(own: OwnTokenizer, text: TextService) -> tuple[str, ...]:
    """What the adapter's tenant should know. Raises AdapterInvalid if its tokens are not all the base's."""
    differing = (token for token, token_id in own.added_tokens.items() if text.token_id(token) != token_id)
    missing = [*islice(differing, _NUM_SHOWN)]
    if missing:
        raise AdapterInvalid(
            f"the adapter's tokenizer adds tokens that the base's does not have, or has under another id: "
            f"{listed(missing)}. Only the base's tokens are served: train the adapter without them. If it was trained "
            "without them already, remove the tokenizer's files from its folder"
        )
    differs = bool(own.chat_template) and own.chat_template != text.template_digest
    return (_OTHER_TEMPLATE,) if differs else ()
