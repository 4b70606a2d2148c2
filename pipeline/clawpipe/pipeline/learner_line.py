"""The line between the learner and the pipeline service: one question, one reply, over plain NATS.

A question that went down with a killed service is asked again, under the same id; a service that was only slow
answers the repetition with the reply that it has, and so does its work once.
"""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable

import anyio
import msgspec
from nats.aio.client import Client

from clawpipe.pipeline.decoding import decoded
from clawpipe.pipeline.errors import BrokerError
from clawpipe.pipeline.observe import EventLog
from clawpipe.pipeline.records import LearnerMessage, LearnerReply, encode
from clawpipe.pipeline.stream_reader import LOST, RETRY_S, unsubscribe

ASK_AGAIN_S = 2.0
ID_HEADER = "Clawpipe-Ask"

_decode_message = msgspec.msgpack.Decoder(LearnerMessage).decode
_decode_reply = msgspec.msgpack.Decoder(LearnerReply).decode


async def ask(
    client: Client, subject: str, message: LearnerMessage, timeout_s: float, *, again_s: float = ASK_AGAIN_S
) -> LearnerReply:
    """The learner's side: asks every `again_s` seconds. BrokerError after `timeout_s` seconds without a reply."""
    deadline = anyio.current_time() + timeout_s
    headers = {ID_HEADER: uuid.uuid4().hex}
    while True:
        try:
            left_s = max(1.0, deadline - anyio.current_time())
            limit_s = min(again_s, left_s)
            reply = await client.request(subject, encode(message), timeout=limit_s, headers=headers)
            return _decode_reply(reply.data)
        except LOST as err:
            if anyio.current_time() > deadline:
                name = type(message).__name__
                raise BrokerError(
                    f"the pipeline service has not answered the learner's {name} for {timeout_s:.0f} s; "
                    "look into logs/pipeline.log of the run folder"
                ) from err
            await anyio.sleep(RETRY_S)


async def serve(
    client: Client, subject: str, handler: Callable[[LearnerMessage], Awaitable[LearnerReply]], log: EventLog
) -> None:
    """The service's side: answers one message after the other; never ends. One that cannot be read gets no answer."""
    sub = await client.subscribe(subject)
    last_id, reply = "", b""
    try:
        async for msg in sub.messages:
            message = decoded(_decode_message, msg.data, subject, log)
            if message is None:
                continue
            ask_id = (msg.headers or {}).get(ID_HEADER, "")
            if not ask_id or ask_id != last_id:
                last_id, reply = ask_id, encode(await handler(message))
            await msg.respond(reply)
    finally:
        with anyio.CancelScope(shield=True), anyio.move_on_after(1):
            await unsubscribe(sub)
