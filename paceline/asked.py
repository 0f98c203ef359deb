"""Whom a command asks: the instances of a cluster on this machine, those that a gateway knows, or given ones.

In: the options that `status`, `top`, `timeline` and the operators' commands share. Out: names, roles and addresses.
Ends the command, with what to do, if there is nobody to ask.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

import grpc.aio

from paceline.config import Cluster, cluster_secrets, read_cluster
from paceline.health import CHANNEL_OPTIONS
from paceline.silence import why_silent
from paceline_proto.v1 import common_pb2, registry_pb2, registry_pb2_grpc
from security.channels import dial
from security.secrets import Secrets

ROLES = {common_pb2.ROLE_PREFILL: "prefill", common_pb2.ROLE_DECODE: "decode"}


@dataclass(frozen=True, slots=True)
class Known:
    """An instance before it is asked."""

    address: str
    name: str = ""
    role: str = ""
    routed: str = ""  # why a gateway that was asked does not use it


@dataclass(frozen=True, slots=True)
class Asked:
    cluster: Cluster | None
    addresses: tuple[str, ...]
    registry: str | None
    timeout: float  # seconds for each answer
    secrets: Secrets | None

    @property
    def url(self) -> str | None:
        """Of the gateway of the cluster on this machine."""
        return self.cluster.url if self.cluster else None

    async def known(self) -> list[Known]:
        parts = self.cluster.instances if self.cluster else []
        known = [Known(part.address, part.name, part.role) for part in parts]
        known += await self._registered() if self.registry else []
        told = {one.address for one in known}
        return known + [Known(address) for address in self.addresses if address not in told]

    async def chosen(self, names: Sequence[str]) -> list[Known]:
        """The named ones and those given by address; without either, all that are known."""
        known = await self.known()
        if not names and not self.addresses:
            return known
        if unknown := [name for name in names if name not in [one.name for one in known]]:
            there = ", ".join(one.name for one in known if one.name) or "none"
            raise SystemExit(f"paceline: no instance {', '.join(unknown)} here; there are {there}")
        return [one for one in known if one.name in names or one.address in self.addresses]

    async def _registered(self) -> list[Known]:
        async with dial(str(self.registry), self.secrets, CHANNEL_OPTIONS) as channel:
            stream = registry_pb2_grpc.RegistryStub(channel).Watch(registry_pb2.WatchRequest(), timeout=self.timeout)
            try:
                answer: registry_pb2.WatchResponse = await stream.read()
            except grpc.aio.AioRpcError as error:
                why = why_silent(error, str(self.registry))
                raise SystemExit(f"paceline: the registry at {self.registry}: {why}") from error
            finally:
                stream.cancel()
        return [
            Known(
                one.description.instance.address,
                one.description.instance.instance_id,
                ROLES.get(one.description.role, ""),
                "" if one.used else one.status,
            )
            for one in answer.instances
        ]


def asked(options: argparse.Namespace, names: Sequence[str] = ()) -> Asked:
    """`names`: of instances that the command is about; an address alone does not tell them."""
    given = options.registry or (options.address and not names)
    cluster = None if given else read_cluster(options.run_dir)
    if cluster is None and not given:
        raise SystemExit(
            f"paceline: no cluster runs in {options.run_dir.absolute()}; start one with `paceline up`, name its "
            "--run-dir, or name instances with --address, or a gateway with --registry"
        )
    secrets = cluster_secrets(options.secrets)
    return Asked(cluster, tuple(options.address or ()), options.registry, options.timeout, secrets)
