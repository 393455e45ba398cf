"""Published checkpoints: resolution of a name to a folder, GGUF file or installed package."""
