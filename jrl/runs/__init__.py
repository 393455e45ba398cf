"""What a run leaves behind and starts from: its folder, lines, checkpoints and loggers."""
