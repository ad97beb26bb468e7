"""Connections that cost a bounded amount: uvicorn's HTTP/1.1 protocol with limits it does not have.

A client owes bytes from the moment it connects or begins a request until that request is complete,
and owes reading while an answer waits in the socket; both debts have a time limit. It also bounds
the number of connections, notices that a client left although it pipelined another request, and
answers what is not HTTP in OpenAI's error shape. It knows no endpoint.
"""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any, ClassVar, Final

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from quickdraft.server.errors import ApiError
from quickdraft.server.limits import Limits

# Read at a time. Parsing costs up to ten microseconds a byte when a body comes in tiny chunks, and
# nobody else is served meanwhile.
READ_BYTES: Final = 16 << 10
PIPELINED_BYTES: Final = 64 << 10  # read ahead of the answer that is being given


class GuardedProtocol(H11Protocol):
    """One connection. Subclasses made by `guarded` carry the limits."""

    limits: ClassVar[Limits] = Limits()

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._owes_bytes: asyncio.TimerHandle | None = None
        self._owes_reading: asyncio.TimerHandle | None = None
        self._in_body = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.max_size = READ_BYTES  # type: ignore[attr-defined]  # asyncio's socket transports have it
        # asyncio does so only for sockets that name their protocol. Without it an answer's second
        # write, and every event of a stream, waits for the client's delayed acknowledgement.
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if len(self.connections) > self.limits.connections:
            message = f"too many connections; at most {self.limits.connections} at a time"
            self._refuse(ApiError(message, status=503, code="too_many_connections"))
            return
        self._watch_bytes()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._owes_bytes, self._owes_reading):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        super().data_received(data)
        self._watch_bytes()
        # Reading was paused for a request that waits its turn; unread, the connection's end would
        # go unnoticed and its request would run on.
        if self.conn.their_state is h11.DONE and len(self.conn.trailing_data[0]) <= PIPELINED_BYTES:
            self.flow.resume_reading()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._owes_reading is None:
            self._owes_reading = self.loop.call_later(self.limits.write_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._owes_reading is not None:
            self._owes_reading.cancel()
            self._owes_reading = None

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()  # closes once everything was sent, which may be never
        if self._owes_reading is None:
            self._owes_reading = self.loop.call_later(self.limits.write_seconds, self.transport.abort)

    def send_400_response(self, msg: str) -> None:
        self._refuse(ApiError(msg, status=400, code="invalid_http"))

    def _watch_bytes(self) -> None:
        """Start the clock when the client owes bytes, stop it when the request is complete. A debt of
        headers and one of a body are two; nothing that dribbles in starts a clock anew."""
        in_body = self.conn.their_state is h11.SEND_BODY
        owes = in_body or self.conn.their_state is h11.IDLE
        if self._owes_bytes is not None and (not owes or in_body != self._in_body):
            self._owes_bytes.cancel()
            self._owes_bytes = None
        if owes and self._owes_bytes is None:
            # The body's reader answers when its time is up; this comes after it, and where nobody reads.
            seconds = self.limits.body_seconds + 1 if in_body else self.limits.header_seconds
            self._owes_bytes = self.loop.call_later(seconds, self._too_slow)
        self._in_body = in_body

    def _too_slow(self) -> None:
        if self.transport.is_closing():
            return
        if self.conn.their_state is h11.IDLE and self.conn.our_state is h11.IDLE:
            message = f"the request's headers did not arrive within {self.limits.header_seconds:g} s"
            self._refuse(ApiError(message, status=408, code="header_timeout"))
        else:
            self.transport.abort()

    def _refuse(self, error: ApiError) -> None:
        """Answer outside any request, and close."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = json.dumps(error.body()).encode()
            headers = [
                (b"content-type", b"application/json"),
                (b"content-length", str(len(body)).encode()),
                (b"connection", b"close"),
            ]
            response = h11.Response(status_code=error.status, headers=headers)
            for event in (response, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


def guarded(limits: Limits) -> type[GuardedProtocol]:
    """The protocol with these limits."""
    return type("GuardedProtocol", (GuardedProtocol,), {"limits": limits})
