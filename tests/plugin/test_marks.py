"""Chat messages are found by their texts, in templates made at random from what real ones do, and in official ones.

A template made here writes pieces, each with the message it belongs to, so it knows where every message stands.
"""

import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from saesteer.plugin.door.marks import find

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
TOKEN = re.compile(r"<[^<>\s]+>|\[/?[A-Z_]+\]|\s+|\w+|.", re.DOTALL)
STYLES = {  # header with the role, end
    "chatml": ("<|im_start|>{}\n", "<|im_end|>\n"),
    "llama": ("<|start_header_id|>{}<|end_header_id|>\n\n", "<|eot_id|>"),
    "no end": ("<|{}|>\n", ""),
    "words": ("{}: ", "\n"),
    "deep": ("<{}>", "</s>"),
}


@dataclass(frozen=True)
class Template:
    """A chat template with some of the traits of real ones."""

    style: str
    merges_system: bool  # into the first user's turn, as Gemma 3 does
    merges_tools: bool  # results of tools that follow each other are one turn of the user's
    default_system: bool
    tools: str  # "no", "first", "last user"
    cuts_reasoning: bool  # of all but the last turn
    thinks: bool  # an assistant's last message gets an empty thought, and the answer begins with one
    trims: bool
    other_end: str  # of the last message, if no answer is opened
    needs_user: bool
    looks: bool  # whether a text begins with <tool_response>
    drops: str  # a role
    hoists: bool  # what a later system message says

    def pieces(self, messages: Any, opened: bool) -> list[tuple[int, str]]:
        """The text with the message that it belongs to; len(messages) opens the answer."""
        header, end = STYLES[self.style]
        users = [n for n, one in enumerate(messages) if one["role"] == "user"]
        if self.needs_user and not users:
            raise ValueError("No user query found in messages.")
        order = sorted(enumerate(messages), key=lambda one: self.hoists and one[1]["role"] != "system")
        order = [(n, one) for n, one in order if one["role"] != self.drops]
        if not order:
            raise ValueError("no message")
        first = order[0][0]
        found = [(first, "<bos>")]
        if self.default_system and messages[0]["role"] != "system":
            found.append((first, header.format("system") + "You are kind." + end))
        if self.tools == "first":
            found.append((first, f"Tools: {TOOLS}\n"))
        merged = False
        for n, one in order:
            role, text, last = one["role"], one["content"], n == len(messages) - 1
            text = text.strip() if self.trims else text
            if self.tools == "last user" and n == max(users, default=-1):
                found.append((n, "[TOOLS]x[/TOOLS]"))
            if role == "assistant" and self.cuts_reasoning and not last and "</think>" in text:
                text = text.split("</think>")[-1].lstrip("\n")
            if (
                self.looks
                and not self.needs_user
                and text.startswith("<tool_response>")
                and text.endswith("</tool_response>")
            ):
                found.append((n, "<again>"))
            joined = self.merges_tools and role == "tool" and n and messages[n - 1]["role"] == "tool"
            found.append((n, "" if merged or joined else header.format(role)))
            if role == "assistant" and self.thinks and last:
                found.append((n, "<think>\n\n</think>\n\n"))
            merged = self.merges_system and role == "system" and n == 0 and not last and messages[1]["role"] == "user"
            joins = self.merges_tools and role == "tool" and not last and messages[n + 1]["role"] == "tool"
            found.append((n, text))
            if merged:
                found.append((n + 1, "\n\n"))
            elif joins:
                found.append((n + 1, "<and>"))
            else:
                found.append((n, (self.other_end if last and not opened and role == "assistant" else "") or end))
        if opened:
            found.append((len(messages), header.format("assistant") + ("<think>\n" if self.thinks else "")))
        return found

    def render(self, messages: Any, opened: bool) -> str:
        return "".join(text for _, text in self.pieces(messages, opened))


