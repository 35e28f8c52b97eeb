"""Texts of adapters that have tokens or chat templates of their own.

A tokenizer with more added tokens shares the base's model. Chat templates are rendered beside the router.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import msgspec
from jinja2 import TemplateError

from ...adapters.adapter import AdapterVersion
from ...adapters.errors import AdapterCorrupt, AdapterInvalid, StoreUnavailable
from ...adapters.format.own_tokenizer import OwnText
from ...adapters.processes.child_processes import ChildProcesses
from ...adapters.tenant_places import TenantPlaces
from ..http.errors import ApiError, unavailable
from .chat_renderer import ChatTemplateError
from .template_process import Probed, Rendered
from .text import OwnRendering, TextService

NUM_PROCESSES: Final = 2  # of which a tenant has one
DEADLINE_S: Final = 30.0  # for one chat, on a machine that is busy: its CPU is bounded more closely
NUM_THREADS: Final = 8  # of chats that are rendered, or wait for a process
MOST_THREADS: Final = 2  # of one tenant
NUM_MADE_AT_ONCE: Final = 4  # of which a tenant has one: with many tokens one takes 0.1 s, much of it with the GIL
MAX_KNOWN: Final = 256  # that are ready, by tenant
MAX_KNOWN_TOKENS: Final = 1 << 17  # added ones of those that have some of their own, some 1 KiB each
_MODULE: Final = "motet.router.text.template_process"
_log = logging.getLogger(__name__)


class AdapterTexts:
    """Belongs to one event loop. Its processes start at first use."""

    def __init__(self, base: TextService, read: Callable[[AdapterVersion], Awaitable[OwnText]]) -> None:
        """`read`: what a version has of its own, from the store."""
        self._base, self._read = base, read
        self._processes = ChildProcesses(_MODULE, NUM_PROCESSES, DEADLINE_S)
        self._places = TenantPlaces(NUM_PROCESSES)
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="template")
        self._turns = TenantPlaces(NUM_THREADS, MOST_THREADS)
        self._making = TenantPlaces(NUM_MADE_AT_ONCE)
        self._texts: OrderedDict[tuple[str, str], TextService] = OrderedDict()  # the last used one last

    async def check(self, tenant: str, own_text: OwnText) -> None:
        """Raises AdapterInvalid for tokens that it cannot have, and for a template that cannot be compiled."""
        try:
            async with self._making.of(tenant):
                await self._service(tenant, own_text)
        except ChatTemplateError as error:
            raise AdapterInvalid(f"{error}: send another, or none for the base's") from error
        except ValueError as error:
            raise AdapterInvalid(f"the adapter's tokenizer cannot be served beside the base's: {error}") from error

    async def text(self, tenant: str, version: AdapterVersion | None) -> TextService:
        """That of a version's requests. None: the base's.

        Raises a 400 for a template that takes too much to be tried, 500 for what is damaged, and 503.
        """
        if version is None or not version.own_text:
            return self._base.of(tenant)
        key = tenant, version.own_text
        if key not in self._texts:
            async with self._making.of(tenant):
                if key not in self._texts:  # nor made while this request waited
                    self._texts[key] = await self._prepared(tenant, version)
        text = self._texts[key]
        self._texts.move_to_end(key)
        while len(self._texts) > MAX_KNOWN or sum(each.num_own for each in self._texts.values()) > MAX_KNOWN_TOKENS:
            self._texts.popitem(last=False)
        return text

    async def _prepared(self, tenant: str, version: AdapterVersion) -> TextService:
        """Raises as `text`."""
        try:
            return await self._service(tenant, await self._read(version))
        except StoreUnavailable as error:
            raise unavailable(str(error), "store_unavailable") from error
        except (AdapterCorrupt, ValueError) as error:
            raise ApiError(500, str(error), code="adapter_failed") from error
        except ChatTemplateError as error:
            raise ApiError(400, f"{error}.", param="messages", code="invalid_messages") from error

    async def _service(self, tenant: str, own_text: OwnText) -> TextService:
        """Raises ValueError for tokens that it cannot have, ChatTemplateError, and 503."""
        rendering = None
        if own_text.chat_template:
            probed = msgspec.json.decode(await self.rendered(tenant, own_text, self.question(own_text)), type=Probed)
            apply = _Apply(self, asyncio.get_running_loop(), tenant, own_text)
            rendering = OwnRendering(probed.forms, probed.chats, apply, self._threads, self._turns)
        return (await asyncio.to_thread(self._base.of_adapter, own_text, rendering)).of(tenant)

    def question(self, own_text: OwnText, **chat: Any) -> bytes:
        """For `rendered`. Slow for a long chat. No chat: what is known of the template."""
        special = dict(self._base.special_tokens)
        for name, token in own_text.special_tokens.items():
            special[name] = token
        if own_text.end_token:
            special["eos_token"] = own_text.end_token
        return json.dumps({**chat, "special_tokens": special}).encode()

    async def rendered(self, tenant: str, own_text: OwnText, question: bytes) -> str:
        """JSON of what has come of it. Raises ChatTemplateError, TemplateError for messages that it refuses, 503."""
        try:
            async with self._places.of(tenant), self._processes.process() as process:
                answer = await process.ask(
                    [own_text.chat_template.encode(), question],
                    lambda frames: msgspec.msgpack.decode(frames[0], type=Rendered),
                )
        except (OSError, EOFError, TimeoutError) as error:
            _log.warning("a chat could not be rendered by its adapter's template: %r", error)
            raise unavailable("The adapter's chat template cannot be rendered now.", "overloaded") from error
        if answer.problem:
            raise ChatTemplateError(f"the adapter's chat template cannot be used: {answer.problem}")
        if answer.refusal:
            raise TemplateError(answer.refusal)
        return answer.text


class _Apply:
    """Renders by one template, for a thread that may wait."""

    def __init__(self, texts: AdapterTexts, loop: asyncio.AbstractEventLoop, tenant: str, own_text: OwnText) -> None:
        self._texts, self._loop, self._tenant, self._own_text = texts, loop, tenant, own_text

    def __call__(self, messages: Any, **options: Any) -> str:
        question = self._texts.question(self._own_text, messages=messages, options=options)
        work = self._texts.rendered(self._tenant, self._own_text, question)
        return str(json.loads(asyncio.run_coroutine_threadsafe(work, self._loop).result()))
