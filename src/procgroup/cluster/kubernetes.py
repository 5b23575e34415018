"""Find the meeting point of a Kubernetes Indexed Job's pods: the pod with index 0, by its name.

The pod's own name is ``JOB-INDEX``. With ``subdomain`` in the pod's template, and a headless service of that name, the
kubelet writes the full name into the pod's /etc/hosts, ``JOB-INDEX.SUBDOMAIN.NAMESPACE.svc.cluster.local``; the name
of pod 0 differs in the index only.
"""

from __future__ import annotations

import re
import socket
from pathlib import Path

from procgroup.types import Endpoint

PORT = 29500
"""The port may be fixed: pods have addresses of their own, so no two jobs share it."""


def meeting_point(pod: str | None = None, hosts: Path = Path("/etc/hosts")) -> Endpoint:
    """Return the name of pod 0, and a port. Raises ValueError where the pod's name has no number or no subdomain."""
    pod = socket.gethostname() if pod is None else pod
    found = re.fullmatch(r"(.+)-\d+", pod)
    if found is None:
        raise ValueError(f"the host name {pod!r} is not that of an Indexed Job's pod, which ends with -INDEX")
    domain = _domain(pod, hosts)
    if not domain:
        raise ValueError(
            f"{hosts} gives the pod {pod!r} no name in a subdomain: set .spec.template.spec.subdomain to the name of a "
            "headless service"
        )
    return Endpoint(f"{found[1]}-0.{domain}", PORT)


def _domain(pod: str, hosts: Path) -> str:
    """Return the domain in the pod's full name; "" without one."""
    try:
        lines = hosts.read_text().splitlines()
    except OSError:
        return ""
    names = [name for line in lines for name in line.partition("#")[0].split()[1:]]
    return next((name.removeprefix(f"{pod}.") for name in names if name.startswith(f"{pod}.")), "")
