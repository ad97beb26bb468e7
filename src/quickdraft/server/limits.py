"""How much one client, and all of them together, may take of this server.

Plain numbers: the protocol (connections, headers, sockets), the body reader, the streams and the
application read them. All times are in seconds.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one server; None means there is none."""

    connections: int = 512  # open at the same time
    header_bytes: int = 32 << 10  # request line and headers together
    headers: int = 100  # header lines
    header_seconds: float = 10.0  # from the first byte (or the connection) to the end of the headers
    body_bytes: int = 32 << 20
    all_bodies_bytes: int = 256 << 20  # bodies being read or worked on, together
    body_seconds: float = 60.0  # for the whole body
    write_seconds: float = 30.0  # how long a client may leave its answer unread
    keep_alive_seconds: float = 30.0  # an idle connection
    ping_seconds: float = 5.0  # silence in an event stream before a comment is sent
    request_seconds: float | None = None  # from arrival to the last token
