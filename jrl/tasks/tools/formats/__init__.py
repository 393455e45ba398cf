"""Formats of tool calls, as public checkpoints write them: each with a parser and a renderer."""
