"""Text of a completion, and the same text with special tokens written out."""


class CompletionText(str):
    """Text of a completion, in which special tokens cannot be told apart.

    Attributes:
      special: the same with special tokens written out, without the end.
    """

    special: str

    def __new__(cls, text: str, special: str):
        instance = super().__new__(cls, text)
        instance.special = special
        return instance


def special_of(text: str) -> str:
    """The text with special tokens written out, of one that has none itself."""
    return text.special if isinstance(text, CompletionText) else text
