"""A consumer of the tests: it says what it got, or raises, as its request wants. Knows no engine."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from saesteer.consumers import Consumer, Request
from saesteer.language.fields import fail, known_field

POINT = "[saesteer.consumers]\njudge = tests.plugin.judge:Judge\n"


def install(folder: Path) -> None:
    """Put a package with the entry point into a folder of sys.path."""
    about = folder / "judge-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: judge\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(POINT)


class Judge(Consumer):
    """Its parameter ``fail`` says where to raise, ``seconds`` how long it takes."""

    def check(self, parameters: Mapping[str, Any], at: str) -> Any:
        for name in parameters:
            if name not in ("fail", "seconds"):
                known_field(name, at, ["fail", "seconds"])
        if parameters.get("fail") not in (None, "take", "end"):
            fail(f"{at}.fail", "unknown_name", "expected take or end")
        return parameters

    def take(self, request: Request, rows: Any) -> None:
        if request.parameters.get("fail") == "take":
            raise RuntimeError("the judge is ill")
        super().take(request, rows)

    def end(self, request: Request) -> Any:
        time.sleep(request.parameters.get("seconds", 0))
        if request.parameters.get("fail") == "end":
            raise RuntimeError("the judge is ill")
        return {
            "tokens": list(request.tokens),
            "finish": request.finish,
            "positions": sorted(int(at) for rows in request.rows for at in rows.positions),
            "kinds": sorted({rows.kind for rows in request.rows}),
        }
