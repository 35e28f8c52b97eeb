"""Where Serve's own server of a replica listens. That a motet's replicas are so: tests/whole/test_kills.py."""

from __future__ import annotations

import grpc
import psutil
import pytest
from ray.serve._private import replica as serves_replica

from motet.cluster.replicas.replica_start import EVERYWHERE, serve_only_at
from motet.tests.rigs.listening_sockets import place_of

LOOPBACK = "127.0.0.1"


async def test_serve_listens_at_the_address_of_the_node_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serves_replica, "add_port_to_grpc_server", serves_replica.add_port_to_grpc_server)  # put back
    serve_only_at(LOOPBACK)
    server = grpc.aio.server()
    port = serves_replica.add_port_to_grpc_server(server, EVERYWHERE)
    await server.start()
    try:
        sockets = psutil.Process().net_connections(kind="inet")
        assert {place_of(socket.laddr.ip) for socket in sockets if socket.laddr.port == port} == {"loopback"}
    finally:
        await server.stop(grace=0)
