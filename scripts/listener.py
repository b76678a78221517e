"""The listening HTTP socket: bound before anything starts, kept while frontends come and go."""

import errno
import ipaddress
import os
import socket
from typing import Final

BACKLOG: Final = 2048  # connections the kernel holds while no frontend accepts


class ListenError(RuntimeError):
    """The address cannot be listened on; the message is for the user."""


def listen(host: str, port: int) -> socket.socket:
    """A listening TCP socket; port 0 takes a free one."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise ListenError(f"--host {host}: {error.strerror}") from error
    except UnicodeError as error:
        raise ListenError(f"--host {host} is no name of a host") from error
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            text = f"port {port} on {host} is already in use: choose another --port, or 0 for any"
        else:
            text = f"cannot listen on {host} port {port}: {os.strerror(error.errno or 0)}"
        raise ListenError(text) from error
    return sock


def url(sock: socket.socket) -> str:
    """http://host:port as a local client reaches it."""
    host, port = sock.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1" if host == "0.0.0.0" else "::1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def is_loopback(host: str) -> bool:
    """Only this machine can reach an address of this name."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
