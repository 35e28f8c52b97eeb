"""`motet doctor`: what it reads and tries, and what it says where something does not answer."""

from __future__ import annotations

import errno
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from motet.cluster.tools import node_facts
from motet.cluster.tools.folder_checks import hold_lock, is_locked_out, redis_url_in, remove_trial
from motet.cluster.tools.machine_checks import check_redis, gather_redis, ok
from motet.cluster.tools.node_facts import Expectations, Questions, check_node, gather_node


def test_without_a_folder_of_secrets_no_file_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "redis-url").write_text("redis://another-hosts")
    monkeypatch.chdir(tmp_path)
    assert redis_url_in("") is None
    assert redis_url_in(str(tmp_path)) == "redis://another-hosts"


def test_a_url_with_a_cut_password_is_not_repeated() -> None:
    (finding,) = check_redis(gather_redis("redis://:Secret/Part@h"))
    assert finding.level == "error"
    assert "percent-encode the password" in finding.found
    assert "Secret" not in repr(finding) and "Part" not in repr(finding)


@pytest.mark.parametrize("is_made", [True, False])
def test_nodes_lock_where_the_data_folder_is_or_will_be(tmp_path: Path, is_made: bool) -> None:
    data_dir = tmp_path / "motet" / "data"
    if is_made:
        data_dir.mkdir(parents=True)
    with ThreadPoolExecutor(1) as first_node:
        holding = first_node.submit(hold_lock, data_dir, "trial")
        assert is_locked_out(data_dir, "trial") is True
        assert holding.result() is True
    remove_trial(data_dir, "trial")
    assert not [*tmp_path.rglob(".motet-doctor*")]
    assert data_dir.exists() == is_made


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_the_first_finding_and_no_fault_of_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def full(*_given: Any, **_options: Any) -> int:
        raise OSError(number, "full")

    monkeypatch.setattr(Path, "write_text", full)
    questions = Questions(data_dir=tmp_path, redis_url="redis://127.0.0.1:1")  # where nothing listens
    facts = gather_node(questions)
    expected = Expectations(
        limits=None, pool_bytes=0, tensor_parallel=1, computes_on_cpu=True, object_store_bytes=1 << 20
    )
    first = next(one for one in check_node(facts, expected) if one.level == "error")
    assert (first.check, facts.folder.problem) == ("data folder", "")
    assert "no more can be written" in first.found and "make room" in first.do


def test_a_controller_that_hangs_is_a_finding_beside_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(*_given: Any, **_options: Any) -> None:
        raise ray.exceptions.GetTimeoutError("Get timed out: some object(s) not ready.")

    earlier = ok("cluster", "what was found before")
    controller: Any = SimpleNamespace(__ray_call__=SimpleNamespace(remote=lambda requested: "an answer to come"))
    monkeypatch.setattr(node_facts, "_gathered", lambda nodes, questions: ({}, [earlier]))
    monkeypatch.setattr(ray, "init", lambda **_options: None)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.setattr(ray, "nodes", lambda: [])
    monkeypatch.setattr(ray, "get_actor", lambda name, namespace: controller)
    monkeypatch.setattr(ray, "get", hang)
    questions: Any = SimpleNamespace(data_dir=Path("/nowhere"))
    expected: Any = None
    first, last = node_facts.examine_cluster("auto", questions, expected)
    assert first == earlier
    assert last.level == "error"
    assert "its controller does not answer: Get timed out" in last.found
