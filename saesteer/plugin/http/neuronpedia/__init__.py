"""The routes of Neuronpedia's inference server, openapi 1.9.0, on this one: its shapes, and what they mean in ours."""
