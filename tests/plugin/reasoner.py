"""A server whose reasoning parser takes the first " the" of an answer for the end of its reasoning. Knows no test."""

from pathlib import Path
from typing import Any

from vllm.reasoning import ReasoningParserManager

from saesteer.consumers import register
from saesteer.planning.plan import END
from tests.plugin.conftest import LONG_PROMPT
from tests.plugin.judge import Judge
from tests.plugin.read_requests import CROWDED

PLUGIN = """
from vllm.reasoning import ReasoningParser, ReasoningParserManager


@ReasoningParserManager.register_module("until_the")
class UntilThe(ReasoningParser):
    def __init__(self, tokenizer, *args, **kwargs):
        super().__init__(tokenizer, *args, **kwargs)
        self.end = tokenizer.encode(" the")[-1]
        self.ended = bool((kwargs.get("chat_template_kwargs") or {}).get("ended"))

    def is_reasoning_end(self, input_ids):
        return self.ended

    def is_reasoning_end_streaming(self, input_ids, delta_ids):
        return self.end in delta_ids

    def extract_content_ids(self, input_ids):
        return []

    def extract_reasoning(self, model_output, request):
        return None, model_output

    def extract_reasoning_streaming(self, *args, **kwargs):
        return None
"""


def options(folder: Path) -> dict[str, Any]:
    """Prompts are computed in chunks, and a crowd preempts. The parser goes into the folder."""
    path = folder / "until_the.py"
    path.write_text(PLUGIN)
    ReasoningParserManager.import_reasoning_parser(str(path))  # vLLM's own servers do so before they look at options
    register("judge", Judge)
    more = {"reasoning_parser": "until_the", "reasoning_parser_plugin": str(path), "consumers": {"judge": {}}}
    return {**CROWDED, "async_scheduling": True, **more}


def text(tag: str, letters: int) -> str:
    """A prompt that no other test has used. The model says " the" soon after it."""
    return f"Notes number {tag}. {LONG_PROMPT}"[:letters]


def border_in(llm: Any, output: Any) -> int:
    """The position of the token that ended the reasoning, or END; the prompt may hold it, too."""
    end = llm.get_tokenizer().encode(" the")[-1]
    generated, start = list(output.outputs[0].token_ids), len(output.prompt_token_ids)
    return start + generated.index(end) if end in generated else END
