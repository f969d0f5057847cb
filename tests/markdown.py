"""The blocks of code of a Markdown page."""

import re


def blocks(page: str, language: str) -> list[str]:
    """The code in blocks of a language, which is all that stands behind the fence."""
    return re.findall(rf"^```{language}\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
