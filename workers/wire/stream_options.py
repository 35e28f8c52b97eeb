"""The stream between a router and a leader: its gRPC method, and the options that both of its sides set."""

from __future__ import annotations

# The method takes and returns bytes: `ToLeader` in, `FromLeader` out. Metadata carries the cluster's secret token.
STREAM_SERVICE = "motet.Leader"
STREAM_METHOD = "Stream"
TOKEN_KEY = "motet-token"
ROUTER_KEY = "motet-router"  # names a router's connection; the same one when it connects again
CONNECT_KEY = "motet-connect"  # how often it has connected so far: a later stream takes an earlier one's place
MAX_MESSAGE_BYTES = 4 << 20  # none is near it: both sides cut what they have to say into pieces
MAX_REQUEST_BYTES = 32 << 20  # of an encoded request, whose parts are put together again

_BOTH_SIDES: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 5_000),  # pings notice a peer whose host vanished
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),  # of a ping that was under way already; a minute by default
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)
ROUTER_OPTIONS = (
    *_BOTH_SIDES,
    ("grpc.enable_retries", 0),
    ("grpc.enable_http_proxy", 0),  # a proxy of the environment is not for inside the cluster
    ("grpc.use_local_subchannel_pool", 1),  # no memory of failed attempts at the same address
)
LEADER_OPTIONS = (
    *_BOTH_SIDES,
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),  # both sides ping: a router is not punished for it
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.so_reuseport", 0),  # a port that another process listens on is an error
)
