"""Who may call a server: whoever knows its token, if it has one, by a host name that is its own.

A web page can send requests to servers on the machine of whoever reads it. The browser names the page's site in
`Origin`; in `Host` too, if the page made its own name resolve to this machine (DNS rebinding).
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from functools import lru_cache
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.types import Scope

from harness1.serve.service import Refused

LOCAL = ("localhost", "127.0.0.1", "::1")
OPEN = ("/health",)
"""Paths that tell nothing, and are answered to everybody."""
KNOWN = 64
"""Hosts and origins of which it is remembered whether they are a server's own."""


class Access:
    """The conditions of access to a server.

    Args:
        hosts: names by which clients may call it, beside those of this machine's loopback.
        token: what every call must present as bearer token or `x-api-key`; empty: nothing.
        addresses: accept any IP address as host, which no page can make its own; for servers of a network.
    """

    def __init__(self, hosts: Iterable[str] = (), token: str = "", addresses: bool = False) -> None:
        self._hosts = frozenset((*LOCAL, *(host.lower().strip("[]").rstrip(".") for host in hosts)))
        self._token, self._addresses = token.encode(), addresses
        self._knows = lru_cache(KNOWN)(self._is_own)

    def check(self, scope: Scope) -> None:
        """Raise Refused if a request is not admitted: by its host (421), its origin (403) or its token (401).

        The token is removed from the request, so that nothing behind can record it.
        """
        if scope["path"] in OPEN:
            return
        named, origins = [], []
        for name, value in scope["headers"]:
            if name == b"host":
                named.append(value.decode("latin-1"))
            elif name == b"origin":
                origins.append(value.decode("latin-1"))
        if len(named) != 1 or not self._knows(f"//{named[0]}"):
            raise Refused(421, f"this server is not {' or '.join(named)[:100]!r}: start it with --allow-host NAME")
        own = f"//{named[0]}"
        if foreign := [each for each in origins if not (self._knows(each) and self._is_page(each, own))]:
            raise Refused(403, f"pages of {foreign[0][:100]!r} may not call this server")
        if self._token:
            kept = [each for each in scope["headers"] if not self._is_token(*each)]
            if len(kept) == len(scope["headers"]):
                raise Refused(401, "this server asks for its token", {"WWW-Authenticate": "Bearer"})
            scope["headers"] = kept

    def _is_own(self, address: str) -> bool:
        try:
            parts = urlsplit(address)
            host, port = (parts.hostname or "").rstrip("."), parts.port
        except ValueError:
            return False
        plain = parts.path == parts.query == parts.fragment == "" and parts.username is None and port != 0
        return plain and (host in self._hosts or (self._addresses and is_address(host)))

    def _is_page(self, origin: str, own: str) -> bool:
        """Return whether a page is of this server's host. A foreign page may stand at an IP address of its own."""
        host = (urlsplit(origin).hostname or "").rstrip(".")
        return host in self._hosts or host == (urlsplit(own).hostname or "").rstrip(".")

    def _is_token(self, name: bytes, value: bytes) -> bool:
        if name == b"authorization":
            scheme, _, value = value.partition(b" ")
            return scheme.lower() == b"bearer" and hmac.compare_digest(value.strip(), self._token)
        return name == b"x-api-key" and hmac.compare_digest(value.strip(), self._token)


def is_address(host: str) -> bool:
    """Return whether a host is an IP address, and not a name."""
    try:
        ip_address(host)
    except ValueError:
        return False
    return True
