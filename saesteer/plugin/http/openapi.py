"""The field ``saesteer`` in vLLM's OpenAPI document, for generated clients. Knows neither the language nor a request.

vLLM's own models do not declare the field, so it is added to the document that they produce. The schemas of a spec and
of the field in answers are in ``data``; tools/schemas.py writes those of a spec.
"""

import json
from pathlib import Path
from typing import Any

from saesteer.config.config import KEY
from saesteer.language.fields import Fields, Json
from saesteer.plugin.http.routes import SERVED

_DATA = Path(__file__).parents[2] / "data"
SCHEMAS: Json = {  # by name
    **json.loads((_DATA / "spec.json").read_text("utf-8")),
    "SaesteerAnswer": json.loads((_DATA / "answer.json").read_text("utf-8")),
}


def reference(name: str) -> Json:
    """A reference to one of the document's schemas."""
    return {"$ref": f"#/components/schemas/{name}"}


def document(app: Any) -> None:
    """Adds the field to the bodies and answers of all served routes in the app's OpenAPI document.

    Args:
        app: vLLM's FastAPI app; routes that it gets later are documented as well.
    """
    original = app.openapi

    def openapi() -> Json:
        found: Json = original()
        schemas = found.setdefault("components", {}).setdefault("schemas", {})
        schemas |= SCHEMAS
        for path in SERVED:
            served = found["paths"].get(path, {}).get("post", {})
            _add(served.get("requestBody", {}), reference("SaesteerSpec"), schemas)
            _add(served.get("responses", {}).get("200", {}), reference("SaesteerAnswer"), schemas)
        return found

    app.openapi = openapi


def _add(body: Fields, field: Json, schemas: Json) -> None:
    """Adds the field to the schemas that a body or an answer refers to."""
    found = [content["schema"] for content in body.get("content", {}).values() if "schema" in content]
    while found:
        schema = found.pop()
        if "$ref" in schema:
            found.append(schemas[schema["$ref"].rpartition("/")[2]])
        elif "anyOf" in schema:
            found += schema["anyOf"]
        else:
            schema.setdefault("properties", {})[KEY] = field
