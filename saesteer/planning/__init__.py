"""What a request means on one server: which changes apply where, at which positions. Knows no tensor and no vLLM."""
