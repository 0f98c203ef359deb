"""Cluster DNS: the names of services and of the pods behind a headless one, as `CoreDNS` answers them.

In: questions by UDP and TCP, and what the API server knows at that moment. Out: addresses. Invariant: nothing is remembered,
so an answer is never older than the API server's; when that does not answer, a question fails instead of naming nobody.
"""

from __future__ import annotations

import urllib.error
from collections.abc import Iterator
from contextlib import contextmanager

from dnslib import QTYPE, RCODE, RR, A, DNSRecord
from dnslib.server import BaseResolver, DNSHandler, DNSLogger, DNSServer

from tests.deploy.control_plane import ControlPlane

DOMAIN = "cluster.local"
TTL_S = 5


@contextmanager
def cluster_dns(plane: ControlPlane, address: str) -> Iterator[None]:
    servers = [
        DNSServer(_Names(plane), address=address, port=53, tcp=tcp, logger=DNSLogger("-recv,-send,-request,-reply"))
        for tcp in (False, True)
    ]
    for server in servers:
        server.start_thread()
    try:
        yield
    finally:
        for server in servers:
            server.stop()
            server.server.server_close()


class _Names(BaseResolver):  # type: ignore[misc]
    def __init__(self, plane: ControlPlane) -> None:
        self._plane = plane

    def resolve(self, request: DNSRecord, handler: DNSHandler) -> DNSRecord:
        reply = request.reply()
        name = str(request.q.qname).rstrip(".").lower()
        try:
            found = addresses(self._plane, name)
        except (OSError, ValueError):
            reply.header.rcode = RCODE.SERVFAIL
            return reply
        if not found:
            reply.header.rcode = RCODE.NXDOMAIN
        elif request.q.qtype in (QTYPE.A, QTYPE.ANY):
            reply.add_answer(*(RR(request.q.qname, QTYPE.A, rdata=A(address), ttl=TTL_S) for address in found))
        return reply


def addresses(plane: ControlPlane, name: str) -> list[str]:
    """Of `[pod.]service.namespace.svc.cluster.local`; none if nobody has that name."""
    labels = name.removesuffix(f".svc.{DOMAIN}").split(".")
    if not name.endswith(f".svc.{DOMAIN}") or len(labels) not in (2, 3):
        return []
    *pod, service, namespace = labels
    try:
        told = plane.call("GET", f"/api/v1/namespaces/{namespace}/services/{service}")
        if not pod and told["spec"].get("clusterIP") not in (None, "", "None"):
            return [told["spec"]["clusterIP"]]
        endpoints = plane.call("GET", f"/api/v1/namespaces/{namespace}/endpoints/{service}")
    except urllib.error.HTTPError as error:
        if error.code == 404:
            return []
        raise
    behind = [address for subset in endpoints.get("subsets") or () for address in subset.get("addresses") or ()]
    return [address["ip"] for address in behind if not pod or address.get("hostname") == pod[0]]
