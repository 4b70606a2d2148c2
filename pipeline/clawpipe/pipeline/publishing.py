"""Stores messages in streams: once each, for as long as it takes within a bound. A part of `broker`."""

from __future__ import annotations

import time

import nats.errors
import nats.js.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js import JetStreamContext
from nats.js.api import PubAck

from clawpipe.pipeline.claims import Claims, claim_for
from clawpipe.pipeline.errors import BrokerError
from clawpipe.pipeline.patience import Patience
from clawpipe.pipeline.records import encode
from clawpipe.pipeline.streams import CLAIM_BYTES

STORE_TIMEOUT_S = 30.0
MIN_STORE_S = 1.0  # for the claim, however long its blob took
ID_HEADER = "Nats-Msg-Id"  # by which the server knows a repetition


class Publisher:
    """See the module."""

    def __init__(self, client: Client, js: JetStreamContext, claims: Claims, storing: Patience) -> None:
        self._client = client
        self._js = js
        self._claims = claims
        self._storing = storing

    async def publish(self, subject: str, data: bytes, message_id: str, timeout_s: float = STORE_TIMEOUT_S) -> None:
        """Returns when the server has stored it. BrokerError after `timeout_s`, or when it is refused."""
        headers = {ID_HEADER: message_id}

        async def attempt(limit_s: float) -> PubAck:
            return await self._js.publish(subject, data, timeout=limit_s, headers=headers)

        try:
            await self._storing.until_done(attempt, f"store {message_id} on {subject}", timeout_s)
        except (nats.js.errors.BadRequestError, nats.errors.MaxPayloadError) as err:
            raise BrokerError(
                f"NATS refuses {message_id} with {len(data)} bytes on {subject} ({err}); the server must take "
                f"messages of {CLAIM_BYTES} bytes: raise its max_payload (now {self._client.max_payload})"
            ) from err

    async def publish_record(self, subject: str, body: bytes, message_id: str, timeout_s: float) -> None:
        """Stores the record itself, or its blob and then a claim to it, both within `timeout_s`."""
        if len(body) <= CLAIM_BYTES:
            await self.publish(subject, body, message_id, timeout_s)
            return
        deadline_s = time.monotonic() + timeout_s
        claim = claim_for(message_id, body)

        async def attempt(limit_s: float) -> None:
            await self._claims.put(claim, body, limit_s)

        await self._storing.until_done(attempt, f"store the body of {message_id}", timeout_s)
        left_s = max(MIN_STORE_S, deadline_s - time.monotonic())
        await self.publish(f"{subject}.claim", encode(claim), message_id, left_s)


def message_id(msg: Msg) -> str:
    """The id that the message was published with; empty without one."""
    return (msg.headers or {}).get(ID_HEADER, "")
