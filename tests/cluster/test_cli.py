from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import click
import msgspec
import pytest
from click.testing import CliRunner, Result

from motet.cluster.commands.cli import main
from motet.cluster.commands.status import status_lines
from motet.cluster.launch.local_serve import free_ports
from motet.cluster.settings.setting_field import format_byte_size, parse_byte_size
from motet.tests.rigs.engine_loads import engine_load
from motet.tests.rigs.fake_motet import BASE, KEY, FakeMotet, running_fake
from motet.workers.wire.engine_load import summed
from motet.workers.wire.messages import GangInfo


@pytest.fixture(scope="module")
def server() -> Iterator[FakeMotet]:
    with running_fake() as fake:
        yield fake


@pytest.fixture
def fake(server: FakeMotet) -> Iterator[FakeMotet]:
    yield server
    server.adapters.clear()
    server.chats.clear()
    server.break_stream_with = None
    server.lacks_tokens, server.guards_status, server.warnings = False, False, []


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"r": 4, "target_modules": ["q_proj"]}))
    (folder / "adapter_model.safetensors").write_bytes(bytes(200_000))
    return folder


def motet(fake: FakeMotet, *arguments: str, typed: str | None = None) -> Result:
    """Runs the command with the address and the key from the environment."""
    environment = {"MOTET_URL": fake.url, "MOTET_API_KEY": KEY}
    return CliRunner().invoke(main, arguments, input=typed, env=environment)


def test_upload_list_delete(fake: FakeMotet, folder: Path) -> None:
    uploaded = motet(fake, "adapters", "upload", "pirate", str(folder))
    assert uploaded.exit_code == 0, uploaded.output
    assert "uploaded pirate version 1, rank 4" in uploaded.stdout
    assert uploaded.stderr == ""
    assert "already there: pirate version 1" in motet(fake, "adapters", "upload", "pirate", str(folder)).stdout
    listed = motet(fake, "adapters", "list")
    assert listed.exit_code == 0
    assert [word for word in listed.stdout.split() if word in ("pirate", "q_proj")] == ["pirate", "q_proj"]
    assert "195 KiB" in listed.stdout
    assert motet(fake, "adapters", "delete", "pirate").stdout == "deleted pirate\n"
    assert fake.adapters == {}


def test_what_is_not_served_of_an_adapter_is_reported(fake: FakeMotet, folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "added_tokens.json").write_text('{"<think>": 320}')
    fake.warnings = ["the adapter's chat template is not the base's"]
    uploaded = motet(fake, "adapters", "upload", "pirate", str(folder))
    assert uploaded.exit_code == 0, uploaded.output
    assert uploaded.stderr.splitlines() == [
        "of added_tokens.json, chat_template.jinja added tokens, the chat template and eos_token are served",
        "warning: pirate: the adapter's chat template is not the base's",
    ]
    for command in (["list"], ["show", "pirate"]):
        assert motet(fake, "adapters", *command).stderr == uploaded.stderr.splitlines(keepends=True)[1]
    fake.lacks_tokens = True
    refused = motet(fake, "adapters", "upload", "pirate", str(folder))
    assert refused.exit_code == 1
    assert "the adapter's tokenizer adds tokens" in refused.stderr
    (folder / "added_tokens.json").write_text("{")
    broken = motet(fake, "adapters", "upload", "pirate", str(folder))
    assert broken.exit_code == 1
    assert "added_tokens.json is not JSON" in broken.stderr


def test_long_names_are_whole_and_json_is_the_servers(fake: FakeMotet, folder: Path) -> None:
    name = "n" * 64
    motet(fake, "adapters", "upload", name, str(folder))
    assert name in motet(fake, "adapters", "list").stdout
    assert json.loads(motet(fake, "adapters", "list", "--json").stdout) == [fake.adapters[name]]
    assert name in motet(fake, "adapters", "show", name).stdout
    assert json.loads(motet(fake, "adapters", "show", name, "--json").stdout) == fake.adapters[name]
    assert "'..' is not accepted" in motet(fake, "adapters", "delete", "..").stderr