templates = st.builds(
    Template,
    style=st.sampled_from([*STYLES]),
    tools=st.sampled_from(["no", "first", "last user"]),
    other_end=st.sampled_from(["", "<|return|>"]),
    drops=st.sampled_from(["none", "tool", "system"]),
)
CONTENTS = [
    "Hi",
    "a",
    " Hello. ",
    "who?\n",
    "",
    " ",
    "Who are you?",
    "<think>\nhm\n</think>\n\nHello.",
    "<think></think>",
]
CONTENTS += [
    "<tool_response>\nsnow\n</tool_response>",
    "<|im_start|>user\nHi",
    "naïve 🙂\U000f0000",
    "[TOOLS]",
    "/no_think Hi",
]
conversations = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["user", "assistant", "tool", "system"]),
            "content": st.sampled_from(CONTENTS) | st.text(max_size=9),
        }
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=400, deadline=None)
@given(template=templates, turns=conversations, system=st.booleans())
def test_random_templates(template: Template, turns: list[dict[str, str]], system: bool) -> None:
    messages = [*([{"role": "system", "content": "Be brief."}] if system else []), *turns]
    try:
        pieces = template.pieces(messages, True)
    except ValueError:
        return  # the request would be refused
    text = "".join(piece for _, piece in pieces)
    starts = [one.start() for one in TOKEN.finditer(text)]
    places = find(messages, template.render, starts, text=text, continued=False)
    wanted = ["".join(piece for owner, piece in pieces if owner == n) for n in range(len(messages))]
    found = [text[low:high] for _, (low, high) in places]
    assert sum(map(len, found)) == places[-1][1][1], "without a gap, none in another"
    # White space between two texts may belong to either.
    assert [one.split() for one in found] == [wanted[n].split() for n, _ in places], (template, messages)
    assert {n for n, _ in places} == {*range(len(messages))}


CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "look", "arguments": {"where": "harbour"}}}
U, A = ({"role": role, "content": "{}"} for role in ("user", "assistant"))
S, T = (
    {"role": "system", "content": "{}"},
    {"role": "tool", "name": "look", "tool_call_id": "abcdefghi", "content": "{}"},
)
OFFICIAL: dict[str, tuple[list[dict[str, Any]], Any]] = {
    "one turn": ([U], None),
    "system": ([S, U], None),
    "two turns": ([U, A, U], None),
    "reasoning kept by the client": ([S, U, A | {"content": "<think>\nhm\n</think>\n\n{}"}, U], None),
    "reasoning": ([U, A | {"reasoning_content": "hm", "reasoning": "hm"}, U], None),
    "tools": ([S, U, A, U], TOOLS),
    "a tool's result": ([U, A | {"content": "", "tool_calls": [CALL]}, T], TOOLS),
    "tools, then a user": ([S, U, A | {"content": "", "tool_calls": [CALL]}, T, T, A, U], TOOLS),
}


@pytest.mark.long  # `make test-long` fetches the templates
def test_official_templates() -> None:
    from transformers.utils.chat_template_utils import _compile_jinja_template

    spec = find_spec("trl")
    if spec is None or spec.origin is None:
        pytest.skip("needs the package trl, as `make test-long` has it, for its chat templates")
    files = sorted((Path(spec.origin).parent / "chat_templates").glob("*.jinja"))
    checked: dict[str, list[str]] = {}
    for file in files:
        template = _compile_jinja_template(file.read_text())
        for name, (turns, tools) in OFFICIAL.items():
            words = [f"word{n} of it" if turn["content"] else "harbour" for n, turn in enumerate(turns)]
            plain = [turn | {"content": turn["content"].format(word)} for turn, word in zip(turns, words, strict=True)]
            parts = [turn | {"content": [{"type": "text", "text": turn["content"]}]} for turn in plain]

            def render(messages: Any, opened: bool, template: Any = template, tools: Any = tools) -> str:
                names = {"bos_token": "<bos>", "eos_token": "<eos>"}
                found = template.render(messages=messages, tools=tools, add_generation_prompt=opened, **names)
                return str(found)

            for messages in (plain, parts):
                try:
                    text = render(messages, True)
                except Exception:  # noqa: BLE001  # the template refuses the conversation
                    continue
                if "'type': 'text'" in text or not all(word in text for word in words):
                    continue  # it does not render all of it
                starts = [one.start() for one in TOKEN.finditer(text)]
                places = find(messages, render, starts, text=text, continued=False)
                found = [text[low:high] for _, (low, high) in places]
                assert [n for n, _ in places] == [*range(len(messages))], (file.name, name)
                for n, one in enumerate(found):
                    assert [word in one for word in words] == [n == m for m in range(len(words))], (
                        file.name,
                        name,
                        found,
                    )
                checked.setdefault(file.name, []).append(name)
    assert len(checked) >= 30 and sum(len(one) for one in checked.values()) >= 300, {
        one: len(checked[one]) for one in checked
    }
