"""Files of a run, which it writes and resumes from: folder, lines, checkpoints and loggers."""