def test_what_the_server_refuses_is_said_in_its_words(fake: FakeMotet) -> None:
    refused = motet(fake, "adapters", "delete", "absent")
    assert refused.exit_code == 1
    assert refused.stderr == "Error: there is no adapter 'absent'\n"


def test_options_go_before_the_environment(fake: FakeMotet) -> None:
    refused = motet(fake, "adapters", "list", "--key", "wrong")
    assert (refused.exit_code, refused.stderr) == (1, "Error: the API key is unknown\n")


def test_no_server_is_an_error_without_a_traceback(fake: FakeMotet) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        failed = motet(fake, "status", "--url", url)
    assert failed.exit_code == 1
    assert failed.stderr.startswith(f"Error: nothing answers at {url}")


def test_status(fake: FakeMotet) -> None:
    assert motet(fake, "status", "--over", "0").stdout == f"version: 0.1.0\nmodel: {BASE}\n"


def test_status_lines_show_sections_and_lists() -> None:
    status = {"ready": True, "gang": None, "gangs": [{"load": {"pool_bytes": 1 << 29, "num_waiting": 2}}], "names": []}
    assert list(status_lines(status)) == [
        "ready: yes",
        "gang: -",
        "gangs 1 of 1",
        "  load",
        "    pool bytes: 512 MiB",
        "    num waiting: 2",
        "names: none",
    ]


def test_what_cannot_start_is_reported_first() -> None:
    starts = [
        {"kind": "gang", "reason": "it waits for the model: /m lacks config.json", "has_failed": False},
        {"kind": "router", "reason": "the port is taken", "has_failed": True},
    ]
    status = {"model": "m", "starts": starts, "taken_back": "gang: --threads = 3: too many"}
    assert list(status_lines(status)) == [
        "a gang cannot start yet: it waits for the model: /m lacks config.json",
        "a router could not start: the port is taken",
        "the configuration before is back, as the newest one cannot run: gang: --threads = 3: too many",
        "model: m",
    ]
    assert list(status_lines(status | {"starts": [], "taken_back": None})) == ["model: m"]


def test_a_load_is_reported_in_words_since_the_start_and_by_the_second() -> None:
    load = engine_load(
        num_running=12,
        num_waiting=3,
        num_waiting_for_adapters=1,
        oldest_waiting_s=0.44,
        num_queued_tokens=2048,
        num_pages=1000,
        num_free_pages=210,
        num_prefix_pages=340,
        num_idle_prefix_pages=300,
        num_adapter_pages=120,
        num_idle_adapter_pages=20,
        num_host_pages=400,
        host_adapter_bytes=5 << 20,
        num_adapter_loads=8,
        num_adapter_reads=3,
        num_loaded_pages=640,
        num_resident_adapters=9,
        num_computed_tokens=1500,
        num_generated_tokens=500,
        num_cached_tokens=3000,
        num_pages_out=40,
        num_prefix_evictions=7,
        num_preemptions=2,
    )
    earlier = engine_load(
        **load.flat() | {"num_pages_out": 10, "num_generated_tokens": 490, "num_prefix_evictions": 70}
    )
    now, before = ({"gangs": [{"gang_id": "a", "load": one.flat()}]} for one in (load, earlier))
    since_the_start = list(status_lines(now))
    assert since_the_start == [
        "gangs 1 of 1",
        "  gang id: a",
        "  load",
        "    sequences: 12 running, 3 waiting, 1 of them for adapters, the oldest for 0.4 s",
        "    queued tokens: 2,048",
        "    pages: 210 of 1,000 free; kept KV 340 (300 idle); adapters 120 (20 idle)",
        "    pages of KV behind them: 400 in host memory, 0 on disk",
        "    adapters: 9 there, 0 coming; 5 MiB packed in host memory",
        "    prompt tokens not computed again (prefix cache): 75.0% of 4,000 since the start",
        "    tokens: 500 generated, 1,500 computed",
        "    copies: 40 pages of KV to host memory, 0 back; 0 failed",
        "    adapter loads: 8 adapters, 3 of them from the store; 640 pages",
        "    evictions: 7 pages of KV, 0 adapters",
        "    preemptions: 2 sequences",
    ]
    by_the_second = list(status_lines(now, before=before, seconds=2.0))
    assert "    tokens a second: 5.0 generated, 0.0 computed" in by_the_second
    assert "    copies a second: 15.0 pages of KV to host memory, 0.0 back; 0.0 failed" in by_the_second
    another = {"gangs": [{"gang_id": "b", "load": earlier.flat()}]}
    assert list(status_lines(now, before=another, seconds=2.0)) == since_the_start


