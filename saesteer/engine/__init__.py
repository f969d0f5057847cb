"""The tensors of one worker: weights, tables and counters on its device. Knows plans, but no HTTP and no vLLM."""
