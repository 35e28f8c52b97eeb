from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from motet.router.text.text import MAX_CHARS_ON_LOOP, MOST_THREADS, TextService
from motet.tests.rigs.patience import PATIENCE_S
from motet.tests.rigs.router_rig import CORPUS, byte_level_tokenizer, decoded, encoded, text_service

TEXT = "the héllo 你好 🎉 👩‍👩‍👧 fox  wörld\n"


def byte_fallback_tokenizer() -> Tokenizer:
    """A tokenizer like SentencePiece's: spaces are ▁, unknown characters become tokens of one byte."""
    trained = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.pre_tokenizer = pre_tokenizers.Split(Regex("(?<=[^▁])(?=▁)"), "isolated")
    trained.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<unk>", "<s>", *byte_tokens], show_progress=False, limit_alphabet=30
    )
    trained.train_from_iterator(CORPUS, trainer)
    state = trained.model
    # The trainer makes the byte tokens special; in such models only <s> and <unk> are.
    tokenizer = Tokenizer(state)
    tokenizer.normalizer, tokenizer.decoder = trained.normalizer, trained.decoder
    tokenizer.pre_tokenizer = trained.pre_tokenizer
    tokenizer.add_special_tokens(["<unk>", "<s>"])
    return tokenizer


@pytest.fixture(scope="module", params=["byte_level", "byte_fallback"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return byte_level_tokenizer() if request.param == "byte_level" else byte_fallback_tokenizer()


@pytest.fixture
def text(tokenizer: Tokenizer) -> TextService:
    return TextService(PreTrainedTokenizerFast(tokenizer_object=tokenizer))


def pieces_of(text: TextService, token_ids: list[int], prompt: list[int] | None = None) -> list[str]:
    detokenizer = text.detokenizer(prompt or [])
    pieces = [detokenizer.step(token_id) for token_id in token_ids]
    return [*pieces, detokenizer.flush()]


async def test_pieces_join_to_the_text(text: TextService) -> None:
    token_ids = await text.encode(TEXT, add_special_tokens=False)
    pieces = pieces_of(text, token_ids)
    assert "".join(pieces) == decoded(text, token_ids) == TEXT
    assert all("�" not in piece for piece in pieces)


async def test_a_cut_character_is_flushed(text: TextService) -> None:
    whole = await text.encode("fox 🎉", add_special_tokens=False)
    pieces = pieces_of(text, whole[:-1])
    assert "".join(pieces) == decoded(text, whole[:-1])
    assert pieces[-1].startswith("�")


def random_token_lists(tokenizer: Tokenizer) -> Iterator[list[int]]:
    """Lists of random tokens: bytes that are no UTF-8, special tokens, anything."""
    rng = random.Random(1)
    for _ in range(300):
        yield [rng.randrange(tokenizer.get_vocab_size()) for _ in range(rng.randrange(1, 40))]


def test_random_tokens_join_to_the_text() -> None:
    text = text_service()
    for token_ids in random_token_lists(byte_level_tokenizer()):
        assert "".join(pieces_of(text, token_ids)) == decoded(text, token_ids)


def test_no_word_is_lost_between_bytes_that_are_no_characters() -> None:
    """Text that was sent cannot be changed when later bytes change how it decodes, but no word may be lost."""
    tokenizer = byte_fallback_tokenizer()
    text = TextService(PreTrainedTokenizerFast(tokenizer_object=tokenizer))
    for token_ids in random_token_lists(tokenizer):
        joined = "".join(pieces_of(text, token_ids))
        position = 0
        for token in map(tokenizer.id_to_token, token_ids):
            word = str(token).strip("▁")
            if not word.startswith("<"):
                position = joined.index(word, position) + len(word)


async def test_the_first_space_after_a_prompt_is_kept(text: TextService) -> None:
    prompt = await text.encode("hello", add_special_tokens=False)
    whole = await text.encode("hello fox", add_special_tokens=False)
    assert whole[: len(prompt)] == prompt
    assert "".join(pieces_of(text, whole[len(prompt) :], prompt)) == " fox"


@pytest.mark.parametrize("before", ["", "fox ", "🎉", "你🎉"])
@pytest.mark.parametrize("letters", ["fox", "zebra ", "猫"])
async def test_a_prompt_that_ends_inside_of_a_character(text: TextService, before: str, letters: str) -> None:
    """The character is complete in the output, and no text after it is lost, even if that is byte tokens, too."""
    for character in ("🎉", "é", "你"):
        token_ids = await text.encode(before + character + letters, add_special_tokens=False)
        for cut in range(1, len(token_ids)):
            of_prompt = b"".join(map(text.token_bytes, token_ids[:cut])).decode(errors="ignore")  # whole characters
            pieces = pieces_of(text, token_ids[cut:], token_ids[:cut])
            assert "".join(pieces) == (before + character + letters)[len(of_prompt) :], cut


async def test_a_character_that_the_prompt_begins_and_nothing_ends(text: TextService) -> None:
    party = await text.encode("fox 🎉", add_special_tokens=False)
    fox = await text.encode("fox", add_special_tokens=False)
    assert "".join(pieces_of(text, fox, party[:-1])).endswith("ox")
    assert "".join(pieces_of(text, [], party[:-1])) == ""
    no_character = await text.encode("fox �", add_special_tokens=False)  # which ends as a broken one does
    assert "".join(pieces_of(text, fox, no_character)) == "fox"


async def test_bytes_of_tokens_join_to_the_bytes_of_the_text(text: TextService) -> None:
    token_ids = await text.encode(TEXT, add_special_tokens=False)
    assert b"".join(map(text.token_bytes, token_ids)) == TEXT.encode()


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "outside", "words", "unigram"])
def test_any_token_has_its_bytes(kind: str) -> None:
    """Those that the decoder makes of it alone, where that is whole characters."""
    made = byte_fallback_tokenizer() if kind == "byte_fallback" else byte_level_tokenizer()
    if kind == "outside":  # as some extended vocabularies have them: not spelled in the alphabet of bytes
        state = json.loads(made.to_str())
        state["model"]["vocab"] |= {"中文": 5_000, "aĠ中": 5_001, "é中": 5_002}
        made = Tokenizer.from_str(json.dumps(state))
    elif kind == "words":
        made = Tokenizer(models.WordPiece({"<unk>": 0, "fox": 1, "##es": 2, "猫": 3}, unk_token="<unk>"))
        made.decoder = decoders.WordPiece()
    elif kind == "unigram":
        made = Tokenizer(models.Unigram([("<unk>", 0.0), ("▁fox", -1.0), ("猫", -2.0)], 0, False))
        made.decoder = decoders.Metaspace()
    text = TextService(PreTrainedTokenizerFast(tokenizer_object=made))
    for token, token_id in made.get_vocab().items():
        raw, alone = text.token_bytes(token_id), made.decode([token_id], skip_special_tokens=False)
        if "\ufffd" not in alone:
            assert raw.decode().strip() == alone.strip(), token
        pieces_of(text, [token_id], [token_id] * 12)  # a prompt of it, and an answer


