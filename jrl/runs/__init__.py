"""Files that a run writes and resumes from: folder, lines, checkpoints and loggers."""
