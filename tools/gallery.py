"""Makes saesteer/data/gallery.json, what the playground shows before the model has answered: cases with stored answers.

Each answer is the embedded model's, to the requests of `saesteer demo`, up to its last whole sentence. Beside each
token of a steered one stands log10 of how many times likelier it is than in the same text without edits.
"""

import json
import math
from itertools import pairwise
from typing import Any

from saesteer.commands.embedded import DEMO_DICTIONARY, DEMO_SAE, GALLERY, engine_options, ensure_model
from saesteer.workbench.demo import batch_of, whole

# Name, feature, value in multiples of max_act, and question, in the order of the page.
CASES = (
    ("Cars", 914, 2.0, "Who are you?"),
    ("Ocean", 6511, 1.5, "What should I do this weekend?"),
    ("Horse", 8515, 1.5, "Tell me about yourself."),
    ("Forest", 2489, 1.0, "How do I fix my computer?"),
    ("Bridge", 3497, 1.5, "Tell me a story."),
)


def made() -> dict[str, Any]:
    """What the file holds, from an engine."""
    from vllm import SamplingParams

    import saesteer
    from saesteer.labels.places import opened

    coder, model = saesteer.load(DEMO_SAE), ensure_model()
    labels = opened(coder.info)
    assert labels is not None and coder.max_act is not None
    cases: list[dict[str, Any]] = []
    for name, feature, value, question in CASES:
        known = labels.feature(feature)
        about = {"label": known and known.label, "max_act": round(float(coder.max_act[feature]), 3)}
        named = {"name": name, "dictionary": DEMO_DICTIONARY, "feature": feature}
        cases.append({**named, **about, "value": value, "question": question})
    batch = batch_of(cases)
    llm = saesteer.LLM(str(model), dictionaries={DEMO_DICTIONARY: str(DEMO_SAE)}, **engine_options())
    params = SamplingParams(
        temperature=0, max_tokens=batch.max_tokens, repetition_penalty=batch.repetition_penalty, logprobs=0
    )
    turns: list[Any] = [[{"role": "user", "content": text}] for text in batch.prompts]
    answers = llm.chat(turns, params, steer=[spec and {**spec, "return": {"dose": True}} for spec in batch.steer])
    for case, plain, steered in zip(cases, answers, answers[len(cases) :], strict=False):
        [applied] = steered.saesteer["applied"]
        shown = ("edit", "site", "tokens_edited", "tokens_cached")
        case |= {"dose": steered.saesteer["dose"], "applied": [{name: applied[name] for name in shown}]}
        case |= {"plain": whole(plain.outputs[0].text), "steered": _changes(llm, steered)}
    return {"model": model.name, "file": DEMO_SAE.name, "cases": cases}


def _changes(llm: Any, answer: Any) -> list[tuple[str, float]]:
    """The tokens of an answer, each with its change."""
    from vllm import SamplingParams

    output, tokenizer = answer.outputs[0], llm.get_tokenizer()
    ids, text = list(output.token_ids), whole(output.text)
    prompt = {"prompt_token_ids": [*answer.prompt_token_ids, *ids]}
    [without] = llm.generate([prompt], SamplingParams(max_tokens=1, prompt_logprobs=0))
    found = []
    for n, (start, stop) in enumerate(pairwise(len(tokenizer.decode(ids[:n])) for n in range(len(ids) + 1))):
        plain = without.prompt_logprobs[len(answer.prompt_token_ids) + n][ids[n]].logprob
        found.append((text[start:stop], round((output.logprobs[n][ids[n]].logprob - plain) / math.log(10), 2)))
    assert "".join(piece for piece, _ in found) == text
    return [one for one in found if one[0]]


if __name__ == "__main__":
    found = made()
    lines = ",\n".join(json.dumps(case, ensure_ascii=False) for case in found.pop("cases"))  # a case in a line
    GALLERY.write_text(f'{json.dumps(found)[:-1]}, "cases": [\n{lines}\n]}}\n')
