"""`transferd keygen`: CURVE keys as files, with the modes that the daemon insists on."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path

import zmq

from transferd.errors import ConfigError

SECRET_MODE = 0o640  # not 0600, so that after `chgrp transferd` the service can read it
PUBLIC_MODE = 0o644


@dataclass(frozen=True, slots=True)
class Keys:
    """The paths of the files. server_made: False if the daemon's pair existed before."""

    server_secret: str
    server_public: str
    clients_dir: str
    client_secret: str
    client_public: str
    server_made: bool

    def tree(self) -> dict[str, object]:
        return asdict(self)

    def text(self) -> str:
        what = "made" if self.server_made else "kept"
        return f"""\
{what}  {self.server_secret}  the daemon's secret key: chgrp it to the daemon's group
{what}  {self.server_public}  its public key: copy it to every client
made  {self.client_public}  a permitted client
made  {self.client_secret}  that client's secret key: move it to the client's machine

The daemon's configuration:

[server.curve]
secret_key_file = "{self.server_secret}"
client_keys_dir = "{self.clients_dir}"

The client's environment (or --key-file and --server-key-file):

TRANSFERD_CURVE_KEY_FILE={self.client_secret}
TRANSFERD_CURVE_SERVER_KEY_FILE={self.server_public}"""


def make_keys(directory: Path, client: str) -> Keys:
    """Create a client's pair in `directory`, and the daemon's if it does not exist yet. Overwrites nothing.

    Raises ConfigError if the client's pair exists, half of the daemon's is missing, or a file cannot be written.
    """
    if not client or client in ("server", ".", "..") or "/" in client or not client.isprintable():
        raise ConfigError("--client", "expected a name that can be a file's, and not 'server'", client)
    where = directory.absolute()
    clients = where / "clients"
    secret, public = where / "server.secret", where / "server.public"
    client_secret, client_public = where / f"{client}.secret", clients / f"{client}.public"
    for path in (client_secret, client_public):
        if path.exists():
            raise ConfigError(str(path), "already exists; choose another --client, or remove the file")
    if secret.exists() != public.exists():
        raise ConfigError(str(secret), "only one key of this pair exists; remove it")
    made = not secret.exists()
    try:
        clients.mkdir(mode=0o755, parents=True, exist_ok=True)
        if made:
            _write_pair(secret, public)
        _write_pair(client_secret, client_public)
    except OSError as error:
        raise ConfigError(str(error.filename or where), f"cannot be written: {error.strerror}") from error
    return Keys(str(secret), str(public), str(clients), str(client_secret), str(client_public), made)


def _write_pair(secret: Path, public: Path) -> None:
    public_key, secret_key = zmq.curve_keypair()
    for path, key, mode in ((secret, secret_key, SECRET_MODE), (public, public_key, PUBLIC_MODE)):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode & 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(key + b"\n")
            os.fchmod(file.fileno(), mode)  # whatever the umask is
