"""Keeps Ray Serve's own server of a replica off the network."""

from __future__ import annotations

from ray.serve._private import replica as serves_replica

EVERYWHERE = "[::]:0"  # where Serve would listen


def serve_only_at(host: str) -> None:
    """Has Serve listen at this address alone, in this process, for calls of this replica by other replicas.

    To be called in the replica's constructor: Serve begins to listen after it. Its server unpickles whatever it is
    sent, so a process that reaches it runs code as motet; by default all can, also where all else listens on loopback.
    Serve itself calls it at the node's address.
    """
    add_port = serves_replica.add_port_to_grpc_server

    def add_port_at_host(server: object, address: str) -> int:
        port: int = add_port(server, f"{host}:0" if address == EVERYWHERE else address)
        return port

    serves_replica.add_port_to_grpc_server = add_port_at_host
