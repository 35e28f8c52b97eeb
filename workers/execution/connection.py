"""Whole messages over a socket between a gang's leader and one of its workers."""

from __future__ import annotations

import socket
import struct
import threading

_LENGTH = struct.Struct("!Q")
_MAX_MESSAGE_BYTES = 1 << 30
# A peer whose host or network is gone is noticed after some 10 s, whether or not it owes an acknowledgement; the kernel
# answers for a process that computes or hangs, so only deadlines notice that.
_VANISHED_PEER = {"TCP_KEEPIDLE": 4, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 10_000}


class ConnectionLostError(Exception):
    """The other side is gone, or sent something that is no message."""


class Connection:
    """Sends from any thread, receives from one. TCP, because workers may be on other nodes."""

    def __init__(self, connected: socket.socket) -> None:
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _VANISHED_PEER.items():
            if (option := getattr(socket, name, None)) is not None:  # not every system has all of them
                connected.setsockopt(socket.IPPROTO_TCP, option, value)
        self._socket = connected
        self._sending = threading.Lock()

    def send(self, message: bytes) -> None:
        try:
            with self._sending:
                self._socket.sendall(_LENGTH.pack(len(message)) + message)
        except OSError as error:
            raise ConnectionLostError(str(error)) from error

    def receive(self) -> bytes:
        """The next message. Waits for it as long as `set_timeout` says."""
        (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
        if length > _MAX_MESSAGE_BYTES:
            raise ConnectionLostError(f"a message of {length} bytes is announced: none is that long")
        return self._exactly(length)

    def set_timeout(self, timeout_s: float | None) -> None:
        self._socket.settimeout(timeout_s)

    def close(self) -> None:
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the other side has closed it already
        self._socket.close()

    def _exactly(self, num_bytes: int) -> bytes:
        received = bytearray()
        while len(received) < num_bytes:
            try:
                piece = self._socket.recv(min(num_bytes - len(received), 1 << 20))
            except OSError as error:
                raise ConnectionLostError(str(error)) from error
            if not piece:
                raise ConnectionLostError("the other side has closed the connection")
            received += piece
        return bytes(received)
