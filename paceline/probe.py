"""One question to one part, for whoever restarts it or routes to it: the image's health check, and a kubelet's probe.

In: `host:port` of an instance (grpc.health.v1) or the URL of a gateway's health. Out: an exit code, 0 for yes, and one
line that says why not. With `live` any answer is a yes: a part that loads or drains is not one to kill.
"""

from __future__ import annotations

import sys
import urllib.error
import urllib.request
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from security.secrets import Secrets

LONGEST_REASON = 500


def probe(target: str, timeout: float, live: bool, secrets: Secrets | None) -> int:
    if target.startswith(("http://", "https://")):
        answered, well, reason = ask_http(target, timeout)
    else:
        answered, well, reason = ask_grpc(target, timeout, secrets)
    if well or (live and answered):
        return 0
    print(f"{target}: {reason}", file=sys.stderr)
    return 1


def ask_http(url: str, timeout: float) -> tuple[bool, bool, str]:
    """Whether there was an answer, whether it is 200, and what it says otherwise."""
    # A proxy in the environment is not for a neighbour in the same pod.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=timeout) as response:
            return True, response.status == 200, f"HTTP {response.status}"
    except urllib.error.HTTPError as error:
        return True, False, f"HTTP {error.code} {error.read(LONGEST_REASON).decode(errors='replace')}"
    except (OSError, ValueError) as error:
        return False, False, f"no answer within {timeout:g} s: {error}"


def ask_grpc(address: str, timeout: float, secrets: Secrets | None) -> tuple[bool, bool, str]:
    """The same of the health service; SERVING is well."""
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    from paceline.silence import is_silent, why_silent
    from security.channels import dial_blocking

    with dial_blocking(address, secrets, (("grpc.enable_http_proxy", 0),)) as channel:
        try:
            told = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=timeout)
        except grpc.RpcError as error:
            return not is_silent(error.code()), False, why_silent(error, address)
    state = health_pb2.HealthCheckResponse.ServingStatus.Name(told.status)
    return True, told.status == health_pb2.HealthCheckResponse.SERVING, state
