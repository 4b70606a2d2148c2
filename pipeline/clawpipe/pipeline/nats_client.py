"""nats-py's client, which a subject that is no UTF-8 does not stop.

NATS takes any bytes for a subject. nats-py decodes them where it reads from the connection: one message with such a
subject ends its reading for good, in silence, and again after every restart, since the message stays in its stream.
"""

from __future__ import annotations

from nats.aio.client import Client
from nats.aio.msg import Msg


class LenientClient(Client):
    """A client that reads on: what is no UTF-8 in a subject is U+FFFD in the message."""

    def _build_message(
        self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: dict[str, str] | None
    ) -> Msg:
        return self.msg_class(
            subject=subject.decode(errors="replace"),
            reply=reply.decode(errors="replace"),
            data=data,
            headers=headers,
            _client=self,
            _sid=sid,
        )
