"""The phases that both sides and the gateway tell add up to the time to first token that a client measures."""

from __future__ import annotations

import pytest

from tests.e2e.cluster import Cluster
from tests.e2e.ttft_client import check_phases

pytestmark = [pytest.mark.e2e, pytest.mark.soak, pytest.mark.timeout(300)]


def test_phases_of_100_requests_add_up_to_the_measured_ttft() -> None:
    with Cluster() as cluster:
        check_phases(cluster, requests=100, prompt=64)