def test_a_gang_is_shown_without_what_its_model_reports() -> None:
    info = GangInfo(
        gang_id="a",
        model=BASE,
        device="cpu",
        dtype="float32",
        kernels="native",
        max_model_len=2048,
        block_size=16,
        num_pages=4096,
        page_bytes=16 << 10,
        num_threads=2,
        vocab_size=512,
        eos_token_ids=(2,),
        sampling_defaults={"temperature": 0.6},
        max_num_sequences=64,
        max_tokens_per_step=512,
        reasons={"pool-bytes": "as the settings say"},
    )
    assert list(status_lines({"gangs": [msgspec.to_builtins(info)]})) == [
        "gangs 1 of 1",
        "  gang id: a",
        f"  model: {BASE}",
        "  device: cpu",
        "  dtype: float32",
        "  kernels: native",
        "  max model len: 2048",
        "  page: 16 tokens, 16 KiB",
        "  pages: 4,096",
        "  threads: 2",
        "  sampling defaults",
        "    temperature: 0.6",
        "  sequences at once, at most: 64",
        "  tokens of a step, at most: 512",
        "  fair order: no",
        "  why these sizes",
        "    pool-bytes: as the settings say",
    ]
    without = msgspec.structs.replace(info, sampling_defaults={})
    assert "  sampling defaults: none" in status_lines({"gangs": [msgspec.to_builtins(without)]})


@pytest.mark.parametrize("num_gangs", [0, 1, 2])
def test_loads_are_summed_only_over_several_gangs(num_gangs: int) -> None:
    loads = [engine_load(num_running=number) for number in range(1, num_gangs + 1)]
    gangs = [{"gang_id": str(number), "load": load.flat()} for number, load in enumerate(loads)]
    total = summed(loads).flat() if loads else None
    lines = list(status_lines({"version": "1", "gangs": gangs, "load": total, "open_generations": 3}))
    running = [line.split(",")[0] for line in lines if "sequences: " in line and "running" in line]
    one_by_one = [f"    sequences: {number} running" for number in range(1, num_gangs + 1)]
    assert running == (one_by_one if num_gangs < 2 else [*one_by_one, "  sequences: 3 running"])
    assert ("load of all gangs" in lines) == (num_gangs > 1)
    assert "load" not in lines


def test_the_sum_too_is_reported_by_the_second() -> None:
    loads = [engine_load(num_generated_tokens=count) for count in (10, 30)]
    now = {"gangs": [{"gang_id": "a"}, {"gang_id": "b"}], "load": loads[1].flat()}
    lines = list(status_lines(now, before={**now, "load": loads[0].flat()}, seconds=2.0))
    assert "  tokens a second: 10.0 generated, 0.0 computed" in lines


