"""Between text and token ids: encoding, chat templates, and text out of tokens as they come."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any, Final, TypeVar

from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import DecodeStream

from ...adapters.format.own_tokenizer import FLAGS, OwnText, OwnToken, template_digest
from ...adapters.tenant_places import TenantPlaces
from ..config import TextsWithControlTokens
from .answer_format import BY_TEMPLATE, AnswerFormat, answer_format, named_format
from .chat_renderer import ChatRenderer, ChatTemplateError, RenderedChat, TemplateForms, template_forms
from .control_tokens import (
    TEMPLATE_ERRORS,
    AddedTokens,
    Apply,
    ControlTokens,
    RenderedChats,
    control_names,
    num_model_ids,
    rendered_chats,
    with_added_tokens,
)
from .model_tokenizer import OwnPooling, load_tokenizer, own_pad_id, own_pooling
from .token_bytes import NFC_SHRINKS, NUM_KEPT_TOKENS, TokenBytes, max_bytes_per_token

T = TypeVar("T")

# A shorter text encodes faster than a thread takes over; a longer one would hold up every stream of this router.
MAX_CHARS_ON_LOOP: Final = 4096
MAX_TOKENS_ON_LOOP: Final = 1024  # to decode at once
MAX_MESSAGES_ON_LOOP: Final = 64  # of a chat
# Long texts wait for each other here, never for uploads, nor uploads for them; and never all for one tenant's.
NUM_THREADS: Final = 3
MOST_THREADS: Final = 2  # of one tenant
# A decoder must see what came just before, or a completion of SentencePiece tokens would lose its first space.
NUM_CONTEXT_TOKENS: Final = 6
MAX_CONTINUATION_BYTES: Final = 3  # of a character in UTF-8
_CUT: Final = "�"  # for bytes that are not a character
# Arguments of the template's renderer that are ours to set.
RESERVED_TEMPLATE_ARGUMENTS: Final = frozenset(
    {
        "conversation",
        "messages",
        "tools",
        "documents",
        "tokenize",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "padding",
        "truncation",
        "max_length",
        "tokenizer_kwargs",
    }
)


@dataclass(frozen=True)
class OwnRendering:
    """By a chat template of an adapter's."""

    forms: TemplateForms  # what it does
    chats: RenderedChats  # what it makes of small chats
    apply: Apply  # slow
    threads: ThreadPoolExecutor  # for all that is not short, by `turns`, so that texts of others do not wait for it
    turns: TenantPlaces


