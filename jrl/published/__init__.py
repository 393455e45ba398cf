"""Published checkpoints: the folder, GGUF file or installed package that a name means."""