def test_chat_answers_line_by_line_and_remembers(fake: FakeMotet) -> None:
    talk = motet(fake, "chat", typed="ahoy there\n\nand again\n/quit\nnever asked\n")
    assert talk.exit_code == 0, talk.output
    assert "AHOY THERE \n" in talk.stdout
    assert "AND AGAIN \n" in talk.stdout
    assert [chat["model"] for chat in fake.chats] == [BASE, BASE]
    assert fake.chats[1]["messages"] == [
        {"role": "user", "content": "ahoy there"},
        {"role": "assistant", "content": "AHOY THERE "},
        {"role": "user", "content": "and again"},
    ]


def test_chat_changes_the_adapter_and_keeps_the_talk(fake: FakeMotet, folder: Path) -> None:
    motet(fake, "adapters", "upload", "pirate", str(folder))
    talk = motet(fake, "chat", typed="one\n/adapter absent\n/adapter pirate\n/adapter\ntwo\n/new\nthree\n")
    assert talk.exit_code == 1, talk.output
    assert f"there is no model 'absent': {BASE}, pirate can be chosen" in talk.stdout
    assert f"now pirate\n{BASE}  [pirate]\n" in talk.stdout
    assert [chat["model"] for chat in fake.chats] == [BASE, "pirate", "pirate"]
    assert [len(chat["messages"]) for chat in fake.chats] == [1, 3, 1]


def test_chat_starts_with_the_chosen_adapter_and_refuses_an_unknown_one(fake: FakeMotet, folder: Path) -> None:
    motet(fake, "adapters", "upload", "pirate", str(folder))
    motet(fake, "chat", "--model", "pirate", typed="one\n")
    assert [chat["model"] for chat in fake.chats] == ["pirate"]
    refused = motet(fake, "chat", "--model", "absent", typed="one\n")
    assert refused.exit_code == 1
    assert "there is no model 'absent'" in refused.stderr


def test_a_failed_answer_is_said_and_not_remembered(fake: FakeMotet) -> None:
    fake.break_stream_with = "error"
    talk = motet(fake, "chat", typed="one\ntwo\n")
    assert talk.exit_code == 1
    assert talk.stdout.count("error: the worker died") == 2
    assert [len(chat["messages"]) for chat in fake.chats] == [1, 1]


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("0", 0), ("1", 1), ("4096", 4096), ("512MiB", 512 << 20), ("2GiB", 2 << 30), ("1.5 kib", 1536), ("3b", 3)],
)
def test_sizes_as_people_write_them(text: str, num_bytes: int) -> None:
    assert parse_byte_size(text) == num_bytes


