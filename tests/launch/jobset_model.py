"""A program: read a JobSet of a manifest into the models of kubeflow-trainer-api; name keys that they do not know.

``python jobset_model.py FILE`` runs with the packages of tests/launcher_environments.py.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, get_args

import yaml
from kubeflow_trainer_api.models import JobsetV1alpha2JobSet
from pydantic import BaseModel


def main() -> None:
    documents = yaml.safe_load_all(Path(sys.argv[1]).read_text())
    (job_set,) = (document for document in documents if document["kind"] == "JobSet")
    JobsetV1alpha2JobSet.from_dict(job_set)
    check_keys(JobsetV1alpha2JobSet, job_set, "JobSet")


def check_keys(model: type[BaseModel], value: dict[str, Any], path: str) -> None:
    """End with the path of a key that the model lacks: from_dict leaves such keys out without a word."""
    fields = {field.alias or name: field for name, field in model.model_fields.items()}
    for key, below in value.items():
        if key not in fields:
            sys.exit(f"{path} has no {key}")
        for inner in models_in(fields[key].annotation):
            for item in below if isinstance(below, list) else [below]:
                check_keys(inner, item, f"{path}.{key}")


def models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    is_mapping = getattr(annotation, "__origin__", None) is dict
    return [] if is_mapping else [model for part in get_args(annotation) for model in models_in(part)]


main()
