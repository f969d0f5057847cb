"""Evaluation harnesses that pass a spec along to a saesteer server, one file each. They import no vLLM."""