class TextService:
    """Text and tokens of one model. Safe to share between requests; has no state but the tokenizer."""

    def __init__(
        self,
        tokenizer: Any,
        control_tokens: TextsWithControlTokens = "prompts",
        response_template: str = BY_TEMPLATE,
        pooling: OwnPooling | None = None,
        pad_id: int | None = None,
    ) -> None:
        """`tokenizer`: of transformers, with a `tokenizers` backend.

        `control_tokens`: which texts of clients may write them: those of completions, those of chats, too, or none.
        `response_template`: of answers, see `answer_format`, which raises ValueError. `pooling`: of embeddings; None:
        where nothing is said. `pad_id`: the model's token for padding; None: it has none.
        """
        self._templated = tokenizer
        self.pooling, self._pad_id = pooling or OwnPooling(), pad_id
        backend: Tokenizer = tokenizer.backend_tokenizer
        backend.no_truncation()  # a tokenizer.json may carry these from its training
        backend.no_padding()
        added = self._use(backend)
        self.token_bytes: Callable[[int], bytes] = lru_cache(NUM_KEPT_TOKENS)(TokenBytes(backend))
        self._num_model_ids, self._max_bytes_per_token = num_model_ids(backend), max_bytes_per_token(backend)
        self.end_id: int | None = None  # of the token that ends an adapter's answers, beside the base's
        self.num_own = 0  # added tokens that are kept for an adapter with tokens of its own
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="text")
        self._turns, self._tenant = TenantPlaces(NUM_THREADS, MOST_THREADS), ""
        self._control_tokens = control_tokens
        self._apply: Apply
        template = _template_of(tokenizer)
        self.answer_format = answer_format(response_template, tokenizer, added.names)
        self._named_formats: dict[str, AnswerFormat] = {}
        apply = self._apply = partial(_applied, tokenizer)
        names = control_names(added, template, rendered_chats(apply))
        self.forms = template_forms(template, apply)
        self._has_template, self._is_own_template = tokenizer.chat_template is not None, False
        self._tokens = ControlTokens(self._backend, added, names.in_messages, self._num_model_ids)
        self._renderer = ChatRenderer(apply, self._tokens, names.in_answers)

    def _use(self, backend: Tokenizer) -> AddedTokens:
        self._backend, added = backend, AddedTokens(backend)
        self._hidden: dict[AnswerFormat, frozenset[int]] = {}  # special tokens by format, of which there are few
        self._added_ids = frozenset(added.by_id)
        self._special_ids = {token_id: token.content for token_id, token in added.by_id.items() if token.special}
        return added

    @classmethod
    def from_folder(
        cls,
        path: Path,
        control_tokens: TextsWithControlTokens = "prompts",
        response_template: str = BY_TEMPLATE,
    ) -> TextService:
        """The service of a model folder in Hugging Face format. Blocking; raises ValueError, see `load_tokenizer`."""
        return cls(load_tokenizer(path), control_tokens, response_template, own_pooling(path), own_pad_id(path))

    def of(self, tenant: str) -> TextService:
        """The same service for this tenant's texts: long ones have a fair turn beside those of others."""
        clone = copy(self)
        clone._tenant = tenant
        return clone

    def of_adapter(self, own_text: OwnText, rendering: OwnRendering | None) -> TextService:
        """The same service for an adapter's texts. Blocking; raises ValueError for tokens that it cannot have.

        `rendering`: by its own chat template; None: the base's renders.
        """
        clone, added = copy(self), self._tokens.added
        if own_text.tokens:
            clone._backend = with_added_tokens(self._backend, {token.id: _added(token) for token in own_text.tokens})
            added = clone._use(clone._backend)
            clone.num_own = len(added.by_id)
            own_bytes = {token.id: token.text.encode() for token in own_text.tokens}
            clone.token_bytes = lambda token_id: own_bytes.get(token_id) or self.token_bytes(token_id)
            clone._max_bytes_per_token = self._max_bytes_with(own_text.tokens)
        if own_text.end_token and clone.token_id(own_text.end_token) is None:
            raise ValueError(f"{own_text.end_token!r} ends its answers, and is no token")
        clone.end_id = clone.token_id(own_text.end_token) if own_text.end_token else None
        if rendering is None:
            template, chats = _template_of(self._templated), rendered_chats(self._apply)
        else:
            template, chats = own_text.chat_template, rendering.chats
            clone.forms, clone._apply = rendering.forms, rendering.apply
            clone._has_template = clone._is_own_template = True
            clone._threads, clone._turns = rendering.threads, rendering.turns
        names = control_names(added, template, chats, added.names & {own_text.end_token})
        if own_text.tokens or names.in_messages != self._tokens.names:
            clone._tokens = ControlTokens(clone._backend, added, names.in_messages, self._num_model_ids)
        clone._renderer = ChatRenderer(clone._apply, clone._tokens, names.in_answers)
        return clone

    def _max_bytes_with(self, tokens: Sequence[OwnToken]) -> int | None:
        """Of text that no token exceeds, with these."""
        if self._max_bytes_per_token is None or any({"lstrip", "rstrip"}.intersection(each.flags) for each in tokens):
            return None
        return max(self._max_bytes_per_token, *(NFC_SHRINKS * len(each.text.encode()) for each in tokens))

    def token_id(self, token: str) -> int | None:
        """The id of a token, added ones included; None: it is not in the vocabulary."""
        return self._backend.token_to_id(token)

    def is_added(self, token: str, token_id: int) -> bool:
        """Whether it is found as a whole wherever a text has it, and has this id."""
        return token_id in self._added_ids and self._backend.token_to_id(token) == token_id

    def token_str(self, token_id: int) -> str:
        """The token as the vocabulary has it; empty: it has none of this id."""
        return self._backend.id_to_token(token_id) or ""

    def answers_of(self, name: str) -> AnswerFormat:
        """The form of answers with this name of the table; `answer_format` is the model's own."""
        if name not in self._named_formats:
            self._named_formats[name] = named_format(name)
        return self._named_formats[name]

    def mark_ids(self, text: str) -> tuple[int, ...] | None:
        """The tokens of a mark in answers; None: it does not begin with an added token, and others may be its text."""
        token_ids = self._backend.encode(text, add_special_tokens=False).ids
        return (*token_ids,) if token_ids and token_ids[0] in self._added_ids else None

    @property
    def special_ids(self) -> Mapping[str, int]:
        """Ids of the special tokens, by name."""
        return {name: token_id for token_id, name in self._special_ids.items()}

    @property
    def special_tokens(self) -> Mapping[str, str]:
        """Special tokens by the names that templates know, such as `bos_token`."""
        return dict(self._templated.special_tokens_map)

    @property
    def template_digest(self) -> str:
        """The digest of the chat template; empty: there is none."""
        template = self._templated.chat_template
        if isinstance(template, dict):
            template = template.get("default")
        return template_digest(template) if template else ""

    def close(self) -> None:
        """Ends the threads after their current work."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def min_tokens(self, text: str) -> int:
        """A lower bound of the text's tokens, without tokenizing it. 0 if none is known."""
        if self._max_bytes_per_token is None:
            return 0
        is_short = len(text) <= MAX_CHARS_ON_LOOP
        num_bytes = len(text.encode("utf-8", "surrogatepass")) if is_short else len(text)  # at least
        return -(-num_bytes // self._max_bytes_per_token)

    @cached_property
    def pair_marks(self) -> tuple[list[int], list[int], list[int]]:
        """The special tokens that the tokenizer puts before, between and behind two texts."""
        encoding = self._backend.encode("a", "a")
        ids, texts = encoding.ids, encoding.sequence_ids
        first, second, end = texts.index(0), texts.index(1), len(texts) - texts[::-1].index(1)
        between = len(texts) - texts[::-1].index(0)
        return ids[:first], ids[between:second], ids[end:]

    def without_padding(self, token_ids: list[int]) -> list[int]:
        """Without tokens for padding at the end, which classifiers of transformers pass over; one token stays."""
        end = len(token_ids)
        while end > 1 and token_ids[end - 1] == self._pad_id:
            end -= 1
        return token_ids[:end]

    async def encode(self, text: str, *, add_special_tokens: bool, limit: int | None = None) -> list[int]:
        """Token ids of a client's text, the last `limit` of them; off the event loop when it is long."""
        return (await self.encode_all([text], add_special_tokens=add_special_tokens, limit=limit))[0]

    async def encode_all(
        self, texts: Sequence[str], *, add_special_tokens: bool, limit: int | None = None
    ) -> list[list[int]]:
        """Token ids of clients' texts, the last `limit` of each; off the event loop when they are long together."""
        encode = self._tokens.encode_as_text if self._control_tokens == "nowhere" else self._encode_all
        work = _encoding(encode, texts, limit, add_special_tokens=add_special_tokens)
        return await self._done(work, sum(map(len, texts)) <= MAX_CHARS_ON_LOOP)

    async def encode_chat(self, chat: RenderedChat, *, add_special_tokens: bool, limit: int | None = None) -> list[int]:
        """Token ids of a chat's prompt, the last `limit` of them; off the event loop when it is long."""
        encode, text = self._encode_all, chat.text
        if chat.aliased is not None:
            encode, text = self._tokens.encode, chat.aliased
        work = _encoding(encode, [text], limit, add_special_tokens=add_special_tokens)
        return (await self._done(work, len(text) <= MAX_CHARS_ON_LOOP))[0]

    async def decode_all(self, token_lists: Sequence[Sequence[int]], *, skip_special_tokens: bool = True) -> list[str]:
        """The text of each list of tokens; off the event loop when they are many together."""
        work = partial(self._backend.decode_batch, token_lists, skip_special_tokens=skip_special_tokens)
        return await self._done(work, sum(map(len, token_lists)) <= MAX_TOKENS_ON_LOOP)

    async def echoes(self, token_lists: Sequence[Sequence[int]], *, skip_special_tokens: bool = True) -> list[str]:
        """The text of each prompt up to where the detokenizer of an echoed prompt continues, see `detokenizer`."""
        texts = await self.decode_all(token_lists, skip_special_tokens=skip_special_tokens)
        return [text[: len(text) - self._num_cut(ids)] for text, ids in zip(texts, token_lists, strict=True)]

    def detokenizer(
        self,
        prompt_token_ids: Sequence[int],
        *,
        is_echoed: bool = False,
        read_as: AnswerFormat | None = None,
        skip_special_tokens: bool = True,
    ) -> Detokenizer:
        """A new one for a sequence that continues this prompt.

        `read_as`: special tokens that this format names are shown.

        `is_echoed`: bytes of an incomplete character at the prompt's end come with the first piece, as the character
        that they turn out to be, and are not in the prompt's own text (`echoes`).
        """
        context = self._context(prompt_token_ids)
        hidden = None if read_as is None else self._hidden_by(read_as)
        if not skip_special_tokens:
            hidden = frozenset()
        return Detokenizer(self._backend, context, is_echoed=is_echoed, hidden=hidden)

    def _hidden_by(self, answers: AnswerFormat) -> frozenset[int]:
        """The special tokens that it does not name."""
        if answers not in self._hidden:
            names = self._special_ids.items()
            self._hidden[answers] = frozenset(token_id for token_id, name in names if not answers.names(name))
        return self._hidden[answers]

    def _num_cut(self, prompt_token_ids: Sequence[int]) -> int:
        """How many characters at the end of the prompt's text are bytes of an incomplete character."""
        text = str(self._backend.decode(self._context(prompt_token_ids), skip_special_tokens=True))
        return len(text) - len(text.rstrip(_CUT))

    def _context(self, prompt_token_ids: Sequence[int]) -> Sequence[int]:
        start = max(len(prompt_token_ids) - NUM_CONTEXT_TOKENS, 0)
        for _ in range(MAX_CONTINUATION_BYTES):  # not inside of a character, which would spoil the bytes after it
            raw = self.token_bytes(prompt_token_ids[start]) if start > 0 else b""
            if raw and raw[0] & 0xC0 == 0x80:
                start -= 1
        return prompt_token_ids[start:]

    async def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        arguments: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
    ) -> RenderedChat:
        """The prompt that the model's chat template makes of messages; off the event loop when they may be long.

        The messages are in the forms that `forms` says. `arguments`: more of the template's. Raises
        `ChatTemplateError`.
        """
        if not self._has_template:
            raise ChatTemplateError("this model has no chat template, so it cannot chat; use /v1/completions")
        reserved = sorted(RESERVED_TEMPLATE_ARGUMENTS.intersection(arguments))
        if reserved:
            raise ChatTemplateError(f"chat_template_kwargs may not set {', '.join(reserved)}")
        lists = {"tools": tools, "documents": documents}
        arguments = {**arguments, **{name: [*entries] for name, entries in lists.items() if entries}}
        work = partial(
            self._as_written if self._control_tokens == "everywhere" else self._renderer.render,
            list(messages),
            arguments,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
        try:
            return await self._done(work, not arguments and not self._is_own_template and _are_short(messages))
        except RecursionError as error:
            raise ChatTemplateError("the messages are nested too deeply for the model's chat template") from error
        except TEMPLATE_ERRORS as error:
            whose = "adapter" if self._is_own_template else "model"
            raise ChatTemplateError(f"the {whose}'s chat template refused the messages: {error}") from error

    def _as_written(
        self, messages: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any], **options: bool
    ) -> RenderedChat:
        """With control tokens wherever texts of messages name some."""
        return RenderedChat(self._apply(messages, **options, **arguments))

    async def _done(self, work: Callable[[], T], is_short: bool) -> T:
        """The result of the work, which runs here if it is short, else in a thread."""
        if is_short:
            return work()
        async with self._turns.of(self._tenant):
            done = asyncio.get_running_loop().run_in_executor(self._threads, work)
            try:
                return await asyncio.shield(done)
            except asyncio.CancelledError:  # its thread works on, and only then is its tenant's turn over
                await asyncio.wait([done])
                if not done.cancelled():
                    done.exception()  # else asyncio logs it, and it may quote the text
                raise

    def _encode_all(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        # The batch call releases the GIL, which `encode` holds: a thread alone would not help.
        encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in encodings]


