"""Setup of a run: its constant parts, made from the configuration, their checks and the dry run."""
