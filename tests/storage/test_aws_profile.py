"""Credentials from the files of AWS's tools."""

from __future__ import annotations

from pathlib import Path

import pytest

from transferd.errors import ConfigError
from transferd.storage.aws_profile import has_credentials, profile_options

CREDENTIALS = """
[default]
aws_access_key_id = ID
aws_secret_access_key = a%secret=
[work]
aws_access_key_id=WID
aws_secret_access_key=WSECRET
aws_session_token=TOKEN
"""
CONFIG = """
[default]
region = eu-west-1
[profile work]
region = us-east-2
aws_access_key_id = not this one
[profile roles]
role_arn = arn:x
source_profile = work
"""


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "credentials").write_text(CREDENTIALS)
    (tmp_path / "config").write_text(CONFIG)
    return {
        "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "credentials"),
        "AWS_CONFIG_FILE": str(tmp_path / "config"),
    }


def test_the_default_profile_has_its_keys_and_its_region(files: dict[str, str]) -> None:
    assert profile_options(files) == {"access_key_id": "ID", "secret_access_key": "a%secret=", "region": "eu-west-1"}
    assert has_credentials(files)


@pytest.mark.parametrize("variable", ["AWS_PROFILE", "AWS_DEFAULT_PROFILE"])
def test_another_profile_is_named_in_the_environment(files: dict[str, str], variable: str) -> None:
    assert profile_options(files | {variable: "work"}) == {
        "access_key_id": "WID",
        "secret_access_key": "WSECRET",
        "session_token": "TOKEN",
        "region": "us-east-2",
    }


@pytest.mark.parametrize("variable", ["AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE"])
def test_what_the_environment_has_comes_first(files: dict[str, str], variable: str) -> None:
    assert profile_options(files | {variable: "x"}) == {}
    assert has_credentials({variable: "x"})


def test_files_that_are_not_there_have_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert profile_options({}) == {}
    assert not has_credentials({})
    assert has_credentials({"AWS_CONTAINER_CREDENTIALS_FULL_URI": "http://x"})
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws" / "credentials").write_text(CREDENTIALS)
    assert profile_options({})["access_key_id"] == "ID"


def test_a_profile_that_is_named_must_have_keys(files: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"AWS_PROFILE names 'gone'.*there is none in the files"):
        profile_options(files | {"AWS_PROFILE": "gone"})
    with pytest.raises(ConfigError, match=r"it has role_arn, source_profile, which transferd does not follow.*export"):
        profile_options(files | {"AWS_PROFILE": "roles"})


def test_a_file_that_cannot_be_read_is_named_without_its_text(files: dict[str, str]) -> None:
    Path(files["AWS_SHARED_CREDENTIALS_FILE"]).write_text("aws_secret_access_key = SECRET\n")
    with pytest.raises(ConfigError, match=r"credentials: File contains no section headers") as raised:
        profile_options(files)
    assert "SECRET" not in str(raised.value)
    Path(files["AWS_SHARED_CREDENTIALS_FILE"]).write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"its credentials cannot be read from .*credentials"):
        profile_options(files)
