"""What learns: weights, what an optimizer keeps of them, objectives and the update."""