def _encoding(
    encode: Callable[..., list[list[int]]], texts: Sequence[str], limit: int | None, *, add_special_tokens: bool
) -> Callable[[], list[list[int]]]:
    """What makes the tokens of texts, the last `limit` of each.

    They are cut where they were made: millions of tokens that are not kept would take long to free on the event loop.
    """
    encode_texts = partial(encode, texts, add_special_tokens=add_special_tokens)
    return encode_texts if limit is None else lambda: [ids[max(len(ids) - limit, 0) :] for ids in encode_texts()]


def _applied(tokenizer: Any, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
    return str(tokenizer.apply_chat_template(messages, tokenize=False, **options))


def _added(token: OwnToken) -> AddedToken:
    return AddedToken(token.text, **{flag: flag in token.flags for flag in FLAGS})


def _template_of(tokenizer: Any) -> str:
    """The chat template's source, of several that it may have all."""
    template = tokenizer.chat_template or ""
    return "\n".join(template.values()) if isinstance(template, dict) else template


def _are_short(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a template renders them in no time, by a quick check."""
    if len(messages) > MAX_MESSAGES_ON_LOOP:
        return False
    values = [value for message in messages for value in message.values()]
    return all(isinstance(value, str) for value in values) and sum(map(len, values)) <= MAX_CHARS_ON_LOOP


class Detokenizer:
    """Text of one growing sequence. The pieces and the flush joined are the text of all tokens."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        context: Sequence[int],
        *,
        is_echoed: bool = False,
        hidden: frozenset[int] | None = None,
    ) -> None:
        """`context`: the last tokens before it. A character that they begin comes whole, with the first piece.

        `hidden`: tokens without a text. None: the special ones.

        `is_echoed`: if nothing ends that character, its bytes are flushed nevertheless, as the prompt's text lacks
        them.
        """
        self._is_echoed = is_echoed
        self._tokenizer = tokenizer
        self._hidden: frozenset[int] = hidden or frozenset()
        self._skips_special = hidden is None
        context = [token_id for token_id in context if token_id not in self._hidden]
        self._stream = self._stream_after(context)
        self._pending: list[int] = []  # tokens since the last piece
        # Context that may end inside of a character, until that is complete.
        self._cut_context = list(context) if context and self._decode(context).endswith(_CUT) else None

    def step(self, token_id: int) -> str:
        """The text that this token completes; empty for a special token or in the middle of a character."""
        if token_id in self._hidden:
            return ""
        self._pending.append(token_id)
        if self._cut_context is not None:
            return self._complete(self._cut_context)
        try:
            piece = self._stream.step(self._tokenizer, token_id)
        except Exception as error:  # the library raises nothing narrower
            if "Invalid prefix" not in str(error):
                raise
            piece = self._restart()
        if piece is None:
            return ""
        self._pending.clear()
        return piece

    def _complete(self, context: list[int]) -> str:
        """The first piece after context that ends inside of a character, once the pending tokens end at one's end."""
        text = self._decode([*context, *self._pending])
        if text.endswith(_CUT):
            return ""
        self._stream = self._stream_after([*context, *self._pending])
        self._cut_context = None
        self._pending.clear()
        return text[self._num_chars_of(context, text) :]

    def _num_chars_of(self, context: list[int], text: str) -> int:
        """How many characters at the start of `text`, which continues the context, are whole in the context.

        Its bytes that were � alone may be a character now: that one is not the context's. And where one invalid byte
        turned a whole run of byte tokens into �, those before it decode once it is left out.
        """
        if self._is_echoed:
            return len(self._decode(context).rstrip(_CUT))
        longest = 0
        for end in range(len(context), max(len(context) - MAX_CONTINUATION_BYTES, 0) - 1, -1):
            prefix = self._decode(context[:end])
            while not text.startswith(prefix):
                prefix = prefix[:-1]
            longest = max(longest, len(prefix))
        return longest

    def _decode(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=self._skips_special))

    def _stream_after(self, token_ids: Sequence[int]) -> DecodeStream:
        return DecodeStream(list(token_ids), skip_special_tokens=self._skips_special)

    def _restart(self) -> str | None:
        """The text of the pending tokens.

        Byte tokens that do not form a character make earlier ones invalid too, whose text was sent already: the whole
        run decodes to replacement characters then. The stream continues after the last piece.
        """
        *earlier, last = self._pending
        self._stream = self._stream_after(earlier)
        return self._stream.step(self._tokenizer, last)

    def flush(self) -> str:
        """What is left of a character that will not be completed. The detokenizer is used up after it."""
        if not self._pending and not (self._is_echoed and self._cut_context is not None):
            return ""
        if self._cut_context is not None:
            text = self._decode([*self._cut_context, *self._pending])
            return text[self._num_chars_of(self._cut_context, text) :]
        return self._decode(self._pending)
