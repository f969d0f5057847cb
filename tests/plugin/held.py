"""What a worker holds for its requests, told by the worker itself. Knows no request and no test.

vLLM mixes the class into its worker by --worker-extension-cls; a server with VLLM_SERVER_DEV_MODE=1 asks it by name.
"""

from typing import Any


class Held:
    """Methods of vLLM's worker."""

    saesteer: Any

    def saesteer_held(self) -> dict[str, int]:
        """Steered requests that it knows, filled rows, held slots of both kinds, rows that hold slots of names."""
        steering, engine = self.saesteer, self.saesteer.engine
        return {
            "requests": len(steering.rows),
            "with a row": len(steering._places),
            "rows": len(engine._filled),
            "slots of requests": sum(map(len, engine.registry._pools.values())),
            "slots of names": sum(used for used, _ in engine.registry.usage().values()),
            "rows that hold names": sum(count for change, count in engine.registry._rows.items() if change),
        }
