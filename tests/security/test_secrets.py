"""The cluster secret folder: made once, complete, readable by its owner alone, and refused when anything is wrong."""

from __future__ import annotations

import datetime
import logging
import shutil
from pathlib import Path

import pytest

from paceline.cli import main
from paceline.doctor import FAIL, OK, WARN, cluster_secrets
from security.folder import make
from security.secrets import CERTIFICATE, CURVE, FILES, KEY, SHARED, SecretsError, load


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "secrets"
    make(folder, ["gateway.example.org", "10.1.2.3"])
    return folder


def test_the_command_makes_a_folder_that_loads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "deep" / "secrets"
    assert main(["certs", str(folder), "--name", "example.org", "--days", "90"]) == 0
    secrets = load(folder)
    assert f"good until {secrets.expires:%Y-%m-%d}" in capsys.readouterr().out
    assert sorted(path.name for path in folder.iterdir()) == sorted(FILES)
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
    assert [path.name for path in folder.parent.iterdir()] == ["secrets"], "nothing is left beside it"


def test_existing_secrets_are_kept_unless_asked(tmp_path: Path) -> None:
    folder = tmp_path / "secrets"
    first = make(folder)
    with pytest.raises(SystemExit, match=r"already holds ca.crt.*--force"):
        main(["certs", str(folder)])
    assert load(folder).fingerprint == first.fingerprint
    assert main(["certs", str(folder), "--force"]) == 0
    assert load(folder).fingerprint != first.fingerprint


@pytest.mark.parametrize("name", ["", "a b", "http://x", "x:80", "user@x", "ä.example"])
def test_names_that_are_none_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(SecretsError, match="neither a host name nor an IP address"):
        make(tmp_path / "secrets", [name])
    assert list(tmp_path.iterdir()) == []


def test_nothing_secret_is_shown(made: Path) -> None:
    secrets = load(made)
    shown = repr(secrets) + str(secrets) + secrets.fingerprint
    for hidden in (secrets.curve_secret.decode(), secrets.curve_public.decode(), secrets.shared.hex(), "PRIVATE"):
        assert hidden not in shown


def test_keys_for_different_purposes_differ(made: Path) -> None:
    secrets = load(made)
    assert len({secrets.derive("a"), secrets.derive("b"), secrets.shared}) == 3
    assert secrets.derive("a") == load(made).derive("a")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    ("content", "complaint"), [(None, "lacks"), (b"", "."), (b"\xff\x00" * 40, "."), (b"a" * 70_000, "larger")]
)
def test_a_damaged_folder_is_refused_by_name(
    made: Path, tmp_path: Path, name: str, content: bytes | None, complaint: str
) -> None:
    folder = Path(shutil.copytree(made, tmp_path / "copy"))
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(content)
    with pytest.raises(SecretsError, match=complaint) as caught:
        load(folder)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize("names", [(KEY,), (CERTIFICATE, KEY)])
def test_a_folder_mixed_from_two_clusters_is_refused(made: Path, tmp_path: Path, names: tuple[str, ...]) -> None:
    folder = Path(shutil.copytree(made, tmp_path / "copy"))
    make(tmp_path / "other")
    for name in names:
        shutil.copy(tmp_path / "other" / name, folder / name)
    with pytest.raises(SecretsError, match="two different clusters"):
        load(folder)


def test_no_folder_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(SecretsError, match="paceline certs"):
        load(tmp_path / "none")


def test_secrets_that_all_users_can_read_are_noted_and_taken(
    made: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = Path(shutil.copytree(made, tmp_path / "copy"))
    for name in (CURVE, SHARED):
        (folder / name).chmod(0o644)
    with caplog.at_level(logging.WARNING):
        load(folder)
    assert [f"{folder / CURVE} can be read by every user" in record.message for record in caplog.records] == [True]


def test_doctor_tells_when_they_end(made: Path, tmp_path: Path) -> None:
    now = datetime.datetime.now(datetime.UTC)
    assert cluster_secrets(made, now).level == OK
    soon = cluster_secrets(made, load(made).expires - datetime.timedelta(days=10))
    assert (soon.level, "(10 days)" in soon.found) == (WARN, True)
    over = cluster_secrets(made, load(made).expires)
    assert (over.level, "expired on" in over.remedy) == (FAIL, True)
    assert cluster_secrets(tmp_path, now).level == FAIL
