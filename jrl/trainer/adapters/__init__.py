"""LoRA adapters of a run: their base weights, and import and export of PEFT files."""
