"""Losses of the log-probability itself: REINFORCE, alone, with a weight or with a penalty."""