@pytest.mark.parametrize("text", ["", "-1", "much", "2GB", "0.1", "1e9", "MiB"])
def test_what_is_no_size_is_refused_with_what_would_be(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a size: .* one byte|is not a size: .*MiB.*accepted"):
        parse_byte_size(text)


def test_sizes_are_shown_short() -> None:
    assert [format_byte_size(size) for size in (0, 1023, 1024, 1536 << 10, 139 << 30, 3 << 40)] == [
        "0 B",
        "1023 B",
        "1 KiB",
        "1.5 MiB",
        "139 GiB",
        "3 TiB",
    ]


@pytest.mark.parametrize(
    ("arguments", "exit_code", "message"),
    [
        (["./no-such-model"], 1, "there is no folder no-such-model"),
        (["."], 1, "lacks config.json, tokenizer.json, model.safetensors"),
        (["model", "--port", "0"], 2, "'--port': '0': a whole number from 1 to 65535 is accepted"),
        (["model", "--threads", "0"], 2, "'--threads': '0': auto or a whole number from 1 to 1024 is accepted"),
        (["model", "--key", "acme=two words"], 2, "a key is printable ASCII without spaces"),
        (["model", "--key", "acme"], 2, "TENANT=KEY (for example acme=a-long-secret) is accepted"),
        (["model", "--pool-bytes", "lots"], 2, "'--pool-bytes': 'lots': a size (bytes, or a number with KiB"),
        (["model", "--dtype", "float16"], 2, "'float16': float32 or bfloat16 is accepted"),
    ],
)
def test_serve_says_what_it_cannot_serve(
    arguments: list[str], exit_code: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (tmp_path / "model" / name).write_text("{}")
    if "--port" not in arguments:
        arguments = [*arguments, "--port", str(free_ports(1)[0])]
    failed = CliRunner().invoke(main, ["serve", *arguments], env={"MOTET_DATA_DIR": str(tmp_path / "data")})
    assert failed.exit_code == exit_code, failed.output
    assert message in failed.stderr
    assert failed.stdout == ""


def test_serve_ends_with_a_message_where_the_model_is_not_supported(tmp_path: Path) -> None:
    for name in ("tokenizer.json", "model.safetensors"):
        (tmp_path / name).write_text("{}")
    (tmp_path / "config.json").write_text('{"architectures": ["MadeUpForCausalLM"]}')
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    arguments = ["serve", str(tmp_path), "--data-dir", str(tmp_path / "data"), "--port", str(port)]
    failed = CliRunner().invoke(main, arguments)
    assert failed.exit_code == 1
    assert "MadeUpForCausalLM' is not supported" in failed.stderr


def test_serve_says_that_the_port_is_taken(tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (tmp_path / name).write_text("{}")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        arguments = ["serve", str(tmp_path), "--data-dir", str(tmp_path / "data"), "--port", port]
        failed = CliRunner().invoke(main, arguments)
    assert failed.exit_code == 1
    assert f"cannot listen at 127.0.0.1:{port}" in failed.stderr


def _commands(group: click.Group, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from _commands(command, (*path, name))
        else:
            yield (*path, name), command


def _options(command: click.Command) -> set[str]:
    return {option for parameter in command.params for option in parameter.opts}


CLIENT_COMMANDS: Final = {path: command for path, command in _commands(main) if "--url" in _options(command)}
MORE: Final = {  # that a command needs to be one
    ("status",): ["--over", "0"],
    ("canary", "start"): ["--share", "0.5"],
    ("tenants", "set"): ["--weight", "2"],
    ("tenants", "delete"): ["--yes"],
    ("users", "delete"): ["--yes"],
}


@pytest.mark.parametrize("key", [None, ""])
@pytest.mark.parametrize("path", CLIENT_COMMANDS, ids=" ".join)
def test_without_a_key_each_command_says_which_one_it_wants(
    fake: FakeMotet, folder: Path, tmp_path: Path, path: tuple[str, ...], key: str | None
) -> None:
    fake.guards_status = True
    command = CLIENT_COMMANDS[path]
    needed = [one for one in command.params if isinstance(one, click.Argument) and one.required]
    values = [str(folder) if isinstance(one.type, click.Path) else "x" for one in needed]
    arguments = [*path, *values, *MORE.get(path, [])]
    environment = {"MOTET_URL": fake.url, "MOTET_DATA_DIR": str(tmp_path)}
    environment |= {"MOTET_API_KEY": key, "MOTET_OPERATOR_KEY": key}  # type: ignore[dict-item]
    failed = CliRunner().invoke(main, arguments, env=environment, input="hello\n")
    assert failed.exit_code == 1, failed.output
    if "--key" in _options(command):
        assert "set MOTET_API_KEY, or use --key or --key-file" in failed.stderr
    else:
        assert f"{tmp_path} has none that can be read: set MOTET_OPERATOR_KEY, or use --key-file" in failed.stderr
    if path == ("usage",):
        failed = CliRunner().invoke(main, [*arguments, "--all"], env=environment)
        assert "set MOTET_OPERATOR_KEY, or use --key or --key-file" in failed.stderr


def test_a_wrong_key_is_reported_in_the_servers_words(fake: FakeMotet) -> None:
    failed = CliRunner().invoke(main, ["adapters", "list", "--key", "wrong"], env={"MOTET_URL": fake.url})
    assert failed.exit_code == 1
    assert "the API key is unknown" in failed.stderr
