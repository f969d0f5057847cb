"""Inside vLLM's workers: sites get their op, and rows are filled as requests arrive. Does not know HTTP."""
