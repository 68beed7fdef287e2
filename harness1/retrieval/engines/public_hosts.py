"""Tells hosts of the public internet from those of a local network, by every address that a name resolves to."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address

Resolve = Callable[[str], Awaitable[tuple[str, ...]]]
"""Returns all IP addresses of a name, () if there is no such name; raises OSError if that cannot be found out now."""

_PUBLIC_V6 = IPv6Network("2000::/3")
"""All that is assigned to hosts of the internet (RFC 4291)."""
_NAT64 = IPv6Network("64:ff9b::/96")
"""An IPv4 address in the last 32 bits, as translators of IPv6 networks give it for every name (RFC 6052)."""
_PROTOCOLS = IPv4Network("192.0.0.0/24")
"""Which `is_global` takes for public before Python 3.13."""


async def resolve(host: str) -> tuple[str, ...]:
    """Return the addresses that this machine's resolver gives for a name, or for an address that address."""
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        if error.errno in (socket.EAI_NONAME, socket.EAI_NODATA):
            return ()
        raise
    except UnicodeError:  # a label is empty or too long
        return ()
    return tuple(dict.fromkeys(str(entry[4][0]) for entry in found))


async def is_public(host: str, resolve: Resolve) -> bool:
    """Return True if a host has addresses, and all of them are public.

    Raises:
        OSError: the resolver cannot tell now.
    """
    addresses = await resolve(host)
    return bool(addresses) and all(map(is_public_address, addresses))


def is_public_address(text: str) -> bool:
    """Return True for the address of a host on the internet; IPv6 addresses that stand for one of IPv4 are judged as
    that one."""
    try:
        address = ip_address(text.partition("%")[0])
    except ValueError:
        return False
    if isinstance(address, IPv6Address):
        inner = _inner(address)
        if inner is None:
            return address in _PUBLIC_V6 and address.is_global
        address = inner
    return address.is_global and not address.is_multicast and address not in _PROTOCOLS


def _inner(address: IPv6Address) -> IPv4Address | None:
    if address in _NAT64:
        return IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address.sixtofour
