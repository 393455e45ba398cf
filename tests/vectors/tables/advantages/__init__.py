"""Rows of jrl/losses/advantages."""

from vectors.tables.advantages import critic, group, rewards_to_go

ROWS = [
    *critic.ROWS,
    *group.ROWS,
    *rewards_to_go.ROWS,
]
