"""What the gateway is told at start.

In: a command line or a caller. Out: one frozen `GatewayConfig`. Everything that bounds the
gateway (requests in flight, body size, waiting times) is a field here and nowhere else.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gateway.policies import POLICIES


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    model: Path  # folder with tokenizer.json, tokenizer_config.json and config.json; no weights needed
    prefill: tuple[str, ...] = ()  # gRPC host:port of prefill instances that do not register
    decode: tuple[str, ...] = ()  # gRPC host:port of decode instances that do not register
    registry: str = ""  # host:port where instances register; port 0: any free one; empty: nowhere
    lease_s: float = 5.0  # a registered instance that is silent for so long is forgotten
    policy: str = "least-work"  # which of the instances that would do is taken
    host: str = "127.0.0.1"
    port: int = 8000  # 0: any free port (the ready line tells which)
    model_name: str = ""  # name clients ask for; empty: the folder's name
    max_inflight: int = 1024  # generation requests at once; beyond it clients get 429
    secrets: str = ""  # folder of the cluster's; "": gRPC without protection
    api_keys: str = ""  # file with one key per line; "": everyone who reaches the port may ask
    insecure: bool = False  # it may listen off loopback all the same
    key_requests_per_s: float = 0.0  # of one API key, bursts of a second's worth; 0: any number
    key_inflight: int = 0  # generation requests of one API key at once; 0: up to max_inflight
    max_connections: int = 4096  # of clients; more are closed at once
    max_body_bytes: int = 32 * 1024 * 1024
    request_timeout_s: float = 600.0  # told to the instances; the gateway waits a little longer
    resumes: int = 3  # times a request may go on elsewhere after what served it has failed
    pair_wait_s: float = 2.0  # how long a new request waits while no pair serves
    resume_wait_s: float = 120.0  # how long it waits for a pair that serves before it is given up
    shutdown_grace_s: float = 10.0  # after SIGTERM, for requests in flight
    describe_interval_s: float = 5.0  # between two looks at an instance that serves and does not register
    describe_timeout_s: float = 3.0
    keepalive_s: float = 5.0  # gRPC ping on connections with calls in flight
    keepalive_timeout_s: float = 5.0  # no answer for so long: the connection is dead
    otlp: str = ""  # host:port of an OTLP/gRPC collector of traces; "": none
    drain_s: float = 5.0  # how long a side whose story no longer matters may take to end by itself

    def __post_init__(self) -> None:
        if self.max_inflight < 1:
            raise ValueError(f"max_inflight must be at least 1, not {self.max_inflight}")
        if self.key_requests_per_s < 0 or self.key_inflight < 0:
            raise ValueError("key_requests_per_s and key_inflight cannot be negative")
        if self.max_connections < 1:
            raise ValueError(f"max_connections must be at least 1, not {self.max_connections}")
        if self.request_timeout_s <= 0:
            raise ValueError(f"request_timeout_s must be positive, not {self.request_timeout_s}")
        if self.lease_s < 0.5:
            raise ValueError(f"lease_s must be at least 0.5, not {self.lease_s}")
        if self.pair_wait_s < 0:
            raise ValueError(f"pair_wait_s cannot be negative: {self.pair_wait_s}")
        if self.policy not in POLICIES:
            raise ValueError(f"there is no policy {self.policy!r}; there are {', '.join(POLICIES)}")
        if self.resumes < 0 or self.resume_wait_s < 0:
            raise ValueError(f"resumes and resume_wait_s cannot be negative: {self.resumes}, {self.resume_wait_s}")

    @property
    def served_name(self) -> str:
        return self.model_name or self.model.resolve().name
