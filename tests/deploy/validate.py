"""Not a test: checks objects against the schemas of a Kubernetes version, run by the validator's own Python.

In: `VERSION CRDS.json` and on standard input a JSON list of objects. Out: a JSON list of complaints, one a line of text.
`CRDS.json` has a schema for each kind that is not Kubernetes' own; a kind that neither knows is a complaint.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import jsonschema
import kubernetes_validate


def complaints(thing: dict[str, Any], version: str, own: dict[str, Any]) -> list[str]:
    name = f"{thing.get('kind')} {thing.get('metadata', {}).get('name')}"
    schema = own["kinds"].get(f"{thing.get('apiVersion')}/{thing.get('kind')}")
    if schema is not None:
        validator = jsonschema.Draft202012Validator({**schema, "$defs": own["$defs"]})
        return [f"{name}: {error.json_path}: {error.message}" for error in validator.iter_errors(thing)]
    try:
        kubernetes_validate.validate(thing, version, strict=True)
    except kubernetes_validate.ValidationError as error:
        return [f"{name}: {'.'.join(map(str, error.path))}: {error.message}"]
    except kubernetes_validate.SchemaNotFoundError as error:
        return [f"{name}: {error.message}"]
    return []


def main() -> None:
    version, path = sys.argv[1:]
    with open(path) as file:
        own = json.load(file)
    found = [line for thing in json.load(sys.stdin) for line in complaints(thing, version, own)]
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
