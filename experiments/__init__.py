"""One folder per question: the command, the result, the verdict."""
