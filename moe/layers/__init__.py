"""Layers one after the other: of a stage, and of the chunks of a pipeline."""
