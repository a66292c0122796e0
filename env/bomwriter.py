"""Write a bill of materials with CycloneDX's own library, and hold it against the format's schema.

Runs in the environment of `requirements/images.txt`: what `env.bom` gathered comes in on standard input as JSON, the
document goes out on standard output.
"""

from __future__ import annotations

import hashlib
import json
import sys
from typing import Any
from uuid import UUID

from cyclonedx.model import HashAlgorithm, HashType, Property
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output.json import JsonV1Dot6
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packageurl import PackageURL


def write(asked: dict[str, Any]) -> str:
    """The document; the same bytes from the same content.

    Raises:
        ValueError: it does not hold against the schema.
    """
    bom = Bom(serial_number=_serial(asked))
    # Later versions of the library may refuse None; this one leaves the field out, and a time would move the bytes.
    bom.metadata.timestamp = None
    image = Component(
        type=ComponentType.CONTAINER,
        name=asked["name"],
        version=asked["version"],
        bom_ref="image",
        properties=_properties(asked["properties"]),
    )
    bom.metadata.component = image
    made = []
    python = {}
    for part in asked["parts"]:
        purl = PackageURL(**part["purl"])
        component = Component(
            type=ComponentType.LIBRARY,
            name=part["name"],
            version=part["version"],
            purl=purl,
            bom_ref=purl.to_string(),
            hashes=[HashType(alg=HashAlgorithm.SHA_256, content=each) for each in part["sha256"]],
            properties=_properties(part["properties"]),
        )
        made.append((component, part["requires"]))
        if purl.type == "pypi":
            python[part["name"], part["version"]] = component
        bom.components.add(component)
    asked_for: set[str] = set()
    for component, requires in made:
        needs = [python[name, version] for name, version in requires]
        asked_for.update(need.bom_ref for need in needs)
        bom.register_dependency(component, needs)
    # what no other package asks for, the image does
    bom.register_dependency(image, [each for each in bom.components if each.bom_ref not in asked_for])
    text = str(JsonV1Dot6(bom).output_as_string(indent=1)) + "\n"
    wrong = JsonStrictValidator(SchemaVersion.V1_6).validate_str(text)
    if wrong is not None:
        raise ValueError(str(wrong))
    return text


def _serial(asked: dict[str, Any]) -> UUID:
    """A serial number that the content decides."""
    return UUID(bytes=hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).digest()[:16], version=5)


def _properties(values: dict[str, str]) -> list[Property]:
    return [Property(name=name, value=value) for name, value in values.items()]


if __name__ == "__main__":
    sys.stdout.write(write(json.load(sys.stdin)))
