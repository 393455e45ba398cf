"""Faults at random moments: `python -m campaign.faults`."""
