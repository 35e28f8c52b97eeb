"""The tokenizer in an adapter's folder: what it says, and what of it is served with the adapter.

Its vocabulary is compared with the base's, and is not served. What differs from the base is: the tokens that it adds,
its chat template, and the token that ends its answers. A client sends these, which are small, and not the files. Of a
folder of the server the router reads it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from ..errors import AdapterInvalid
from .strict_json import parse_object

TEMPLATE_FILE: Final = "chat_template.jinja"
_ADDED_FILE, FAST_FILE, _CONFIG_FILE = "added_tokens.json", "tokenizer.json", "tokenizer_config.json"
_SPECIAL_FILE: Final = "special_tokens_map.json"
_TEMPLATES_FOLDER: Final = "additional_chat_templates"
TOKENIZER_FILES: Final = (
    _ADDED_FILE,
    TEMPLATE_FILE,
    "chat_template.json",
    "merges.txt",
    _SPECIAL_FILE,
    FAST_FILE,
    "tokenizer.model",
    _CONFIG_FILE,
    "vocab.json",
)
# How a tokenizer finds an added token in a text, as transformers and tokenizers name it.
TokenFlag = Literal["special", "normalized", "lstrip", "rstrip", "single_word"]
FLAGS: Final[tuple[TokenFlag, ...]] = ("special", "normalized", "lstrip", "rstrip", "single_word")
_ORDINARY: Final[tuple[TokenFlag, ...]] = ("normalized",)  # as `add_tokens` adds a text
_END: Final = "eos_token"
# Where a config names tokens, which are special then.
_NAMES: Final = (_END, *(f"{name}_token" for name in ("bos", "unk", "sep", "pad", "cls", "mask")))
_LISTS_OF_NAMES: Final = ("additional_special_tokens", "extra_special_tokens")


class OwnTokenizer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What the tokenizer in an adapter's folder says."""

    added_tokens: Mapping[str, int] = {}  # ids by text, beside the ordinary vocabulary
    chat_template: str = ""  # its `template_digest`; empty: it has none
    flags: Mapping[str, tuple[TokenFlag, ...]] = {}  # of added tokens that have some
    end_token: str = ""  # its `eos_token`; empty: it names none
    special_tokens: Mapping[str, str] = {}  # the others that it names, such as `bos_token`


NO_TOKENIZER: Final = OwnTokenizer()


class OwnToken(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A token that an adapter's tokenizer has, and the base's has not, or has under another name."""

    id: Annotated[int, Meta(ge=0)]
    text: Annotated[str, Meta(min_length=1)]
    flags: tuple[TokenFlag, ...] = ()


_HEADER: Final = b"motet own text 1\n"


class OwnText(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How an adapter's texts are read and written, where that is not the base's way."""

    chat_template: str = ""
    tokens: tuple[OwnToken, ...] = ()  # by id
    end_token: str = ""  # it ends answers, as do the base's
    special_tokens: Mapping[str, str] = {}  # by names that its template knows

    def encode(self) -> bytes:
        """A chat template alone is stored as it is, as it was before there was more."""
        if self == OwnText(self.chat_template) and not self.chat_template.encode().startswith(_HEADER):
            return self.chat_template.encode()
        return _HEADER + msgspec.json.encode(self)

    @property
    def digest(self) -> str:
        """SHA-256, hex, of what it makes of texts.

        >>> OwnText("{{ a }}").digest == template_digest("{{ a }}")
        True
        """
        return template_digest(self.encode().decode())

    @classmethod
    def decode(cls, data: bytes, digest: str) -> OwnText:
        """What `encode` wrote. Raises ValueError for damaged data."""
        text = data.decode()
        if template_digest(text) != digest:
            raise ValueError(f"its digest is not {digest}")
        return msgspec.json.decode(data[len(_HEADER) :], type=cls) if data.startswith(_HEADER) else cls(text)


NO_OWN_TEXT: Final = OwnText()


def template_digest(template: str) -> str:
    """SHA-256, hex, of what a template renders by: line ends and the last one of a file do not count.

    >>> template_digest("{{ a }}\\r\\n") == template_digest("{{ a }}")
    True
    """
    return hashlib.sha256(template.replace("\r\n", "\n").rstrip("\n").encode()).hexdigest()


def tokenizer_files(folder: Path) -> list[str]:
    """Names of the files of a tokenizer in an adapter's folder, and of its folder of more templates."""
    return [name for name in (*TOKENIZER_FILES, _TEMPLATES_FOLDER) if (folder / name).exists()]


def read_own_tokenizer(folder: Path) -> tuple[OwnTokenizer, str]:
    """What the folder's tokenizer says, and the source of its chat template; empty: it has none.

    Raises AdapterInvalid, which names the file, for one that cannot be read.
    """

    def read(name: str) -> bytes | None:
        path = folder / name
        return path.read_bytes() if path.is_file() else None

    return own_tokenizer(read, str(folder))


def own_tokenizer(read: Callable[[str], bytes | None], where: str) -> tuple[OwnTokenizer, str]:
    """The same of files by name. `read`: None: there is no such file. `where`: named in the error.

    >>> files = {"added_tokens.json": b'{"<tool>": 7}', "chat_template.jinja": b"{{ messages }}"}
    >>> own_tokenizer(files.get, "pirate")
    (OwnTokenizer(added_tokens={'<tool>': 7}, chat_template='f24189f...', flags=...), '{{ messages }}')
    """

    def object_of(name: str) -> dict[str, Any]:
        data = read(name)
        return {} if data is None else parse_object(data, name)

    config = object_of(_CONFIG_FILE)
    try:
        added: dict[str, Any] = {**object_of(_ADDED_FILE)}
        flags = dict.fromkeys(added, _ORDINARY)
        described = [(int(number), token) for number, token in config.get("added_tokens_decoder", {}).items()]
        described += [(token["id"], token) for token in object_of(FAST_FILE).get("added_tokens", [])]
        for number, token in described:
            added[token["content"]] = number
            flags[token["content"]] = tuple(flag for flag in FLAGS if token.get(flag, False))
        config_of_names = {**object_of(_SPECIAL_FILE), **config}
        named = [config_of_names.get(name) or "" for name in _NAMES]
        for key in _LISTS_OF_NAMES:
            listed = config_of_names.get(key) or ()
            named += listed.values() if isinstance(listed, dict) else listed
        texts = [each["content"] if isinstance(each, dict) else each for each in named]
        for text in added.keys() & {*texts}:
            flags[text] = tuple(flag for flag in FLAGS if flag == "special" or flag in flags[text])
        template = _template(read(TEMPLATE_FILE), config)
        facts = {
            "added_tokens": added,
            "chat_template": template_digest(template) if template else "",
            "flags": {text: some for text, some in flags.items() if some},
            "end_token": texts[0],
            "special_tokens": {name: text for name, text in zip(_NAMES, texts, strict=False) if text and name != _END},
        }
        return msgspec.convert(facts, OwnTokenizer), template
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        message = f"the tokenizer in {where} cannot be read ({error}): save it again, or remove it"
        raise AdapterInvalid(message) from error


def _template(template_file: bytes | None, config: Mapping[str, Any]) -> str:
    """The template of chats: a file of its own goes first, as in transformers."""
    template = template_file.decode("utf-8") if template_file is not None else config.get("chat_template")
    if isinstance(template, list):  # several, each with its name
        template = next((entry["template"] for entry in template if entry["name"] == "default"), None)
    return template or ""
