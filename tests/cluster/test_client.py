from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from motet.cluster.client.client import ChatPiece, ClientError, MotetClient, RequestRefused, ServerUnreachable
from motet.tests.rigs.fake_motet import BASE, KEY, FakeMotet, running_fake

NUM_BYTES = 300_001


@pytest.fixture(scope="module")
def server() -> Iterator[FakeMotet]:
    with running_fake() as fake:
        yield fake


@pytest.fixture
def fake(server: FakeMotet) -> Iterator[FakeMotet]:
    yield server
    server.adapters.clear()
    server.break_stream_with = None


@pytest.fixture
def client(fake: FakeMotet) -> Iterator[MotetClient]:
    with MotetClient(fake.url + "/", KEY) as client:
        yield client


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 4, "target_modules": ["q_proj", "v_proj"]}))
    (tmp_path / "adapter_model.safetensors").write_bytes(bytes(NUM_BYTES))
    return tmp_path


def test_upload_reports_every_byte_and_what_was_registered(client: MotetClient, fake: FakeMotet, folder: Path) -> None:
    seen: list[tuple[int, int]] = []
    adapter, created = client.upload_adapter("pirate", folder, lambda sent, total: seen.append((sent, total)))
    assert created
    assert (adapter.name, adapter.version, adapter.rank, adapter.num_bytes) == ("pirate", 1, 4, NUM_BYTES)
    assert adapter.targets == ("q_proj", "v_proj")
    assert len(seen) > 2, "the file is read in pieces"
    assert seen == sorted(seen)
    assert seen[-1] == (NUM_BYTES, NUM_BYTES)


def test_same_upload_again_is_not_new_and_a_changed_one_is(client: MotetClient, folder: Path) -> None:
    first, _ = client.upload_adapter("pirate", folder)
    again, created = client.upload_adapter("pirate", folder)
    assert (again, created) == (first, False)
    (folder / "adapter_model.safetensors").write_bytes(b"other")
    changed, created = client.upload_adapter("pirate", folder)
    assert (changed.version, created) == (2, True)
    assert client.adapters() == [changed]


def test_upload_of_a_folder_that_is_no_adapter_names_the_file(client: MotetClient, folder: Path) -> None:
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(ClientError, match=r"adapter_model\.safetensors is missing"):
        client.upload_adapter("pirate", folder)


def test_a_folder_of_checkpoints_names_those_that_hold_one(client: MotetClient, folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "checkpoints" / "checkpoint-40")
    with pytest.raises(ClientError, match=r"adapters are in folders below it \(checkpoint-40\): give one of these"):
        client.upload_adapter("pirate", tmp_path / "checkpoints")


def test_an_adapter_in_pickle_is_refused_with_how_to_save_it(client: MotetClient, folder: Path) -> None:
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(ClientError, match=r"pickle is never read.*safe_serialization=True"):
        client.upload_adapter("pirate", folder)


def test_a_name_that_cannot_be_is_refused_before_anything_is_sent(folder: Path) -> None:
    with MotetClient("http://127.0.0.1:1") as client, pytest.raises(ClientError, match=r"'\.\.' is not accepted"):
        client.upload_adapter("..", folder)


def test_an_address_with_v1_is_the_same(fake: FakeMotet) -> None:
    with MotetClient(fake.url + "/v1/", KEY) as client:
        assert client.models() == [BASE]


def test_models_are_the_base_and_then_the_adapters(client: MotetClient, folder: Path) -> None:
    client.upload_adapter("pirate", folder)
    assert client.models() == [BASE, "pirate"]


def test_delete(client: MotetClient, folder: Path) -> None:
    client.upload_adapter("pirate", folder)
    client.delete_adapter("pirate")
    assert client.adapters() == []
    with pytest.raises(RequestRefused, match="no adapter 'pirate'") as refused:
        client.delete_adapter("pirate")
    assert refused.value.status_code == 404


def test_a_list_of_several_pages_is_whole(client: MotetClient, fake: FakeMotet, folder: Path) -> None:
    fake.page_size, num_before = 2, fake.num_pages
    names = ["a", "b b", "c&d", "e", "f"]
    for name in ("a", "e", "f"):
        client.upload_adapter(name, folder)
    fake.adapters |= {name: {**fake.adapters["a"], "name": name} for name in ("b b", "c&d")}
    assert [adapter.name for adapter in client.adapters()] == names
    assert fake.num_pages - num_before == 3
    fake.page_size = 1000


def test_a_name_is_one_segment_of_the_path(client: MotetClient, folder: Path) -> None:
    client.upload_adapter("models", folder)
    with pytest.raises(ClientError, match="not accepted"):
        client.delete_adapter("../adapters/models")
    assert [adapter.name for adapter in client.adapters()] == ["models"]


def test_chat_streams_pieces_and_then_the_count(client: MotetClient, fake: FakeMotet) -> None:
    pieces = list(client.chat(BASE, [{"role": "user", "content": "ahoy there"}], max_tokens=7))
    assert pieces == [
        ChatPiece("AHOY "),
        ChatPiece("THERE "),
        ChatPiece(finish_reason="stop"),
        ChatPiece(completion_tokens=2),
    ]
    assert fake.chats[-1]["max_tokens"] == 7
    assert fake.chats[-1]["temperature"] == 0


def test_chat_without_a_limit_leaves_it_to_the_server(client: MotetClient, fake: FakeMotet) -> None:
    list(client.chat(BASE, [{"role": "user", "content": "ahoy"}]))
    assert "max_tokens" not in fake.chats[-1]


def test_chat_with_an_unknown_model_is_refused_with_the_servers_words(client: MotetClient) -> None:
    with pytest.raises(RequestRefused, match="there is no model 'absent'") as refused:
        list(client.chat("absent", [{"role": "user", "content": "ahoy"}]))
    assert refused.value.status_code == 404


def test_an_error_event_ends_the_stream_with_its_message(client: MotetClient, fake: FakeMotet) -> None:
    fake.break_stream_with = "error"
    pieces = client.chat(BASE, [{"role": "user", "content": "one two"}])
    assert next(pieces) == ChatPiece("ONE ")
    with pytest.raises(RequestRefused, match="the worker died") as refused:
        next(pieces)
    assert refused.value.status_code is None


def test_a_stream_that_was_cut_off_is_no_answer(client: MotetClient, fake: FakeMotet) -> None:
    fake.break_stream_with = "cut"
    with pytest.raises(ServerUnreachable, match="before the answer was complete"):
        list(client.chat(BASE, [{"role": "user", "content": "one two"}]))


def test_a_wrong_key_is_refused_with_the_servers_words(fake: FakeMotet) -> None:
    with MotetClient(fake.url, "wrong") as client, pytest.raises(RequestRefused, match="key is unknown") as refused:
        client.models()
    assert refused.value.status_code == 401


def test_no_server_is_said_with_the_address() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound and not listening: refuses
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        with MotetClient(url) as client, pytest.raises(ServerUnreachable, match=url):
            client.status()


def test_another_kind_of_server_is_noticed(fake: FakeMotet) -> None:
    with MotetClient(fake.url + "/not-json") as client, pytest.raises(ClientError, match="not JSON"):
        client.status()


def test_an_address_that_is_none_is_an_error_of_ours() -> None:
    for url in ("not a url", "ftp://127.0.0.1", "http://"):
        with pytest.raises(ClientError, match=url):
            MotetClient(url)
    with pytest.raises(ClientError):
        MotetClient("http://127.0.0.1:port")
