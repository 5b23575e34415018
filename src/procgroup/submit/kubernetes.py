"""The manifest of ``procgroup submit k8s``: one pod for each rank, as a JobSet or as an Indexed Job with its service.

The index of a pod is its rank (JOB_COMPLETION_INDEX). The other pods find the pod with index 0 by its name. The job's
key is a Secret of the cluster, visible to whoever may read Secrets of the namespace, or the written file.
"""

from __future__ import annotations

import argparse
import json
import re
import secrets

from procgroup.cluster.kubernetes import PORT

_SECRET = """apiVersion: v1
kind: Secret
metadata:
  name: {key_name}
type: Opaque
stringData:
  job-key: "{key}"
"""

_JOB_SET = """---
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: {name}
spec:
  network:
    enableDNSHostnames: true
    subdomain: {name}
  replicatedJobs:
    - name: ranks
      replicas: 1
      template:
        spec:
{job}"""

_INDEXED_JOB = """---
apiVersion: v1
kind: Service
metadata:
  name: {name}
spec:
  clusterIP: None  # headless: gives the pods names
  publishNotReadyAddresses: true
  selector:
    batch.kubernetes.io/job-name: {name}
---
apiVersion: batch/v1
kind: Job
metadata:
  name: {name}
spec:
{job}"""

_JOB = """completionMode: Indexed
completions: {pods}
parallelism: {pods}
backoffLimit: 0
template:
  spec:
{subdomain}    restartPolicy: Never
    containers:
      - name: rank
        image: {image}
        command: {program}
        env:
          - name: WORLD_SIZE
            value: "{pods}"
          - name: MASTER_ADDR
            value: {address}
          - name: MASTER_PORT
            value: "{port}"
          - name: PROCGROUP_JOB_KEY
            valueFrom:
              secretKeyRef:
                name: {key_name}
                key: job-key
        ports:
          - containerPort: {port}
{resources}"""

_NAME = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``procgroup submit k8s``."""
    parser.add_argument("--kind", choices=("jobset", "job"), default="jobset", help="JobSet (default) or Indexed Job")
    parser.add_argument("--pods", type=int, default=1, help="pods of the job, a rank in each (default: 1)")
    parser.add_argument("--image", required=True, help="the container image, with Python, procgroup and the program")
    parser.add_argument("--cpus", default="", help="cores of each pod, such as 4 or 500m")
    parser.add_argument("--memory", default="", help="memory of each pod, such as 8Gi")
    parser.add_argument("--gpus", type=int, default=0, help="NVIDIA GPUs of each pod")


def manifest(options: argparse.Namespace) -> str:
    """Return the manifest, with a new key. Raises ValueError for a name or a number that Kubernetes refuses."""
    if not _NAME.fullmatch(options.name):
        raise ValueError(
            f"expected --name to be at most 40 small letters, digits and hyphens, a letter first, got {options.name!r}"
        )
    if options.pods < 1 or options.gpus < 0:
        raise ValueError(f"expected --pods of at least 1 and --gpus of at least 0, got {options.pods}, {options.gpus}")
    if not options.image.strip():
        raise ValueError(f"expected --image to be a container image, got {options.image!r}")
    is_job_set = options.kind == "jobset"
    first_pod = f"{options.name}-ranks-0-0" if is_job_set else f"{options.name}-0"
    names = {"name": options.name, "key_name": f"{options.name}-key"}
    job = _JOB.format(
        **names,
        pods=options.pods,
        subdomain="" if is_job_set else f"    subdomain: {options.name}\n",
        image=json.dumps(options.image),  # a JSON string is also a YAML string
        program=json.dumps(options.program),
        address=f"{first_pod}.{options.name}",
        port=PORT,
        resources=_resources(options),
    )
    template, indent = (_JOB_SET, 10) if is_job_set else (_INDEXED_JOB, 2)
    lines = "".join(f"{' ' * indent}{line}\n" for line in job.splitlines())
    return _SECRET.format(**names, key=secrets.token_hex(32)) + template.format(**names, job=lines)


def _resources(options: argparse.Namespace) -> str:
    """Return the resources of each pod, as a part of the manifest's container."""
    wanted = {"cpu": options.cpus, "memory": options.memory, "nvidia.com/gpu": options.gpus and str(options.gpus)}
    lines = [f"            {name}: {json.dumps(amount)}\n" for name, amount in wanted.items() if amount]
    return "        resources:\n          limits:\n" + "".join(lines) if lines else ""
