"""Configuration of a run: settings, command-line flags, settings files and one-line errors."""
