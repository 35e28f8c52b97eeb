import psutil
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from motet.workers.engine_builder import rendezvous

HOST = "127.0.0.1"


def test_workers_meet_at_one_address_alone() -> None:
    """The store asks for no secret: any process that reaches it can read and delete what is in it."""
    store = rendezvous(HOST)
    sockets = psutil.Process().net_connections("inet")
    listening = {one.laddr.ip for one in sockets if one.status == "LISTEN" and one.laddr.port == store.port}
    assert listening == {HOST}
    TCPStore(HOST, store.port, is_master=False).set("from", "a worker")
    assert store.get("from") == b"a worker"
