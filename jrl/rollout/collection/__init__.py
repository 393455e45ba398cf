"""What a step samples: a round, informative groups, windows, or ahead of the updates."""
