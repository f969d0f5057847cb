"""A request of the small world as a worker gets it, through the front end."""

from types import SimpleNamespace
from typing import Any

from saesteer.config.config import KEY
from saesteer.engine.engine import Engine
from saesteer.language.spec import from_json
from saesteer.plugin.door import admission
from tests.small_world import WIDTH

ADD = {"op": "add", "vector": [1.0] * WIDTH, "site": "resid_mid.1"}


def admitted(engine: Engine, spec: Any, prompt_len: int, **brought: Any) -> Any:
    """A request as the worker gets it, through the front end."""
    params = SimpleNamespace(extra_args={KEY: spec, **brought}, stop=[], max_tokens=None)
    request = SimpleNamespace(prompt_token_ids=[1] * prompt_len, sampling_params=params, cache_salt=None)
    admission.Door("server").admit(from_json(spec), engine.catalog, request)
    return SimpleNamespace(req_id="r", prompt_token_ids=[1] * prompt_len, sampling_params=params, num_computed_tokens=0)
