"""Where a process may listen without protection."""

from __future__ import annotations

import pytest

from security.exposure import Exposed, check_cluster_port, check_public_port, is_loopback


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("[::1]", True), ("localhost", True),
     ("0.0.0.0", False), ("::", False), ("10.0.0.7", False), ("8.8.8.8", False), ("fe80::1%eth0", False),
     ("no-such-host.invalid", False)],
)  # fmt: skip
def test_what_counts_as_loopback(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback


@pytest.mark.parametrize(("check", "remedy"), [(check_cluster_port, "paceline certs"), (check_public_port, "--api-keys")])  # fmt: skip
def test_off_loopback_needs_protection_or_insistence(check: object, remedy: str) -> None:
    assert callable(check)
    for host, protected, insecure in (("127.0.0.1", False, False), ("0.0.0.0", True, False), ("0.0.0.0", False, True)):
        check("the port", host, protected, insecure)
    with pytest.raises(Exposed, match=f"the port would listen on 0.0.0.0.*{remedy}.*--insecure"):
        check("the port", "0.0.0.0", False, False)
