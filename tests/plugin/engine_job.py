"""One engine in a process of its own: JSON job on stdin, JSON answer on stdout, in the line that begins with answer.

With VLLM_PLUGINS="" the engine is stock: saesteer is not even imported by vLLM.
"""

import json
import sys
from typing import Any


def main() -> None:
    """Run the job: {"model", "options", "dictionaries" or null, "batches": [{"prompts", "steer", "tokens"}]}."""
    job: dict[str, Any] = json.load(sys.stdin)
    from vllm import LLM, SamplingParams

    options = job["options"]
    if job["dictionaries"] is not None:
        options["additional_config"] = {"saesteer": {"dictionaries": job["dictionaries"]}}
    llm = LLM(model=job["model"], **options)
    answers = []
    for batch in job["batches"]:
        params = []
        for spec in batch.get("steer") or [None] * len(batch["prompts"]):
            extra = None if spec is None else {"saesteer": spec}
            params.append(
                SamplingParams(temperature=0, max_tokens=batch["tokens"], logprobs=0, ignore_eos=True, extra_args=extra)
            )
        outputs = llm.generate(batch["prompts"], params, use_tqdm=False)
        completions = [output.outputs[0] for output in outputs]
        answers.append([[(t, s[t].logprob) for t, s in zip(c.token_ids, c.logprobs, strict=True)] for c in completions])
    sys.stdout.write("\nanswer " + json.dumps(answers) + "\n")


if __name__ == "__main__":
    main()
