"""The planner beside what is known: published figures, papers' formulas, compiled programs."""
