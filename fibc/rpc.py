"""Length-prefixed msgpack messages between a parent and its children."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Sequence
from typing import Any, Self

import msgpack

_LENGTH = struct.Struct("<Q")
MAX_MESSAGE_BYTES = 1 << 30
"""A longer announcement is not a message: a child that lost control of its memory wrote into the socket."""


class ChannelClosedError(Exception):
    """The other side is gone; what it did not answer stays unanswered."""


class Channel:
    """One end of a stream socket that carries messages (JSON-able values, and bytes). It owns the socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock

    @classmethod
    def pair(cls) -> tuple[Self, socket.socket]:
        """Return a channel and the raw socket of its other end, to hand to a child."""
        ours, theirs = socket.socketpair()
        return cls(ours), theirs

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Any) -> None:
        """Send one message.

        Raises:
            ChannelClosedError: If the other side is gone.
        """
        data = msgpack.packb(message, use_bin_type=True)
        try:
            self._socket.settimeout(None)
            self._socket.sendall(_LENGTH.pack(len(data)) + data)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise ChannelClosedError from error

    def receive(self, timeout_s: float | None = None) -> Any:
        """Return the next message.

        Args:
            timeout_s: Seconds for the whole message; None waits for ever.

        Raises:
            ChannelClosedError: If the other side is gone, or does not speak this protocol.
            TimeoutError: If it took longer.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size, deadline))
        if length > MAX_MESSAGE_BYTES:
            raise ChannelClosedError
        try:
            return msgpack.unpackb(self._read(length, deadline), raw=False, strict_map_key=False)
        except (msgpack.UnpackException, ValueError) as error:
            raise ChannelClosedError from error

    def send_fds(self, fds: Sequence[int]) -> None:
        """Send open file descriptors, after the message that announces them."""
        socket.send_fds(self._socket, [b"F"], list(fds))

    def receive_fds(self, count: int) -> list[int]:
        """Return ``count`` file descriptors, which the caller then owns."""
        self._socket.settimeout(None)
        data, fds, _, _ = socket.recv_fds(self._socket, 1, count)
        if not data or len(fds) != count:
            raise ChannelClosedError
        return fds

    def close(self) -> None:
        self._socket.close()

    def _read(self, size: int, deadline: float | None) -> bytes:
        data = bytearray()
        while len(data) < size:
            remaining = None if deadline is None else deadline - time.monotonic()
            if remaining is not None and remaining <= 0:
                raise TimeoutError
            self._socket.settimeout(remaining)
            try:
                chunk = self._socket.recv(min(size - len(data), 1 << 20))
            except ConnectionResetError as error:
                raise ChannelClosedError from error
            if not chunk:
                raise ChannelClosedError
            data += chunk
        return bytes(data)
