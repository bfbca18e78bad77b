"""Who may use a server: API keys, and pages of other sites that may not."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path

from rlx.errors import OptionError
from rlx.serve.api_errors import ApiError
from rlx.support.records import dataclass

_SHORTEST = 8


@dataclass(frozen=True)
class Caller:
    """Who sent a request: a name for logs and for a fair share, made of the key or the address."""

    name: str


class ApiKeys:
    """Keys that are accepted; without any, everyone is. Only their digests are kept."""

    def __init__(self, keys: Iterable[str] = ()) -> None:
        self._digests: list[bytes] = []
        self.replace(keys)

    def __bool__(self) -> bool:
        return bool(self._digests)

    def replace(self, keys: Iterable[str]) -> None:
        """Accept these keys instead."""
        found = []
        for key in keys:
            if len(key) < _SHORTEST or not key.isascii() or any(c.isspace() for c in key):
                raise OptionError(
                    "not an API key", where="--api-key", got=f"{len(key)} characters",
                    expected=f"{_SHORTEST} or more printable ASCII characters",
                )  # fmt: skip
            found.append(_digest(key))
        self._digests = found

    def caller(self, headers: Mapping[str, str], address: str) -> Caller:
        """Who sends these headers; an error unless a key is accepted."""
        if not self._digests:
            return Caller(address)
        kind, _, given = headers.get("authorization", "").partition(" ")
        key = given.strip() if kind.lower() == "bearer" else headers.get("x-api-key", "")
        if not key:
            raise ApiError(
                401, "You didn't provide an API key. Send it in the header "
                "'Authorization: Bearer KEY'.", code="missing_api_key",
            )  # fmt: skip
        digest = _digest(key)
        # every key is compared, in the same time
        same = [hmac.compare_digest(digest, known) for known in self._digests]
        if not any(same):
            raise ApiError(401, "Incorrect API key provided.", code="invalid_api_key")
        return Caller("key-" + digest.hex()[:8])


def refuse_other_sites(headers: Mapping[str, str], origins: Iterable[str], local: bool) -> None:
    """Refuse what pages of other sites send through a browser of this machine. `origins` are let
    in; a `local` server is called by a loopback name alone, whatever a name server says."""
    host = headers.get("host", "")
    if local and not is_loopback(_host_name(host)):
        raise ApiError(
            403, f"This server is for this machine alone, but was called as {host[:100]!r}. "
            "Call it as localhost or 127.0.0.1, or start it with an API key.", code="wrong_host",
        )  # fmt: skip
    origin, allowed = headers.get("origin"), [*origins]
    own = (f"http://{host}", f"https://{host}")
    if origin is not None and origin not in own and not {origin, "*"} & {*allowed}:
        raise ApiError(
            403, f"Pages of {origin[:100]!r} may not use this server. To let them, start it with "
            "--cors-origin, or with an API key.", code="wrong_origin",
        )  # fmt: skip


def _host_name(host: str) -> str:
    """A Host header without its port."""
    name, _, port = host.rpartition(":")
    return (name if port.isdigit() else host).strip("[]")


def is_loopback(host: str) -> bool:
    """Whether a name or address is of this machine alone."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "replace")).digest()


def keys_of_text(text: str) -> list[str]:
    """Keys that are separated by commas or lines; `#` begins a comment."""
    lines = (line.partition("#")[0] for line in text.splitlines())
    return [key for line in lines for part in line.split(",") if (key := part.strip())]


def keys_of_file(path: Path) -> list[str]:
    """The keys in a file that only its owner may read."""
    if stat.S_IMODE(path.stat().st_mode) & 0o077:
        raise OptionError(
            "others may read this file of keys", where=str(path), hint=f"chmod 600 {path}"
        )
    return keys_of_text(path.read_text(encoding="utf-8"))
