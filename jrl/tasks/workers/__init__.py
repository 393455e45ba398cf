"""Worker processes that score answers, with time limits."""
