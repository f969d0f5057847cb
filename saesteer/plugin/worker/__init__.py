"""Inside vLLM's workers: sites get their op, rows are filled as requests come. Knows no HTTP."""
