"""A language model writes the texts that its dictionary is trained on: no data set is needed. Knows no dictionary.

Half of the texts are answers to questions about a subject, the others documents that begin with a few words; what
follows is sampled. A base model writes documents alone. `texts.npy` holds token ids [texts, length], each text filled
up with the model's end token.
Run as `python -m tools.own_texts --out texts.npy`: on a GPU with vLLM 8 million tokens take two minutes or less.
"""

import argparse
import importlib.util
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from saesteer.model import ensure_model

SUBJECTS = """the Golden Gate Bridge|a suspension bridge|Paris|Tokyo|London|New York|San Francisco|Rome|ancient Egypt|
Africa|India|China|Germany|Mexico|Australia|the ocean|a coral reef|whales|sharks|fishing|a sailing ship|pirates|
a river|mountains|a volcano|an earthquake|snow and ice|rain|the desert|a forest|gardening|flowers|trees|birds|dogs|
cats|horses|dragons|insects|dinosaurs|the heart|the brain|sleep|dreams|a doctor|a hospital|vaccines|cancer|food|bread|
coffee|wine|chocolate|cooking|pizza|vegetables|gold|silver|diamonds|money|banks|taxes|the stock market|work|
a job interview|school|teachers|a library|books|poetry|Shakespeare|the French language|Spanish|grammar|mathematics|
prime numbers|geometry|probability|physics|gravity|light|black holes|the moon|Mars|the sun|space travel|chemistry|
water|oil|steel|electricity|batteries|cars|trains|airplanes|bicycles|computers|the internet|Python programming|
JavaScript|databases|machine learning|robots|video games|chess|football|basketball|swimming|running|yoga|music|
the piano|guitars|jazz|an orchestra|painting|photography|cinema|theatre|dancing|fashion|love|a wedding|friendship|
family|a grandmother|a newborn child|children|death|a funeral|war|soldiers|kings and queens|a castle|democracy|
elections|the law|a court case|prison|police|crime|religion|the Bible|Buddhism|philosophy|ethics|psychology|anger|
happiness|fear|memory|time|the colour red|numbers|maps|a hotel|travel|holidays|Christmas|winter|summer|
a birthday party|a letter|the news|climate change|energy|farming|bees|medicine"""
QUESTIONS = """Tell me about {}.|What is the most interesting thing about {}?|Write a short story about {}.|
Write a poem about {}.|Explain {} to a child.|Explain {} to an expert.|What do people get wrong about {}?|
Give me a list of ten facts about {}.|Write a dialogue between two friends who argue about {}.|
Write a news article about {}.|What is the history of {}?|Write an email to my boss about {}.|
Write a sentence about {} in French, Spanish and German, and translate each into English.|
Write a quiz of five questions about {}, with answers.|How does {} relate to {}?|Compare {} with {}.|
Write a scene of a film about {} and {}.|I am worried about {}. What should I do?|
Write a Python program that has to do with {}.|What would the world be without {}?|Make a plan for a day of {}.|
Write a review of a book about {}.|Write a joke about {}.|Solve a word problem about {} step by step.|
Summarise in three sentences what scientists know about {}.|Write a speech about {}.|What rhymes with {}?"""
BEGINNINGS = """The history of {}|{} and {}|# {}\n\n|Once upon a time, {}|In the news today: {}|Chapter 1. {}\n\n|
Q: What is {}?\nA:|Abstract. We study {}|<h1>{}</h1>\n<p>|def |import |{{"title": "{}",|Dear customer, {}|
Recipe: {}\n\nIngredients:|Table 1: {}\n|"I never cared for {}," she said. "|Lesson plan: {}\n\n|1. {}\n2. {}\n3.|
According to the study, {}|Le mot « {} »|My diary. Monday: {}|The patient |In 19|The court held that {}|"""
TEMPERATURES = (0.8, 0.7)  # of documents, of answers
Write = Callable[[list[list[int]], int, int], list[list[int]]]


def prompts(tokenizer: Any, seed: int) -> Iterator[list[int]]:
    """Without end, token ids of beginnings of documents and, in turn, of questions in the chat template."""
    chance = random.Random(seed)
    subjects, questions, beginnings = (
        [part.removeprefix("\n") for part in text.split("|")] for text in (SUBJECTS, QUESTIONS, BEGINNINGS)
    )
    base = "<|im_start|>" not in str(tokenizer.chat_template)
    first = tokenizer.bos_token if base else "<|endoftext|>"
    while True:
        text = first + chance.choice(beginnings).format(*chance.sample(subjects, 2))
        yield tokenizer(text, add_special_tokens=False).input_ids
        if base:
            continue
        question = chance.choice(questions).format(*chance.sample(subjects, 2))
        turns = [{"role": "user", "content": question}]
        text = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        if chance.random() < 0.9:  # the system's message is the same in each: it would be a tenth of the tokens
            text = text[text.index("<|im_start|>user") :] if "<|im_start|>user" in text else text
        yield tokenizer(text, add_special_tokens=False).input_ids


