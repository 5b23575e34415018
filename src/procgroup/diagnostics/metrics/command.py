"""The command ``procgroup metrics``: serves metrics of all jobs of this host to Prometheus."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Sequence

DEFAULT_PORT = 9464
_MISSING = "prometheus_client is not installed; install it with: pip install prometheus_client"
FLAGS = {
    "--port": f"the port; 0: a free one, which is printed; by default {DEFAULT_PORT}",
    "--address": "the address to listen on, such as 0.0.0.0 for all; by default that of loopback, 127.0.0.1",
    "--once": "print the metrics, and end",
}


def main(arguments: Sequence[str]) -> int:
    """Run the command until Ctrl-C; return 0, or 2 when prometheus_client is missing or the port is taken."""
    options = _parser().parse_args(arguments)
    try:
        import prometheus_client

        from procgroup.diagnostics.metrics.collector import JobsCollector
    except ImportError:
        print(f"procgroup metrics: {_MISSING}", file=sys.stderr)
        return 2
    registry = prometheus_client.CollectorRegistry()
    registry.register(JobsCollector())
    if options.once:
        print(prometheus_client.generate_latest(registry).decode(), end="")
        return 0
    signal.signal(signal.SIGTERM, _end)
    try:
        server, _ = prometheus_client.start_http_server(options.port, options.address, registry)
    except OSError as error:
        where = f"{options.address}:{options.port}"
        print(f"procgroup metrics: cannot listen on {where}: {error.strerror or error}", file=sys.stderr)
        return 2
    try:
        host = f"[{options.address}]" if ":" in options.address else options.address
        print(f"http://{host}:{server.server_port}/metrics\nCtrl-C ends it", flush=True)
        while True:
            time.sleep(3600)
    except KeyboardInterrupt:
        return 0
    finally:
        server.shutdown()
        server.server_close()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="procgroup metrics",
        description="Serve metrics of all jobs of this host to Prometheus: calls, bytes, seconds in calls, states and "
        "what ranks report, by their flight records. Ctrl-C ends it.",
    )
    parser.add_argument("--port", type=int, default=DEFAULT_PORT, metavar="N", help=FLAGS["--port"])
    parser.add_argument("--address", default="127.0.0.1", help=FLAGS["--address"])
    parser.add_argument("--once", action="store_true", help=FLAGS["--once"])
    return parser


def _end(number: int, _: object) -> None:
    sys.exit(128 + number)
