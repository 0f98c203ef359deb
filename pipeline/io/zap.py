"""Who may speak on the ring: CURVE keys, and the rank that each key belongs to.

The daemon makes one key pair per rank and epoch and tells each rank its own secret and everyone's public
keys. Every ring socket is encrypted with them, and the gatekeeper of the ring's context (`security.gatekeeper`)
names the rank whose key a message came with: a reporter's rank is bound to its key and never read from what it
says.
"""

from __future__ import annotations

import msgspec
import zmq

from security.gatekeeper import guard, present


class RingKeys(msgspec.Struct, frozen=True):
    """Z85 keys: this rank's own pair, and the public ones of all ranks in rank order."""

    public: str
    secret: str
    ranks: tuple[str, ...]

    def serve(self, socket: zmq.Socket[bytes]) -> None:
        """Before `bind`."""
        guard(socket, self.secret)

    def dial(self, socket: zmq.Socket[bytes], rank: int) -> None:
        """Before `connect`; `rank` is the one that binds."""
        present(socket, self.public, self.secret, self.ranks[rank])


def make_keys(ranks: int) -> list[RingKeys]:
    """Fresh keys for an epoch, one `RingKeys` per rank."""
    pairs = [tuple(key.decode() for key in zmq.curve_keypair()) for _ in range(ranks)]
    return [RingKeys(public, secret, tuple(public for public, _ in pairs)) for public, secret in pairs]
