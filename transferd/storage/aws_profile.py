"""Credentials from the files of AWS's tools: ~/.aws/credentials and ~/.aws/config. obstore does not read them.

The environment's own keys and a web identity token come before them, as in AWS's SDKs; containers and the machine's
metadata service come after them.
"""

from __future__ import annotations

import configparser
from collections.abc import Mapping
from pathlib import Path

from transferd.errors import ConfigError

BEFORE = ("AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE")
ELSEWHERE = (*BEFORE, "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_CONTAINER_CREDENTIALS_FULL_URI")
KEYS = {
    "aws_access_key_id": "access_key_id",
    "aws_secret_access_key": "secret_access_key",
    "aws_session_token": "session_token",
    "region": "region",
}
KEY = "storage.object.url"


def profile_options(environ: Mapping[str, str]) -> dict[str, str]:
    """What the files say for AWS_PROFILE or the profile "default": options of the library. {} if they have nothing.

    Raises ConfigError if a file cannot be read, or if AWS_PROFILE names a profile without keys.
    """
    if any(environ.get(name) for name in BEFORE):
        return {}
    name = environ.get("AWS_PROFILE") or environ.get("AWS_DEFAULT_PROFILE") or ""
    wanted = name or "default"
    files = {
        environ.get("AWS_SHARED_CREDENTIALS_FILE") or "~/.aws/credentials": wanted,
        environ.get("AWS_CONFIG_FILE") or "~/.aws/config": wanted if wanted == "default" else f"profile {wanted}",
    }
    found: dict[str, str] = {}
    more: set[str] = set()
    for path, section in files.items():
        said = _section(path, section)
        more |= said.keys()
        found = {KEYS[key]: value for key, value in said.items() if key in KEYS} | found
    if name and not found.keys() >= {"access_key_id", "secret_access_key"}:
        other = sorted(key for key in more if key.startswith(("sso_", "role_", "credential_", "source_", "login_")))
        why = f"it has {', '.join(other)}, which transferd does not follow" if other else "there is none in the files"
        problem = f"AWS_PROFILE names {name!r}, and that profile has no keys in {' or '.join(files)}: {why}"
        raise ConfigError(KEY, f"{problem}; export its keys (`aws configure export-credentials`)")
    return found


def has_credentials(environ: Mapping[str, str]) -> bool:
    """Whether some are there, or are named, without a question to the machine's metadata service."""
    return any(environ.get(name) for name in ELSEWHERE) or "access_key_id" in profile_options(environ)


def _section(path: str, section: str) -> dict[str, str]:
    parser = configparser.ConfigParser(interpolation=None, default_section="")
    try:
        parser.read_string(Path(path).expanduser().read_text())
        return dict(parser[section]) if parser.has_section(section) else {}
    except (FileNotFoundError, NotADirectoryError, RuntimeError):  # RuntimeError: the user has no home directory
        return {}
    except (OSError, UnicodeDecodeError, configparser.Error) as error:
        what = error.strerror if isinstance(error, OSError) else str(error).split("\n", 1)[0]
        raise ConfigError(KEY, f"its credentials cannot be read from {path}: {what}") from None