async def test_bytes_of_ids_beyond_the_tokenizer(text: TextService, tokenizer: Tokenizer) -> None:
    assert text.token_bytes(tokenizer.get_vocab_size() + 5) == b""
    assert "".join(pieces_of(text, [tokenizer.get_vocab_size() + 5])) == ""


async def test_long_texts_encode_alike(text: TextService) -> None:
    long = "the quick brown fox " * (MAX_CHARS_ON_LOOP // 20 + 1)
    token_ids = await text.encode(long, add_special_tokens=False)
    assert decoded(text, token_ids) == long
    assert len(token_ids) < MAX_CHARS_ON_LOOP


async def longest_pause(work: Awaitable[object]) -> float:
    """The longest time for which the event loop was blocked during the work, as a share of the work's time.

    In time of this process's threads: while the machine does something else, none of them blocks the loop.
    """
    pauses = [0.0]
    started = last = time.process_time()

    async def turn() -> None:
        nonlocal last
        while True:
            await asyncio.sleep(0.001)
            now = time.process_time()
            pauses.append(now - last)
            last = now

    turning = asyncio.create_task(turn())
    await asyncio.sleep(0)
    await work
    ended = time.process_time()
    turning.cancel()
    return max(*pauses, ended - last) / (ended - started)


async def least_pause(work: Callable[[], Awaitable[object]]) -> float:
    """The least of five: the loop's thread may get no core for the whole work, but not each time."""
    return min([await longest_pause(work()) for _ in range(5)])


async def test_a_long_text_does_not_hold_up_the_loop(text: TextService) -> None:
    """Another thread alone would not help: `Tokenizer.encode` holds the interpreter's lock all the time."""
    long = "the quick brown fox " * 100_000
    assert await least_pause(lambda: text.encode(long, add_special_tokens=False)) < 0.5


async def test_many_short_texts_count_together(text: TextService) -> None:
    texts = ["the quick brown fox " * 200] * 500
    assert all(len(one) <= MAX_CHARS_ON_LOOP for one in texts)
    assert await least_pause(lambda: text.encode_all(texts, add_special_tokens=False)) < 0.5
    token_ids = encoded(text, texts[0])
    assert await least_pause(lambda: text.decode_all([token_ids] * 500)) < 0.5
    assert await text.decode_all([token_ids] * 2) == [decoded(text, token_ids)] * 2


@pytest.mark.parametrize("how", ["content", "messages", "arguments"])
async def test_long_chats_are_rendered_in_threads_of_their_own(how: str) -> None:
    text = text_service("{% for m in messages %}{{ m.content }}{% endfor %}")
    threads: list[str] = []
    service = text._templated
    apply = service.apply_chat_template

    def watched(*args: Any, **options: Any) -> Any:
        threads.append(threading.current_thread().name)
        return apply(*args, **options)

    service.apply_chat_template = watched
    message = {"role": "user", "content": "x" * MAX_CHARS_ON_LOOP if how == "content" else "x"}
    for messages, arguments in (
        ([{"role": "user", "content": "x"}], {}),
        ([message] * (65 if how == "messages" else 1), {"mood": "x"} if how == "arguments" else {}),
    ):
        await text.render_chat(messages, add_generation_prompt=False, continue_final_message=False, arguments=arguments)
    short, long = threads
    assert short == threading.main_thread().name
    assert long.startswith("text")


async def test_uploads_cannot_take_the_threads_of_texts(text: TextService) -> None:
    release = threading.Event()
    loop = asyncio.get_running_loop()
    executor = ThreadPoolExecutor(1)
    loop.set_default_executor(executor)
    try:
        busy = loop.run_in_executor(None, release.wait)
        async with asyncio.timeout(PATIENCE_S):
            await text.encode("the quick brown fox " * MAX_CHARS_ON_LOOP, add_special_tokens=False)
    finally:
        release.set()
    await busy


@pytest.mark.parametrize("gives_up", [False, True])
async def test_one_tenants_long_texts_hold_up_no_others(
    text: TextService, monkeypatch: pytest.MonkeyPatch, gives_up: bool
) -> None:
    """However many it has sent or given up, and however long they take: they end after the other tenant's here."""
    greedy, quiet = text.of("greedy"), text.of("quiet")
    long, encode_all = "the quick brown fox " * MAX_CHARS_ON_LOOP, greedy._encode_all
    has_ended, num_begun = threading.Event(), threading.Semaphore(0)

    def encode(*args: Any, **options: Any) -> list[list[int]]:
        num_begun.release()
        assert has_ended.wait(PATIENCE_S)
        return encode_all(*args, **options)

    monkeypatch.setattr(greedy, "_encode_all", encode)
    flood = [asyncio.create_task(greedy.encode(long, add_special_tokens=False)) for _ in range(20)]
    try:
        async with asyncio.timeout(PATIENCE_S):
            for _ in range(MOST_THREADS):
                assert await asyncio.to_thread(num_begun.acquire, timeout=PATIENCE_S)
            for task in flood if gives_up else ():
                task.cancel()
            flood += [asyncio.create_task(greedy.encode(long, add_special_tokens=False)) for _ in range(20)]
            for _ in range(20):
                await asyncio.sleep(0)
            await quiet.encode(long, add_special_tokens=False)
        assert not num_begun.acquire(blocking=False)
    finally:
        has_ended.set()
    ended = await asyncio.gather(*flood, return_exceptions=True)
    assert sum(isinstance(each, list) for each in ended) == (20 if gives_up else 40)


async def test_the_least_number_of_tokens_is_never_too_high(text: TextService, tokenizer: Tokenizer) -> None:
    """With both kinds of tokenizers, and for a text of the longest token alone."""
    longest = max(tokenizer.get_vocab(), key=lambda token: len(token.encode()))
    for one in (TEXT, longest * 50, "fox " * 50, "▁" * 50, " " * 50, ""):
        assert text.min_tokens(one) <= len(await text.encode(one, add_special_tokens=False))
    assert text.min_tokens("the quick brown fox " * 50) > 10


async def test_special_tokens_have_no_text() -> None:
    text = text_service()
    token_ids = await text.encode("<|start|>fox<|end|>", add_special_tokens=False)
    assert "".join(pieces_of(text, token_ids)) == decoded(text, token_ids) == "fox"
    assert b"".join(map(text.token_bytes, token_ids)) == b"<|start|>fox<|end|>"


def test_from_a_folder(tmp_path: Path) -> None:
    wrapped = PreTrainedTokenizerFast(tokenizer_object=byte_level_tokenizer(), eos_token="<|end|>")
    wrapped.backend_tokenizer.enable_truncation(3)
    wrapped.save_pretrained(tmp_path)
    text = TextService.from_folder(tmp_path)
    assert decoded(text, encoded(text, TEXT)) == TEXT  # nothing is truncated


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        TextService.from_folder(tmp_path)