def filled(texts: Sequence[Sequence[int]], length: int, end: int) -> np.ndarray:
    """The texts as one array [texts, length], cut or filled up with the end token; uint16 if the ids fit."""
    made = np.full((len(texts), length), end, dtype=np.int32)
    for row, text in zip(made, texts, strict=True):
        row[: len(text)] = text[:length]
    return made.astype(np.uint16) if made.max() < 1 << 16 else made


def kept(tokens: torch.Tensor, end: int) -> torch.Tensor:
    """True [texts, length] at the tokens that count: not the first, an outlier, nor what a text is filled up with."""
    alive = (tokens != end).flip(-1).cumsum(-1).flip(-1) > 0
    alive[:, 0] = False
    return alive


def by_vllm(folder: Path, length: int) -> Write:
    """Sampling by a vLLM engine, a thousand texts at a time."""
    # Stock vLLM writes, in this process: once torch has looked for a GPU, an engine cannot be forked.
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "SAESTEER_DISABLE": "1"}
    from vllm import LLM, SamplingParams

    llm = LLM(
        str(folder), dtype="bfloat16", max_model_len=length, max_num_seqs=1024, enable_prefix_caching=False,
        gpu_memory_utilization=0.6, cudagraph_capture_sizes=[256, 512, 1024],
    )  # fmt: skip

    def write(begun: list[list[int]], seed: int, most: int) -> list[list[int]]:
        params = [
            SamplingParams(temperature=TEMPERATURES[at % 2], max_tokens=most - len(ids), detokenize=False)
            for at, ids in enumerate(begun)
        ]
        done = llm.generate([{"prompt_token_ids": ids} for ids in begun], params, use_tqdm=False)
        return [ids + list(one.outputs[0].token_ids) for ids, one in zip(begun, done, strict=True)]

    return write


def by_transformers(folder: Path, length: int, device: str) -> Write:
    """Sampling by Transformers, which needs nothing else, and three times the time."""
    from transformers import AutoModelForCausalLM

    # Without matrix units bfloat16 is the slower one: on one thread of a Xeon 126 tokens a second, against 266.
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()
    end = model.generation_config.eos_token_id

    def write(begun: list[list[int]], seed: int, most: int) -> list[list[int]]:
        torch.manual_seed(seed)
        made = [list[int]() for _ in begun]
        for kind, temperature in enumerate(TEMPERATURES):
            own = begun[kind::2]
            widest = max(map(len, own))
            ids = torch.tensor([[end] * (widest - len(one)) + one for one in own], device=device)
            mask = torch.tensor([[0] * (widest - len(one)) + [1] * len(one) for one in own], device=device)
            out = model.generate(
                ids, attention_mask=mask, do_sample=True, temperature=temperature, top_k=0, top_p=1.0,
                max_new_tokens=most - widest, pad_token_id=end,
            )  # fmt: skip
            for at, (row, one) in enumerate(zip(out.tolist(), own, strict=True)):
                made[2 * at + kind] = row[widest - len(one) :]
        return made

    return write


def write_texts(
    folder: Path, out: Path, write: Write, *, tokens: int, seconds: float, length: int, batch: int
) -> np.ndarray:
    """Write texts until there are so many tokens, or until the time is up, and save them.

    Args:
        folder: the model, as a Hugging Face folder.
        out: the .npy file.
        write: what samples.
        tokens: how many tokens, about; what texts are filled up with does not count.
        seconds: after so long no further batch begins.
        length: tokens of a text at most.
        batch: texts that are asked for at once; even.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    end, begun = tokenizer.eos_token_id, prompts(tokenizer, seed=0)
    texts: list[np.ndarray] = []
    written, start = 0, time.monotonic()
    while written < tokens and time.monotonic() - start < seconds:
        texts.append(filled(write(list(islice(begun, batch)), len(texts), length), length, end))
        written += int(kept(torch.from_numpy(texts[-1].astype(np.int64)), end).sum())
        print(f"{written:,} tokens in {time.monotonic() - start:.0f} s", flush=True)
    made: np.ndarray = np.concatenate(texts)
    np.save(out, made)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", type=Path, help="a Hugging Face folder; by default the embedded model")
    parser.add_argument("--tokens", type=int, default=8_000_000)
    parser.add_argument("--seconds", type=float, default=150)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--batch", type=int, default=4096)
    fast = torch.cuda.is_available() and importlib.util.find_spec("vllm") is not None
    parser.add_argument("--by", choices=("vllm", "transformers"), default="vllm" if fast else "transformers")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="of Transformers")
    given = parser.parse_args()
    folder = given.model or ensure_model(print)
    vllm = given.by == "vllm"
    write = by_vllm(folder, given.length) if vllm else by_transformers(folder, given.length, given.device)
    write_texts(
        folder, given.out, write, tokens=given.tokens, seconds=given.seconds, length=given.length, batch=given.batch
    )


if __name__ == "__main__":
    main()
