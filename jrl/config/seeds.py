"""What a seed may be, for every command that takes one."""


def check_seed(seed: int) -> None:
    """Refuses a seed that is none.

    JAX keeps 32 bits of a seed: beyond them two seeds would be the same one.

    Raises:
      ValueError: unless ``0 <= seed < 2**32``.
    """
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed={seed} must lie in 0..4294967295.")
