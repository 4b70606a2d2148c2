"""The messages between a rollout's slot in the supervisor (trio) and the proxy (asyncio) on the same host.

One SOCK_SEQPACKET connection per slot, one msgpack message per packet, strictly request and reply, so the
order is the protocol: Take -> Assigned | Drained; Open (+ the listening socket) -> Opened; Settle -> Settled;
Close -> Closed; then Take again. A connection that breaks between Assigned and Closed means that the slot is
gone: the proxy drops its listener and hands the request back to the work queue.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct

from clawpipe.pipeline.records import Outcome, RolloutRequest

MAX_PACKET_BYTES = 128 * 1024


class Take(Struct, frozen=True, kw_only=True, tag="take"):
    """The slot is free: give it a rollout."""


class Assigned(Struct, frozen=True, kw_only=True, tag="assigned"):
    """Run this. `attempt` tells this delivery of the request from all others."""

    request: RolloutRequest
    attempt: int


class Drained(Struct, frozen=True, kw_only=True, tag="drained"):
    """There will be no more rollouts; the slot ends."""


class Open(Struct, frozen=True, kw_only=True, tag="open"):
    """Serve the listening socket that comes with this packet: it is this rollout's identity."""

    rollout_id: str
    harness: str


class Opened(Struct, frozen=True, kw_only=True, tag="opened"):
    """Calls are served."""


class Settle(Struct, frozen=True, kw_only=True, tag="settle"):
    """The harness is gone: take no new call, finish or cut those in flight, fix the list of calls."""

    rollout_id: str


class Settled(Struct, frozen=True, kw_only=True, tag="settled"):
    """Which calls exist will not change any more."""

    num_calls: int
    ends_aborted: bool = False  # the newest call ended in an error which the harness could see


class Close(Struct, frozen=True, kw_only=True, tag="close"):
    """Publish the manifest with this outcome and acknowledge the request."""

    rollout_id: str
    outcome: Outcome
    started_s: float
    ended_s: float


class Closed(Struct, frozen=True, kw_only=True, tag="closed"):
    """The manifest is stored."""


ToProxy = Take | Open | Settle | Close
ToSlot = Assigned | Drained | Opened | Settled | Closed

_to_proxy = msgspec.msgpack.Decoder(ToProxy)
_to_slot = msgspec.msgpack.Decoder(ToSlot)


def encode(message: ToProxy | ToSlot) -> bytes:
    """One packet. ValueError when it does not fit into a packet."""
    data = msgspec.msgpack.encode(message)
    if len(data) > MAX_PACKET_BYTES:
        raise ValueError(f"link: a {type(message).__name__} of {len(data)} bytes is over {MAX_PACKET_BYTES}")
    return data


def decode_to_proxy(data: bytes) -> ToProxy:
    """A packet that a slot sent. msgspec.ValidationError when it is none."""
    return _to_proxy.decode(data)


def decode_to_slot(data: bytes) -> ToSlot:
    """A packet that the proxy sent. msgspec.ValidationError when it is none."""
    return _to_slot.decode(data)
