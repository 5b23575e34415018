"""Serves a few pages to the browsers of this user: on loopback only, and only to who has the token.

Other users of the host can connect to loopback, and a page of any site that the user visits can make the browser do so,
hence:

- each request needs the token, which is random and is in the address that the command prints;
- the Host header has to be an address of loopback, so that no other name that resolves to it (DNS rebinding) is served;
- answers forbid the browser to embed, to store, or to load anything besides (see ``page/document.py``);
- a request is a GET whose head has 16 KiB at most and comes within 5 s, and 16 connections are served at a time.
"""

from __future__ import annotations

import hmac
import io
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from types import TracebackType
from typing import Any, NamedTuple, TypeAlias
from urllib.parse import parse_qs, urlsplit

LOOPBACK = "127.0.0.1"
MOST_HEAD_BYTES = 16 << 10
MOST_CONNECTIONS = 16
_HEAD_SECONDS = 5.0
_ANSWER_SECONDS = 30.0
_HOST_NAMES = (LOOPBACK, "localhost")


class HttpAnswer(NamedTuple):
    """What is sent for a path."""

    kind: str
    content: str


Pages: TypeAlias = Mapping[str, Callable[[Mapping[str, str]], HttpAnswer]]
"""Paths with the functions that answer them, given the parameters of the address."""


class PageServer:
    """Serves while it is used as a context manager. Raises OSError when the port cannot be listened on."""

    def __init__(self, pages: Pages, policy: str, port: int = 0) -> None:
        self.token: str = secrets.token_urlsafe(24)
        self._listener = _HttpListener((LOOPBACK, port), _HttpRequest)
        self._listener.pages, self._listener.policy, self._listener.token = pages, policy, self.token
        self._thread = threading.Thread(target=self._listener.serve_forever, args=(0.05,), daemon=True)

    @property
    def address(self) -> str:
        """The address of the first page, with the token."""
        return f"http://{LOOPBACK}:{self._listener.server_port}/?token={self.token}"

    def __enter__(self) -> PageServer:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.shutdown()
        self._listener.server_close()


class _HttpListener(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False  # a slow browser does not delay the end
    pages: Pages
    policy: str
    token: str

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._free = threading.Semaphore(MOST_CONNECTIONS)

    def server_bind(self) -> None:
        # HTTPServer's own looks up the host's name, which may take long.
        TCPServer.server_bind(self)
        self.server_name, self.server_port = LOOPBACK, self.socket.getsockname()[1]

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Do not print that a browser has gone."""


class _HttpRequest(BaseHTTPRequestHandler):
    server: _HttpListener
    server_version, sys_version = "procgroup", ""

    def handle(self) -> None:
        head = _read_head(self.connection)
        if head is not None:
            self.connection.settimeout(_ANSWER_SECONDS)
            self.rfile = io.BufferedReader(io.BytesIO(head))
            super().handle()

    def do_GET(self) -> None:
        address = urlsplit(self.path)
        parameters = {name: values[-1] for name, values in parse_qs(address.query).items()}
        token = parameters.pop("token", "")
        if not _is_loopback(self.headers.get_all("Host", [])):
            self.send_error(HTTPStatus.FORBIDDEN, "This host name is not served")
        elif not hmac.compare_digest(token.encode(), self.server.token.encode()):
            self.send_error(HTTPStatus.FORBIDDEN, "The address needs the token that procgroup top has printed")
        elif address.path not in self.server.pages:
            self.send_error(HTTPStatus.NOT_FOUND)
        else:
            self._send(self.server.pages[address.path](parameters))

    def _send(self, answer: HttpAnswer) -> None:
        content = answer.content.encode()
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", f"{answer.kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def end_headers(self) -> None:
        self.send_header("Content-Security-Policy", f"{self.server.policy}; frame-ancestors 'none'")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("Cache-Control", "no-store")
        super().end_headers()

    def log_message(self, format: str, *arguments: Any) -> None:  # noqa: A002
        """Print nothing."""


def _read_head(connection: socket.socket) -> bytes | None:
    """Return a request up to the empty line that ends its head; None when none comes that is small and soon enough."""
    head, deadline = b"", time.monotonic() + _HEAD_SECONDS
    while b"\r\n\r\n" not in head:
        left = deadline - time.monotonic()
        if left <= 0 or len(head) >= MOST_HEAD_BYTES:
            return None
        connection.settimeout(left)
        try:
            received = connection.recv(MOST_HEAD_BYTES - len(head))
        except OSError:
            return None
        if not received:
            return None
        head += received
    return head


def _is_loopback(hosts: list[str]) -> bool:
    try:
        return len(hosts) == 1 and urlsplit(f"//{hosts[0]}").hostname in _HOST_NAMES
    except ValueError:
        return False
