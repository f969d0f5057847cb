"""`saesteer demo`: two questions to the embedded model, without and with the bridge clamped, in one batch, side by side."""

from pathlib import Path

# Trained on the embedded model's own text; see ensure_model in model.py.
DEMO_SAE = Path(__file__).parent / "data" / "smollm2-135m-l15-9216.safetensors"
DEMO_DICTIONARY = "demo"
# Features of it that a person would recognise.
BRIDGE, OCEAN, GOLD, FRENCH = 3497, 6511, 7081, 546
