"""The tokenizer in an adapter's folder. Its chat template is served; else it is only compared with the base's.

A client sends these, which are small, and not the files. Of a folder of the server the router reads it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from ..errors import AdapterInvalid
from .strict_json import parse_object

TEMPLATE_FILE: Final = "chat_template.jinja"
_ADDED_FILE, FAST_FILE, _CONFIG_FILE = "added_tokens.json", "tokenizer.json", "tokenizer_config.json"
_TEMPLATES_FOLDER: Final = "additional_chat_templates"
TOKENIZER_FILES: Final = (
    _ADDED_FILE,
    TEMPLATE_FILE,
    "chat_template.json",
    "merges.txt",
    "special_tokens_map.json",
    FAST_FILE,
    "tokenizer.model",
    _CONFIG_FILE,
    "vocab.json",
)


class OwnTokenizer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    added_tokens: Mapping[str, int] = {}  # ids by text, beside the ordinary vocabulary
    chat_template: str = ""  # its `template_digest`; empty: it has none


NO_TOKENIZER: Final = OwnTokenizer()


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
    """What the folder's tokenizer adds, and the source of its chat template; empty: it has none.

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
    (OwnTokenizer(added_tokens={'<tool>': 7}, chat_template='f24189f...'), '{{ messages }}')
    """

    def object_of(name: str) -> dict[str, Any]:
        data = read(name)
        return {} if data is None else parse_object(data, name)

    config = object_of(_CONFIG_FILE)
    added: dict[str, Any] = {**object_of(_ADDED_FILE)}
    try:
        added |= {token["content"]: int(number) for number, token in config.get("added_tokens_decoder", {}).items()}
        added |= {token["content"]: token["id"] for token in object_of(FAST_FILE).get("added_tokens", [])}
        template = _template(read(TEMPLATE_FILE), config)
        digest = template_digest(template) if template else ""
        return msgspec.convert({"added_tokens": added, "chat_template": digest}, OwnTokenizer), template
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        message = f"the tokenizer in {where} cannot be read ({error}): save it again, or remove it"
        raise AdapterInvalid(message) from error


def _template(template_file: bytes | None, config: Mapping[str, Any]) -> str:
    """The template of chats: a file of its own goes first, as in transformers."""
    template = template_file.decode("utf-8") if template_file is not None else config.get("chat_template")
    if isinstance(template, list):  # several, each with its name
        template = next((entry["template"] for entry in template if entry["name"] == "default"), None)
    return template or ""
