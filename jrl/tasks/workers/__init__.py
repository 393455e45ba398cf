"""Worker processes that check answers, and are killed at their time limit."""
